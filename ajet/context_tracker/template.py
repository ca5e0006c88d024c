"""`ChatTemplate`: a tokenizer's chat template, and the form of messages that it understands.

Templates differ in what they accept: some raise on a system message, on two user messages in a row or on tool-call
arguments given as text; others silently leave such things out. What this one does is learned by rendering small
conversations of sentinel words and looking for them. `fit` then brings messages into a form that it renders in full.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from ajet.context_tracker.encoder import TextEncoder, control_tokens
from ajet.context_tracker.messages import REASONING_FIELDS
from ajet.schema.chat import Message, Tool
from ajet.schema.errors import ConfigError, InvalidRequestError

STUB = "ajetstub"
"""Every stub word begins with this, so that none can reach a prompt unnoticed."""
STUB_NAME, STUB_DESCRIPTION, STUB_KEY = f"{STUB}tool", f"{STUB}description", f"{STUB}key"
STUB_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": STUB_NAME,
        "description": STUB_DESCRIPTION,
        "parameters": {"type": "object", "properties": {STUB_KEY: {"type": "string", "description": "a key"}}},
    },
}
KEPT_CHARACTERS = 16_000_000
"""Characters of rendered texts that are kept, with what they were rendered from; beyond that all are dropped."""
SHORT_ID_LENGTH = 9
"""Mistral's templates reject tool-call ids of any other length."""


class TemplateRefusal(InvalidRequestError):
    """The chat template rejected these messages."""


def stub_word(kind: str, index: int) -> str:
    """A word that no template writes, and that trimming and JSON leave unchanged."""
    return f"{STUB}{kind}{index}x"


def stub_call(index: int, count: int = 1) -> list[dict[str, Any]]:
    """Tool calls of sentinel words."""
    return [
        {
            "id": stub_word("id", 100 * index + n),
            "type": "function",
            "function": {"name": STUB_NAME, "arguments": {STUB_KEY: stub_word("call", 100 * index + n)}},
        }
        for n in range(count)
    ]


class ToolForm(NamedTuple):
    """What a template makes of tool calls and their results, and how it wants them."""

    calls: bool
    """It writes calls."""
    results: bool
    """It writes results."""
    as_text: bool
    """It wants arguments as text."""
    short_ids: bool


NO_TOOLS = ToolForm(False, False, False, False)


