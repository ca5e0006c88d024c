"""`ReplyParser`: from the raw text of a reply to its message: reasoning, content and tool calls.

One streaming machine serves all model families. A family is data (`Markup`): which marks open and close reasoning and
tool calls, and a function that reads what stands between them; `tool_call_parsers.py` has them all. `parse` is `feed`
of the whole text, so what is streamed always equals what is parsed, however the text was cut into pieces.

A parser never raises: what can't be read stays in the content as text and is named in `ParsedReply.malformed`. White
space directly before or after markup belongs to the markup and is dropped; all other text is exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ajet.gateway.chat.tool_calls import (
    CallScanner,
    Incomplete,
    JsonScanner,
    MakeScanner,
    NotACall,
    Unreadable,
    WrittenCall,
)
from ajet.schema.chat import Message, Tool

ReadCalls = Callable[[str, Sequence[Tool]], list[WrittenCall]]
"""Reads what stands between a block's marks. Raises `Unreadable`, or `Incomplete` if more text could help."""


@dataclass(frozen=True, slots=True)
class MarkedBlock:
    """A stretch of text that holds tool calls."""

    open: str
    close: tuple[str, ...]
    """Any of these ends it; so does the end of the reply."""
    read: ReadCalls
    only_first: bool = False
    """Opens only at the very start of a reply (or after its reasoning)."""
    keep_open: bool = False
    """The opening mark is part of the text that `read` gets."""
    scan: MakeScanner = JsonScanner
    """Reads the calls while they are being written."""


