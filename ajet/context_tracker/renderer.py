"""`Renderer`: messages and tools → the token ids that the engine sees. One per tokenizer, shared by all episodes.

`render` renders a conversation through the model's chat template; `probe.appended` gives only the text that new
messages add after a recorded reply, or says why the template doesn't allow that. Neither decodes what was sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ajet.context_tracker.messages import plain_messages
from ajet.context_tracker.settings import ReasoningHistory
from ajet.context_tracker.template import ChatTemplate
from ajet.context_tracker.template_probe import NotStable, TemplateProbe
from ajet.schema.chat import Message, Tool
from ajet.schema.errors import InvalidRequestError

__all__ = ["NotStable", "Renderer"]

LEAST_TOKENS = 2
"""Of anything that a template writes for a message or a tool call."""
_USER: Message = {"role": "user", "content": ""}
_REPLY: Message = {"role": "assistant", "content": ""}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_ANSWER: Message = {"role": "tool", "tool_call_id": "c", "content": ""}


class Least(NamedTuple):
    """The fewest tokens that a template writes for these."""

    message: int
    call: int


class Renderer:
    """Not thread-safe: it belongs to the service loop."""

    def __init__(
        self, tokenizer: Any, *, reasoning_history: ReasoningHistory = "template", end_tokens: Iterable[str] = ()
    ) -> None:
        """`end_tokens`: tokens that end a reply, besides the tokenizer's own and those of its template."""
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self.encoder = self.template.encoder
        self.reasoning_history = reasoning_history
        self.probe = TemplateProbe(self.template, reasoning_history)
        ids = [tokenizer.convert_tokens_to_ids(token) for token in (*self.probe.end_tokens, *end_tokens)]
        self.end_ids: frozenset[int] = frozenset(
            i for i in (*ids, tokenizer.eos_token_id) if i is not None and i != tokenizer.unk_token_id
        )
        """Ids that end a reply."""

    @property
    def supports_tools(self) -> bool:
        """Whether the template tells the model about tools."""
        return self.template.takes_tools

    @cached_property
    def least(self) -> Least:
        """From what the template makes of empty messages, whoever sends them."""
        calls = [{**_REPLY, "tool_calls": [_CALL]}]
        messages = (
            self._added([_USER], [_REPLY, _USER]) // 2,
            self._added([_USER], [_USER]),
            self._added([_USER, *calls, _ANSWER], [_ANSWER]),
        )
        call = self._added([_USER], [{**_REPLY, "tool_calls": [_CALL] * 4}]) - self._added([_USER], calls)
        return Least(max(LEAST_TOKENS, min(messages)), max(LEAST_TOKENS, call // 3))

    def _added(self, messages: list[Message], more: list[Message]) -> int:
        """How many tokens these messages add. 0 if the template doesn't take them."""
        try:
            return len(self.render([*messages, *more])) - len(self.render(messages))
        except InvalidRequestError:
            return 0

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a whole conversation, given in OpenAI's form."""
        plain = plain_messages(messages)
        return self.encoder.whole(self.text(plain, tools, template_kwargs or {}, generate=add_generation_prompt))

    def length(
        self, messages: Sequence[Message], tools: Sequence[Tool], template_kwargs: Mapping[str, Any], most: int
    ) -> int:
        """How many ids a conversation has; if its beginning alone has more than `most`, how many that has."""
        text = self.text(plain_messages(messages), tools, template_kwargs)
        return self.encoder.beyond(text, most) or len(self.encoder.whole(text))

    def text(
        self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: Mapping[str, Any], *, generate: bool = True
    ) -> str:
        """The rendered text of plain messages, with a marker wherever a user's text imitates a control token."""
        fitted = self.template.fit(messages, first=True)
        return self.template.text(fitted, self.encoder.mark(list(tools)) or None, kwargs, generate=generate)

    def closing_ids(self, text: str, sampled: Sequence[int]) -> list[int] | NotStable:
        """The ids of appended text, without the end token if the model sampled it itself."""
        ids = self.encoder.continuation(text)
        control = self.encoder.first_control(text)
        if sampled and ids and sampled[-1] == ids[0] and text.startswith(control or "\0"):
            return ids[1:]
        if not sampled or sampled[-1] not in self.end_ids:
            return ids
        said, written = (self.tokenizer.decode(part) for part in (sampled[-1:], ids[:1]))
        return NotStable(f"the model ended its reply with {said!r}, where the template writes {written!r}")

    def decode(self, token_ids: Sequence[int], *, stopped_by: str | int | None = None) -> str:
        """The raw text of a reply, without its end token and cut at the stop string."""
        ids = list(token_ids)
        if ids and (ids[-1] in self.end_ids or ids[-1] == stopped_by):
            ids.pop()
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if isinstance(stopped_by, str) and stopped_by in text:
            text = text[: text.rindex(stopped_by)]
        return text
