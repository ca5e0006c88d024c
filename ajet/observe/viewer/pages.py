"""`Pages`: the viewer's HTML pages and notes, and `Gate`, which decides who may see them.

`Gate` lets only those in who have the link or the password (`Access`). `NotesApi` is the one part that writes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec
from jinja2 import Environment, FileSystemLoader, select_autoescape
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ajet.observe.run_files import Note, NotesError, read_regular
from ajet.observe.viewer.library import (
    Library,
    Reading,
    RunGain,
    differences,
    differently_judged,
    named_runs,
    run_gains,
)
from ajet.schema import __version__
from ajet.system.http_messages import LOOPBACK, HttpRequest, without_port

_HERE = Path(__file__).parent
_STATIC = _HERE / "static"
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


# ---------------------------------------------------------------- access


@dataclass(slots=True)
class Access:
    """Decides who may see the pages: by password if there is one, otherwise by token."""

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
        """Whether this is the password or token. The right one is accepted however many wrong ones were tried."""
        right = self.password if self.password is not None else self.token
        if hmac.compare_digest(_bytes(secret), _bytes(right)):
            return True
        self.failures.append(time.monotonic())
        return False

    def authenticated(self, request: HttpRequest) -> bool:
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


# ---------------------------------------------------------------- pages


class _Page(NamedTuple):
    """A page of an experiment: its template, the tab that it is below, and its title."""

    template: str
    tab: str
    title: str = ""


_PAGES = {
    "": _Page("overview.html", "overview"),
    "/charts": _Page("run.html", "charts", "Charts"),
    "/episodes": _Page("episodes.html", "episodes", "Episodes"),
    "/tasks": _Page("tasks.html", "tasks", "Tasks"),
    "/task/{task:path}": _Page("task.html", "tasks", "Task"),
    "/candidates": _Page("candidates.html", "candidates", "Candidates"),
    "/differences": _Page("differences.html", "episodes", "Differences"),
    "/group/{group:path}": _Page("group.html", "episodes", "Group"),
    "/episode/{episode:path}": _Page("episode.html", "episodes", "Episode"),
}


class Pages:
    """The routes of all pages."""

    def __init__(self, library: Library, access: Access) -> None:
        self._library = library
        self._access = access
        self._templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=select_autoescape(default=True, default_for_string=True),
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._static = static_path()
        self._templates.globals.update(version=__version__, library=library, static=self._static)

    def routes(self) -> list[Route | Mount]:
        return [
            Route("/", self.home),
            Route("/login", self.login, methods=["GET", "POST"]),
            Route("/compare", self.compare),
            *(Route(f"/x/{{name}}{path}", partial(self.experiment, page)) for path, page in _PAGES.items()),
            Route("/x/{name}/about", self.about),
            Mount(self._static, StaticFiles(directory=_STATIC)),
        ]

    def _page(self, template: str, status: int = 200, **values: Any) -> Response:
        return HTMLResponse(self._templates.get_template(template).render(**values), status)

    def home(self, request: Request) -> Response:
        return self._page("home.html", title="Experiments")

    def compare(self, request: Request) -> Response:
        names = named_runs(request.query_params.get("runs", ""))
        compared = [self._library.get(name) for name in names]
        reading = Reading()
        unknown: dict[str, list[str]] | None = None
        return self._page(
            "run.html",
            title="Compare",
            runs=names,
            experiment=None,
            tab="charts",
            differences=reading.part(partial(differences, compared), unknown),
            warning=reading.part(partial(differently_judged, compared), ""),
            gains=reading.part(partial(run_gains, compared), list[RunGain]()),
            problems=dict.fromkeys(reading.problems),
        )

    def experiment(self, page: _Page, request: Request, **values: Any) -> Response:
        """A page of one experiment; its template is given what the address names."""
        named = dict(request.path_params)
        experiment = self._library.get(named.pop("name"))
        title = " ".join(filter(None, (page.title, *named.values())))
        return self._page(
            page.template,
            title=f"{title} · {experiment.name}" if title else experiment.name,
            experiment=experiment,
            tab=page.tab,
            runs=[experiment.name],
            **named,
            **values,
        )

    def about(self, request: Request) -> Response:
        experiment = self._library.get(request.path_params["name"])
        reading = Reading()
        events: list[dict[str, Any]] = reading.part(experiment.events, [])
        log: list[dict[str, Any]] = reading.part(experiment.log_tail, [])
        environment: dict[str, str] = reading.part(experiment.environment, {})

        def text(name: str) -> str:
            file = experiment.path / name
            return reading.part(partial(read_regular, file), "") if file.exists() else ""

        return self.experiment(
            _Page("about.html", "about", "About"),
            request,
            events=list(reversed(events)),
            log=list(reversed(log))[:200],
            environment=environment,
            rubrics=text("cache/rubrics.yaml"),
            asked=text("config.yaml"),
            resolved=text("config.resolved.yaml"),
            problems=reading.problems,
        )

    async def login(self, request: Request) -> Response:
        wrong, wanted = "wrong" in request.query_params, request.query_params.get("next", "/")
        if request.method == "POST":
            form = dict(parse_qsl((await request.body()).decode("utf-8", "replace")))
            wanted = form.get("next", "/")
            if self._access.admits(form.get("secret", "")):
                return sign_in(self._access, wanted)
            await asyncio.sleep(self._access.pause_s)
            wrong = True
        needs_password = self._access.password is not None
        status = 401 if wrong else 200
        return self._page(
            "login.html", status, title="Sign in", next=wanted, wrong=wrong, needs_password=needs_password
        )

    def error(self, path: str, status: int, detail: str) -> Response:
        """Render the page that says what went wrong, with a way back."""
        name = path.split("/")[2] if path.startswith("/x/") else ""
        title = "There is no such page" if status == HTTPStatus.NOT_FOUND else HTTPStatus(status).phrase
        detail = path if detail == HTTPStatus.NOT_FOUND.phrase else detail
        near = name if name in self._library.names() else ""
        return self._page("error.html", status, title=title, detail=detail, near=near)


@cache
def static_path() -> str:
    """The path of styles and scripts. It contains a hash of their content, so browsers can cache them forever."""
    content = hashlib.sha256()
    for file in sorted(_STATIC.iterdir()):
        content.update(file.name.encode() + file.read_bytes())
    return f"/static/{content.hexdigest()[:12]}"


# ---------------------------------------------------------------- notes


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to keep a note."""

    note: str
    tags: list[str]
    episode: str = ""


