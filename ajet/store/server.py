"""`StoreServer`: a store over HTTP. `POST /v1/store/<request>` with the request as JSON; every error is JSON, too.

`await start(host, port)`, then `url`; `await aclose()` at the end. The store is the caller's to open and to close.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from ajet import __version__
from ajet.store.access_keys import AccessKeys
from ajet.store.context import Caller
from ajet.store.database_store import DatabaseStore
from ajet.store.records import ProtocolInfo
from ajet.store.requests import (
    OPERATIONS,
    PROTOCOL,
    KeyRefusedError,
    NotAllowedError,
    Operation,
    ProtocolMismatchError,
    Role,
    StoreError,
    StoreUnavailableError,
)
from ajet.store.rows import VERSIONS
from ajet.store.wire import PATH_PREFIX, PROTOCOL_HEADER, document
from ajet.system.access import InvalidKeyError, presented_key
from ajet.system.http_messages import Answer, HttpLimits, HttpRequest, json_answer
from ajet.system.http_server import HttpServer

log = logging.getLogger(__name__)

KEYS_S = 2.0
"""How often keys are read anew: a revoked one is refused within it."""
STORE_LIMITS = HttpLimits(
    header_deadline_s=10.0,
    body_deadline_s=60.0,
    max_body_bytes=64 * 1024 * 1024,
    max_buffered_bytes=256 * 1024 * 1024,
)
INFO_PATH = "/v1/store"
OPENAPI_PATH = "/openapi.json"
HEALTH_PATH = "/healthz"
_GETS = (INFO_PATH, OPENAPI_PATH, HEALTH_PATH)


Extension = Callable[[Caller, dict[str, Any]], Awaitable[Any]]
"""Answers what runners ask beside the store, with JSON for JSON. Raises a StoreError."""
EXTENSION_PREFIX = "/v1/runner/"


class _Route(NamedTuple):
    operation: Operation
    decode: Any


_ROUTES = {
    PATH_PREFIX + operation.path: _Route(operation, msgspec.json.Decoder(operation.request).decode)
    for operation in OPERATIONS
}


class _Admitted(NamedTuple):
    caller: Caller | None
    route: _Route | None
    extension: Extension | None = None


class StoreServer:
    def __init__(
        self,
        store: DatabaseStore,
        limits: HttpLimits = STORE_LIMITS,
        tls: ssl.SSLContext | None = None,
        extensions: Mapping[str, Extension] | None = None,
    ) -> None:
        """`extensions`: what else keys of runners may ask, by its path below `/v1/runner/`."""
        self._store = store
        self._extensions = {EXTENSION_PREFIX + name: answer for name, answer in (extensions or {}).items()}
        self._keys = AccessKeys()
        self._server = HttpServer(self, limits, tls)
        self._reader: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0, settings: str = "--host or --port") -> None:
        """Listen. Raises AddressError."""
        await self._read_keys()
        await self._server.start(host, port, settings)
        self._reader = asyncio.create_task(self._keep_reading_keys())

    @property
    def url(self) -> str:
        return self._server.address.url

    @property
    def connections(self) -> int:
        return self._server.connections

    async def aclose(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader
        await self._server.aclose()

    async def _read_keys(self) -> None:
        self._keys.read(await self._store.tables(lambda tables: tables.access_keys()))

    async def _keep_reading_keys(self) -> None:
        while True:
            await asyncio.sleep(KEYS_S)
            try:
                await self._read_keys()
            except StoreUnavailableError as error:
                log.warning("keys could not be read: %s", error)

    # ------------------------------------------------------------ requests

    def admit(self, request: HttpRequest) -> Answer | None:
        try:
            request.caller = self._admit(request)
            request.unauthenticated = request.caller.caller is None
        except StoreError as error:
            return _refusal(error)
        except InvalidKeyError as error:
            return _refusal(KeyRefusedError(str(error)))
        return None

    def _admit(self, request: HttpRequest) -> _Admitted:
        path = request.path
        route = _ROUTES.get(path)
        extension = self._extensions.get(path)
        if route is None and extension is None and path not in _GETS:
            raise _NoSuchPathError(f"no such path: {path[:200]} (see {OPENAPI_PATH})")
        allowed = "GET" if path in _GETS else "POST"
        if request.method != allowed:
            raise _WrongMethodError(f"{path} takes {allowed}")
        if path in (HEALTH_PATH, OPENAPI_PATH):
            return _Admitted(None, None)
        spoken = request.headers.get(PROTOCOL_HEADER.encode())
        if spoken is not None and spoken != str(PROTOCOL).encode():
            raise ProtocolMismatchError(
                f"this store speaks protocol {PROTOCOL} (ajet {__version__}), the client "
                f"{spoken.decode('latin-1')[:20]}: install the same version of ajet on both sides"
            )
        caller = self._keys.caller(presented_key(request))
        if route is not None and not route.operation.roles & caller.roles:
            raise NotAllowedError(
                f"the key {caller.name!r} is for {', '.join(sorted(caller.roles))}; "
                f"{route.operation.path} needs {' or '.join(sorted(route.operation.roles))}"
            )
        if extension is not None and Role.RUNNER not in caller.roles:
            raise NotAllowedError(f"the key {caller.name!r} is not a runner's")
        return _Admitted(caller, route, extension)

    async def handle(self, request: HttpRequest) -> Answer:
        caller, route, extension = request.caller
        if extension is not None:
            return await self._extend(extension, caller, request)
        if route is None:
            return self._get(request.path, caller)
        try:
            asked = route.decode(request.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return _refusal(StoreError(f"{route.operation.path}: {error or 'the body is not what it should be'}"))
        try:
            return json_answer(await self._store.carry_out(asked, caller), headers=_HEADERS)
        except StoreError as error:
            return _refusal(error)

    async def _extend(self, extension: Extension, caller: Caller, request: HttpRequest) -> Answer:
        try:
            asked = msgspec.json.decode(request.body, type=dict[str, Any])
            return json_answer(await extension(caller, asked), headers=_HEADERS)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return _refusal(StoreError(f"{request.path}: {error}"))
        except StoreError as error:
            return _refusal(error)

    def _get(self, path: str, caller: Caller | None) -> Answer:
        if path == HEALTH_PATH:
            return json_answer({"status": "ok"}, headers=_HEADERS)
        if path == OPENAPI_PATH:
            return Answer(200, document(), {"content-type": "application/json", **_HEADERS})
        assert caller is not None
        info = ProtocolInfo(
            protocol=PROTOCOL, ajet=__version__, schema=max(VERSIONS), roles=sorted(str(role) for role in caller.roles)
        )
        return json_answer(info, headers=_HEADERS)

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        return json_answer({"error": {"code": code, "message": message}}, status, _HEADERS)


_HEADERS = {PROTOCOL_HEADER: str(PROTOCOL), "cache-control": "no-store", "x-content-type-options": "nosniff"}


class _NoSuchPathError(StoreError):
    http_status = 404
    code = "no_such_path"


class _WrongMethodError(StoreError):
    http_status = 405
    code = "method_not_allowed"


def _refusal(error: StoreError) -> Answer:
    return json_answer({"error": {"code": error.code, "message": str(error)}}, error.http_status, _HEADERS)
