"""The checks of `compute_madness_checklist`, which detect abnormal replies, nonsense among them."""

from __future__ import annotations

import json
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any
from unicodedata import category

from ajet.context_tracker.encoder import XML_TAG
from ajet.context_tracker.messages import content_text, split_reasoning
from ajet.schema.chat import Message, Tool

LETTER_RUN = 100
"""No word in any language repeats a letter this often in a row, however long its laughter."""
SYMBOL_RUN = 400
"""Lines of dashes and numbers with many zeros are shorter."""
FILLERS = frozenset("AFfXxNn0/")
"""Filler characters in data: zero and one bits in base64 and hexadecimal, placeholders, unknown bases."""
FILLER_RUN = 4000
PHRASE_REPEATS = 20
LINE_REPEATS = 16
"""The limit for prose: no text repeats a sentence this often in a row."""
WORD_REPEATS = 60
DATA_REPEATS = 200
"""The limit for possible code, markup or data: an array of nulls, closing tags, a column of equal values."""
LONGEST_PHRASE_WORDS = 8
LONGEST_PHRASE_LETTERS = 32
LONGEST_LINE_BLOCK = 4
PROSE_WORDS = 3
"""A block of fewer different words may be a column of a table, or code (`end`, `return null`)."""
PROSE = re.compile(r"[^\W\d_]+(?:[’'-][^\W\d_]+)*[.,!?…。，！？]*")
SENTENCE_ENDS = (".", "!", "?", "…", "。", "！", "？")
CODE_WORDS = frozenset(
    re.findall(r"\w+", "null none nil nan true false yes no na pass end else return done fi nop undefined void")
)
UNSPACED_WORD = 60
"""Longer words are searched letter by letter: languages without spaces, or a word that never ends."""
UNSPACED_REPEATS = 40
"""The limit for a block of letters in a language without spaces."""
ENCODED_REPEATS = 2000
"""The limit for letters and digits only, as in base64 or hexadecimal: the encoded file may repeat itself."""
GARBAGE_CHARACTERS = 4
GARBAGE_SHARE = 0.001
"""A reply cut by length may end in part of a character, and a long reply may hold a few: more than that is garbage."""
SALAD_WINDOW = 160
"""The window, in characters, in which `SALAD_SWITCHES` are counted, so that the end of a long reply counts on its
own."""
SALAD_SWITCHES = 8
"""Changes between scripts that don't stand side by side: within a word, or from word to word without punctuation."""
BLENDS = frozenset({"greek", "cjk", "symbols"})
"""Scripts that normal text mixes: terms and formulas within another language. Names in Latin letters go with any."""
GARBAGE = re.compile("[\ufffd\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f\ue000-\uf8ff\ufdd0-\ufdef]")
SCRIPTS = (  # (first code point, name): coarse, but fine enough to notice a mixture
    (0x0000, "latin"),
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


def _repetition(text: str) -> str | None:
    half = LETTER_RUN // 2
    for at in range(0, len(text) - half + 1, half):  # a long run fills one of these blocks
        if text[at] == text[at + half - 1] and text[at : at + half] == text[at] * half:
            run, letter = _run(text, at), text[at]
            limit = FILLER_RUN if letter in FILLERS else LETTER_RUN if letter.isalpha() else SYMBOL_RUN
            if run >= limit and not letter.isspace():
                return f"the character {letter!r} {run} times in a row"
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if found := _repeated(lines, LONGEST_LINE_BLOCK, _line_repeats):
        block, repeats = found
        return f"the line {block[0][:40]!r} at least {repeats} times in a row"
    words = text.replace("\n", " \n ").split(" ")
    words = [word for word in words if word]
    if found := _repeated(words, LONGEST_PHRASE_WORDS, _phrase_repeats):
        block, repeats = found
        return f"the words {' '.join(block)[:40]!r} at least {repeats} times in a row"
    for word in words:
        if len(word) > UNSPACED_WORD and (found := _repeated(word, LONGEST_PHRASE_LETTERS, _letter_repeats)):
            block, repeats = found
            return f"the letters {''.join(block)!r} at least {repeats} times in a row"
    return None


def _line_repeats(block: Sequence[str]) -> int:
    """How often these lines must stand in a row to be abnormal."""
    sentences = all(line.endswith(SENTENCE_ENDS) for line in block)
    return LINE_REPEATS if sentences and _is_prose([word for line in block for word in line.split()]) else DATA_REPEATS


def _phrase_repeats(block: Sequence[str]) -> int:
    if len(block) == 1 and PROSE.fullmatch(block[0]) and block[0].strip(".,!?").lower() not in CODE_WORDS:
        return WORD_REPEATS
    return PHRASE_REPEATS if _is_prose(block) else DATA_REPEATS


def _letter_repeats(block: Sequence[str]) -> int:
    letters = "".join(block)
    if letters.isascii():
        return ENCODED_REPEATS if letters.isalnum() else DATA_REPEATS
    return UNSPACED_REPEATS if letters.isalpha() else DATA_REPEATS


def _is_prose(words: Sequence[str]) -> bool:
    """Whether these words form a sentence: more than a few, and neither code nor data."""
    plain = [word for word in words if PROSE.fullmatch(word)]
    enough = len({word.lower() for word in plain} - CODE_WORDS) >= PROSE_WORDS
    return enough and len(plain) == len(words) and sum("," in word for word in words) * 3 <= len(words)


def _run(text: str, at: int) -> int:
    """The length of the run of equal characters around this position."""
    before, after = text[: at + 1], text[at:]
    return len(before) - len(before.rstrip(text[at])) + len(after) - len(after.lstrip(text[at])) - 1


def _repeated(
    items: Sequence[str], longest: int, needed: Callable[[Sequence[str]], int]
) -> tuple[Sequence[str], int] | None:
    """A block of up to `longest` items, containing a letter, that occurs in a row as often as `needed` says of it."""
    least = min(LINE_REPEATS, PHRASE_REPEATS)
    for period in range(1, longest + 1):
        run = period * (least - 1)
        if len(items) < run + period:
            return None
        same = bytes(map(operator.eq, items[period:], items))
        at = same.find(b"\x01" * run)
        while at >= 0:
            end = same.find(b"\x00", at)
            end = len(same) if end < 0 else end
            block, repeats = items[at : at + period], (end - at) // period + 1
            if any(character.isalpha() for item in block for character in item) and repeats >= (
                wanted := needed(block)
            ):
                return block, wanted
            at = same.find(b"\x01" * run, end)
    return None


def _garbage(text: str) -> str | None:
    if text.isascii() and text.isprintable():
        return None
    found = GARBAGE.findall(text)
    if len(found) >= max(GARBAGE_CHARACTERS, GARBAGE_SHARE * len(text)):
        return f"{len(found)} characters that aren't text, the first is {found[0]!r}"
    if text.isascii():
        return None
    return _salad(text)


def _salad(text: str) -> str | None:
    """Detect scripts that change again and again, within words or from word to word."""
    switches: list[int] = []
    before, gap = "", ""
    for at, character in enumerate(text):
        if not character.isalpha():
            gap += "" if category(character).startswith("M") else character  # a vowel sign belongs to its letter
            continue
        script = _script(character)
        if before and script != before and gap in ("", " ") and not _blend(script, before):
            switches.append(at)
            if len(switches) >= SALAD_SWITCHES and at - switches[-SALAD_SWITCHES] <= SALAD_WINDOW:
                return f"{SALAD_SWITCHES} changes of script within {SALAD_WINDOW} characters, {text[at - 8 : at + 8]!r}"
        before, gap = script, ""
    return None


def _blend(one: str, other: str) -> bool:
    return "latin" in (one, other) or {one, other} <= BLENDS


def _script(character: str) -> str:
    return SCRIPTS[bisect_right(SCRIPTS, ord(character), key=itemgetter(0)) - 1][1]


TOOL_SYNTAX = re.compile(r"</?tool_calls?>|\[TOOL_CALLS\]|<\|python_tag\|>|<function=|<｜tool▁call|<\|tool_calls?")


@dataclass(frozen=True, slots=True)
class CheckedReply:
    """The input of a check."""

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
    reply = CheckedReply(raw, content, reasoning or "", message.get("tool_calls") or (), tools, controls, malformed)
    for name in checks:
        if (found := CHECKS[name](reply)) is not None:
            return f"{name}: {found}"
    return None


def nonsense(reply: CheckedReply) -> str | None:
    """Control tokens as text, endless repetition, undecodable bytes, a salad of scripts."""
    for text in (reply.content, reply.reasoning):
        if text and (found := _control_text(text, reply.controls) or _repetition(text) or _garbage(text)):
            return found
    return None


def non_ascii(reply: CheckedReply) -> str | None:
    """Any character outside ASCII."""
    if reply.raw.isascii():
        return None
    return f"{next(c for c in reply.raw if not c.isascii())!r} is not an ASCII character"


def format_type_1(reply: CheckedReply) -> str | None:
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


def wrong_toolcall(reply: CheckedReply) -> str | None:
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
        required = (known[name].get("parameters") or {}).get("required")
        for key in required if isinstance(required, list) else ():
            if key not in arguments:
                return f"{name} lacks the argument {key!r}"
    return None


CHECKS: dict[str, Callable[[CheckedReply], str | None]] = {
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
