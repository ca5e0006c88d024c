"""`StoreServer`: a store over HTTP, which takes OTLP, too, and its keys: who may ask it for what.

`await start(host, port)`, then `url`; `await aclose()` at the end. The caller opens and closes the store. Keys are kept
in the store's own tables: `issue`, `accept`, `rotate` and `revoke` change them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import sqlite3
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from ajet.observe import otlp
from ajet.observe.tracing import by_our_clock
from ajet.schema import __version__
from ajet.schema.span import Span
from ajet.store.context import StoreCaller
from ajet.store.database_store import DatabaseStore
from ajet.store.records import ProtocolInfo
from ajet.store.requests import (
    BATCH_PATH,
    MAX_BATCH,
    OPERATIONS,
    PATH_PREFIX,
    PROTOCOL,
    PROTOCOL_HEADER,
    SMALL,
    AddSpans,
    BatchItem,
    BatchOutcome,
    ErrorDetail,
    KeyRefusedError,
    NotAllowedError,
    ProtocolMismatchError,
    Role,
    StoreError,
    StoreOperation,
    StoreUnavailableError,
    UnknownIdError,
    checked_copy,
    document,
)
from ajet.store.rows import VERSIONS, Row
from ajet.store.sqlite import SqliteConnection
from ajet.store.tables import Tables
from ajet.system.http_messages import (
    PREFIX,
    Answer,
    HttpLimits,
    HttpRequest,
    InvalidKeyError,
    json_answer,
    presented_key,
)
from ajet.system.http_server import HttpServer

T = TypeVar("T")
log = logging.getLogger(__name__)

KEYS_S = 2.0
"""How often keys are read again: a revoked one is refused within this time."""
STORE_LIMITS = HttpLimits(
    header_deadline_s=10.0,
    body_deadline_s=60.0,
    max_body_bytes=64 * 1024 * 1024,
    max_buffered_bytes=256 * 1024 * 1024,
)
INFO_PATH = "/v1/store"
OPENAPI_PATH = "/openapi.json"
HEALTH_PATH = "/healthz"
MAX_TOGETHER = 10_000
"""Requests in one."""
_GETS = (INFO_PATH, OPENAPI_PATH, HEALTH_PATH)
EXTENSION_PREFIX = "/v1/runner/"
_HEADERS = {PROTOCOL_HEADER: str(PROTOCOL), "cache-control": "no-store", "x-content-type-options": "nosniff"}
MAX_NAME_CHARS = 64
SHORTEST_KEY_CHARS = 32


@dataclass(frozen=True, slots=True)
class AccessKey:
    """What a store keeps about a key."""

    name: str
    roles: frozenset[Role]
    created: float
    expires: float | None


def caller_of(key: str, keys: Mapping[str, AccessKey]) -> StoreCaller:
    """The caller that has this key, among those known by their digests. Raises KeyRefusedError.

    Keys are looked up by their digest, so the time that it takes says nothing about a key.
    """
    found = keys.get(_digest(key))
    if found is None:
        raise KeyRefusedError("not a key of this store, or it was revoked: see `ajet store keys list`")
    if not _alive(found):
        raise KeyRefusedError(f"the key {found.name!r} has expired: make one with `ajet store keys rotate`")
    return StoreCaller(found.name, found.roles)


def issue(tables: Tables, name: str, roles: Iterable[Role], valid_seconds: float | None = None) -> str:
    """Make a new key. Only its digest is stored, so it can't be shown again."""
    if not name.isprintable() or " " in name or not 0 < len(name) <= MAX_NAME_CHARS or not name.isascii():
        raise StoreError(f"a key's name has 1 to {MAX_NAME_CHARS} printable ASCII characters and no space: {name!r}")
    if any(key.name == name and _alive(key) for key in listed(tables)):
        raise StoreError(f"there is a key named {name!r} already: rotate it, or choose another name")
    return _add(tables, name, frozenset(roles), valid_seconds)


def accept(tables: Tables, name: str, roles: Iterable[Role], key: str) -> None:
    """Add a key that was made elsewhere. It must be long and random."""
    if len(key) < SHORTEST_KEY_CHARS:
        raise StoreError(f"a key has at least {SHORTEST_KEY_CHARS} characters, long and random")
    tables.add_access_key(name, _digest(key), ",".join(sorted(frozenset(roles))), time.time(), None)


