"""The store over HTTP: keys and what they may do, versions, lost answers, hostile bodies, TLS."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ajet.store import client as client_module
from ajet.store import server as access_keys
from ajet.store.client import BlockingStore, StoreClient
from ajet.store.database_store import DatabaseStore, memory_store, sqlite_store
from ajet.store.records import AttemptedRollout, RolloutConfig, Span
from ajet.store.requests import (
    OPERATIONS,
    AttemptRef,
    KeyRefusedError,
    NewRollout,
    NotAllowedError,
    ProtocolMismatchError,
    Role,
    StoreError,
    StoreUnavailableError,
)
from ajet.store.server import StoreServer, issue
from ajet.system.http_server import AddressError, tls_context

pytestmark = pytest.mark.anyio


@dataclass
class Served:
    server: StoreServer
    store: DatabaseStore
    keys: dict[str, str]

    def client(self, role: str, **options: Any) -> StoreClient:
        return StoreClient(self.server.url, self.keys[role], patience_seconds=0, **options)


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[Served]:
    async with asyncio.timeout(60), memory_store() as store:
        roles = {"writer": Role.WRITER, "reader": Role.READER, "runner": Role.RUNNER, "other": Role.RUNNER}
        keys = {}
        for name, role in roles.items():
            keys[name] = await store.tables(lambda tables, name=name, role=role: issue(tables, name, [role]))  # type: ignore[misc]
        server = StoreServer(store, **options)
        await server.start()
        try:
            yield Served(server, store, keys)
        finally:
            await server.aclose()


def names(claimed: AttemptedRollout) -> tuple[str, str]:
    assert claimed.attempt is not None
    return claimed.rollout.rollout_id, claimed.attempt.attempt_id


async def test_each_role_may_do_its_own_and_no_more() -> None:
    async with (
        served() as at,
        at.client("writer") as writer,
        at.client("reader") as reader,
        at.client("runner") as runner,
    ):
        rollout = await writer.enqueue_one(1)
        assert (await writer.info()).roles == ["writer"]
        with pytest.raises(NotAllowedError, match="'reader' is for reader; rollouts/enqueue needs writer"):
            await reader.enqueue_one(1)
        with pytest.raises(NotAllowedError):
            await runner.enqueue_one(1)
        with pytest.raises(NotAllowedError):
            await writer.claim("w")
        with pytest.raises(NotAllowedError):
            await runner.query_rollouts()
        with pytest.raises(NotAllowedError):
            await runner.cancel([rollout.rollout_id])
        assert (await reader.query_rollouts()).total == 1
        assert len(await runner.claim("w")) == 1


async def test_a_runner_sees_and_changes_only_what_it_claimed() -> None:
    async with (
        served() as at,
        at.client("writer") as writer,
        at.client("runner") as mine,
        at.client("other") as other,
    ):
        await writer.enqueue_one(1)
        (claimed,) = await mine.claim("w")
        rollout_id, attempt_id = names(claimed)
        span = Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id="s", name="n")
        assert await mine.add_spans([span]) == 1
        assert (await mine.query_spans(rollout_id)).total == 1
        reference = AttemptRef(rollout_id=rollout_id, attempt_id=attempt_id)
        for intrusion in (
            other.query_spans(rollout_id),
            other.query_attempts(rollout_id),
            other.add_spans([span]),
            other.report(rollout_id, attempt_id, "succeeded"),
            other.heartbeat("w", [reference]),
            other.next_sequence_ids(rollout_id),
        ):
            with pytest.raises(NotAllowedError, match="was not claimed with this key"):
                await intrusion
        assert (await mine.report(rollout_id, attempt_id, "succeeded")).status == "succeeded"


async def test_keys_expire_rotate_and_are_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as at:
        tables, refresh = at.store.tables, at.server.read_keys
        async with at.client("writer") as writer, at.client("runner") as old:
            await writer.enqueue_one(1)
            claimed = (await old.claim("w"))[0]
            at.keys["new"] = await tables(lambda tables: access_keys.rotate(tables, "runner", grace_seconds=100))
            await refresh()
            async with at.client("new") as new:
                await old.query_spans(names(claimed)[0])
                await new.query_spans(names(claimed)[0])  # what the old key claimed belongs to the new one
                at.keys["last"] = await tables(lambda tables: access_keys.rotate(tables, "runner", grace_seconds=0))
                await refresh()
                with pytest.raises(KeyRefusedError, match="'runner' has expired"):
                    await new.claim("w")
            await tables(lambda tables: access_keys.revoke(tables, "writer"))
            await refresh()
            with pytest.raises(KeyRefusedError, match="expired"):
                await writer.enqueue_one(1)
            assert {key.name for key in await tables(access_keys.listed)} == {"writer", "reader", "runner", "other"}
        with pytest.raises(StoreError, match="'reader' already"):
            await tables(lambda tables: issue(tables, "reader", [Role.READER]))
        with pytest.raises(StoreError, match="no key named 'none'"):
            await tables(lambda tables: access_keys.revoke(tables, "none"))


@pytest.mark.parametrize("key", ["none", "sk-ajet-wrong", "é", "x" * 5000])
async def test_wrong_keys_are_refused_before_the_body(key: str) -> None:
    async with served() as at, httpx.AsyncClient() as http:
        headers = {"authorization": f"Bearer {key}".encode()}
        reply = await http.post(f"{at.server.url}/v1/store/rollouts/enqueue", headers=headers, content=b"{")
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_key"
        assert (await http.get(f"{at.server.url}/healthz")).json() == {"status": "ok"}


async def test_another_protocol_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as at:
        monkeypatch.setattr(client_module, "PROTOCOL", 1)  # an older runner, say
        async with at.client("writer") as writer:
            with pytest.raises(ProtocolMismatchError, match=r"speaks protocol 2 .*client 1: install the same version"):
                await writer.enqueue_one(1)


async def test_what_is_no_store_is_told(tmp_path: Path) -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(page, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with StoreClient(f"http://127.0.0.1:{port}", "k") as client:
        with pytest.raises(StoreError, match="is not a store: it answered 200 'hello'"):
            await client.info()
    server.close()
    async with StoreClient(f"http://127.0.0.1:{port}", "k", patience_seconds=0) as client:
        with pytest.raises(StoreUnavailableError, match="can't be reached"):
            await client.info()
    with pytest.raises(KeyRefusedError, match="no key for"):
        StoreClient("http://127.0.0.1:1", "a\nb")
    with pytest.raises(StoreError, match="not the URL of a store"):
        StoreClient("localhost:4747", "k")


class Flaky:
    """Passes bytes on to a server, but loses some answers."""

    def __init__(self, port: int, lost: int) -> None:
        self.port, self.lost = port, lost

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                back.write(head + await reader.readexactly(length))
                answer = await there.readuntil(b"\r\n\r\n")
                answer += await there.readexactly(int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                if self.lost:
                    self.lost -= 1
                    break
                writer.write(answer)
        except asyncio.IncompleteReadError:
            pass
        back.close()
        writer.close()


async def test_a_lost_answer_strands_and_duplicates_nothing() -> None:
    async with served() as at:
        flaky = Flaky(at.server._server.address.port, 0)
        proxy = await asyncio.start_server(flaky.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        async with StoreClient(url, at.keys["writer"]) as writer, StoreClient(url, at.keys["runner"]) as runner:
            flaky.lost = 1
            rollouts = await writer.enqueue([NewRollout(input=n) for n in range(3)])
            flaky.lost = 2
            claimed = await runner.claim("w", limit=3, wait_seconds=5)
            assert [one.rollout.rollout_id for one in claimed] == [one.rollout_id for one in rollouts]
            for one in claimed:
                rollout_id, attempt_id = names(one)
                flaky.lost = 1
                await runner.add_spans([Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id="s", name="n")])
                flaky.lost = 1
                assert (await runner.report(rollout_id, attempt_id, "succeeded")).status == "succeeded"
            statistics = await at.store.statistics()
            assert statistics.rollouts == {"succeeded": 3}
            assert (await at.store.query_spans(rollouts[0].rollout_id)).total == 1
        proxy.close()


async def test_a_server_that_restarts_costs_time_only(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "s") as store:
        key = await store.tables(lambda tables: issue(tables, "all", list(Role)))
        first = StoreServer(store)
        await first.start()
        port = first._server.address.port
        client = StoreClient(first.url, key, patience_seconds=30)
        (rollout,) = await client.enqueue([NewRollout(input=1, config=RolloutConfig(unresponsive_seconds=60))])
        waiting = asyncio.create_task(client.wait([rollout.rollout_id], 30))
        await asyncio.sleep(0)
        await first.aclose()
    asking = asyncio.create_task(client.claim("w", wait_seconds=10))
    async with sqlite_store(tmp_path / "s") as store:
        second = StoreServer(store)
        await second.start(port=port)
        (claimed,) = await asking
        await client.report(*names(claimed), "succeeded")
        assert [one.rollout.status for one in await waiting] == ["succeeded"]
        await client.aclose()
        await second.aclose()


def test_code_without_an_event_loop(tmp_path: Path) -> None:
    async def start() -> tuple[DatabaseStore, StoreServer, str]:
        store = await memory_store().open()
        key = await store.tables(lambda tables: issue(tables, "all", list(Role)))
        server = StoreServer(store)
        await server.start()
        return store, server, key

    loop = asyncio.new_event_loop()
    store, server, key = loop.run_until_complete(start())
    with BlockingStore(store_maker) as alone:
        assert alone.enqueue_one({"x": 1}).input == {"x": 1}
    done = loop.run_in_executor(None, use_blocking, server.url, key)
    assert loop.run_until_complete(done) == "succeeded"
    loop.run_until_complete(server.aclose())
    loop.run_until_complete(store.aclose())
    loop.close()


async def store_maker() -> DatabaseStore:
    return await memory_store().open()


def use_blocking(url: str, key: str) -> str:
    with BlockingStore.connect(url, key) as store:
        rollout = store.enqueue_one(1)
        (claimed,) = store.claim("w", wait_seconds=5)
        store.report(*names(claimed), "succeeded")
        return str(store.wait([rollout.rollout_id])[0].rollout.status)


# ---------------------------------------------------------------- hostile bodies


BAD_BODIES = [
    (b"", "truncated"),
    (b"[]", "Expected `object`"),
    (b"{", "truncated"),
    (b'{"rollouts": 1}', "Expected `array`"),
    (b'{"rollouts": [], "unknown": 1}', "unknown"),
    (b'{"rollouts": [{"input": 1, "config": {"max_attempts": 0}}]}', ">= 1"),
    (b'{"rollouts": [{"input": 1, "mode": "test2"}]}', "test2"),
    (b'{"rollouts": [{"input": NaN}]}', "malformed"),
    (b'{"rollouts": [{"input": "\\ud800"}]}', ""),
    (b'{"rollouts": [{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", ""),
    (b"\xff\xfe", ""),
]


@pytest.mark.parametrize(("body", "says"), BAD_BODIES)
async def test_a_wrong_body_is_refused_with_its_place(body: bytes, says: str) -> None:
    async with served() as at, httpx.AsyncClient() as http:
        headers = {"authorization": f"Bearer {at.keys['writer']}"}
        reply = await http.post(f"{at.server.url}/v1/store/rollouts/enqueue", headers=headers, content=body)
        assert reply.status_code == 400, reply.text
        assert says in reply.json()["error"]["message"]
        assert "Traceback" not in reply.text
        assert (await at.store.statistics()).rollouts == {}


async def test_paths_and_methods() -> None:
    async with served() as at, httpx.AsyncClient(base_url=at.server.url) as http:
        assert (await http.get("/none")).status_code == 404
        assert (await http.get("/v1/store/rollouts/enqueue")).status_code == 405
        document = (await http.get("/openapi.json")).json()
        assert len(document["paths"]) == len(OPERATIONS) + 3
        assert document["openapi"] == "3.1.0"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({name for operation in OPERATIONS for name in operation.request.__struct_fields__})
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5).map(json.dumps).map(str.encode) | st.binary()


def test_no_body_makes_the_server_fail() -> None:
    """Random bodies for every request, with a key that may do everything."""

    async def run(asked: list[tuple[str, bytes]]) -> None:
        async with served() as at, httpx.AsyncClient(base_url=at.server.url) as http:
            key = await at.store.tables(lambda tables: issue(tables, "all", list(Role)))
            await at.server.read_keys()
            for path, body in asked:
                body = body.replace(b"wait_seconds", b"x")
                headers = {"authorization": f"Bearer {key}"}
                reply = await http.post(f"/v1/store/{path}", headers=headers, content=body)
                assert reply.status_code < 500, (path, body, reply.text)
                reply.json()

    paths = st.sampled_from([operation.path for operation in OPERATIONS])

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(paths, BODIES), min_size=15, max_size=15))
    def fuzz(asked: list[tuple[str, bytes]]) -> None:
        asyncio.run(run(asked))

    fuzz()


@pytest.mark.slow
def test_the_api_is_what_its_document_says() -> None:
    """Requests made from the OpenAPI document: every answer is of the form that it promises."""
    schemathesis = pytest.importorskip("schemathesis")

    async def start() -> Served:
        store = await memory_store().open()
        key = await store.tables(lambda tables: issue(tables, "all", list(Role)))
        server = StoreServer(store)
        await server.start()
        return Served(server, store, {"all": key})

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    at = asyncio.run_coroutine_threadsafe(start(), loop).result()
    schema = schemathesis.openapi.from_url(f"{at.server.url}/openapi.json")

    try:
        for result in schema.get_all_operations():
            operation = result.ok()
            strategy = operation.as_strategy()

            @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=strategy)
            def run(case: Any) -> None:
                if isinstance(case.body, dict):
                    case.body.pop("wait_seconds", None)
                answer = case.call(headers={"authorization": f"Bearer {at.keys['all']}"})
                assert answer.status_code in (200, 400, 404, 409), answer.text
                if answer.status_code == 200:
                    case.operation.validate_response(answer)

            run()
    finally:
        asyncio.run_coroutine_threadsafe(at.server.aclose(), loop).result()
        asyncio.run_coroutine_threadsafe(at.store.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


# ---------------------------------------------------------------- TLS


def certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert), "-days",
         "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return cert, key


async def test_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)

    async with served(tls=tls_context(cert, key, "--tls-cert and --tls-key")) as at:
        assert at.server.url.startswith("https://")
        async with at.client("writer", ca=cert) as writer:
            assert (await writer.enqueue_one(1)).input == 1
            assert len(await asyncio.gather(*(writer.enqueue_one("x" * 100_000) for _ in range(5)))) == 5
        async with at.client("writer") as stranger:
            with pytest.raises(StoreError, match=r"certificate can't be trusted.*--ca"):
                await stranger.enqueue_one(1)
        async with StoreClient(at.server.url.replace("https", "http"), "k", patience_seconds=0) as plain:
            with pytest.raises(StoreUnavailableError):
                await plain.info()


def test_tls_files_that_are_wrong(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with pytest.raises(AddressError, match="--tls-cert: no file"):
        tls_context(tmp_path / "none", key, "--tls-cert")
    with pytest.raises(AddressError, match="not a certificate and its private key"):
        tls_context(key, cert, "--tls-cert")
    with pytest.raises(AddressError, match="--tls-cert and --tls-key go together"):
        tls_context(cert, "", "--tls-cert and --tls-key")
    assert isinstance(tls_context(cert, key, "x"), ssl.SSLContext)


async def test_opentelemetrys_exporter_adds_spans_and_each_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are those of docs/store.md."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    def export(url: str, key: str, ids: dict[str, str], name: str) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"Authorization=Bearer%20{key}")
        provider = TracerProvider(resource=Resource.create({f"agentlightning.{key}": ids[key] for key in ids}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        tracer = provider.get_tracer("test")
        with tracer.start_as_current_span(name), tracer.start_as_current_span("inner") as inner:
            inner.set_attribute("tags", ["a", "b"])
        provider.shutdown()

    async with served() as at, at.client("writer") as writer, at.client("runner") as runner:
        rollout = await writer.enqueue_one(1)
        [claimed] = await runner.claim("worker")
        ids = dict(zip(("rollout_id", "attempt_id"), names(claimed), strict=True))
        await asyncio.to_thread(export, at.server.url, at.keys["runner"], ids, "outer")
        spans = (await writer.query_spans(rollout_id=rollout.rollout_id)).items
        assert sorted(span.name for span in spans) == ["inner", "outer"]
        assert {(span.rollout_id, span.attempt_id) for span in spans} == {names(claimed)}
        assert next(span for span in spans if span.name == "inner").attributes == {"tags": ["a", "b"]}

        def described(rollout_id: str, span_id: str) -> dict[str, Any]:
            values = {**ids, "rollout_id": rollout_id}
            pairs = [{"key": f"agentlightning.{k}", "value": {"stringValue": v}} for k, v in values.items()]
            span = {"traceId": "a" * 32, "spanId": span_id * 16, "name": "mine"}
            return {"resource": {"attributes": pairs}, "scopeSpans": [{"spans": [span]}]}

        body = {"resourceSpans": [described("none", "c"), described(ids["rollout_id"], "d")]}
        async with httpx.AsyncClient(base_url=at.server.url, trust_env=False) as client:

            async def post(key: str, content: Any) -> httpx.Response:
                headers = {"authorization": f"Bearer {key}"}
                return await client.post("/v1/traces", content=json.dumps(content), headers=headers)

            answer = (await post(at.keys["runner"], body)).json()["partialSuccess"]
            assert (answer["rejectedSpans"], "none" in answer["errorMessage"]) == ("1", True)
            assert (await post(at.keys["reader"], body)).status_code == 403
            assert (await post("x" * 40, body)).status_code == 401
            assert (await post(at.keys["runner"], {"resourceSpans": 3})).status_code == 400
            others = (await post(at.keys["other"], body)).json()["partialSuccess"]
            assert others["rejectedSpans"] == "2"  # it has not claimed the rollout
        assert (await writer.query_spans(rollout_id=rollout.rollout_id)).total == 3


async def test_small_requests_of_one_client_go_together_and_each_has_its_own_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[str] = []
    once = StoreClient._once

    async def counted(self: StoreClient, method: str, path: str, *rest: Any) -> bytes:
        sent.append(path)
        return await once(self, method, path, *rest)

    async with served() as at, at.client("writer") as writer, at.client("runner") as runner:
        rollouts = await asyncio.gather(*(writer.enqueue_one(number) for number in range(20)))
        claimed = {names(one) for one in await runner.claim("worker", limit=19)}
        assert len(claimed) == 19
        mine = next(one for one in rollouts if one.rollout_id in dict(claimed))
        (unclaimed,) = (one for one in rollouts if one.rollout_id not in dict(claimed))
        monkeypatch.setattr(StoreClient, "_once", counted)
        spans = [
            Span(rollout_id=rollout, attempt_id=attempt, span_id=str(index), name="x")
            for rollout, attempt in claimed
            for index in range(4)
        ]
        wrong = Span(rollout_id=unclaimed.rollout_id, attempt_id="at-1", span_id="1", name="x")
        twice = [*spans, wrong, spans[0]]
        added = await asyncio.gather(*(runner.add_spans([span]) for span in twice), return_exceptions=True)
        assert added[: len(spans)] == [1] * len(spans)
        assert isinstance(added[-2], StoreError) and added[-1] == 0
        assert sent == ["/v1/store/batch"]
        page = await writer.query_spans(rollout_id=mine.rollout_id)
        assert page.total == 4

        sent.clear()
        alone = asyncio.create_task(runner.add_spans([spans[0]]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        dropped = asyncio.create_task(runner.add_spans([spans[1]]))
        await asyncio.sleep(0)
        dropped.cancel()
        assert await alone == 0
        refused = [writer.add_spans([spans[0]]), writer.enqueue_one(1)]
        not_allowed, queued = await asyncio.gather(*refused, return_exceptions=True)
        assert isinstance(not_allowed, NotAllowedError) and not isinstance(queued, BaseException)
        assert sent == ["/v1/store/spans/add", "/v1/store/batch"]


async def test_requests_that_wait_are_refused_when_the_client_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async with served() as at:
        writer = at.client("writer")
        monkeypatch.setattr(StoreClient, "_once", never)
        waiting = [asyncio.create_task(writer.enqueue_one(number)) for number in range(3)]
        await asyncio.sleep(0)
        await writer.aclose()
        for ended in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(ended, StoreUnavailableError) and "closed" in str(ended)


async def test_a_request_that_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as at, at.client("writer") as writer:

        async def slow(*_: Any, **__: Any) -> Any:
            raise httpx.ReadTimeout("")

        monkeypatch.setattr(writer._http, "request", slow)
        with pytest.raises(StoreUnavailableError, match="can't be reached: ReadTimeout"):
            await writer.enqueue_one(1)


async def test_a_batch_that_the_database_cant_commit_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as at:
        carry_out, refused = at.store.carry_out, 1

        async def sometimes(request: Any, caller: Any = None) -> Any:
            nonlocal refused
            if refused:
                refused -= 1
                raise StoreUnavailableError("the disk is full for a moment")
            return await carry_out(request, caller)

        monkeypatch.setattr(at.store, "carry_out", sometimes)
        async with StoreClient(at.server.url, at.keys["writer"], patience_seconds=30) as writer:
            first, second = await asyncio.gather(writer.enqueue_one(1), writer.enqueue_one(2))
        assert {first.input, second.input} == {1, 2} and refused == 0
        assert sum((await at.store.statistics()).rollouts.values()) == 2


async def test_a_damaged_record_is_refused_by_name_and_what_came_with_it_is_done() -> None:
    async with served() as at, at.client("runner") as runner:
        await at.store.enqueue([NewRollout(input=number) for number in range(3)])
        ids = [names(one) for one in await runner.claim("w", limit=3)]
        damage = "UPDATE attempt SET body = ? WHERE attempt_id = ?"
        await at.store.tables(lambda tables: tables._db.rows(damage, (b'{"meta', ids[1][1])))
        reports = (runner.report(*each, "succeeded") for each in ids)
        first, refused, last = await asyncio.gather(*reports, return_exceptions=True)
        assert isinstance(refused, StoreError) and f"rollout {ids[1][0]}: " in str(refused)
        for done in (first, last):
            assert not isinstance(done, BaseException) and done.status == "succeeded"


@pytest.mark.parametrize(
    ("items", "status", "said"),
    [
        ({}, 400, "batch: "),
        ([{"request": "rollouts/wait", "body": {}}], 200, "does not come together"),
        ([{"request": "nothing", "body": {}}], 200, "does not come together"),
        ([{"request": "rollouts/enqueue", "body": {"rollouts": 3}}], 200, "rollouts/enqueue: "),
        ([{"request": "x", "body": 1}] * 10_001, 400, "at most 10000"),
    ],
)
async def test_hostile_batches(items: Any, status: int, said: str) -> None:
    async with served() as at, httpx.AsyncClient(base_url=at.server.url, trust_env=False) as client:
        headers = {"authorization": f"Bearer {at.keys['writer']}"}
        answer = await client.post("/v1/store/batch", content=json.dumps(items), headers=headers)
        assert answer.status_code == status and said in answer.text
        assert (await client.post("/v1/store/batch", content="[]")).status_code == 401
