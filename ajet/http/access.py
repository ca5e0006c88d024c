"""Who may look: a token in the first URL, then a cookie; a password when others on the network can reach the page.

Every answer forbids scripts, styles and connections from elsewhere, and inline scripts altogether.
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

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_COOKIE_SECONDS = 30 * 24 * 3600
_FAILURES_A_MINUTE = 20
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
    """How one server lets people in."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    password: str | None = None
    hosts: tuple[str, ...] = LOOPBACK
    """Names under which the page may be asked for; empty: any (with a password). Keeps other sites' scripts out."""
    failures: list[float] = field(default_factory=list)

    @property
    def cookie(self) -> str:
        """Its name. Browsers share cookies between ports of a host, so two servers need two names."""
        return f"ajet_{hmac.new(self.token.encode(), b'cookie', 'sha256').hexdigest()[:12]}"

    @property
    def cookie_value(self) -> str:
        return hmac.new(self.token.encode(), (self.password or "").encode(), "sha256").hexdigest()

    def admits(self, secret: str) -> bool:
        """Whether this is the token or the password. Too many wrong ones in a minute: nobody, for a while."""
        now = time.monotonic()
        self.failures[:] = [when for when in self.failures if now - when < 60]
        if len(self.failures) >= _FAILURES_A_MINUTE:
            return False
        right = self.password if self.password is not None else self.token
        if hmac.compare_digest(secret.encode(), right.encode()):
            return True
        self.failures.append(now)
        return False


class Gate:
    """ASGI middleware: admits those with the cookie, and puts the protecting headers on every answer."""

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
        if access.hosts and _hostname(request) not in access.hosts:
            return PlainTextResponse("This page is not served under that name.\n", 421)
        path = request.url.path
        if path.startswith("/static/") or path == "/login":
            return None
        if access.password is None and "token" in request.query_params:
            return self._first_visit(request)
        given = request.cookies.get(access.cookie, "")
        if hmac.compare_digest(given, access.cookie_value):
            return None
        if path.startswith("/api/"):
            return PlainTextResponse("Open the page with the link that `ajet view` printed.\n", 401)
        wanted = path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/login?next={quote(wanted, safe='')}", 303)

    def _first_visit(self, request: Request) -> Response:
        if not self._access.admits(request.query_params["token"]):
            return RedirectResponse("/login?wrong=1", 303)
        rest = [(key, value) for key, value in parse_qsl(request.url.query) if key != "token"]
        return admit(self._access, request.url.path + (f"?{urlencode(rest)}" if rest else ""))


def admit(access: Access, where: str) -> Response:
    """Go on to a page of this server, with the cookie."""
    inside = where if where.startswith("/") and not where.startswith(("//", "/\\")) else "/"
    answer = RedirectResponse(inside, 303)
    answer.set_cookie(
        access.cookie, access.cookie_value, max_age=_COOKIE_SECONDS, httponly=True, samesite="lax", path="/"
    )
    return answer


def _hostname(request: Request) -> str:
    host = request.headers.get("host", "")
    return host[1 : host.index("]")] if host.startswith("[") and "]" in host else host.rsplit(":", 1)[0]
