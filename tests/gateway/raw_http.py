"""HTTP by hand, for what no decent client sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from session_parts import LineEngine, new_session

from ajet.context_tracker import TrackerSettings
from ajet.gateway import EpisodeKey, Gateway, GatewaySettings
from ajet.http.connection import HttpLimits
from ajet.session import EpisodeSession


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Place(NamedTuple):
    """A gateway with one episode."""

    gateway: Gateway
    session: EpisodeSession
    key: EpisodeKey
    engine: LineEngine

    @property
    def port(self) -> int:
        return int(self.key.base_url.rpartition(":")[2].partition("/")[0])


@asynccontextmanager
async def place(
    engine: LineEngine | None = None,
    limits: HttpLimits | None = None,
    tracking: TrackerSettings | None = None,
    **more: Any,
) -> AsyncIterator[Place]:
    gateway = Gateway(GatewaySettings(limits=limits or HttpLimits(), **more))
    await gateway.start()
    engine = engine or LineEngine("hi")
    session = new_session(engine, tracking=tracking)
    try:
        yield Place(gateway, session, gateway.register(session), engine)
    finally:
        await gateway.aclose()


def request_bytes(method: str, path: str, key: str, body: bytes | Any = b"", **headers: str) -> bytes:
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size + 2)
        await reader.readline()
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Reply(int(head[0].split()[1]), headers, body)


async def send(port: int, data: bytes) -> Reply:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await asyncio.wait_for(read_reply(reader), 10)
    finally:
        writer.close()


async def post(where: Place, path: str, body: Any, key: str | None = None, **headers: str) -> Reply:
    return await send(where.port, request_bytes("POST", path, key or where.key.api_key, body, **headers))