class ChatTemplate:
    """Renders messages as text, and knows which messages the template accepts."""

    def __init__(self, tokenizer: Any) -> None:
        source = getattr(tokenizer, "chat_template", None)
        if not source or not isinstance(source, str | Mapping):
            raise ConfigError(
                "the model's tokenizer has no chat template, so messages can't become a prompt: use an instruction-"
                "tuned model, or put a chat_template.jinja beside its tokenizer files"
            )
        self._tokenizer = tokenizer
        self.source: str = source if isinstance(source, str) else "\n".join(dict(source).values())
        self._tells_time = "strftime_now" in self.source
        self._compiled: Any = None
        """The template, if rendering it directly gives what the tokenizer gives."""
        self._in_parts = False
        """It reads a content only if that is a list of parts."""
        self._rendered: dict[str, str] = {}
        self._kept_characters = 0
        user = [{"role": "user", "content": stub_word("user", 0)}]
        reply = {"role": "assistant", "content": stub_word("reply", 0)}
        samples = [self._render(user, None, {}, True)]
        if stub_word("user", 0) not in samples[0]:  # of models that see: they may read texts from parts alone
            self._in_parts = True
            samples = [self._render(user, None, {}, True)]
            if stub_word("user", 0) not in samples[0]:
                raise ConfigError(
                    "the model's chat template leaves out what the user says: correct it, in chat_template.jinja or "
                    "tokenizer_config.json"
                )
        self._compiled = _compiled(tokenizer)
        if self._compiled is not None and samples != [self._render(user, None, {}, True)]:
            self._compiled = None
        talk = self._try([*user, reply, {"role": "user", "content": stub_word("user", 1) + " two\n\n  lines é"}])
        samples += [talk] if talk else []
        self.encoder = TextEncoder(tokenizer, control_tokens(tokenizer, self.source), samples)

    # ------------------------------------------------------------------ rendering

    def text(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, kwargs: Mapping[str, Any], *, generate: bool
    ) -> str:
        """The text of messages that `fit` returned. Raises TemplateRefusal.

        The episodes of a group begin with the same messages, which are rendered once.
        """
        if self._tells_time:
            return self._render(messages, tools, kwargs, generate)
        given = repr((messages, tools, kwargs, generate))
        text = self._rendered.get(given)  # the thread for long prompts may clear it at any time
        if text is None:
            text = self._render(messages, tools, kwargs, generate)
            self._kept_characters += len(given) + len(text)
            if self._kept_characters > KEPT_CHARACTERS:
                self._rendered.clear()
                self._kept_characters = len(given) + len(text)
            self._rendered[given] = text
        return text

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, kwargs: Mapping[str, Any], generate: bool
    ) -> str:
        from jinja2.exceptions import TemplateError

        from ajet.context_tracker.template_limits import limit_templates, rendering

        limit_templates()
        if self._in_parts:
            messages = [_as_parts(message) for message in messages]
        try:
            with rendering():
                if self._compiled is not None and messages and not kwargs and all(map(_is_plain, messages)):
                    text: str = self._compiled.render(
                        messages=list(messages),
                        tools=tools or None,
                        documents=None,
                        add_generation_prompt=generate,
                        **self._tokenizer.special_tokens_map,
                    )
                else:
                    text = self._tokenizer.apply_chat_template(
                        list(messages), tools=tools or None, tokenize=False, add_generation_prompt=generate, **kwargs
                    )
        except RecursionError as error:
            raise TemplateRefusal("the model's chat template calls itself without end on these messages") from error
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            # What a template raises itself, or runs into with messages it doesn't expect.
            raise TemplateRefusal(f"the model's chat template does not accept these messages: {error}") from error
        return text

    def _try(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> str | None:
        try:
            return self._render(messages, tools, {}, False)
        except TemplateRefusal:
            return None

    def _shows(self, messages: Sequence[Message], *words: str, tools: Sequence[Tool] | None = None) -> bool:
        text = self._try(messages, tools)
        return text is not None and all(word in text for word in words)

    # ------------------------------------------------------------------ what the template understands

    @cached_property
    def takes_developer(self) -> bool:
        return "developer" in self.source

    @cached_property
    def takes_system(self) -> bool:
        return self._shows([_stub("system", 0), _stub("user", 0)], stub_word("system", 0), stub_word("user", 0))

    @cached_property
    def takes_late_system(self) -> bool:
        return self._takes_late("system")

    @cached_property
    def takes_late_developer(self) -> bool:
        return self._takes_late("developer")

    def _takes_late(self, role: str) -> bool:
        talk = [_stub("user", 0), _stub("assistant", 0), _stub(role, 1), _stub("user", 1)]
        twice = [_stub(role, 0), _stub(role, 1), _stub("user", 0)]
        word = stub_word(role, 1)
        return self._shows(talk, word) and self._shows(twice, stub_word(role, 0), word)

    @cached_property
    def takes_user_twice(self) -> bool:
        return self._shows([_stub("user", 0), _stub("user", 1)], stub_word("user", 0), stub_word("user", 1))

    @cached_property
    def reasoning_field(self) -> str:
        """The field that the template reads reasoning from, and be it only beside tool calls. Empty: none."""
        for field in REASONING_FIELDS:
            reasoning = {field: stub_word("reason", 0)}
            if self._shows_reasoning(reasoning) or self._shows_reasoning({**reasoning, "tool_calls": stub_call(0)}):
                return field
        return ""

    @cached_property
    def takes_thinking_part(self) -> bool:
        """Whether it reads reasoning from a part of the content. Otherwise it goes into the text, in `<think>`."""
        return self._shows_reasoning({"content": _thinking(stub_word("reason", 0), stub_word("reply", 0))})

    def _shows_reasoning(self, fields: Mapping[str, Any]) -> bool:
        word = stub_word("reason", 0)
        text = self._try([_stub("user", 0), {**_stub("assistant", 0), **fields}]) or ""
        return word in text and f"'{word}'" not in text and f'"{word}"' not in text  # not just printed as data

    @cached_property
    def takes_text_with_reasoning(self) -> bool:
        """Whether a tool call may stand beside both; otherwise the text becomes a part of the reasoning."""
        calls = _shape_calls(stub_call(0), self._tool_form.as_text, self._tool_form.short_ids)
        return self._shows_reasoning({self.reasoning_field: stub_word("reason", 0), "tool_calls": calls})

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template shows tools to the model at all."""
        talk = [_stub("system", 0), _stub("user", 0)]
        return any(self._shows(messages, STUB_NAME, tools=[STUB_TOOL]) for messages in (talk, talk[1:]))

    @cached_property
    def _tool_form(self) -> ToolForm:
        seen = NO_TOOLS
        for as_text, short in product((False, True), repeat=2):
            calls = _shape_calls(stub_call(0), as_text, short)
            identity = calls[0]["id"]
            reply = {"role": "assistant", "content": "", "tool_calls": calls}
            result = {**_stub("tool", 0), "tool_call_id": identity, "name": STUB_NAME}
            talk = [_stub("user", 0), reply, result]
            text = self._try([*talk, _stub("assistant", 1)], [STUB_TOOL]) or self._try(talk, [STUB_TOOL])
            if text is None or f"'{STUB_KEY}'" in text:  # rejected, or printed as a Python dict
                continue
            called = stub_word("call", 0) in text and (STUB_NAME in text or identity in text)
            form = ToolForm(called, stub_word("tool", 0) in text, as_text, short)
            if called:
                return form
            seen = seen if seen.results else form
        return seen

    # ------------------------------------------------------------------ fitting messages

    def fit(self, messages: Sequence[Message], *, first: bool) -> list[Message]:
        """Plain messages in a form that the template renders in full. `first`: they begin the conversation.

        What the template has no place for is kept as text: a system message goes into the next user message, a late one
        becomes a user message, as does a tool result; a tool call is written into the reply.
        """
        fitted: list[Message] = []
        held: list[str] = []  # system texts on their way into the next user message
        for message in messages:
            role = message["role"]
            leading = first and all(m["role"] in ("system", "developer") for m in fitted)
            if role == "developer" and not (self.takes_developer if leading else self.takes_late_developer):
                role = "system"
            if role == "system":
                if leading and not self.takes_system:
                    held.append(message["content"])
                    continue
                if leading and fitted and not self.takes_late_system:
                    fitted[-1]["content"] += "\n\n" + self.encoder.mark(message["content"])
                    continue
                if not leading and not self.takes_late_system:
                    role = "user"
            elif role == "tool" and not self._tool_form.results:
                role = "user"
            if held and role != "system":
                content = "\n\n".join(held)
                held = []
                if role == "user":
                    message = {**message, "content": f"{content}\n\n{message['content']}"}
                else:
                    self._append(fitted, {"role": "user", "content": self.encoder.mark(content)})
            self._append(fitted, self._fit_one(message, role))
        if held:
            self._append(fitted, {"role": "user", "content": self.encoder.mark("\n\n".join(held))})
        return fitted

    def _append(self, fitted: list[Message], message: Message) -> None:
        last = fitted[-1] if fitted else None
        if last and last["role"] == message["role"] == "user" and not self.takes_user_twice:
            last["content"] += "\n\n" + message["content"]
        else:
            fitted.append(message)

    def _fit_one(self, message: Message, role: str) -> Message:
        mark = self.encoder.mark
        fit: Message = {"role": role, "content": mark(message["content"])}
        if "name" in message and role == message["role"]:
            fit["name"] = mark(message["name"])
        if role == "tool":
            identity = message["tool_call_id"]
            fit["tool_call_id"] = mark(_short_id(identity) if self._tool_form.short_ids else identity)
        if role != "assistant":
            return fit
        calls = message.get("tool_calls", [])
        if calls and not self._tool_form.calls:
            fit["content"] = "\n".join(filter(None, [fit["content"], *map(_call_as_text, mark(calls))]))
            calls = []
        if reasoning := message.get("reasoning_content"):
            fit |= self._fit_reasoning(mark(reasoning), fit["content"], bool(calls))
        if calls:
            fit["tool_calls"] = mark(_shape_calls(calls, self._tool_form.as_text, self._tool_form.short_ids))
        return fit

    def _fit_reasoning(self, reasoning: str, content: str, calls: bool) -> Message:
        if self.reasoning_field:
            if calls and content and not self.takes_text_with_reasoning:
                reasoning, content = f"{reasoning}\n\n{content}", ""
            return {self.reasoning_field: reasoning, "content": content}
        if self.takes_thinking_part:
            return {"content": _thinking(reasoning, content)}
        return {"content": f"<think>\n{reasoning.strip()}\n</think>\n\n{content}"}


def _compiled(tokenizer: Any) -> Any:
    """The template as transformers compiles it. Rendering it directly takes half the time: what transformers does
    before is for messages that aren't `_is_plain`. None if the tokenizer has a way of its own, or several templates."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    usual = PreTrainedTokenizerBase.apply_chat_template
    if getattr(tokenizer.apply_chat_template, "__func__", None) is not usual or not isinstance(
        tokenizer.chat_template, str
    ):
        return None
    return chat_template_utils._compile_jinja_template(tokenizer.chat_template)


def _is_plain(message: Message) -> bool:
    """Whether transformers passes a message to the template as it is: it has a text, and no reasoning."""
    return type(message["content"]) is str and not any(field in message for field in REASONING_FIELDS)


def _as_parts(message: Message) -> Message:
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def _stub(role: str, index: int) -> Message:
    return {"role": role, "content": stub_word("reply" if role == "assistant" else role, index)}


def _thinking(reasoning: str, content: str) -> list[dict[str, str]]:
    parts = [{"type": "thinking", "thinking": reasoning}]
    return [*parts, {"type": "text", "text": content}] if content else parts


def _shape_calls(calls: Sequence[Mapping[str, Any]], as_text: bool, short: bool) -> list[dict[str, Any]]:
    shaped = []
    for call in calls:
        arguments = call["function"]["arguments"]
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": call["function"]["name"], "arguments": arguments}
        identity = _short_id(call["id"]) if short else call["id"]
        shaped.append({"id": identity, "type": "function", "function": function})
    return shaped


def _short_id(identity: str) -> str:
    if len(identity) == SHORT_ID_LENGTH and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:SHORT_ID_LENGTH]


def _call_as_text(call: Mapping[str, Any]) -> str:
    body = json.dumps(
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False
    )
    return f"<tool_call>\n{body}\n</tool_call>"
