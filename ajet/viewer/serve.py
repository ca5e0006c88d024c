"""Runs the viewer: picks an address, prints the link, serves until interrupted."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ajet.http.access import LOOPBACK, Access
from ajet.schema.errors import UserError
from ajet.viewer.app import create_app
from ajet.viewer.library import Library, NoExperimentsError

DEFAULT_PORT = 8642
_SHORTEST_PASSWORD = 8


class AddressError(UserError):
    """An address that can't or must not be served on."""


@dataclass(frozen=True, slots=True)
class ViewerSettings:
    """What is shown, and to whom."""

    root: Path
    host: str = "127.0.0.1"
    port: int | None = None
    """None: 8642, or any free one if that is taken."""
    password: str | None = None


class Viewer:
    """A viewer with its socket bound; `serve` runs it on this thread."""

    def __init__(self, settings: ViewerSettings) -> None:
        outward = not is_loopback(settings.host)
        if outward and (settings.password is None or len(settings.password) < _SHORTEST_PASSWORD):
            raise AddressError(
                f"--host {settings.host}: others can reach that address, so the page needs a password of at least "
                f"{_SHORTEST_PASSWORD} characters: --password, or AJET_VIEW_PASSWORD. Without one, view from this "
                f"machine (or through `ssh -L`)."
            )
        self.library = Library(settings.root)
        if not settings.root.exists():
            raise NoExperimentsError(
                f"{settings.root}: no such folder. Runs write to saved_experiments/<name>; give that folder, or one "
                f"experiment in it."
            )
        self.access = Access(password=settings.password, hosts=() if outward else (*LOOPBACK, settings.host))
        self.socket = _bind(settings.host, settings.port)
        self.host, self.port = settings.host, int(self.socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The link to open."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        names = self.library.names()
        path = f"/x/{quote(names[0])}" if self.library.single else "/"
        token = "" if self.access.password is not None else f"?token={self.access.token}"
        return f"http://{host}:{self.port}{path}{token}"

    def serve(self) -> None:
        """Serve until interrupted."""
        import uvicorn

        app = create_app(self.library, self.access)
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, ws="none")
        uvicorn.Server(config).run(sockets=[self.socket])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in (port,) if port is not None else (DEFAULT_PORT, 0):
        # asyncio switches Nagle's waiting off only where a socket says that it is TCP: else an answer takes 40 ms more
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
        except OSError as error:
            listener.close()
            if candidate == 0 or port is not None:
                raise AddressError(
                    f"can't listen on {host}:{candidate}: {error.strerror}. Give another --port"
                ) from error
            continue
        return listener
    raise AssertionError("port 0 either binds or raises")
