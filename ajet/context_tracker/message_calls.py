"""`MessageCalls`: calls to a model that tells no tokens, kept as messages. They are read, and never trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ajet.schema.call_tree import ROOT, Call
from ajet.schema.chat import Message
from ajet.schema.generation import FinishReason, Sampling

_SAID = ("role", "content", "tool_calls", "tool_call_id", "name")
"""What two messages are compared by: clients drop or add other fields."""


class MessageCalls:
    """Calls in the order in which they were answered. Each extends the latest whose messages and reply it repeats."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._known: list[list[Any]] = []
        """Of each call, its messages and its reply."""

    def add(
        self,
        agent: str,
        target: str,
        messages: Sequence[Message],
        toolset: int,
        sampling: Sampling,
        reply: Message,
        finish_reason: FinishReason,
        tokens: tuple[int, int],
        started_s: float,
        seconds: float,
    ) -> None:
        """`tokens`: of prompt and reply, as the server counted them; 0 if it didn't."""
        said = [_said(message) for message in messages]
        extends = self._extended(agent, said)
        known = 0 if extends == ROOT else len(self._known[extends])
        self.calls.append(
            Call(
                name=f"call-{len(self.calls)}",
                agent=agent,
                target=target,
                turn=0 if extends == ROOT else self.calls[extends].turn + 1,
                prompt_run=ROOT,
                prompt_tokens=tokens[0],
                reply_tokens=tokens[1],
                finish_reason=finish_reason,
                sampling=sampling,
                trainable=False,
                extends=extends,
                new_messages=[dict(message) for message in messages[known:]],
                reply=dict(reply),
                tools=toolset,
                started_s=started_s,
                seconds=seconds,
            )
        )
        self._known.append([*said, _said(reply)])

    def _extended(self, agent: str, said: list[Any]) -> int:
        for index in range(len(self.calls) - 1, -1, -1):
            known = self._known[index]
            if self.calls[index].agent == agent and len(known) < len(said) and said[: len(known)] == known:
                return index
        return ROOT


def _said(message: Message) -> dict[str, Any]:
    return {key: message[key] for key in _SAID if message.get(key) not in (None, "", [])}
