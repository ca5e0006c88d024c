"""`Access`: who may see a server's pages. A token in the first URL, then a cookie; or a password.

Every answer forbids scripts, styles and connections from other sites, and inline scripts altogether.
"""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ajet.system.access import LOOPBACK, without_port
from ajet.system.http_messages import HttpRequest

_COOKIE_SECONDS = 30 * 24 * 3600
_FAILURES_PER_MINUTE = 20
GUESSING_PAUSE_S = 2.0
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(slots=True)
class Access:
    """How a server lets people in: by password if there is one, otherwise by token."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    password: str | None = None
    hosts: tuple[str, ...] = LOOPBACK
    """Host names under which the pages are served; empty: any. Keeps out other sites' scripts (DNS rebinding)."""
    failures: list[float] = field(default_factory=list)
    """When wrong secrets were given within the last minute."""

    @property
    def cookie(self) -> str:
        """The cookie's name. Browsers share cookies between a host's ports, so each server needs a name of its own."""
        return f"ajet_{hmac.new(self.token.encode(), b'cookie', 'sha256').hexdigest()[:12]}"

    @property
    def cookie_value(self) -> str:
        return hmac.new(self.token.encode(), (self.password or "").encode(), "sha256").hexdigest()

    def admits(self, secret: str) -> bool:
        """Whether this is the password or token. The right one always is, however many wrong ones were tried."""
        right = self.password if self.password is not None else self.token
        if hmac.compare_digest(_bytes(secret), _bytes(right)):
            return True
        self.failures.append(time.monotonic())
        return False

    def knows(self, request: HttpRequest) -> bool:
        """Whether a request has the cookie, before any framework has read it."""
        cookies = request.headers.get(b"cookie", b"")
        wanted = f"{self.cookie}={self.cookie_value}".encode()
        return any(hmac.compare_digest(one.strip(), wanted) for one in cookies.split(b";"))

    @property
    def pause_s(self) -> float:
        """How long the answer to a wrong secret waits: guessing is slow after too many within a minute."""
        now = time.monotonic()
        self.failures[:] = [when for when in self.failures if now - when < 60]
        return GUESSING_PAUSE_S if len(self.failures) > _FAILURES_PER_MINUTE else 0.0


class Gate:
    """ASGI middleware: lets in requests with the cookie, and puts the protective headers on every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                kept = message["status"] == 200 and scope["path"].startswith("/static/")
                headers["cache-control"] = "private, max-age=31536000, immutable" if kept else "no-store"
            await send(message)

        request = Request(scope, receive)
        answer = self._refusal(request)
        await (answer or self._app)(scope, receive, send_protected)

    def _refusal(self, request: Request) -> Response | None:
        access = self._access
        if access.hosts and without_port(request.headers.get("host", "")) not in access.hosts:
            return PlainTextResponse("This page isn't served under that host name.\n", 421)
        path = request.scope["path"]  # `request.url` is made from the Host header, which a client writes as it likes
        if path.startswith("/static/") or path == "/login":
            return None
        if access.password is None and "token" in request.query_params:
            return self._first_visit(request)
        given = request.cookies.get(access.cookie, "")
        if hmac.compare_digest(_bytes(given), _bytes(access.cookie_value)):
            return None
        if path.startswith("/api/"):
            return PlainTextResponse("Not signed in: open the link that the server printed when it started.\n", 401)
        query = request.scope["query_string"].decode("latin-1")
        wanted = path + (f"?{query}" if query else "")
        return RedirectResponse(f"/login?next={quote(wanted, safe='')}", 303)

    def _first_visit(self, request: Request) -> Response:
        if not self._access.admits(request.query_params["token"]):
            return RedirectResponse("/login?wrong=1", 303)
        query = request.scope["query_string"].decode("latin-1")
        rest = [(key, value) for key, value in parse_qsl(query) if key != "token"]
        return sign_in(self._access, request.scope["path"] + (f"?{urlencode(rest)}" if rest else ""))


def sign_in(access: Access, where: str) -> Response:
    """Set the cookie and go on to a page of this server."""
    inside = where if where.startswith("/") and not where.startswith(("//", "/\\")) else "/"
    answer = RedirectResponse(inside, 303)
    answer.set_cookie(
        access.cookie, access.cookie_value, max_age=_COOKIE_SECONDS, httponly=True, samesite="lax", path="/"
    )
    return answer


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
