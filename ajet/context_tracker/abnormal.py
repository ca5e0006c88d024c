"""Checks of `compute_madness_checklist`: is a reply abnormal? Each returns what it found, or None.

They look for what a collapsing policy writes, not for unusual text: maths, accents, arrows, currency, emoji, any
language, code, tables, separators and long numbers pass.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ajet.context_tracker.encoder import XML_TAG
from ajet.context_tracker.messages import content_text, split_reasoning
from ajet.schema.chat import Message, Tool

LETTER_RUN = 40
"""No word in any language repeats a letter this often in a row."""
SYMBOL_RUN = 400
"""Lines of dashes and numbers with many zeros are shorter."""
PHRASE_REPEATS = 20
LINE_REPEATS = 16
LONGEST_PHRASE_WORDS = 8
LONGEST_PHRASE_LETTERS = 32
LONGEST_LINE_BLOCK = 4
UNSPACED_WORD = 60
"""Longer words are searched letter by letter: languages without spaces, or a word that never ends."""
GARBAGE_CHARACTERS = 4
GARBAGE_SHARE = 0.001
"""A reply cut by length may end in part of a character, and a long reply may hold a few: more than that is garbage."""
SALAD_SCRIPTS = 4
SALAD_LETTERS = 40

GARBAGE = re.compile("[\ufffd\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f\ue000-\uf8ff\ufdd0-\ufdef]")
TOOL_SYNTAX = re.compile(r"</?tool_calls?>|\[TOOL_CALLS\]|<\|python_tag\|>|<function=|<｜tool▁call|<\|tool_calls?")
SCRIPTS = (  # (first code point, name): coarse, but fine enough to notice a mixture
    (0x0041, "latin"),
    (0x0370, "greek"),
    (0x0400, "cyrillic"),
    (0x0530, "armenian"),
    (0x0590, "hebrew"),
    (0x0600, "arabic"),
    (0x0900, "indic"),
    (0x0E00, "thai"),
    (0x0F00, "tibetan"),
    (0x10A0, "georgian"),
    (0x1100, "hangul"),
    (0x1200, "ethiopic"),
    (0x1E00, "latin"),
    (0x1F00, "greek"),
    (0x2000, "symbols"),
    (0x2E80, "cjk"),
    (0xAC00, "hangul"),
    (0xD800, "other"),
    (0xF900, "cjk"),
    (0xFE00, "other"),
)


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
        if text and (found := _control_text(text, reply.controls) or _repetition(text) or _garbage(text)):
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


def _repetition(text: str) -> str | None:
    half = LETTER_RUN // 2
    for at in range(0, len(text) - half + 1, half):  # a long run fills one of these blocks
        if text[at] == text[at + half - 1] and text[at : at + half] == text[at] * half:
            run = _run(text, at)
            if run >= (LETTER_RUN if text[at].isalpha() else SYMBOL_RUN) and not text[at].isspace():
                return f"the character {text[at]!r} {run} times in a row"
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if block := _repeated(lines, LONGEST_LINE_BLOCK, LINE_REPEATS):
        return f"the line {block[0][:40]!r} at least {LINE_REPEATS} times in a row"
    words = text.split()
    if block := _repeated(words, LONGEST_PHRASE_WORDS, PHRASE_REPEATS):
        return f"the words {' '.join(block)[:40]!r} at least {PHRASE_REPEATS} times in a row"
    for word in words:
        if len(word) > UNSPACED_WORD and (block := _repeated(word, LONGEST_PHRASE_LETTERS, PHRASE_REPEATS)):
            return f"the letters {''.join(block)!r} at least {PHRASE_REPEATS} times in a row"
    return None


def _run(text: str, at: int) -> int:
    """The length of the run of equal characters around this position."""
    before, after = text[: at + 1], text[at:]
    return len(before) - len(before.rstrip(text[at])) + len(after) - len(after.lstrip(text[at])) - 1


def _repeated(items: Sequence[str], longest: int, repeats: int) -> Sequence[str] | None:
    """A block of up to `longest` items, containing a letter, that occurs `repeats` times in a row."""
    for period in range(1, longest + 1):
        run = period * (repeats - 1)
        if len(items) < run + period:
            return None
        same = bytes(map(operator.eq, items[period:], items))
        at = same.find(b"\x01" * run)
        while at >= 0:
            block = items[at : at + period]
            if any(character.isalpha() for item in block for character in item):
                return block
            end = same.find(b"\x00", at)
            at = same.find(b"\x01" * run, end) if end >= 0 else -1
    return None


def _garbage(text: str) -> str | None:
    if text.isascii() and text.isprintable():
        return None
    found = GARBAGE.findall(text)
    if len(found) >= max(GARBAGE_CHARACTERS, GARBAGE_SHARE * len(text)):
        return f"{len(found)} characters that aren't text, the first is {found[0]!r}"
    if text.isascii():
        return None
    letters = [_script(character) for character in text if character.isalpha()]
    switches = sum(map(operator.ne, letters[1:], letters))
    if len(letters) >= SALAD_LETTERS and len(set(letters)) >= SALAD_SCRIPTS and switches * 3 > len(letters):
        return f"letters of {len(set(letters))} scripts mixed within words"
    return None


def _script(character: str) -> str:
    code = ord(character)
    name = "latin"
    for first, script in SCRIPTS:
        if code < first:
            break
        name = script
    return name