@dataclass(frozen=True, slots=True)
class Markup:
    """How one family marks reasoning and tool calls."""

    think_open: str = "<think>"
    think_close: str = "</think>"
    blocks: tuple[MarkedBlock, ...] = ()
    noise: tuple[str, ...] = ()
    """Marks without a meaning of their own, dropped if tools are offered."""
    frame: tuple[str, ...] = ()
    """Marks around text and reasoning that are no part of it, whether tools are offered or not."""
    think_again: bool = False
    """There may be reasoning in several places, not only at the beginning."""
    bare_ids: bool = False
    """Tool-call ids are nine letters and digits, without a prefix (Mistral's templates reject others)."""
    numbered_ids: bool = False
    """The model writes the ids of its tool calls itself: functions.<name>:<number> (Kimi)."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What is added to a tool call."""

    index: int
    """Which of the reply's calls, in the order in which they began."""
    begins: bool
    """The first piece: it has the name."""
    ends: bool
    """The last one."""
    id: str
    name: str = ""
    arguments: str = ""
    failed: str | None = None
    """With the last one: why the call can't be read. It is text after all, which follows."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece of text adds to the reply."""

    content: str = ""
    reasoning: str = ""
    call: CallPiece | None = None


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A reply as a message, and what could not be read in it."""

    message: Message
    malformed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyParser:
    """Reads the replies of one model family."""

    name: str
    markup: Markup = field(default_factory=Markup)

    def stream(
        self, tools: Sequence[Tool] = (), *, call_id: str = "", in_reasoning: bool = False, pieces: bool = False
    ) -> ParserStream:
        """A reader for one reply. Without `tools`, nothing is taken for a tool call.

        `in_reasoning`: the prompt itself ended with the opening mark. `call_id`: tool-call ids are derived from it.
        `pieces`: tool calls are given out while they are being written, instead of whole.
        """
        return ParserStream(self.markup, tools, call_id, in_reasoning, pieces)

    def parse(
        self, text: str, tools: Sequence[Tool] = (), *, call_id: str = "", in_reasoning: bool = False
    ) -> ParsedReply:
        """The whole reply at once."""
        stream = self.stream(tools, call_id=call_id, in_reasoning=in_reasoning)
        stream.finish(text)
        return stream.reply()


PLAIN = ReplyParser("plain", Markup(think_open="", think_close=""))
"""Takes everything as text."""


class ParserStream:
    """Reads one reply piece by piece: `feed` each piece, then `finish`, then `reply`."""

    def __init__(self, markup: Markup, tools: Sequence[Tool], call_id: str, in_reasoning: bool, pieces: bool) -> None:
        self._markup = markup
        self._pieces = pieces
        self._scanner: CallScanner | None = None
        self._scanned = 0
        """How much of the open block's buffer the scanner has been fed."""
        self._given: list[int] = []
        """For each call that the scanner has found: how many pieces of its arguments have been emitted."""
        self._begun = 0
        """How many calls have been given out, readable or not."""
        self._tools = tools
        self._call_id = call_id
        self._blocks = markup.blocks if tools else ()
        self._noise = (*markup.frame, *markup.noise) if tools else markup.frame
        self._thinking = in_reasoning and bool(markup.think_open)
        self._block: MarkedBlock | None = None
        self._buffer = ""
        self._space = ""
        """White space that may turn out to precede markup."""
        self._after_markup = in_reasoning
        self._tried = 0
        """How far the open block's buffer has been searched for closing marks."""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[Message] = []
        self._malformed: list[str] = []

    # ------------------------------------------------------------ reading

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece; return what is now certain."""
        self._buffer += text
        deltas: list[Delta] = []
        while self._advance(deltas, last=False):
            pass
        return deltas

    def finish(self, text: str = "") -> list[Delta]:
        """The reply has ended, with this piece: return the rest."""
        self._buffer += text
        deltas: list[Delta] = []
        while self._advance(deltas, last=True):
            pass
        if self._thinking:
            self._malformed.append(f"reasoning was not closed with {self._markup.think_close}")
        if self._space and not self._after_markup:
            self._add(self._space, deltas)
            self._space = ""
        return deltas

    def reply(self) -> ParsedReply:
        """The message; call this after `finish`."""
        message: Message = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._tool_calls:
            message["tool_calls"] = self._tool_calls
        return ParsedReply(message, tuple(self._malformed))

    def _advance(self, deltas: list[Delta], *, last: bool) -> bool:
        """Consume what can be consumed; return whether more may be."""
        if self._block is not None:
            return self._advance_block(self._block, deltas, last=last)
        if not self._buffer:
            return False
        marks = self._marks()
        at, mark = _first_of(self._buffer, marks)
        if mark is None:
            keep = 0 if last else _partial_mark(self._buffer, marks)
            self._text(self._buffer[: len(self._buffer) - keep], deltas)
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        self._text(self._buffer[:at], deltas)
        rest = self._buffer[at:]
        if not last and any(len(other) > len(mark) and other.startswith(rest) for other in marks):
            self._buffer = rest  # a longer mark may be coming
            return False
        if mark not in self._marks():  # it only opens at the start, and text precedes it
            self._text(mark, deltas)
            self._buffer = self._buffer[at + len(mark) :]
            return True
        self._buffer = self._buffer[at + len(mark) :]
        if self._thinking or mark in self._noise:
            self._turn()
        elif mark == self._markup.think_open and self._may_think():
            self._turn(thinking=True)
        else:
            self._block = next(block for block in self._blocks if block.open == mark)
            if self._block.keep_open:
                self._buffer = mark + self._buffer
            self._tried = len(mark) if self._block.keep_open else 0
            self._scanner = self._block.scan(self._tools) if self._pieces else None
            self._scanned, self._given = 0, []
        return True

    def _advance_block(self, block: MarkedBlock, deltas: list[Delta], *, last: bool) -> bool:
        self._scan(deltas)
        while True:
            at, close = _first_of(self._buffer, block.close, self._tried)
            if close is None:
                break
            try:
                calls = block.read(self._buffer[:at], self._tools)
            except Incomplete:
                self._tried = at + len(close)  # the mark may be inside a string: look for the next one
                continue
            except Unreadable as error:
                self._give_up(block, at, close, error, deltas)
                return True
            self._take(calls, self._buffer[at + len(close) :], deltas)
            return True
        if not last:
            longest = max((len(close) for close in block.close), default=1)
            self._tried = max(self._tried, len(self._buffer) - longest + 1)
            return False
        try:
            self._take(block.read(self._buffer, self._tools), "", deltas)
        except Unreadable as error:
            at, close = _first_of(self._buffer, block.close)
            self._give_up(block, at if close else len(self._buffer), close or "", error, deltas)
        return True

    def _scan(self, deltas: list[Delta]) -> None:
        """Give out what is certain of the calls in the open block, provided that it is readable in the end."""
        if self._scanner is None:
            return
        self._scanner.feed(self._buffer[self._scanned :])
        self._scanned = len(self._buffer)
        for number, call in enumerate(self._scanner.calls):
            begins = number == len(self._given)
            if begins:
                self._given.append(0)
            if arguments := "".join(call.arguments[self._given[number] :]):
                self._given[number] = len(call.arguments)
            if begins or arguments:
                call_id = call.id or self._new_id(len(self._tool_calls) + number)
                name = call.name if begins else ""
                deltas.append(Delta(call=CallPiece(self._begun + number, begins, False, call_id, name, arguments)))

    def _take(self, calls: list[WrittenCall], rest: str, deltas: list[Delta]) -> None:
        scanned = self._scanner.calls if self._scanner is not None else []
        for number, call in enumerate(calls):
            function = {"name": call.name, "arguments": call.arguments}
            call_id = call.id or self._new_id(len(self._tool_calls))
            tool_call = {"id": call_id, "type": "function", "function": function}
            self._tool_calls.append(tool_call)
            begins = number >= len(self._given)
            given = 0 if begins else sum(map(len, scanned[number].arguments[: self._given[number]]))
            name, left = call.name if begins else "", call.arguments[given:]
            deltas.append(Delta(call=CallPiece(self._begun, begins, True, call_id, name, left)))
            self._begun += 1
        self._buffer = rest
        self._turn()

    def _give_up(self, block: MarkedBlock, at: int, close: str, why: Unreadable, deltas: list[Delta]) -> None:
        """What can't be read stays text."""
        for number, call in enumerate(self._scanner.calls if self._scanner is not None else ()):
            call_id = call.id or self._new_id(len(self._tool_calls) + number)
            deltas.append(Delta(call=CallPiece(self._begun + number, False, True, call_id, failed=str(why))))
        self._begun += len(self._given)
        if not isinstance(why, NotACall):
            self._malformed.append(f"tool call: {why}")
        opening = "" if block.keep_open else block.open
        text, self._buffer = opening + self._buffer[:at] + close, self._buffer[at + len(close) :]
        self._block, self._scanner, self._given = None, None, []
        self._text(text, deltas)

    # ------------------------------------------------------------ writing

    def _turn(self, *, thinking: bool = False) -> None:
        """Markup was read: drop the white space around it."""
        self._thinking = thinking
        self._block, self._scanner, self._given = None, None, []
        self._space, self._after_markup = "", True

    def _text(self, text: str, deltas: list[Delta]) -> None:
        """Text between markup; its trailing white space is held back until it is clear what follows."""
        text = self._space + text
        self._space = ""
        if self._after_markup:
            text = text.lstrip()
            if not text:
                return
            self._after_markup = False
        solid = text.rstrip()
        self._space = text[len(solid) :]
        if solid:
            self._add(solid, deltas)

    def _add(self, text: str, deltas: list[Delta]) -> None:
        if self._thinking:
            self._reasoning.append(text)
            deltas.append(Delta(reasoning=text))
        else:
            self._content.append(text)
            deltas.append(Delta(content=text))

    def _marks(self) -> list[str]:
        """The marks that mean something at this point."""
        if self._thinking:
            return [self._markup.think_close]
        fresh = not self._content
        marks = [block.open for block in self._blocks if fresh or not block.only_first]
        if self._markup.think_open and self._may_think():
            marks.append(self._markup.think_open)
        return [*marks, *self._noise]

    def _may_think(self) -> bool:
        return self._markup.think_again or not (self._content or self._reasoning or self._tool_calls)

    def _new_id(self, position: int) -> str:
        """Derived from the call and the position, so that running an episode again gives the same ids."""
        digest = hashlib.blake2b(f"{self._call_id}/{position}".encode(), digest_size=8).hexdigest()
        return digest[:9] if self._markup.bare_ids else f"call_{digest}"


def _first_of(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, str | None]:
    """The earliest mark and where it begins; of two at the same place, the longer."""
    best: tuple[int, int, str | None] = (len(text), 0, None)
    for mark in marks:
        at = text.find(mark, start)
        if at >= 0 and (at, -len(mark)) < best[:2]:
            best = (at, -len(mark), mark)
    return best[0], best[2]


def _partial_mark(text: str, marks: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that may be the beginning of a mark."""
    longest = min(len(text), max((len(mark) for mark in marks), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in marks):
            return length
    return 0
