"""`TemplateProbe`: learns, by rendering, whether messages can follow a reply without changing what came before.

For each *shape* (the roles in the history's last turns, what the reply holds, the roles of the new messages, whether
there are tools, the template's arguments) it renders a short conversation of sentinel words, once up to the generation
prompt and once with the reply and new messages added. If the second text begins with the first, holds every word of the
reply, and continues with the new messages, then the template only appends; what lies between the reply's last word and
the new messages closes a turn. Otherwise the rule says what the template does instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ajet.context_tracker.encoder import XML_TAG
from ajet.context_tracker.settings import ReasoningHistory
from ajet.context_tracker.template import (
    STUB_TOOL,
    STUB_TOOL_WORDS,
    ChatTemplate,
    TemplateRefusal,
    stub_call,
    stub_word,
)
from ajet.schema.chat import Message

Skeleton = tuple[str, ...]
"""The shape of a history: its head (`s`, `d` or `-`) and its last two turns, with one letter per message."""

MAX_PERIOD = 6
TURN_LETTERS = 12
"""How much of a turn's shape matters. A loop of calls and results repeats: twice stands for a hundred times."""
MAX_RULES = 4096
"""Rules kept at a time: shapes are few, but template arguments can be anything."""
EXCERPT = 40
"""Characters shown of a text that a template rewrites."""

THOUGHT_END = "</think>"

LETTERS = {"system": "s", "developer": "d", "user": "u", "tool": "t"}
REPLIES = {  # (reasoning, has content, tool calls) → letter; upper case: with content
    ("", False, 0): "e",
    ("", True, 0): "a",
    ("field", False, 0): "q",
    ("field", True, 0): "r",
    ("inline", True, 0): "i",
    ("", False, 1): "c",
    ("", True, 1): "C",
    ("", False, 2): "m",
    ("", True, 2): "M",
    ("field", False, 1): "k",
    ("field", True, 1): "K",
    ("field", False, 2): "n",
    ("field", True, 2): "N",
    ("inline", True, 1): "J",
    ("inline", True, 2): "P",
}
HOLDS = {name: shape for shape, name in REPLIES.items()}
WITHOUT_REASONING = {name: REPLIES[("", content, calls)] for name, (_, content, calls) in HOLDS.items()}


def letter(message: Message) -> str:
    """What in a plain message can matter to a template's structure."""
    role = message["role"]
    if role != "assistant":
        return LETTERS[role]
    content = message["content"]
    reasoning = "field" if "reasoning_content" in message else "inline" if "</think>" in content else ""
    return REPLIES[(reasoning, bool(content), min(2, len(message.get("tool_calls", ()))))]


@lru_cache(maxsize=65536)
def extend_skeleton(skeleton: Skeleton, new: str) -> Skeleton:
    """The shape of a history after one more message."""
    if not skeleton:
        return (new,) if new in "sd" else ("-", new)
    head, *turns = skeleton
    if new == "u" or not turns:
        return (head, *turns[-1:], new)
    return (head, *turns[:-1], _shorten(turns[-1] + new))


def shape_after(skeleton: Skeleton, messages: Sequence[Message]) -> Skeleton:
    """The shape of a history after more messages."""
    for message in messages:
        skeleton = extend_skeleton(skeleton, letter(message))
    return skeleton


