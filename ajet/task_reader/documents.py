"""Reads documents as text (txt, md, html, pdf, docx, and folders of them), and splits them into chunks, each with its
position."""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any

from ajet.schema.errors import MissingDependencyError, TaskDataError
from ajet.schema.install import install_command
from ajet.task_reader.task_reader_base import found_place

log = logging.getLogger("ajet.task_reader")

KEY = "ajet.task_reader.data_generation.document_reader.document_path"
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")
PARAGRAPH = re.compile(r"\n\s*\n")
UNSEEN = ("script", "style", "title", "template", "noscript")
"""Elements whose text isn't shown. `head` isn't among them: its end tag is optional, and these elements hold all of its
text."""
SPACED = ("p", "section", "article", "main", "pre", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "hr")
LINES = ("div", "br", "li", "ul", "ol", "dl", "dt", "dd", "tr", "table", "caption", "option", "nav", "aside", "footer")
CELLS = ("td", "th")
MARKS = (
    *((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32")),  # first: one begins like that of UTF-16
    *((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")),
)
"""Byte order marks, and the encoding that each stands for."""
CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
CHARSET_WITHIN = 1024
"""A page must declare its encoding within so many bytes."""
OVERLONG = 4
"""A sentence or paragraph that is longer than this many chunks is probably a table or a log, so it is cut."""
HIDDEN = (".", "~$")
"""Prefixes of file names that are skipped in folders: `.git`, and files that Word and macOS leave."""


@dataclass(frozen=True, slots=True)
class Document:
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous part of a document."""

    source: str
    index: int
    start: int
    """Where it begins in the document's text, in characters."""
    text: str


def read_documents(paths: Sequence[str], base_dirs: Sequence[Path] = ()) -> list[Document]:
    """Read all documents, in the order of `paths`, and those of a folder by name. An error names the unreadable
    file."""
    found: list[Document] = []
    for given in paths:
        path = found_place(given, base_dirs, KEY)
        if path.is_file():
            found.append(Document(given, _text(path)))
            continue
        files = [file for file in sorted(path.rglob("*")) if _is_document(file, path)]
        if not files:
            raise TaskDataError(f"{KEY}: the folder {given} holds no document ({', '.join(READERS)})")
        found += [Document(str(file.relative_to(path.parent)), _text(file)) for file in files]
    for document in found:
        if not document.text.strip():
            log.warning("%s holds no text (a scanned page, perhaps): it is left out", document.source)
    full = [document for document in found if document.text.strip()]
    if paths and not full:
        raise TaskDataError(f"{KEY}: none of the documents holds any text")
    return full


def chunks_of(document: Document, size: int, split_by: str) -> list[Chunk]:
    """Split a document into pieces of at most `size` characters. A longer sentence or paragraph stays whole, unless it
    exceeds OVERLONG times the size: then it is cut at white space."""
    text = document.text
    pieces: list[Chunk] = []
    start = 0
    for end in _ends(text, size, split_by):
        piece = text[start:end].lstrip()
        if piece:
            pieces.append(Chunk(document.source, len(pieces), end - len(piece), piece.rstrip()))
        start = end
    return pieces


def _ends(text: str, size: int, split_by: str) -> Iterator[int]:
    if split_by == "character":
        yield from range(size, len(text), size)
        yield len(text)
        return
    pattern = PARAGRAPH if split_by == "paragraph" else SENTENCE_END
    begun = last = 0
    for end in _ends_of_sentences(text, pattern, OVERLONG * size):
        if end - begun > size and last > begun:
            yield last
            begun = last
        last = end
    yield len(text)


def _ends_of_sentences(text: str, pattern: re.Pattern[str], longest: int) -> Iterator[int]:
    last = 0
    for end in (*(found.end() for found in pattern.finditer(text)), len(text)):
        while end - last > longest:
            space = max(text.rfind(mark, last + 1, last + longest) for mark in " \n")
            last = space + 1 if space > 0 else last + longest
            yield last
        yield end
        last = end


def _is_document(file: Path, folder: Path) -> bool:
    if any(part.startswith(HIDDEN) for part in file.relative_to(folder).parts):
        return False
    return file.suffix.lower() in READERS and file.is_file()


def _text(path: Path) -> str:
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise TaskDataError(f"{KEY}: {path}: can't read {path.suffix or 'a file without ending'}; {', '.join(READERS)}")
    try:
        return read(path)
    except OSError as error:
        raise TaskDataError(f"{KEY}: {path}: can't be read: {error}") from None
    except UnicodeDecodeError as error:
        raise TaskDataError(f"{KEY}: {path}: can't be read: {error}\n    save it as UTF-8") from None


def _plain(path: Path) -> str:
    return _decoded(path.read_bytes())


def _decoded(data: bytes, encoding: str = "utf-8") -> str:
    """Decode text by its byte order mark, or else in this encoding."""
    found = next((name for mark, name in MARKS if data.startswith(mark)), encoding)
    return data.decode(found).replace("\r\n", "\n").replace("\r", "\n")


def _html(path: Path) -> str:
    data = path.read_bytes()
    parser = _Text()
    parser.feed(_decoded(data, _declared_encoding(data)))
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.parts).splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _declared_encoding(page: bytes) -> str:
    """The encoding that a page declares; UTF-8 if it declares none that can be used."""
    found = CHARSET.search(page[:CHARSET_WITHIN])
    name = found[1].decode() if found else "utf-8"
    try:
        b"x".decode(name)  # unknown, not a text encoding, or not a superset of ASCII, as which the page was read so far
    except (LookupError, UnicodeError):
        return "utf-8"
    return name


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0
        self._cells = 0
        """The number of cells in the current row so far."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in UNSEEN
        if tag in CELLS:
            self.parts.append(" | " if self._cells else "")
            self._cells += 1
        elif tag == "tr":
            self._cells = 0
        if tag in SPACED or tag in LINES:
            self.parts.append("\n\n" if tag in SPACED else "\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in UNSEEN))

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(re.sub(r"\s+", " ", data))


def _pdf(path: Path) -> str:
    try:
        from pypdf import PdfReader
    except ImportError:
        raise MissingDependencyError(f"{KEY}: {path} needs pypdf: {install_command('documents')}") from None
    try:
        return "\n\n".join(page.extract_text() for page in PdfReader(path).pages)
    except Exception as error:  # noqa: BLE001 - a damaged or encrypted file makes the library raise errors of any kind
        raise TaskDataError(f"{KEY}: {path}: not a readable PDF: {type(error).__name__}: {error}") from None


def _docx(path: Path) -> str:
    try:
        import docx
    except ImportError:
        raise MissingDependencyError(f"{KEY}: {path} needs python-docx: {install_command('documents')}") from None
    parts = []
    try:
        for block in docx.Document(str(path)).iter_inner_content():
            if hasattr(block, "rows"):
                parts.append("\n".join(" | ".join(_cells(row)) for row in block.rows))
            else:
                parts.append(block.text)
    except Exception as error:  # noqa: BLE001 - likewise: errors of zip, of compression, of XML, and of its own
        why = f"{type(error).__name__}: {error}"
        raise TaskDataError(f"{KEY}: {path}: not a readable Word document: {why}") from None
    return "\n\n".join(part for part in parts if part.strip())


def _cells(row: Any) -> Iterator[str]:
    """The texts of a row's cells. The library gives a cell that spans several columns once for each."""
    for _, same in groupby(row.cells, lambda cell: cell._tc):
        yield next(same).text.strip()


READERS = {
    ".txt": _plain,
    ".md": _plain,
    ".markdown": _plain,
    ".html": _html,
    ".htm": _html,
    ".pdf": _pdf,
    ".docx": _docx,
}
