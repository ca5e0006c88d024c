"""`Viewer`: listens on an address, tells the link to open, and serves the pages until interrupted."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ajet.observe.viewer.access import Access
from ajet.observe.viewer.app import create_app
from ajet.observe.viewer.library import Library, NoExperimentsError
from ajet.system.access import LOOPBACK, is_loopback
from ajet.system.http_messages import Answer, AsgiApp, HttpLimits, HttpRequest
from ajet.system.http_server import AddressError, HttpServer, listen

DEFAULT_PORT = 8642
_SHORTEST_PASSWORD = 8
_SETTINGS = "--host or --port"
_LIMITS = HttpLimits(max_body_bytes=64 * 1024)
"""Pages send the sign-in form and notes."""


@dataclass(frozen=True, slots=True)
class ViewerSettings:
    """What is shown, and to whom."""

    root: Path
    host: str = "127.0.0.1"
    port: int | None = None
    """None: 8642, or any free port if that one is taken."""
    password: str | None = None
    trajectories: Path | None = None
    """The folder of trajectories that `root` was made from, if it was."""


class Viewer:
    """A viewer that is listening; `serve` runs it on the calling thread."""

    def __init__(self, settings: ViewerSettings) -> None:
        outward = not is_loopback(settings.host)
        if outward and (settings.password is None or len(settings.password) < _SHORTEST_PASSWORD):
            raise AddressError(
                f"--host {settings.host}: other machines can reach that address, so the page needs a password of at "
                f"least {_SHORTEST_PASSWORD} characters: --password, or AJET_VIEW_PASSWORD. Without one, view from "
                f"this machine (or through `ssh -L`)."
            )
        self.library = Library(settings.root, settings.trajectories)
        if not settings.root.exists():
            raise NoExperimentsError(
                f"{settings.root}: no such folder. Runs write to saved_experiments/<name>; give that folder, or one "
                f"experiment in it."
            )
        self.access = Access(password=settings.password, hosts=() if outward else (*LOOPBACK, settings.host))
        self.socket = _listen(settings.host, settings.port)
        self.host, self.port = settings.host, int(self.socket.getsockname()[1])

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
        request.unauthenticated = not self._access.knows(request)  # then the application asks to sign in

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
