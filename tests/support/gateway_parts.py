"""A gateway with one episode over a scripted engine, and requests to it by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from ajet.context_tracker import TrackerSettings
from ajet.gateway import EpisodeKey, Gateway, GatewaySettings
from ajet.gateway.chat import EpisodeSession, SessionSettings
from ajet.system.http_messages import HttpLimits
from support.raw_http import Reply, request_bytes, send
from support.session_parts import LineEngine, new_session


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
    settings: SessionSettings | None = None,
    **more: Any,
) -> AsyncIterator[Place]:
    gateway = Gateway(GatewaySettings(limits=limits or HttpLimits(), **more))
    await gateway.start()
    engine = engine or LineEngine("hi")
    session = new_session(engine, settings, tracking)
    try:
        yield Place(gateway, session, gateway.register(session), engine)
    finally:
        await gateway.aclose()


async def post(where: Place, path: str, body: Any, key: str | None = None, **headers: str) -> Reply:
    return await send(where.port, request_bytes("POST", path, key or where.key.api_key, body, **headers))