def rotate(tables: Tables, name: str, valid_seconds: float | None = None, grace_seconds: float = 3600.0) -> str:
    """Make a new key with the name and roles of an old one, which expires after `grace_seconds`."""
    roles = {role for key in listed(tables) if key.name == name for role in key.roles}
    if not roles:
        raise UnknownIdError(f"no key named {name!r}: see `ajet store keys list`")
    tables.expire_access_keys(name, time.time() + grace_seconds)
    return _add(tables, name, frozenset(roles), valid_seconds)


def revoke(tables: Tables, name: str) -> None:
    """End every key of this name."""
    if not any(key.name == name for key in listed(tables)):
        raise UnknownIdError(f"no key named {name!r}: see `ajet store keys list`")
    tables.expire_access_keys(name, time.time())


def listed(tables: Tables) -> list[AccessKey]:
    """List all keys, expired ones included."""
    return [_key(row) for row in tables.access_keys()]


def _add(tables: Tables, name: str, roles: frozenset[Role], valid_seconds: float | None) -> str:
    key = f"{PREFIX}{secrets.token_urlsafe(32)}"
    now = time.time()
    expires = None if valid_seconds is None else now + valid_seconds
    tables.add_access_key(name, _digest(key), ",".join(sorted(roles)), now, expires)
    return key


def _key(row: Row) -> AccessKey:
    return AccessKey(row[0], frozenset(Role(role) for role in row[2].split(",")), row[3], row[4])


def _alive(key: AccessKey) -> bool:
    return key.expires is None or key.expires > time.time()


def _digest(key: str) -> str:
    """Hash a key. Keys are long and random, so a plain hash can't be reversed by guessing."""
    return hashlib.sha256(key.encode()).hexdigest()


async def key_tables(path: str | None, postgres: str | None, work: Callable[[Tables], T]) -> T:
    """Run `work` in a transaction on the keys. Raises a StoreError."""
    if postgres is None:
        assert path is not None
        return _in_file(Path(path), work)
    from ajet.store.postgres import PostgresDatabase

    database = PostgresDatabase(postgres)
    await database.open(lambda events: None, lambda: None)
    try:
        return await database.transact(work)
    finally:
        await database.aclose()


def _in_file(path: Path, work: Callable[[Tables], T]) -> T:
    if not path.is_file():
        raise StoreError(f"{path}: no such file. `ajet store --path {path}` makes it, and its first keys")
    connection = SqliteConnection(path)
    try:
        connection.set_up(str(path))
        connection.raw.execute("BEGIN IMMEDIATE")
        result = work(Tables(connection))
        connection.raw.execute("COMMIT")
    except sqlite3.Error as error:
        raise StoreError(f"{path}: not a store, or it can't be written: {error}") from error
    finally:
        connection.raw.close()
    return result


Extension = Callable[[StoreCaller, dict[str, Any]], Awaitable[Any]]
"""Answers a runner's request that isn't about the store, JSON for JSON. Raises a StoreError."""


class _Route(NamedTuple):
    operation: StoreOperation
    decode: Any


_ROUTES = {
    PATH_PREFIX + operation.path: _Route(operation, msgspec.json.Decoder(operation.request).decode)
    for operation in OPERATIONS
}
_ROUTES[otlp.PATH] = _ROUTES[PATH_PREFIX + "spans/add"]
"""Who may add spans may do so as OTLP."""