def _shorten(turn: str) -> str:
    for period in range(1, MAX_PERIOD + 1):
        if len(turn) >= 3 * period and turn[-3 * period :] == turn[-period:] * 3:
            return turn[:-period]
    return turn if len(turn) <= TURN_LETTERS else turn[:1] + turn[2 - TURN_LETTERS :]


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
    """The template appends for this shape: `stubs` + new messages render as `anchor` + what to append."""

    stubs: list[Message]
    """The shortest conversation after which new messages render as they do after the whole shape."""
    with_tools: bool
    anchor: str
    """The rendered text up to the end of the reply's own words; what closes the turn follows."""
    opening: str
    """What the template writes before the reply's first word, in a history."""


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
        """Whether thoughts are the template's matter: one that doesn't know them leaves them as text."""
        self._rules: dict[tuple[Any, ...], AppendRule | NotStable] = {}
        self.end_tokens = self._learn_end_tokens()

    def appended(
        self,
        skeleton: Skeleton,
        reply: Message,
        new: Sequence[Message],
        has_tools: bool,
        kwargs: Mapping[str, Any],
        *,
        empty_thought: bool = False,
    ) -> str | NotStable:
        """The text that the template adds after a reply for new messages and the next generation prompt.

        `empty_thought`: the reply was sampled with a thought that has no content, so the message doesn't show it.
        """
        has_tools = has_tools and self._template.takes_tools
        shape = (skeleton, letter(reply), _new_letters(new), has_tools)
        key = (*shape, _stable(kwargs))
        rule = self._rules.get(key)
        fresh = rule is None
        if rule is None:
            rule = self._remember(key, *shape, kwargs)
        if isinstance(rule, NotStable):
            return rule
        if empty_thought and self._drops_thoughts and THOUGHT_END not in rule.opening:
            return NotStable("the template drops an empty thought once other messages follow")
        fitted = self._template.fit(new, first=False)
        text = self._render([*rule.stubs, *fitted], rule.with_tools, kwargs)
        if not text.startswith(rule.anchor) and not fresh:
            # A template that writes the date changes at midnight: learn it again.
            rule = self._remember(key, *shape, kwargs)
            if isinstance(rule, NotStable):
                return rule
            text = self._render([*rule.stubs, *fitted], rule.with_tools, kwargs)
        if not text.startswith(rule.anchor):
            return NotStable("the content of these messages changes how the template writes those before them")
        return text[len(rule.anchor) :]

    def forbid(
        self, skeleton: Skeleton, reply: Message, new: Sequence[Message], has_tools: bool, kwargs: Mapping[str, Any]
    ) -> NotStable:
        """Stop appending for this shape: a whole conversation did not render as its rule predicted."""
        rule = NotStable("the template depends on more of the history than its last turns")
        has_tools = has_tools and self._template.takes_tools
        self._rules[(skeleton, letter(reply), _new_letters(new), has_tools, _stable(kwargs))] = rule
        return rule

    def _remember(self, key: tuple[Any, ...], *shape: Any) -> AppendRule | NotStable:
        if len(self._rules) >= MAX_RULES:
            self._rules.clear()
        try:
            rule: AppendRule | NotStable = self._learn(*shape)
        except _Unstable as reason:
            rule = NotStable(str(reason))
        except TemplateRefusal as refusal:
            rule = NotStable(f"the template rejects a conversation of this shape ({refusal})")
        self._rules[key] = rule
        return rule

    def _learn(
        self, skeleton: Skeleton, reply: str, new: str, has_tools: bool, kwargs: Mapping[str, Any]
    ) -> AppendRule:
        letters = "".join(skeleton).removeprefix("-")
        if self._keep:
            letters = "".join(WITHOUT_REASONING.get(kind, kind) for kind in letters)
            reply = WITHOUT_REASONING[reply]
        reply = "a" if reply == "e" else reply  # an empty reply leaves no word to look for
        index = len(letters)
        head = stub_conversation(letters)
        talk = stub_conversation(letters + reply + new)
        stubs = self._template.fit(talk[: index + 1], first=True)
        before = self._render(self._template.fit(head, first=True), has_tools, kwargs, generate=not self._keep)
        if self._keep:  # only the words must stay: how a reply opens (`<think>`) or a text ends may differ
            before = before[: max((at + len(w) for w in _all_words(head) if (at := before.rfind(w)) >= 0), default=0)]
        ended = self._render(stubs, has_tools, kwargs, generate=False)
        after = self._render([*stubs, *self._template.fit(talk[index + 1 :], first=False)], has_tools, kwargs)
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
        for message in talk[index + 1 :]:
            if any(word not in after[end:] for word in _all_words([message])):
                raise _Unstable(f"the template leaves out a {message['role']} message in this position")
        tail = self._reply_tail(ended[ended.rindex(words[-1]) + len(words[-1]) :])
        if not after.startswith(tail, end):
            raise _Unstable("the template writes the end of a reply differently once other messages follow")
        anchor = after[: end + len(tail)]
        if any(word in after[len(anchor) :] for word in [*_all_words(talk[: index + 1]), *STUB_TOOL_WORDS]):
            raise _Unstable("the template repeats the tools or earlier messages after a reply")
        opening = after[len(before) : after.index(words[0], len(before))]
        rule = AppendRule(stubs, has_tools, anchor, opening)
        return self._shorter(rule, after[len(anchor) :], reply, talk[index + 1 :], kwargs) or rule

    def _shorter(
        self, rule: AppendRule, appended: str, reply: str, new: Sequence[Message], kwargs: Mapping[str, Any]
    ) -> AppendRule | None:
        """The same rule with a history of one message, if what follows doesn't depend on more: it renders faster."""
        fitted = self._template.fit(new, first=False)
        stubs = self._template.fit(stub_conversation("u" + reply), first=True)
        for with_tools in (False, True)[: 1 + rule.with_tools]:
            try:
                text = self._render([*stubs, *fitted], with_tools, kwargs)
            except TemplateRefusal:
                continue
            if text.endswith(appended) and _words(reply, 1)[-1] in text[: -len(appended)]:
                return AppendRule(stubs, with_tools, text[: -len(appended)], rule.opening)
        return None

    def _reply_tail(self, tail: str) -> str:
        """Of what follows a closed reply's last word: the part that the model says itself."""
        ends = [at for token in self.end_tokens if (at := tail.find(token)) >= 0]
        return tail[: min(ends)] if ends else tail.removesuffix(self._closing)

    def _learn_end_tokens(self) -> frozenset[str]:
        """The control tokens that end a reply in this template; if there are none, those that open the next turn."""
        encoder, tokens = self._template.encoder, set()
        self._closing = self._tail_after("ua", generate=False)
        first = encoder.first_control(self._closing)
        if first:
            tokens.add(first)
            rest = self._closing.partition(first)[2]
            called = encoder.control_at_end(self._tail_after("uc", generate=False).removesuffix(rest).rstrip())
            if called and not XML_TAG.fullmatch(called):
                tokens.add(called)
        else:
            tokens |= {encoder.first_control(self._tail_after(letters, generate=False)) for letters in ("uau", "uct")}
        return frozenset(tokens - {""})

    def _tail_after(self, letters: str, *, generate: bool) -> str:
        """What follows the last word of a conversation's first reply."""
        talk = self._template.fit(stub_conversation(letters), first=True)
        word = _words(letters[1], 1)[-1]
        try:
            text = self._render(talk, "c" in letters and self._template.takes_tools, {}, generate=generate)
        except TemplateRefusal:
            return ""
        return text.rpartition(word)[2] if word in text else ""

    def _render(
        self, fitted: Sequence[Message], has_tools: bool, kwargs: Mapping[str, Any], *, generate: bool = True
    ) -> str:
        return self._template.text(fitted, [STUB_TOOL] if has_tools else None, kwargs, generate=generate)


def _all_words(messages: Sequence[Message]) -> list[str]:
    """The sentinel words of contents, which a template may never leave out."""
    words = [word for message in messages for word in message["content"].split()]
    return [word for word in words if word.startswith("ajet") and "reason" not in word]


def _new_letters(new: Sequence[Message]) -> str:
    letters = "".join(map(letter, new))
    while "ttt" in letters:
        letters = letters.replace("ttt", "tt")
    return letters


def _stable(kwargs: Mapping[str, Any]) -> str:
    return json.dumps(kwargs, sort_keys=True, default=str) if kwargs else ""


def _difference(before: str, after: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    was, now = before[max(0, at - 12) : at + EXCERPT], after[max(0, at - 12) : at + EXCERPT]
    return f"the template rewrites what came before once other messages follow: {was!r} becomes {now!r}"