class NotesApi:
    """The routes under which notes are read and kept."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def routes(self) -> list[Route]:
        return [
            Route("/api/x/{name}/notes", self.read),
            Route("/api/x/{name}/notes", self.write, methods=["POST"]),
        ]

    def read(self, request: Request) -> Response:
        """All notes of an experiment, and why none can be kept, if that is so."""
        name = request.path_params["name"]
        notes = self._library.get(name).notes.read()
        return _json({**asdict(notes), "refused": self._library.why_no_notes})

    async def write(self, request: Request) -> Response:
        require_own_page(request)
        try:
            written = msgspec.json.decode(await request.body(), type=_Written)
        except msgspec.DecodeError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"not a note: {error}") from error
        return _json(asdict(await run_in_threadpool(self._keep, request.path_params["name"], written)))

    def _keep(self, name: str, written: _Written) -> Note:
        experiment = self._library.get(name)
        if self._library.why_no_notes:
            raise HTTPException(HTTPStatus.CONFLICT, self._library.why_no_notes)
        store = experiment.store() if written.episode else None
        if written.episode and (store is None or not store.has(written.episode)):
            raise HTTPException(HTTPStatus.NOT_FOUND, f"no episode {written.episode!r} in {name}")
        try:
            return experiment.notes.write(written.note, written.tags, written.episode)
        except NotesError as error:
            raise HTTPException(HTTPStatus.CONFLICT, str(error)) from error


def require_own_page(request: Request) -> None:
    """Raise unless a page of this server sent the request: browsers say so in its headers, and no form sends JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
    if site != "same-origin" or (origin is not None and urlsplit(origin).netloc != request.headers.get("host")):
        raise HTTPException(HTTPStatus.FORBIDDEN, "notes are written from the viewer's own pages only")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
