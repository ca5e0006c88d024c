"""`ScriptedEngine`: replies from a file or a function instead of a model.

It runs any workflow end to end without weights: in tests, in `ajet validate --run`, to try a tool loop. Replies go
through a real tokenizer, so their ids are real; their logprobs are made up: always 0.0.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.engine.base import EnginePlacement, OnTokens, RequestGate, StopMatch, StopRule, check_request
from ajet.engine.model_source import ModelSource
from ajet.schema.chat import Completion, EngineCapabilities, GenerateRequest, Message, TokenChunk
from ajet.schema.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reply = str | Message
MADE_UP_LOGPROB = 0.0


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """What a reply function gets."""

    prompt: str
    """The prompt as text, special tokens included."""
    index: int
    """How many calls the same session has made before."""
    session_id: str
    request: GenerateRequest


ReplyFunction = Callable[[ScriptedCall], Reply]


def read_replies(path: str | Path) -> list[Reply]:
    """Read a YAML or JSON list of replies, each a text or a message with content and tool_calls."""
    import yaml

    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        content: Any = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}\n    a file with replies is needed") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} is not valid {'JSON' if file.suffix == '.json' else 'YAML'}: {error}") from error
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{file}: expected a list of replies (texts, or messages with content and tool_calls)")
    for index, reply in enumerate(content):
        if not isinstance(reply, str | dict):
            raise ConfigError(
                f"{file}: reply {index + 1} is {reply!r:.60}, expected a text (put it in quotes) or a message"
            )
    return content


class ScriptedEngine:
    """An `Engine` with given replies.

    Each session goes through a list of replies from the start and repeats the last one, so concurrent episodes don't
    affect each other. A reply function decides by the prompt.
    """

    @classmethod
    def from_config(cls, config: Any, placement: EnginePlacement) -> ScriptedEngine:
        """Read the replies that `rollout.scripted_replies` names."""
        path = config.ajet.rollout.scripted_replies
        if not path:
            raise ConfigError("rollout.engine: scripted needs rollout.scripted_replies, a YAML or JSON list of replies")
        model = config.ajet.model.path
        tokenizer = lambda: ModelSource.resolve(model).tokenizer()  # noqa: E731
        return cls(read_replies(path), tokenizer, max_model_len=config.ajet.rollout.max_model_len)

    def __init__(
        self,
        replies: Sequence[Reply] | ReplyFunction,
        tokenizer: PreTrainedTokenizerBase | Callable[[], PreTrainedTokenizerBase],
        *,
        max_model_len: int = 32768,
    ) -> None:
        self._replies = replies
        self._given: Any = tokenizer
        self._max_model_len = max_model_len
        self._calls: Counter[str] = Counter()
        """By session."""
        self._version = 0
        self._gate = RequestGate()
        self._closed = False

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("scripted", load_weights=True, max_model_len=self._max_model_len)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Loaded on first use."""
        is_tokenizer = hasattr(self._given, "convert_ids_to_tokens")
        tokenizer: PreTrainedTokenizerBase = self._given if is_tokenizer else self._given()
        return tokenizer

    async def ready(self) -> None:
        await asyncio.to_thread(lambda: self.tokenizer)

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        if self._closed:
            raise EngineError("the scripted engine is closed")
        async with self._gate.request():
            await self.ready()
            room = check_request(request, max_model_len=self._max_model_len, vocabulary=len(self.tokenizer))
            await asyncio.sleep(0)  # can be cancelled here, as with a model
            drawn, stop = self._draw(request, room)
        logprobs = [MADE_UP_LOGPROB] * len(drawn)
        if on_tokens is not None:
            on_tokens(TokenChunk(drawn, logprobs))
        top = [[(token, MADE_UP_LOGPROB)] for token in drawn] if request.top_logprobs else None
        return Completion(drawn, logprobs, stop.reason, stop.by, [(0, self._version)], top)

    def _draw(self, request: GenerateRequest, room: int) -> tuple[list[int], StopMatch]:
        index = self._calls[request.session_id]
        self._calls[request.session_id] += 1
        if callable(self._replies):
            prompt = self._decode(request.prompt_ids)
            reply = self._replies(ScriptedCall(prompt, index, request.session_id, request))
        else:
            reply = self._replies[min(index, len(self._replies) - 1)]
        rule = StopRule.of(request.sampling, {int(self.tokenizer.eos_token_id)}, room)
        drawn: list[int] = []
        for token in self._spell(reply):
            drawn.append(token)
            stop = rule.check(drawn, self._decode)
            if stop is not None:
                return drawn, stop
        return drawn, StopMatch("stop", drawn[-1])

    def _spell(self, reply: Reply) -> list[int]:
        """The reply's ids, with an end token last."""
        text = reply if isinstance(reply, str) else self._render(reply)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        end = self.tokenizer.eos_token_id
        return ids if ids and ids[-1] == end else [*ids, int(end)]

    def _render(self, message: Message) -> str:
        """The message as the model's chat template writes it."""
        question = [{"role": "user", "content": "?"}]
        template: Any = self.tokenizer.apply_chat_template
        before = template(question, tokenize=False, add_generation_prompt=True)
        after = template([*question, {"role": "assistant", "content": "", **message}], tokenize=False)
        end = self._decode([int(self.tokenizer.eos_token_id)])
        return str(after).removeprefix(str(before)).split(end)[0]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    async def load_weights(self, source: Any, version: int) -> None:
        """There are no weights; later replies carry the version."""
        self._version = version

    async def pause(self) -> None:
        await self._gate.close()

    async def resume(self) -> None:
        self._gate.open()

    async def aclose(self) -> None:
        self._closed = True