class _Admitted(NamedTuple):
    caller: StoreCaller | None
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
        self._keys: dict[str, AccessKey] = {}
        """By their digests, as last read from the store's tables."""
        self._server = HttpServer(self, limits, tls)
        self._reader: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0, settings: str = "--host or --port") -> None:
        """Listen. Raises AddressError."""
        await self.read_keys()
        await self._server.start(host, port, settings)
        self._reader = asyncio.create_task(self._keep_reading_keys())

    @property
    def url(self) -> str:
        return self._server.address.url

    async def aclose(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader
        await self._server.aclose()

    async def read_keys(self) -> None:
        """Learn of new and revoked keys at once."""
        rows = await self._store.tables(lambda tables: tables.access_keys())
        self._keys = {row[1]: _key(row) for row in rows}

    async def _keep_reading_keys(self) -> None:
        while True:
            await asyncio.sleep(KEYS_S)
            try:
                await self.read_keys()
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
        if route is None and extension is None and path != BATCH_PATH and path not in _GETS:
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
        caller = caller_of(presented_key(request), self._keys)
        if route is not None:
            _check_role(caller, route.operation)
        if extension is not None and Role.RUNNER not in caller.roles:
            raise NotAllowedError(f"the key {caller.name!r} is not a runner's")
        return _Admitted(caller, route, extension)

    async def handle(self, request: HttpRequest) -> Answer:
        try:
            return await self._answer(request)
        except StoreError as error:
            return _refusal(error)

    async def _answer(self, request: HttpRequest) -> Answer:
        """Raises a StoreError."""
        caller, route, extension = request.caller
        if extension is not None:
            asked = _decoded(_decode_object, request.body, request.path)
            return json_answer(await extension(caller, asked), headers=_HEADERS)
        if request.path == BATCH_PATH:
            return json_answer(await self._together(caller, request.body), headers=_HEADERS)
        if route is None:
            return self._get(request.path, caller)
        if request.path == otlp.PATH:
            return await self._export(caller, request)
        asked = _decoded(route.decode, request.body, route.operation.path)
        return json_answer(await self._store.carry_out(asked, caller), headers=_HEADERS)

    async def _together(self, caller: StoreCaller, body: bytes) -> list[BatchOutcome]:
        """Carry out several small requests. Each has its own outcome, and the database commits them together. If it
        can't, all are refused, to be sent again."""
        items = _decoded(_decode_items, body, "batch")
        if len(items) > MAX_TOGETHER:
            raise StoreError(f"batch: {len(items)} requests; at most {MAX_TOGETHER}")
        return await asyncio.gather(*(self._one_of(item, caller) for item in items))

    async def _one_of(self, item: BatchItem, caller: StoreCaller) -> BatchOutcome:
        try:
            route = _ROUTES.get(PATH_PREFIX + item.request)
            if route is None or route.operation.request not in SMALL:
                raise _NoSuchPathError(f"batch: {item.request[:200]!r} does not come together with others")
            _check_role(caller, route.operation)
            answer = await self._store.carry_out(_decoded(route.decode, item.body, item.request[:200]), caller)
            return BatchOutcome(answer=msgspec.Raw(msgspec.json.encode(answer)))
        except StoreUnavailableError:
            raise
        except StoreError as error:
            return BatchOutcome(error=ErrorDetail(error.code, str(error)))

    async def _export(self, caller: StoreCaller, request: HttpRequest) -> Answer:
        """Keep spans that come as OTLP. Their resource names the rollout and the attempt."""

        async def keep(spans: Sequence[Span], left_out: int) -> otlp.Rejected:
            ours = by_our_clock(spans, time.time())
            why = [f"a request holds {MAX_BATCH} spans at most"] * left_out
            if await self._add(ours, caller) is not None:
                alone = await asyncio.gather(*(self._add([span], caller) for span in ours))
                why += [reason for reason in alone if reason is not None]
            return otlp.Rejected(len(why), why[0] if why else "")

        kind = request.headers.get(b"content-type", b"").decode("latin-1")
        return await otlp.receive(request.body, kind, MAX_BATCH, keep)

    async def _add(self, spans: list[Span], caller: StoreCaller) -> str | None:
        """Add all of these or none. Returns why they are refused."""
        try:
            await self._store.carry_out(checked_copy(AddSpans(spans=spans)), caller)
        except StoreUnavailableError:
            raise
        except StoreError as error:
            return str(error)
        return None

    def _get(self, path: str, caller: StoreCaller | None) -> Answer:
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


_decode_items = msgspec.json.Decoder(list[BatchItem]).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def _decoded(decode: Callable[[bytes | msgspec.Raw], Any], body: bytes | msgspec.Raw, what: str) -> Any:
    """Decode a body. Raises a StoreError, which says what it should be."""
    try:
        return decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{what}: {error or 'the body is not what it should be'}") from None


def _check_role(caller: StoreCaller, operation: StoreOperation) -> None:
    """Raises NotAllowedError."""
    if not operation.roles & caller.roles:
        raise NotAllowedError(
            f"the key {caller.name!r} is for {', '.join(sorted(caller.roles))}; "
            f"{operation.path} needs {' or '.join(sorted(operation.roles))}"
        )


class _NoSuchPathError(StoreError):
    http_status = 404
    code = "no_such_path"


class _WrongMethodError(StoreError):
    http_status = 405
    code = "method_not_allowed"


def _refusal(error: StoreError) -> Answer:
    return json_answer({"error": {"code": error.code, "message": str(error)}}, error.http_status, _HEADERS)
