"""`LLMAPIClient`: the agentic-rollout library's client of a model server; part of `ajet.compat.agentic_rollout`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ajet.agents.model_function import Message

CLIENT_S = 120.0
"""How long a reply may take."""


class ReplyText(str):
    """A reply's text, which knows how it ended: one that was cut or withheld is no answer."""

    finish_reason: str = "stop"


class LLMAPIClient:
    """A client of an OpenAI-compatible server: `generate` is an LLM function. What fails raises."""

    def __init__(
        self,
        api_key: str,
        base_url: str,
        model: str,
        debug: bool = False,
        max_retries: int = 3,
        proxy_url: str | None = None,
    ) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        through = DefaultAsyncHttpxClient(proxy=proxy_url, timeout=CLIENT_S) if proxy_url else None
        self.model = model
        self._client = AsyncOpenAI(
            api_key=api_key, base_url=base_url, max_retries=max_retries, timeout=CLIENT_S, http_client=through
        )

    async def generate(
        self, messages: Sequence[Message], max_tokens: int = 16000, temperature: float = 0.7, **more: Any
    ) -> str:
        """The reply's text."""
        asked: Any = list(messages)
        reply = await self._client.chat.completions.create(
            model=self.model, messages=asked, max_tokens=max_tokens, temperature=temperature, **more
        )
        choice = reply.choices[0]
        text = ReplyText(choice.message.content or choice.message.refusal or "")
        text.finish_reason = "refusal" if choice.message.refusal else choice.finish_reason
        return text

    async def close(self) -> None:
        await self._client.close()


def create_llm_client(api_key: str, base_url: str, model: str, **more: Any) -> LLMAPIClient:
    """`LLMAPIClient(…)`."""
    return LLMAPIClient(api_key, base_url, model, **more)
