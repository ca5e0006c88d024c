"""`TemplateProbe`: finds out, by rendering, whether a template only appends when messages follow a reply.

For each *shape* (the roles in the history's last turns, what the reply holds, the roles of the new messages, whether
there are tools, the template's arguments) it renders a short conversation of sentinel words, once up to the generation
prompt and once with the reply and new messages added. If the second text begins with the first, holds every word of the
reply, and continues with the new messages, then the template only appends; the text between the reply's last word and
the new messages closes a turn. Otherwise the rule says what the template does instead.

What is appended to a real reply is rendered after that reply, with its names and ids. If it depends on earlier messages
(the template counts calls, or looks them up), it is taken from a rendering of the whole conversation: `found_in`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ajet.context_tracker.encoder import XML_TAG
from ajet.context_tracker.messages import HOLDS, LETTERS, WITHOUT_REASONING, ReasoningHistory, Shape, split_reasoning
from ajet.context_tracker.template import (
    STUB,
    STUB_DESCRIPTION,
    STUB_TOOL,
    ChatTemplate,
    TemplateRefusal,
    stub_call,
    stub_word,
)
from ajet.schema.chat import Message

MAX_RULES = 4096
"""Rules kept at a time: shapes are few, but template arguments can be anything."""
EXCERPT = 40
"""How many characters are shown of a text that a template rewrites."""

THOUGHT_END = "</think>"
EARLIER = "uctmtta"
"""A turn with tool calls. If it changes what is appended after a later one, the template counts or looks back."""


def stub_conversation(letters: str, start: int = 0) -> list[Message]:
    """Plain messages of sentinel words in this shape."""
    messages: list[Message] = []
    pending: list[str] = []
    for index, kind in enumerate(letters, start):
        if kind == "t":
            call_id = pending.pop(0) if pending else ""
            messages.append({"role": "tool", "content": stub_word("tool", index), "tool_call_id": call_id})
        elif kind in HOLDS:
            messages.append(_stub_reply(kind, index))
            pending = [call["id"] for call in messages[-1].get("tool_calls", ())]
        else:
            role = next(role for role, name in LETTERS.items() if name == kind)
            messages.append({"role": role, "content": stub_word(role, index)})
    return messages


def _stub_reply(kind: str, index: int) -> Message:
    reasoning, content, calls = HOLDS[kind]
    message: Message = {"role": "assistant", "content": stub_word("reply", index) if content else ""}
    if reasoning == "field":
        message["reasoning_content"] = stub_word("reason", index)
    elif reasoning == "inline":
        message["content"] = f"<think>\n{stub_word('reason', index)}\n</think>\n\n{message['content']}"
    if calls:
        message["tool_calls"] = stub_call(index, calls)
    return message


def _words(kind: str, index: int) -> list[str]:
    """The sentinel words of a stub reply, in order."""
    reasoning, content, calls = HOLDS[kind]
    words = [stub_word("reason", index)] if reasoning else []
    words += [stub_word("reply", index)] if content else []
    return words + [stub_word("call", 100 * index + n) for n in range(calls)]


@dataclass(frozen=True, slots=True)
class AppendRule:
    """The template appends for this shape: `head`, a reply and new messages render as `before`, the reply's own text,
    and what to append."""

    head: list[Message]
    """A conversation after which a reply and new messages render as they do after the whole shape."""
    short: bool
    """Whether it is the shortest one, so that what is appended depends on no earlier message."""
    with_tools: bool
    before: str
    """The rendered head."""
    opening: str
    """What the template writes before the reply's first word, in a history."""
    boundary: str
    """The control token that what is appended begins with. Empty: it begins with other text."""
    inside: int
    """How many of them the reply's own text has. No message can add any: control tokens in them are broken."""


@dataclass(frozen=True, slots=True)
class NotStable:
    """The template doesn't just append; `why` says what it does instead."""

    why: str


class _Unstable(Exception):
    pass


