"""`page_text`: what a person would read of an HTML page. Links keep their addresses.

A scanner of its own: the standard library's takes minutes for a page that is made to be slow. This one looks at each
character a bounded number of times, and never fails; HTML that is wrong is read as well as can be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from urllib.parse import urljoin

HIDDEN = frozenset({"script", "style", "noscript", "template", "svg", "iframe", "object", "textarea"})
BLOCKS = frozenset(
    {"p", "div", "section", "article", "main", "header", "footer", "nav", "aside", "ul", "ol", "li", "table", "tr"}
    | {"pre", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "br", "hr", "form", "figure", "figcaption", "dl", "dt"}
    | {"dd", "details", "summary", "address", "body"}
)
BEGINNINGS = {**{f"h{level}": "#" * level + " " for level in range(1, 7)}, "li": "- ", "td": " | ", "th": " | "}
TAG_CHARS = 4096
"""Of a tag, how much is looked at."""
_NAME = re.compile(r"/?([a-zA-Z][a-zA-Z0-9:-]{0,40})")
_HREF = re.compile(r"\shref\s{0,9}=\s{0,9}(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+))", re.IGNORECASE)
_ENDS = {name: re.compile(f"</{name}\\b", re.IGNORECASE) for name in HIDDEN | {"title"}}


def page_text(html: str, url: str = "") -> str:
    """The text of a page: its title, then its content, a line for each block."""
    reader = _Reader(url)
    for piece, is_tag in _pieces(html):
        if is_tag:
            reader.tag(piece)
        else:
            reader.characters(piece)
    return reader.text()


def _pieces(html: str) -> Iterator[tuple[str, bool]]:
    """Texts, and tags without their brackets. What isn't shown is left out; the title is `title=…`, a tag."""
    at = 0
    while (begun := html.find("<", at)) >= 0:
        yield html[at:begun], False
        name = _NAME.match(html, begun + 1)
        if html.startswith("<!--", begun):
            end = html.find("-->", begun + 4)
            at = end + 3
        elif name is None and html[begun + 1 : begun + 2] not in ("!", "?"):
            yield "<", False
            at = begun + 1
            continue
        else:
            end = html.find(">", begun)
            at = end + 1
        if end < 0:  # nothing closes it, nor any later one
            return
        if name is None:
            continue
        word = name[1].lower()
        if word in _ENDS and html[begun + 1] != "/" and html[end - 1] != "/":
            closed = _ENDS[word].search(html, at)
            if word == "title":
                yield "title=" + html[at : closed.start() if closed else at + TAG_CHARS], True
            if closed is None:
                return
            at = closed.start()
        else:
            yield html[begun + 1 : min(end, begun + TAG_CHARS)], True
    yield html[at:], False


class _Reader:
    def __init__(self, url: str) -> None:
        self._url = url
        self._title = ""
        self._parts: list[str] = []
        self._preformatted = False
        self._link = ""
        self._link_text = False

    def tag(self, text: str) -> None:
        if text.startswith("title="):
            self._title = self._title or " ".join(unescape(text[6:]).split())
            return
        found = _NAME.match(text)
        name = found[1].lower() if found else ""
        ends = text.startswith("/")
        if name in BLOCKS:
            self._parts.append("\n")
        if name == "pre":
            self._preformatted = not ends
        elif name == "a":
            self._anchor(text, ends)
        elif not ends:
            self._parts.append(BEGINNINGS.get(name, ""))

    def _anchor(self, text: str, ends: bool) -> None:
        if self._link and self._link_text:
            self._parts.append(f" ({self._link})")
        found = None if ends else _HREF.search(text)
        target = unescape(next(filter(None, found.groups()), "")) if found else ""
        if target.lower().startswith(("#", "javascript:", "data:")):
            target = ""
        try:
            self._link = urljoin(self._url, target) if target else ""
        except ValueError:  # a page may link to anything
            self._link = target
        self._link_text = False

    def characters(self, text: str) -> None:
        text = unescape(text)
        self._link_text = self._link_text or bool(text.strip())
        self._parts.append(text if self._preformatted else re.sub(r"\s+", " ", text))

    def text(self) -> str:
        lines = [line.rstrip() for line in "".join(self._parts).split("\n")]
        lines = [line if line.startswith("    ") else re.sub(r" {2,}", " ", line).lstrip() for line in lines]
        body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
        return f"{self._title}\n\n{body}".strip()
