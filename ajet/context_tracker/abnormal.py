"""Checks of `compute_madness_checklist`: is a reply abnormal? Each returns what it found, or None.

They look for what a collapsing policy writes, not for unusual text: maths, accents, arrows, currency, emoji, any
language, code, tables, separators and long numbers pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ajet.context_tracker.encoder import XML_TAG
from ajet.context_tracker.messages import content_text, split_reasoning
from ajet.context_tracker.nonsense import find_nonsense
from ajet.schema.chat import Message, Tool

TOOL_SYNTAX = re.compile(r"</?tool_calls?>|\[TOOL_CALLS\]|<\|python_tag\|>|<function=|<｜tool▁call|<\|tool_calls?")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a check may look at."""

    raw: str
    """The text as sampled, without its end token."""
    content: str
    reasoning: str
    tool_calls: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool]
    controls: Collection[str]
    malformed: Sequence[str]


def find_abnormal(
    raw: str,
    message: Message,
    tools: Sequence[Tool],
    checks: Sequence[str],
    controls: Collection[str],
    malformed: Sequence[str] = (),
) -> str | None:
    """The first check that fails and what it found: `"nonsense: the word 'so' 25 times in a row"`."""
    plain = {**message, "content": content_text(message.get("content"), "reply")}
    reasoning, content = split_reasoning(plain)
    reply = Reply(raw, content, reasoning or "", message.get("tool_calls") or (), tools, controls, malformed)
    for name in checks:
        if (found := CHECKS[name](reply)) is not None:
            return f"{name}: {found}"
    return None


def nonsense(reply: Reply) -> str | None:
    """Control tokens as text, endless repetition, undecodable bytes, a salad of scripts."""
    for text in (reply.content, reply.reasoning):
        if text and (found := _control_text(text, reply.controls) or find_nonsense(text)):
            return found
    return None


def non_ascii(reply: Reply) -> str | None:
    """Any character outside ASCII."""
    if reply.raw.isascii():
        return None
    return f"{next(c for c in reply.raw if not c.isascii())!r} is not an ASCII character"


def format_type_1(reply: Reply) -> str | None:
    """Exactly one `<think>` block, followed by exactly one python block."""
    text = reply.raw
    if "</think>" in text and "<think>" not in text:
        text = "<think>" + text  # opened by the generation prompt
    if text.count("<think>") != 1 or text.count("</think>") != 1:
        return f"{text.count('<think>')} <think> and {text.count('</think>')} </think>, expected one of each"
    before, _, rest = text.partition("<think>")
    answer = rest.partition("</think>")[2]
    if before.strip():
        return f"text before <think>: {before.strip()[:40]!r}"
    blocks = answer.count("```python")
    if blocks != 1 or answer.count("```") != 2 or answer.rfind("```") <= answer.find("```python"):
        return f"{blocks} python blocks after </think>, expected exactly one, closed"
    return None


def wrong_toolcall(reply: Reply) -> str | None:
    """A call that can't be read, names an unknown tool, or lacks a required argument."""
    if reply.malformed:
        return f"a tool call that can't be read: {reply.malformed[0][:120]!r}"
    if reply.tools and (found := TOOL_SYNTAX.search(reply.content)):
        return f"{found[0]} in the text, but no tool call could be read"
    known = {tool["function"]["name"]: tool["function"] for tool in reply.tools if "function" in tool}
    for call in reply.tool_calls:
        name, arguments = call["function"]["name"], call["function"].get("arguments")
        if name not in known:
            return f"there is no tool {name!r}; the tools are {', '.join(sorted(known)) or 'none'}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                return f"the arguments of {name} are not JSON: {arguments[:80]!r}"
        if not isinstance(arguments, Mapping):
            return f"the arguments of {name} are not an object"
        required = (known[name].get("parameters") or {}).get("required") or ()
        if missing := [key for key in required if key not in arguments]:
            return f"{name} lacks the argument {missing[0]!r}"
    return None


CHECKS: dict[str, Callable[[Reply], str | None]] = {
    "nonsense": nonsense,
    "non_ascii": non_ascii,
    "format_type_1": format_type_1,
    "wrong_toolcall": wrong_toolcall,
}
"""By their names in `compute_madness_checklist`."""


def _control_text(text: str, controls: Collection[str]) -> str | None:
    for token in controls:
        # `</s>` is a control token of some models, but also HTML
        if token in text and len(token) > 2 and not XML_TAG.fullmatch(token):
            return f"the control token {token} written as text"
    return None