class TemplateProbe:
    """The rules of one chat template."""

    def __init__(self, template: ChatTemplate, reasoning_history: ReasoningHistory) -> None:
        self._template = template
        self._keep = reasoning_history == "keep"
        self._drops_thoughts = not self._keep and THOUGHT_END in template.source
        """Whether the template handles reasoning. One that doesn't leaves it as text."""
        self._rules: dict[tuple[Any, ...], AppendRule | NotStable] = {}
        self._agrees: dict[Shape, bool] = {}
        """For each shape seen so far: whether a whole conversation continues like its rule's short one."""
        self.end_tokens = self._learn_end_tokens()

    def appended(
        self,
        shape: Shape,
        reply: Message,
        new: Sequence[Message],
        kwargs: Mapping[str, Any],
        *,
        empty_thought: bool = False,
    ) -> str | NotStable:
        """The text that the template adds after a reply for new messages and the next generation prompt.

        It is what a short conversation shows. If `trusts` says no, it must be taken from the whole one, by `found_in`.
        `empty_thought`: the reply was sampled with a thought that has no content, so the message doesn't show it.
        """
        rule = self._rules.get(shape[:-1])
        fresh = rule is None
        if rule is None:
            rule = self._remember(shape, kwargs)
        if isinstance(rule, NotStable):
            return rule
        if empty_thought and self._drops_thoughts and THOUGHT_END not in rule.opening:
            return NotStable("the template drops an empty thought once other messages follow")
        reply = _without_reasoning(reply) if self._keep else reply
        talk = self._template.fit([reply, *new], first=False)
        text = self._render([*rule.head, *talk], rule.with_tools, kwargs)
        if not text.startswith(rule.before) and not fresh:
            # A template that writes the date changes at midnight: learn it again.
            rule = self._remember(shape, kwargs)
            if isinstance(rule, NotStable):
                return rule
            text = self._render([*rule.head, *talk], rule.with_tools, kwargs)
        end = self._end_of_reply(rule, text, reply, kwargs)
        if end is None:
            return NotStable("the content of these messages changes how the template writes those before them")
        return text[end:]

    def trusts(self, shape: Shape, appended: str) -> bool:
        """Whether this is what the template adds to a whole conversation of this shape, too."""
        return self._agrees.get(shape, False) and STUB not in appended

    def found_in(self, whole: str, before: str, shape: Shape, appended: str) -> str | NotStable:
        """The text that the template adds in a whole conversation, where it adds `appended` in a short one.

        `before`: the conversation up to the reply. From now on this shape is trusted if they are the same.
        """
        rule = self._rules[shape[:-1]]
        assert isinstance(rule, AppendRule)
        if not whole.startswith(before):
            return NotStable(_difference(before, whole))
        count = appended.count(rule.boundary) if rule.boundary else 0
        if count and (self._keep or whole.count(rule.boundary, len(before)) == rule.inside + count):
            added = rule.boundary + rule.boundary.join(whole.rsplit(rule.boundary, count)[1:])
        elif not count and whole.endswith(appended):
            added = appended
        else:
            return NotStable("the template writes what follows a reply differently in a long conversation")
        if len(self._agrees) >= MAX_RULES:
            self._agrees.clear()
        self._agrees[shape] = rule.short and added == appended
        return added

    def _end_of_reply(self, rule: AppendRule, text: str, reply: Message, kwargs: Mapping[str, Any]) -> int | None:
        """The position at which the reply's text ends. None: the template doesn't render it as the rule says."""
        if not text.startswith(rule.before):
            return None
        words = len(rule.before)
        for part in filter(None, split_reasoning(reply)):
            said = part.strip()
            found = text.find(said, words)
            if found < 0:
                said = self._template.encoder.mark(said)
                found = text.find(said, words)
            if found < 0:
                return None
            words = found + len(said)
        if rule.boundary:
            pieces = text[len(rule.before) :].split(rule.boundary, rule.inside + 1)
            end = len(text) - len(rule.boundary) - len(pieces[-1]) if len(pieces) == rule.inside + 2 else -1
        else:
            talk = [*rule.head, *self._template.fit([reply], first=False)]
            ended = self._render(talk, rule.with_tools, kwargs, generate=False).removesuffix(self._closing)
            end = len(ended) if text.startswith(ended) else -1
        return end if end >= words else None

    def _remember(self, shape: Shape, kwargs: Mapping[str, Any]) -> AppendRule | NotStable:
        if len(self._rules) >= MAX_RULES:
            self._rules.clear()
        try:
            rule: AppendRule | NotStable = self._learn(shape, kwargs)
        except _Unstable as reason:
            rule = NotStable(str(reason))
        except TemplateRefusal as refusal:
            rule = NotStable(f"the template rejects a conversation of this shape ({refusal})")
        self._rules[shape[:-1]] = rule
        return rule

    def _learn(self, shape: Shape, kwargs: Mapping[str, Any]) -> AppendRule:
        letters, reply = "".join(shape.skeleton).removeprefix("-"), shape.reply
        if self._keep:
            letters = "".join(WITHOUT_REASONING.get(kind, kind) for kind in letters)
            reply = WITHOUT_REASONING[reply]
        reply = "a" if reply == "e" else reply  # an empty reply leaves no word to look for
        has_tools = shape.has_tools and self._template.takes_tools
        rule, appended = self._prove(letters, reply, shape.new, has_tools, kwargs)
        with suppress(_Unstable, TemplateRefusal):
            head = shape.skeleton[0].removeprefix("-")
            longer = head + EARLIER + letters.removeprefix(head)
            _, same = self._prove(longer, reply, shape.new, has_tools, kwargs, start=-len(EARLIER))
            for with_tools in (False, True)[: 1 + has_tools if same == appended else 0]:
                with suppress(_Unstable, TemplateRefusal):
                    shorter, same = self._prove("u", reply, shape.new, with_tools, kwargs, start=len(letters) - 1)
                    if same == appended:
                        return replace(shorter, short=True)
        return rule

    def _prove(
        self, letters: str, reply: str, new: str, has_tools: bool, kwargs: Mapping[str, Any], start: int = 0
    ) -> tuple[AppendRule, str]:
        """Verify the rule with sentinel words. Returns it with the text appended there. Raises _Unstable."""
        index = start + len(letters)
        talk = stub_conversation(letters + reply + new, start)
        head, said, follows = talk[: len(letters)], talk[len(letters)], talk[len(letters) + 1 :]
        fitted = self._template.fit(head, first=True)
        stubs = [*fitted, *self._template.fit([said], first=False)]
        before = self._render(fitted, has_tools, kwargs, generate=not self._keep) if fitted else ""
        if self._keep:  # only the words must stay: how a reply opens (`<think>`) or a text ends may differ
            before = before[: max((at + len(w) for w in _all_words(head) if (at := before.rfind(w)) >= 0), default=0)]
        ended = self._render(stubs, has_tools, kwargs, generate=False)
        after = self._render([*stubs, *self._template.fit(follows, first=False)], has_tools, kwargs)
        if not after.startswith(before):
            raise _Unstable(_difference(before, after))
        words = _words(reply, index)
        end = len(before)
        for word in words:
            found = after.find(word, end)
            if found < 0:
                what = "earlier reasoning" if word == stub_word("reason", index) else "part of an earlier reply"
                raise _Unstable(f"the template drops {what} once other messages follow")
            end = found + len(word)
        for message in follows:
            if any(word not in after[end:] for word in _all_words([message])):
                raise _Unstable(f"the template leaves out a {message['role']} message in this position")
        tail = self._reply_tail(ended[ended.rindex(words[-1]) + len(words[-1]) :])
        if not after.startswith(tail, end):
            raise _Unstable("the template writes the end of a reply differently once other messages follow")
        end += len(tail)
        appended = after[end:]
        if any(word in appended for word in [*_all_words([*head, said]), STUB_DESCRIPTION]):
            raise _Unstable("the template repeats the tools or earlier messages after a reply")
        opening = after[len(before) : after.index(words[0], len(before))]
        first = self._template.encoder.first_control(appended)
        calls = words[-HOLDS[reply][2] :] if HOLDS[reply][2] else words[-1:]
        between = first in after[after.index(calls[0], len(before)) : end]  # once for each call, however many
        boundary = first if first and appended.startswith(first) and not between else ""
        inside = after[len(before) : end].count(boundary) if boundary else 0
        return AppendRule(fitted, False, has_tools, before, opening, boundary, inside), appended

    def _reply_tail(self, tail: str) -> str:
        """The part of the text after a closed reply's last word that the model itself generates."""
        ends = [at for token in self.end_tokens if (at := tail.find(token)) >= 0]
        return tail[: min(ends)] if ends else tail.removesuffix(self._closing)

    def _learn_end_tokens(self) -> frozenset[str]:
        """The control tokens that end a reply in this template; if there are none, those that open the next turn."""
        encoder, tokens = self._template.encoder, set()
        self._closing = self._tail_after("ua")
        first = encoder.first_control(self._closing)
        if first:
            tokens.add(first)
            rest = self._closing.partition(first)[2]
            called = encoder.control_at_end(self._tail_after("uc").removesuffix(rest).rstrip())
            if called and not XML_TAG.fullmatch(called):
                tokens.add(called)
        else:
            tokens |= {encoder.first_control(self._tail_after(letters)) for letters in ("uau", "uct")}
        return frozenset(tokens - {""})

    def _tail_after(self, letters: str) -> str:
        """What follows the last word of a conversation's first reply."""
        talk = self._template.fit(stub_conversation(letters), first=True)
        word = _words(letters[1], 1)[-1]
        try:
            text = self._render(talk, "c" in letters and self._template.takes_tools, {}, generate=False)
        except TemplateRefusal:
            return ""
        return text.rpartition(word)[2] if word in text else ""

    def _render(
        self, fitted: Sequence[Message], has_tools: bool, kwargs: Mapping[str, Any], *, generate: bool = True
    ) -> str:
        return self._template.text(fitted, [STUB_TOOL] if has_tools else None, kwargs, generate=generate)


def _all_words(messages: Sequence[Message]) -> list[str]:
    """The sentinel words of message contents, which a template must never omit."""
    words = [word for message in messages for word in message["content"].split()]
    return [word for word in words if word.startswith(STUB) and "reason" not in word]


def _without_reasoning(reply: Message) -> Message:
    return {key: value for key, value in reply.items() if key != "reasoning_content"} | {
        "content": split_reasoning(reply)[1]
    }


def common_length(one: str, other: str) -> int:
    """The length of the common prefix of two texts."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _difference(before: str, after: str) -> str:
    at = common_length(before, after)
    was, now = before[max(0, at - 12) : at + EXCERPT], after[max(0, at - 12) : at + EXCERPT]
    return f"the template rewrites what came before once other messages follow: {was!r} becomes {now!r}"
