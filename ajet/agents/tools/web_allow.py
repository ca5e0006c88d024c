"""`AllowList`: which addresses of the web may be reached."""

from __future__ import annotations

import asyncio
import ipaddress
import posixpath
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from ajet.agents.tools.tool import ToolSetupError

SHOWN = 12
"""How many entries a message names."""
PORTS = {"http": 80, "https": 443}
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
NetworkRange = ipaddress.IPv4Network | ipaddress.IPv6Network


class Refused(Exception):
    """An address that may not be reached. The message is for the model."""


class AllowList:
    """Entries: `docs.python.org`, `*.example.org`, `example.org:8080`, `https://example.org/docs/`, `10.0.0.0/8`."""

    def __init__(self, entries: Sequence[str]) -> None:
        if not entries:
            raise ToolSetupError(
                "web_fetch reaches nothing unless it is told what: {web_fetch: {allow: [docs.python.org]}}"
            )
        self._entries = list(entries)
        self._networks: list[NetworkRange] = []
        self._places: list[_Place] = []
        for entry in entries:
            if not isinstance(entry, str) or not entry.strip():
                raise ToolSetupError(f"web_fetch.allow: {entry!r} is no host")
            try:
                self._networks.append(ipaddress.ip_network(entry.strip("[]"), strict=False))
            except ValueError:
                self._places.append(_Place(entry))

    def __str__(self) -> str:
        shown = ", ".join(self._entries[:SHOWN])
        return shown if len(self._entries) <= SHOWN else f"{shown}, and {len(self._entries) - SHOWN} more"

    def checked_url(self, url: str) -> str:
        """The address without a fragment, if its host is allowed. Raises `Refused`."""
        try:
            parts = urlsplit(url)
            port = parts.port
            host = (parts.hostname or "").rstrip(".").encode("idna").decode("ascii").lower()
            path = _plain_path(parts.path)
            parts.query.encode("ascii")
        except ValueError:
            raise Refused(f"{url[:200]!r} is no address: write it in full, with unusual characters escaped") from None
        if parts.scheme not in PORTS or not host:
            raise Refused(f"{url[:200]!r} is no address of the web: it must begin with https:// or http://")
        if parts.username is not None or parts.password is not None:
            raise Refused("an address with a user name or password is not fetched")
        literal = _literal(host)
        if literal is not None:
            allowed = any(literal in network for network in self._networks)
        else:
            allowed = any(place.holds(parts.scheme, host, port, path) for place in self._places)
        if not allowed:
            raise Refused(f"{host}{path if self._of_host(host) else ''} may not be fetched. Allowed: {self}.")
        shown = f"[{host}]" if ":" in host else host
        netloc = shown if port in (None, PORTS[parts.scheme]) else f"{shown}:{port}"
        return urlunsplit((parts.scheme, netloc, path, parts.query, ""))

    async def addresses(self, host: str, port: int) -> list[str]:
        """What a host leads to. Raises `Refused` if any of it is private and not listed."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Refused(f"{host} was not found: {error}") from None
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        for text in addresses:
            address = _unwrapped(ipaddress.ip_address(text.partition("%")[0]))
            if not address.is_global and not any(address in network for network in self._networks):
                raise Refused(f"{host} leads to {address}, which is no public address, and may not be fetched")
        return addresses

    def _of_host(self, host: str) -> bool:
        return any(place.host == host for place in self._places)


class _Place:
    """One entry that names a host."""

    def __init__(self, entry: str) -> None:
        text = entry.strip()
        try:
            parts = urlsplit(text if "://" in text else f"//{text}")
            self.port = parts.port
            name = (parts.hostname or "").rstrip(".")
            self._below = name.startswith("*.")
            self.host = name.removeprefix("*.").encode("idna").decode("ascii").lower()
            self._path = _plain_path(parts.path)
        except ValueError:
            self.host = ""
        if not self.host or "*" in self.host or parts.scheme not in ("", *PORTS) or parts.query or parts.username:
            raise ToolSetupError(
                f"web_fetch.allow: {entry!r} is no host; write docs.python.org, *.example.org, example.org:8080, "
                "https://example.org/docs/ or an IP address"
            )
        self._scheme = parts.scheme

    def holds(self, scheme: str, host: str, port: int | None, path: str) -> bool:
        """Whether an address lies here."""
        if self._scheme and scheme != self._scheme:
            return False
        if (host.endswith("." + self.host) if self._below else host == self.host) is False:
            return False
        if (port or PORTS[scheme]) != (self.port or PORTS[self._scheme or scheme]):
            return False
        folder = self._path.rstrip("/")
        return path == folder or path.startswith(folder + "/") or not folder


def _plain_path(path: str) -> str:
    """A path without `..`: what a server takes it for decides, and not how it is written."""
    if "\\" in path or any(ord(character) < 33 for character in path):
        raise ValueError(path)
    path.encode("ascii")
    parts = [unquote(part) for part in path.split("/")]
    if any(part in (".", "..") or "/" in part for part in parts):
        slash = "/" if path.endswith("/") else ""
        path = posixpath.normpath(unquote(path)) + slash
        path.encode("ascii")
    return "/" + path.lstrip("/")


def _literal(host: str) -> Address | None:
    try:
        return _unwrapped(ipaddress.ip_address(host))
    except ValueError:
        return None


def _unwrapped(address: Address) -> Address:
    """An IPv4 address that is written as an IPv6 one."""
    inner: Any = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    return inner if inner is not None else address
