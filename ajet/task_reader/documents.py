"""Documents as text: txt, md, html, pdf, docx, and folders of them; and their chunks, each with its place."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from ajet.schema.errors import MissingDependencyError, TaskDataError
from ajet.schema.install import install_command

log = logging.getLogger("ajet.task_reader")

KEY = "ajet.task_reader.data_generation.document_reader.document_path"
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")
PARAGRAPH = re.compile(r"\n\s*\n")
UNSEEN = ("script", "style", "head", "template", "noscript")
BLOCKS = ("p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article", "pre", "table", "ul")


@dataclass(frozen=True, slots=True)
class Document:
    """One file's text."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of a document."""

    source: str
    index: int
    start: int
    """Where it begins in the document's text, in characters."""
    text: str


def read_documents(paths: Sequence[str], base_dirs: Sequence[Path] = ()) -> list[Document]:
    """All documents, in the order of `paths`; those of a folder by name. An unreadable one is named."""
    found: list[Document] = []
    for given in paths:
        path = _there(given, base_dirs)
        if path.is_file():
            found.append(Document(given, _text(path)))
            continue
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix.lower() in READERS]
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
    """The document in pieces of at most `size` characters, but for single sentences or paragraphs that are longer."""
    text = document.text
    pieces: list[Chunk] = []
    start = 0
    for end in _ends(text, size, split_by):
        if end - start and text[start:end].strip():
            pieces.append(Chunk(document.source, len(pieces), start, text[start:end].strip()))
        start = end
    return pieces


def _ends(text: str, size: int, split_by: str) -> Iterator[int]:
    if split_by == "character":
        yield from range(size, len(text), size)
        yield len(text)
        return
    pattern = PARAGRAPH if split_by == "paragraph" else SENTENCE_END
    begun = last = 0
    for end in (*(found.end() for found in pattern.finditer(text)), len(text)):
        if end - begun > size and last > begun:
            yield last
            begun = last
        last = end
    yield len(text)


def _there(given: str, base_dirs: Sequence[Path]) -> Path:
    path = Path(given).expanduser()
    for candidate in (path, *(folder / path for folder in base_dirs)):
        if candidate.exists():
            return candidate
    raise TaskDataError(f"{KEY}: no file or folder {given!r}, neither here nor beside the YAML")


def _text(path: Path) -> str:
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise TaskDataError(f"{KEY}: {path}: can't read {path.suffix or 'a file without ending'}; {', '.join(READERS)}")
    try:
        return read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise TaskDataError(f"{KEY}: {path}: can't be read: {error}") from None


def _plain(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig")


def _html(path: Path) -> str:
    parser = _Text()
    parser.feed(_plain(path))
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.parts).splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


class _Text(HTMLParser):
    """The visible text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in UNSEEN
        if tag in BLOCKS:
            self.parts.append("\n\n" if tag in ("p", "section", "article") or tag[0] == "h" else "\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in UNSEEN))

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(re.sub(r"\s+", " ", data))


def _pdf(path: Path) -> str:
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ImportError:
        raise MissingDependencyError(f"{KEY}: {path} needs pypdf: {install_command('documents')}") from None
    try:
        return "\n\n".join(page.extract_text() for page in PdfReader(path).pages)
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        # a damaged or encrypted file makes the library raise many kinds of errors
        raise TaskDataError(f"{KEY}: {path}: not a readable PDF: {type(error).__name__}: {error}") from None


def _docx(path: Path) -> str:
    try:
        import docx
        from docx.opc.exceptions import PackageNotFoundError
    except ImportError:
        raise MissingDependencyError(f"{KEY}: {path} needs python-docx: {install_command('documents')}") from None
    from zipfile import BadZipFile

    try:
        document = docx.Document(str(path))
    except (BadZipFile, KeyError, ValueError, PackageNotFoundError) as error:
        raise TaskDataError(f"{KEY}: {path}: not a readable Word document: {error}") from None
    parts = []
    for block in document.iter_inner_content():
        if hasattr(block, "rows"):
            parts.append("\n".join(" | ".join(cell.text.strip() for cell in row.cells) for row in block.rows))
        else:
            parts.append(block.text)
    return "\n\n".join(part for part in parts if part.strip())


READERS = {
    ".txt": _plain,
    ".md": _plain,
    ".markdown": _plain,
    ".html": _html,
    ".htm": _html,
    ".pdf": _pdf,
    ".docx": _docx,
}
