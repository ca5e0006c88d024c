"""Documents as people have them: other encodings, pages without end tags, tables, damaged files, folders with more."""

from __future__ import annotations

import contextlib
import io
import random
import zipfile
from pathlib import Path

import pytest

from ajet.schema.errors import TaskDataError
from ajet.task_reader.documents import Document, chunks_of, read_documents

SAID = "Größe: 3 €."


def text_of(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    (document,) = read_documents([str(path)])
    return document.text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_text_tells_its_encoding(tmp_path: Path, encoding: str) -> None:
    assert text_of(tmp_path / "a.txt", f"{SAID}\r\n{SAID}".encode(encoding)) == f"{SAID}\n{SAID}"


@pytest.mark.parametrize(
    ("meta", "encoding"),
    [
        ("<meta charset=windows-1252>", "cp1252"),
        ('<meta http-equiv="content-type" content="text/html; charset=iso-8859-15">', "iso-8859-15"),
        ("<meta charset='utf-16'>", "utf-8"),  # can't be: it was read as ASCII so far
        ("<meta charset='no-such-thing'>", "utf-8"),
        ("<meta charset='hex'>", "utf-8"),
        ("", "utf-8"),
    ],
)
def test_a_page_tells_its_encoding(tmp_path: Path, meta: str, encoding: str) -> None:
    assert text_of(tmp_path / "a.html", f"<head>{meta}</head><p>{SAID}".encode(encoding)) == SAID


def test_an_unknown_encoding_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match=r"a.txt: can't be read: .* position 2.*\n.*save it as UTF-8"):
        text_of(tmp_path / "a.txt", "Größe".encode("latin-1"))


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<html><head><title>T</title><body><p>Said.</body></html>", "Said."),  # `</head>` may be left out
        ("<title>T</title><p>One<p>Two", "One\n\nTwo"),
        ("<tr><th>City</th><th>People</th></tr><tr><td>Paris</td><td>2</td></tr>", "City | People\nParis | 2"),
        ("<dl><dt>Name</dt><dd>What it is</dd></dl>", "Name\nWhat it is"),
    ],
)
def test_pages(tmp_path: Path, page: str, text: str) -> None:
    assert text_of(tmp_path / "a.html", page.encode()) == text


def docx(**parts: bytes) -> bytes:
    """A Word document, with some of its parts replaced."""
    library = pytest.importorskip("docx")
    document = library.Document()
    document.add_paragraph("Said.")
    whole, changed = io.BytesIO(), io.BytesIO()
    document.save(whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, parts.get(name.rpartition("/")[2].partition(".")[0], source.read(name)))
    return changed.getvalue()


def test_a_cell_that_spans_columns_is_read_once(tmp_path: Path) -> None:
    document = pytest.importorskip("docx").Document()
    table = document.add_table(rows=2, cols=3)
    for row, texts in enumerate((("A", "", "same"), ("same", "same", "B"))):
        for column, text in enumerate(texts):
            table.cell(row, column).text = text
    table.cell(0, 0).merge(table.cell(0, 1))
    document.save(whole := io.BytesIO())
    assert text_of(tmp_path / "a.docx", whole.getvalue()) == "A | same\nsame | same | B"


def damaged(content: bytes, seed: int) -> bytes:
    draw = random.Random(seed)
    changed = bytearray(content)
    for _ in range(draw.choice((1, 5, 50))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("content", [b"", b"<a><b>", b"<x/>", b"rubbish"])
def test_a_word_document_with_damaged_xml_is_named(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(TaskDataError, match=r"a\.docx: not a readable Word document: \w+: "):
        text_of(tmp_path / "a.docx", docx(document=content))


def test_no_damage_to_a_word_document_is_a_crash(tmp_path: Path) -> None:
    whole = docx()
    for seed in range(40):
        with contextlib.suppress(TaskDataError):
            text_of(tmp_path / "a.docx", damaged(whole, seed))


def test_a_pdf_with_a_filter_that_nobody_knows_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    data, places = b"%PDF-1.4\n", []
    for number, body in enumerate(
        (
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R "
            b"/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
            b"<< /Length 3 /Filter /Nonsense >>\nstream\nabc\nendstream",
        ),
        start=1,
    ):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"xref\n0 5\n0000000000 65535 f \n%strailer\n<< /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF"
    content = data + end % (table, len(data))
    with pytest.raises(TaskDataError, match=r"a\.pdf: not a readable PDF: NotImplementedError: "):
        text_of(tmp_path / "a.pdf", content)


def test_what_programs_leave_in_a_folder_is_no_document(tmp_path: Path) -> None:
    for name in ("~$report.docx", "._report.pdf", ".git/readme.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\x05user")
    (tmp_path / "a.txt").write_text("Said.")
    assert [document.text for document in read_documents([str(tmp_path)])] == ["Said."]


@pytest.mark.parametrize("split_by", ["sentence", "paragraph", "character"])
def test_a_chunk_begins_where_it_says(split_by: str) -> None:
    text = "\n\n  One sentence is here.\n\n    Then an indented one follows.   The last."
    chunks = chunks_of(Document("a", text), 25, split_by)
    assert len(chunks) > 1 and all(text.startswith(chunk.text, chunk.start) for chunk in chunks)


@pytest.mark.parametrize("split_by", ["sentence", "paragraph"])
@pytest.mark.parametrize("word", ["word ", "x", "line\n"])
def test_a_text_without_sentences_is_cut_all_the_same(split_by: str, word: str) -> None:
    text = word * 500 + "End."
    chunks = chunks_of(Document("a", text), 50, split_by)
    assert max(len(chunk.text) for chunk in chunks) <= 200
    assert "".join("".join(chunk.text for chunk in chunks).split()) == "".join(text.split())
    assert all(text.startswith(chunk.text[:5], chunk.start) for chunk in chunks)
    if word == "word ":
        assert all(chunk.text.startswith(("word", "End")) for chunk in chunks)
