"""`Viewer`: listens on an address, gives the link to open, and serves the pages until interrupted."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response

from ajet.observe.viewer.data import Data
from ajet.observe.viewer.library import ExperimentNotFoundError, Library, NoExperimentsError
from ajet.observe.viewer.pages import Access, Gate, NotesApi, Pages
from ajet.schema.errors import UserError
from ajet.system.http_messages import LOOPBACK, Answer, AsgiApp, HttpLimits, HttpRequest, is_loopback
from ajet.system.http_server import AddressError, HttpServer, listen

_COMPRESS_FROM_BYTES = 50_000


def create_app(library: Library, access: Access) -> Starlette:
    """Make the application that shows these experiments."""
    pages = Pages(library, access)

    def refuse(request: Request, status: int, detail: str) -> Response:
        if request.scope["path"].startswith("/api/"):
            return Response(msgspec.json.encode({"error": detail}), status, media_type="application/json")
        return pages.error(request.scope["path"], status, detail)

    def failed(request: Request, error: Exception) -> Response:
        match error:
            case HTTPException():
                return refuse(request, error.status_code, error.detail)
            case ExperimentNotFoundError():
                return refuse(request, HTTPStatus.NOT_FOUND, str(error))
            case sqlite3.Error():
                return refuse(request, HTTPStatus.INTERNAL_SERVER_ERROR, f"episodes.sqlite can't be read: {error}")
            case UnicodeError():
                detail = f"the URL contains text that can't be read: {error}"
                return refuse(request, HTTPStatus.BAD_REQUEST, detail)
        return refuse(request, HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    known = (HTTPException, UserError, UnicodeError, sqlite3.Error, OSError)
    return Starlette(
        routes=[*pages.routes(), *Data(library).routes(), *NotesApi(library).routes()],
        middleware=[
            Middleware(Gate, access=access),
            Middleware(GZipMiddleware, minimum_size=_COMPRESS_FROM_BYTES, compresslevel=1),
        ],
        exception_handlers={kind: failed for kind in known},
    )


DEFAULT_PORT = 8642
_SHORTEST_PASSWORD = 8
_SETTINGS = "--host or --port"
_LIMITS = HttpLimits(max_body_bytes=64 * 1024)
"""Pages send the sign-in form and notes."""


class Viewer:
    """A viewer that is listening; `serve` runs it on the calling thread."""

    def __init__(
        self,
        root: Path,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        password: str | None = None,
        trajectories: Path | None = None,
    ) -> None:
        """`port` None: 8642, or any free one if that one is taken. `trajectories`: the folder that `root` was made of,
        if it was."""
        outward = not is_loopback(host)
        if outward and (password is None or len(password) < _SHORTEST_PASSWORD):
            raise AddressError(
                f"--host {host}: other machines can reach that address, so the page needs a password of at "
                f"least {_SHORTEST_PASSWORD} characters: --password, or AJET_VIEW_PASSWORD. Without one, view from "
                f"this machine (or through `ssh -L`)."
            )
        self.library = Library(root, trajectories)
        if not root.exists():
            raise NoExperimentsError(
                f"{root}: no such folder. Runs write to saved_experiments/<name>; give that folder, or one "
                f"experiment in it."
            )
        self.access = Access(password=password, hosts=() if outward else (*LOOPBACK, host))
        self.socket = _listen(host, port)
        self.host, self.port = host, int(self.socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The link to open."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        names = self.library.names()
        path = f"/x/{quote(names[0])}" if self.library.single else "/"
        if self.library.trajectories is not None:
            path += "/episodes"
        token = "" if self.access.password is not None else f"?token={self.access.token}"
        return f"http://{host}:{self.port}{path}{token}"

    def serve(self) -> None:
        """Serve until interrupted."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = HttpServer(_Pages(create_app(self.library, self.access), self.access), _LIMITS)
        await server.start_on(self.socket)
        try:
            await asyncio.Event().wait()  # until the task is cancelled: by Ctrl-C
        finally:
            await server.aclose()


class _Pages:
    """An `HttpHandler` that leaves every request to the application."""

    def __init__(self, app: AsgiApp, access: Access) -> None:
        self._app, self._access = app, access

    def admit(self, request: HttpRequest) -> None:
        request.unauthenticated = not self._access.authenticated(request)  # then the application asks to sign in

    async def handle(self, request: HttpRequest) -> AsgiApp:
        return self._app

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        headers = {"content-type": "text/plain; charset=utf-8", "x-content-type-options": "nosniff"}
        return Answer(status, f"{message}\n".encode(), headers)


def _listen(host: str, port: int | None) -> socket.socket:
    if port is not None:
        return listen(host, port, _SETTINGS)
    try:
        return listen(host, DEFAULT_PORT, _SETTINGS)
    except AddressError:  # most likely another viewer has it
        return listen(host, 0, _SETTINGS)
