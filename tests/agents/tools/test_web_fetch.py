"""The web fetch tool, against real servers on this machine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet.agents.tools import ToolResult, Toolset, ToolSetupError, make_tools
from ajet.agents.tools.web_fetch import AllowList, Refused, page_text

PAGE = (
    "<html><head><title>A &amp; B</title><script>if (1<2) '</p>'</script></head><body><h1>Head</h1><p>Some <b>bold</b> "
    "text, <a href='/x'>a link</a>.</p><!-- hidden --></body></html>"
)


class Site(BaseHTTPRequestHandler):
    """What each path answers."""

    seen: list[str]

    def do_GET(self) -> None:
        type(self).seen.append(self.path)
        name = self.path.split("?")[0]
        if name.startswith("/to/"):
            self.answer(302, "text/plain", b"", location=self.path.removeprefix("/to/"))
        elif name == "/page":
            self.answer(200, "text/html; charset=utf-8", PAGE.encode())
        elif name == "/latin":
            self.answer(200, "text/plain; charset=latin-1", "grün".encode("latin-1"))
        elif name == "/punycode":
            self.answer(200, "text/plain; charset=punycode", b"a" * 500_000 + b"-" + b"z9" * 500_000)
        elif name == "/long":
            self.answer(200, "text/plain", b"0123456789" * 5000)
        elif name == "/binary":
            self.answer(200, "application/pdf", b"%PDF\0")
        elif name == "/slow":
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(200):
                    self.wfile.write(b"x")
                    time.sleep(0.1)
            except OSError:
                pass
        else:
            self.answer(404, "text/plain", b"nothing here")

    def answer(self, status: int, kind: str, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"content-type": kind, "content-length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Any]:
    handler = type("Handler", (Site,), {"seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def fetch(url: str, allow: list[str], start: int | None = None, **options: Any) -> ToolResult:
    async def main() -> ToolResult:
        async with Toolset(make_tools([{"web_fetch": {"allow": allow, **options}}])) as toolset:
            return await toolset.call("web_fetch", {"url": url, **({} if start is None else {"start": start})})

    return asyncio.run(main())


def test_pages_as_text(site: Any) -> None:
    port = site.server_port
    here = [f"localhost:{port}", "127.0.0.1"]
    page = fetch(f"http://localhost:{port}/page#part", here)
    assert page.success, page.output
    link = f"http://localhost:{port}/x"
    assert page.output == f"A & B\n\n# Head\n\nSome bold text, a link ({link})."
    assert fetch(f"http://localhost:{port}/latin", here).output == "grün"
    missing = fetch(f"http://localhost:{port}/no", here)
    assert not missing.success and "status 404" in missing.output and "nothing here" in missing.output
    assert "only text can be shown" in fetch(f"http://localhost:{port}/binary", here).output


def test_long_pages_come_in_parts(site: Any) -> None:
    url, here = f"http://localhost:{site.server_port}/long", [f"localhost:{site.server_port}", "127.0.0.1"]
    first = fetch(url, here, output_chars=100)
    assert first.output.endswith("[characters 0 to 100 of 50,000]\n[to go on: start=100]")
    assert fetch(url, here, start=49_995, output_chars=100).output.startswith("56789\n[")
    assert "beyond its end" in fetch(url, here, start=60_000).output
    cut = fetch(url, here, max_bytes=50)
    assert cut.output == "0123456789" * 5 + "\n[the page is longer: only its first 50 bytes were read]"
    assert "did not answer within 0.5 s" in fetch(url.replace("/long", "/slow"), here, timeout=0.5).output


def test_redirects_are_checked(site: Any) -> None:
    port = site.server_port
    base, here = f"http://localhost:{port}", [f"localhost:{port}", "127.0.0.1"]
    assert fetch(f"{base}/to//latin", here).output == "grün"
    for target in ("http://evil.example/", f"http://localhost:{port + 1}/", "file:///etc/passwd", "ftp://localhost/"):
        told = fetch(f"{base}/to/{target}", here)
        assert not told.success and ("may not be fetched" in told.output or "not a web address" in told.output)
    assert "more than 5 redirects" in fetch(f"{base}/to/" * 1 + "/to/" * 9 + "/latin", here).output


def test_private_addresses_are_refused_unless_listed(site: Any) -> None:
    port = site.server_port
    told = fetch(f"http://localhost:{port}/page", [f"localhost:{port}"])
    assert not told.success and "not a public address" in told.output and site.RequestHandlerClass.seen == []
    assert "may not be fetched" in fetch(f"http://127.0.0.1:{port}/page", ["example.org"]).output
    assert fetch(f"http://127.0.0.1:{port}/latin", ["127.0.0.0/8"]).output == "grün"
    for literal in ("2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "127.1", "[::1]", "0"):
        told = fetch(f"http://{literal}:{port}/page", ["*.example.org", "example.org"])
        assert not told.success and site.RequestHandlerClass.seen == ["/latin"], literal


@pytest.mark.parametrize(
    "address",
    [
        "64:ff9b::7f00:1",
        "64:ff9b::a00:1",
        "64:ff9b:1::1",
        "fec0::1",
        "ff02::1",
        "224.0.0.1",
        "::ffff:10.0.0.1",
        "2002:7f00:1::",
    ],
)
def test_what_leads_inside_is_refused(address: str) -> None:
    rules = AllowList(["example.org"])
    with pytest.raises(Refused, match="not a public address"):
        asyncio.run(rules.addresses(address, 80))
    assert asyncio.run(AllowList(["64:ff9b::/96", "0.0.0.0/0", "::/0"]).addresses(address, 80))


def test_a_charset_that_is_made_to_be_slow(site: Any) -> None:
    told = fetch(f"http://127.0.0.1:{site.server_port}/punycode", ["127.0.0.1"])
    assert told.success and told.output.startswith("aaaa"), "read as UTF-8, like any unknown one"


def test_a_dead_server(site: Any) -> None:
    site.shutdown()
    site.server_close()
    told = fetch(f"http://127.0.0.1:{site.server_port}/", ["127.0.0.1"])
    assert not told.success and "could not be reached" in told.output


@pytest.mark.parametrize(
    ("allow", "url", "allowed"),
    [
        ("docs.python.org", "https://docs.python.org/3/", True),
        ("docs.python.org", "https://DOCS.python.org./3/", True),
        ("docs.python.org", "https://docs.python.org:8443/", False),
        ("docs.python.org", "https://docs.python.org.evil.example/", False),
        ("docs.python.org", "https://evil.example/docs.python.org", False),
        ("docs.python.org", "https://docs.python.org@evil.example/", False),
        ("docs.python.org", "https://evil.example#@docs.python.org/", False),
        ("docs.python.org", "https://evil.example\\@docs.python.org/", False),
        ("docs.python.org", "file://docs.python.org/etc/passwd", False),
        ("*.example.org", "http://a.b.example.org/", True),
        ("*.example.org", "http://example.org/", False),
        ("*.example.org", "http://badexample.org/", False),
        ("https://example.org/docs/", "https://example.org/docs/a", True),
        ("https://example.org/docs/", "https://example.org/docs", True),
        ("https://example.org/docs/", "http://example.org/docs/a", False),
        ("https://example.org/docs/", "https://example.org/docsx", False),
        ("https://example.org/docs/", "https://example.org/docs/../secret", False),
        ("https://example.org/docs/", "https://example.org/docs/%2e%2e/secret", False),
        ("https://example.org/docs/", "https://example.org/docs/..%2fsecret", False),
        ("https://example.org/docs/", "https://example.org/docs/..;/secret", False),
        ("https://example.org/docs/", "https://example.org/docs/%2e%2e%3bx/secret", False),
        ("https://example.org/docs/", "https://example.org/docs/a;v=1/b", True),
        ("bücher.example", "https://xn--bcher-kva.example/", True),
    ],
)
def test_what_the_list_allows(allow: str, url: str, allowed: bool) -> None:
    rules = AllowList([allow])
    if allowed:
        rules.checked_url(url)
    else:
        with pytest.raises(Refused):
            rules.checked_url(url)


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_address_gets_past_the_list_or_raises_otherwise(text: str) -> None:
    for url in (text, f"http://{text}", f"https://{text}.example.org/{text}"):
        try:
            checked = AllowList(["*.example.org"]).checked_url(url)
        except Refused:
            continue
        host = checked.split("://", 1)[1].split("/", 1)[0].split(":")[0]
        assert host.endswith(".example.org")


@pytest.mark.parametrize("allow", [None, [], [""], ["*"], ["http://"], ["a.*.org"], ["ftp://x.org"], [3]])
def test_without_a_list_there_is_no_tool(allow: Any) -> None:
    with pytest.raises(ToolSetupError, match="web_fetch"):
        make_tools([{"web_fetch": {} if allow is None else {"allow": allow}}])


@pytest.mark.parametrize("piece", ["<!--", "<", "<a", "<a ", "<a x='", "</", "<script>", "<title>", "&#", "<![CDATA["])
def test_a_page_that_is_made_to_be_slow(piece: str) -> None:
    page_text(piece * 40_000)


@given(st.text(alphabet="<>/=\"' abpre!-&#;\n", max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read(text: str) -> None:
    assert isinstance(page_text(text), str)
