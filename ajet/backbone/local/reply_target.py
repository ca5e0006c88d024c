"""What a model has to sample after its prompt so that a given assistant message is read from it: `reply_ids`.

A chat template is written for histories: it may drop the reasoning of a last reply, write an empty thought instead, or
end a reply with nothing. So the answer and the thought are rendered apart, joined as the model would have to write
them after this generation prompt, and read back by the family's reply parser. A reply that does not come back as it
was given is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ajet.context_tracker import Renderer
from ajet.context_tracker.encoder import MARK
from ajet.context_tracker.messages import plain_message, plain_messages, split_reasoning
from ajet.context_tracker.template import TemplateRefusal, stub_call, stub_word
from ajet.schema.chat import Message, Tool
from ajet.session.reply_parser import ReplyParser

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""The arguments by which the templates of Qwen, GLM, Nemotron, DeepSeek and others are asked for a thought."""


def reply_ids(
    renderer: Renderer,
    parser: ReplyParser,
    history: Sequence[Message],
    reply: Message,
    tools: Sequence[Tool] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids after the prompt of `history`, including the end token. Raises ValueError if no reply reads like this."""
    # a template may change earlier thoughts for a last reply, but a reply doesn't depend on them
    before = [_without_reasoning(message) for message in plain_messages(history)]
    place = _Place(renderer, parser, before, tools, kwargs or {})
    said = plain_message(reply, f"messages[{len(history)}]")
    reasoning, answer = split_reasoning(said)[0], _without_reasoning(said)
    text, end = place.ended(place.after_prompt(answer, reasoning), answer)
    place.check(text, said)
    return renderer.encoder.continuation(text + end)


class _Place:
    """Where a reply is to be written: after this history, with these tools and template arguments."""

    def __init__(
        self,
        renderer: Renderer,
        parser: ReplyParser,
        history: list[Message],
        tools: Sequence[Tool],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._renderer, self._parser = renderer, parser
        self._history, self._tools, self._kwargs = history, tools, kwargs
        self._open = parser.markup.think_open or "<think>"
        self._close = parser.markup.think_close or "</think>"
        self._mark = rf"{re.escape(self._open)}\s*", rf"{re.escape(self._close)}\s*"
        prompt = self._prompt(kwargs)
        begun = re.search(rf"({self._mark[0]})?({self._mark[1]})?\Z", prompt)
        assert begun is not None
        self._head = prompt[: begun.start()]
        self._begun = begun[0]
        """What the prompt itself has written of the thought."""
        self._thinks = bool(begun[1]) and not begun[2]

    def after_prompt(self, answer: Message, reasoning: str) -> str:
        """What the model writes after the prompt, up to whatever the template puts after a last reply."""
        bare = self._body(answer)
        if self._begun and not self._thinks:
            if reasoning.strip():
                raise ValueError(self._no_place_for_reasoning())
            return self._without_thought(bare)
        if not (reasoning.strip() or self._thinks):
            return bare
        text = self._thought(answer, reasoning, bare)
        if not self._thinks:
            return text
        space = self._begun[len(self._open) :]
        return text.lstrip().removeprefix(self._open).removeprefix(space)

    def ended(self, text: str, answer: Message) -> tuple[str, str]:
        """The text up to its end token, and that. A template may leave it to the next message to end a reply."""
        renderer = self._renderer
        ends = "|".join(map(re.escape, renderer.tokenizer.convert_ids_to_tokens(sorted(renderer.end_ids))))
        if (found := re.search(ends, text)) is not None:
            return text[: found.start()], found[0]
        alone, followed = self._whole(answer), self._whole(answer, *_next_messages(answer))
        token = renderer.encoder.first_control(followed[len(alone) :]) if followed.startswith(alone) else ""
        if not token:
            raise ValueError("the chat template ends this reply without an end token")
        return text, token

    def check(self, text: str, said: Message) -> None:
        """Raise ValueError unless the parser reads this message from the text."""
        called = [{"type": "function", "function": {"name": c["function"]["name"]}} for c in said.get("tool_calls", ())]
        read = self._parser.parse(text.replace(MARK, ""), list(self._tools) or called, in_reasoning=self._thinks)
        for name, expected, found in zip(
            ("tool calls", "reasoning", "content"), _parts(said), _parts(read.message), strict=True
        ):
            if expected != found:
                raise ValueError(
                    f"after this prompt the model can't say this reply's {name}: {_short(expected)} would be read as "
                    f"{_short(found)}" + (f" ({'; '.join(read.malformed)})" if read.malformed else "")
                )

    # ------------------------------------------------------------ rendering

    def _prompt(self, kwargs: Mapping[str, Any]) -> str:
        return self._renderer.text(self._history, self._tools, kwargs)

    def _whole(self, *messages: Message) -> str:
        return self._renderer.text([*self._history, *messages], self._tools, self._kwargs, generate=False)

    def _body(self, reply: Message) -> str:
        """What the template writes for a reply in a history."""
        whole = self._whole(reply)
        if not whole.startswith(self._head):
            raise ValueError("the chat template puts other text before this reply than it prompts the model with")
        return whole[len(self._head) :]

    # ------------------------------------------------------------ the thought

    def _thought(self, answer: Message, reasoning: str, bare: str) -> str:
        """Thought and answer: as the template writes them, if it does, or else joined."""
        marked = re.escape(self._renderer.encoder.mark(reasoning).strip())
        if marked:
            whole = self._body({**answer, "reasoning_content": reasoning})
            if re.match(rf"\s*{self._mark[0]}{marked}\s*{self._mark[1]}", whole):
                return whole
        before, after = self._thought_form()
        return f"{before}{self._renderer.encoder.mark(reasoning).strip()}{after}{self._without_thought(bare)}"

    def _thought_form(self) -> tuple[str, str]:
        """What stands before and after a thought. Some templates keep it only beside tool calls, others never."""
        word = stub_word("reason", 0)
        probe: Message = {"role": "assistant", "content": stub_word("reply", 0), "reasoning_content": word}
        for reply in (probe, {**probe, "tool_calls": stub_call(0)}):
            try:
                body = self._body(reply)
            except TemplateRefusal:
                continue
            if found := re.match(rf"(\s*{self._mark[0]}){word}(\s*{self._mark[1]})", body):
                return found[1], found[2]
        space = self._begun[len(self._open) :]
        return self._open + space, space + self._close + 2 * space

    def _without_thought(self, body: str) -> str:
        return re.sub(rf"\A\s*({self._mark[0]})?{self._mark[1]}", "", body)

    def _no_place_for_reasoning(self) -> str:
        problem = f"the prompt ends with {self._begun.strip()!r}, after which the model does not reason"
        for name in THINKING_SWITCHES:
            if self._prompt({**self._kwargs, name: True}).rstrip().endswith(self._close):
                continue
            switch = json.dumps({"chat_template_kwargs": {name: True}})[1:-1]
            return f"{problem}: add {switch} beside the messages, or drop the reasoning"
        return f"{problem}: drop the reasoning"


def _without_reasoning(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**kept, "content": split_reasoning(message)[1]}


def numbered_calls(messages: Sequence[Message]) -> list[Message]:
    """The same conversation, with the ids that a model gives its calls if it counts them: functions.<name>:<number>."""
    numbered: list[Message] = []
    names: dict[str, str] = {}
    count = 0
    for message in messages:
        if message.get("tool_call_id") in names:
            message = {**message, "tool_call_id": names[message["tool_call_id"]]}
        if calls := message.get("tool_calls"):
            ids = [f"functions.{call['function']['name']}:{count + n}" for n, call in enumerate(calls)]
            names |= {call.get("id", ""): own for call, own in zip(calls, ids, strict=True)}
            count += len(calls)
            message = {**message, "tool_calls": [{**call, "id": own} for call, own in zip(calls, ids, strict=True)]}
        numbered.append(message)
    return numbered


def _next_messages(answer: Message) -> list[Message]:
    """What follows a reply like this in a conversation."""
    calls = answer.get("tool_calls")
    if not calls:
        return [{"role": "user", "content": stub_word("user", 0)}]
    return [{"role": "tool", "content": stub_word("tool", 0), "tool_call_id": call["id"]} for call in calls]


def _parts(message: Message) -> tuple[list[tuple[str, Any]], str, str]:
    """Tool calls, reasoning and content, as far as text can tell them apart."""
    reasoning, content = split_reasoning(message)
    calls = plain_message(message, "reply").get("tool_calls", ())
    called = [(call["function"]["name"], _as_written(call["function"]["arguments"])) for call in calls]
    return called, reasoning.strip(), content.strip()


def _as_written(arguments: Any) -> Any:
    """Arguments between tags have no types: the text of a number is the number."""
    if not isinstance(arguments, dict):
        return arguments
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}


def _short(value: Any) -> str:
    if not value:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= 80 else text[:80] + "…")
