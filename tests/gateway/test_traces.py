"""`POST /v1/traces`: OpenTelemetry's own SDK and exporter, and senders that mean no good."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import msgspec
import pytest

from ajet.gateway.protocol import agent_key
from ajet.observe.otlp import JSON, MAX_BYTES, PROTOBUF, OtlpError, read_export, to_json
from ajet.observe.tracing import attributes as names
from ajet.observe.tracing import get_rewards_from_span
from ajet.schema.span import Span
from ajet.task_runner.tuner import AjetTuner
from support.gateway_parts import Place, place, post
from support.raw_http import Reply, request_bytes, send
from support.session_parts import LineEngine

PATH = "/v1/traces"
AGENT = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("agent")
with tracer.start_as_current_span("plan") as plan:
    with tracer.start_as_current_span("calculator") as tool:
        tool.set_attribute("tool.name", "calculator")
        tool.set_attribute("tool.parameters", [1, 2])
        tool.add_event("started", {"at": 1})
        tool.record_exception(ValueError("no"))
    plan.set_attribute("agentlightning.reward.0.name", "primary")
    plan.set_attribute("agentlightning.reward.0.value", 0.5)
provider.shutdown()
"""
REWARDING = """
import os
from openai import OpenAI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

client = OpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
ids = [client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}]).id for text in "abc"]
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
tracer = provider.get_tracer("agent")
for call, reward in ((ids[1], 0.25), ("none of them", 9.0)):
    with tracer.start_as_current_span("score") as span:
        span.set_attribute("agentlightning.reward.0.name", "primary")
        span.set_attribute("agentlightning.reward.0.value", reward)
        span.set_attribute("agentlightning.link.0.key_match", "gen_ai.response.id")
        span.set_attribute("agentlightning.link.0.value_match", call)
provider.shutdown()
"""
OPENINFERENCE = """
import os
from openai import OpenAI
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
OpenAIInstrumentor().instrument(tracer_provider=provider)
client = OpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello there"}])
provider.shutdown()
"""


async def run_agent(here: Place, code: str, **options: Any) -> None:
    tuner = AjetTuner.remote(here.key.base_url, here.key.api_key, None, control_key=here.key.control_key)
    base_url, api_key, _ = tuner.as_oai_baseurl_apikey("solver")
    given = {**tuner.otlp_environment("solver", **options), "BASE_URL": base_url, "API_KEY": api_key}
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", textwrap.dedent(code)), env={**os.environ, **given}, stderr=subprocess.PIPE
    )
    said = (await program.communicate())[1].decode()
    assert program.returncode == 0 and "Failed" not in said, said


@pytest.mark.parametrize("rewards", [False, True])
def test_an_agent_with_opentelemetry(rewards: bool) -> None:
    async def run() -> None:
        async with place() as here:
            await run_agent(here, AGENT, rewards=rewards)
            tool, plan = here.session.spans.spans
            assert (tool.name, tool.parent_id, plan.parent_id) == ("calculator", plan.span_id, None)
            assert tool.attributes == {"tool.name": "calculator", "tool.parameters": [1, 2]}
            assert [event["name"] for event in tool.events] == ["started", "exception"]
            assert tool.start_time is not None and tool.end_time is not None and tool.start_time <= tool.end_time
            assert tool.resource["telemetry.sdk.language"] == "python"
            assert (tool.attempt_id, [tool.sequence_id, plan.sequence_id]) == (here.session.episode_id, [1, 2])
            assert get_rewards_from_span(plan) == ({"primary": 0.5} if rewards else {})
            assert (names.NOT_COUNTED in plan.attributes) is not rewards
            assert here.session.tracker.finish(None).reward == (0.5 if rewards else None)

    asyncio.run(run())


@pytest.mark.parametrize("rewards", [False, True])
def test_a_reward_in_a_span_is_that_of_the_call_it_names(rewards: bool) -> None:
    async def run() -> None:
        async with place() as here:
            await run_agent(here, REWARDING, rewards=rewards)
            known, unknown = here.session.spans.spans
            assert (names.NOT_COUNTED in known.attributes) is not rewards
            assert ("none of them" if rewards else "control key") in unknown.attributes[names.NOT_COUNTED]
            episode = here.session.tracker.finish(1.0)
            assert [call.reward for call in episode.tree.calls] == [None, 0.25 if rewards else None, None]
            assert episode.reward == 1.0, "the outcome is the workflow's"

    asyncio.run(run())


@pytest.mark.parametrize("value", ["nan", "0.5", True])
def test_a_reward_that_is_no_number_says_that_it_doesnt_count(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with place() as here:
            given = {"agentlightning.reward.0.value": value}
            span = Span(rollout_id="e", attempt_id="e", span_id="1a", trace_id="1a", name="score", attributes=given)
            reply = await post(here, PATH, to_json([span], {}, ""), here.key.control_key)
            assert reply.status == 200
            (kept,) = here.session.spans.spans
            assert "must be a finite number" in kept.attributes[names.NOT_COUNTED]
            assert here.session.tracker.finish(None).reward is None
            assert "must be a finite number" in caplog.text

    asyncio.run(run())


def test_an_agent_instrumented_with_openinference() -> None:
    pytest.importorskip("openinference.instrumentation.openai")

    async def run() -> None:
        async with place(LineEngine("good day")) as here:
            await run_agent(here, OPENINFERENCE)
            (span,) = here.session.spans.spans
            assert span.attributes["openinference.span.kind"] == "LLM"
            assert span.attributes["llm.input_messages.0.message.content"] == "hello there"
            assert "good day" in span.attributes["llm.output_messages.0.message.content"]

    asyncio.run(run())


def document(*spans: Span) -> dict[str, Any]:
    return to_json(spans, {"service.name": "test"})


def span(number: int = 1, **more: Any) -> Span:
    ids = {"rollout_id": "r", "attempt_id": "a", "trace_id": "ab" * 16, "span_id": f"{number:016x}"}
    return Span(**{**ids, "name": "tool", "start_time": 1.0, "end_time": 2.0, **more})


async def send_json(here: Place, body: Any, key: str | None = None, **headers: str) -> Reply:
    return await post(here, PATH, body, key, content_type="application/json", **headers)


def test_json_and_repeated_batches() -> None:
    async def run() -> None:
        async with place() as here:
            body = document(span(1, attributes={"a": 1, "b": [True, "x"], "c": {"d": 0.5}}), span(2))
            assert (await send_json(here, body)).json() == {}
            assert (await send_json(here, body)).json() == {}, "a sender repeats what was not acknowledged"
            squeezed = gzip.compress(json.dumps(document(span(3))).encode())
            assert (await send_json(here, squeezed, content_encoding="gzip")).status == 200
            assert [one.span_id for one in here.session.spans.spans] == [f"{number:016x}" for number in (1, 2, 3)]
            first = here.session.spans.spans[0]
            assert first.attributes == {"a": 1, "b": [True, "x"], "c": {"d": 0.5}}
            assert (first.start_time, first.end_time, first.resource) == (1.0, 2.0, {"service.name": "test"})
            twice = f"{here.key.base_url.rpartition(':')[2].partition('/')[0]}"
            assert twice and (await post(here, f"/v1{PATH}", document(span(4)))).status == 200

    asyncio.run(run())


def nested(depth: int) -> bytes:
    value = b'{"arrayValue": {"values": [' * depth + b'{"intValue": "1"}' + b"]}}" * depth
    one = b'{"traceId": "ab", "spanId": "cd", "name": "x", "attributes": [{"key": "k", "value": ' + value + b"}]}"
    return b'{"resourceSpans": [{"scopeSpans": [{"spans": [' + one + b"]}]}]}"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"resourceSpans": 5}', 400),
        (b'{"resourceSpans": [5, {"scopeSpans": "x"}]}', 200),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "x"}]}]}]}', 400),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "zz", "spanId": "a"}]}]}]}', 400),
        (nested(20), 200),
        (nested(400), 400),
        (b"[" * 100_000, 400),
        (b'{"resourceSpans": []}' + b" " * MAX_BYTES, 413),
    ],
)
def test_malformed_json(body: bytes, status: int) -> None:
    async def run() -> None:
        async with place() as here:
            reply = await send_json(here, body)
            assert reply.status == status, reply
            assert status == 200 or reply.json()["message"]
            assert (await send_json(here, document(span(9)))).status == 200

    asyncio.run(run())


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x0a\x05abc", os.urandom(1000), b'{"resourceSpans": []}'])
def test_malformed_protobuf(body: bytes) -> None:
    async def run() -> None:
        async with place() as here:
            reply = await post(here, PATH, body, content_type="application/x-protobuf")
            assert (reply.status, reply.headers["content-type"]) == (400, "application/x-protobuf")
            assert (await post(here, PATH, b"x", content_type="text/plain")).status == 415

    asyncio.run(run())


def test_bombs_and_strangers() -> None:
    async def run() -> None:
        async with place() as here:
            bomb = gzip.compress(b" " * (200 * 1024 * 1024))
            assert (await send_json(here, bomb, content_encoding="gzip")).status == 413
            assert (await send_json(here, document(span()), key="sk-ajet-wrong")).status == 401
            assert (await send(here.port, request_bytes("GET", PATH, here.key.api_key))).status == 405
            many = document(*(span(number) for number in range(1, 2102)))
            partial = (await send_json(here, many)).json()["partialSuccess"]
            assert (partial["rejectedSpans"], len(here.session.spans.spans)) == ("101", 2000)
            assert here.session.spans.left_out == 101
            here.session.revoke()
            assert (await send_json(here, document(span(5000)))).status == 409

    asyncio.run(run())


def length_prefixed(tag: int, inner: bytes) -> bytes:
    size, digits = len(inner), b""
    while size > 127:
        digits, size = digits + bytes([size % 128 + 128]), size // 128
    return bytes([tag]) + digits + bytes([size]) + inner


EMPTY = b"\x0a\x00" * (MAX_BYTES // 2 - 50)
"""Two bytes each."""


@pytest.mark.parametrize(
    "body",
    [
        EMPTY,
        length_prefixed(0x0A, EMPTY.replace(b"\x0a", b"\x12")),
        length_prefixed(0x0A, length_prefixed(0x12, EMPTY.replace(b"\x0a", b"\x12"))),
        length_prefixed(0x0A, length_prefixed(0x0A, EMPTY)),
        json.dumps({"resourceSpans": [{}] * (MAX_BYTES // 4)}, separators=(",", ":")).encode()[:MAX_BYTES],
    ],
    ids=["resources", "scopes", "spans", "attributes", "json"],
)
def test_what_is_empty_is_counted_before_it_is_read(body: bytes) -> None:
    kind = JSON if body.startswith(b"{") else PROTOBUF
    with pytest.raises(OtlpError, match="objects and arrays" if kind == JSON else "export smaller batches"):
        read_export(body, kind, 1000)


@pytest.mark.parametrize(
    "count, text, kept", [(256, "x", 256), (257, "x", 255), (2, "x" * 9000, 1), (1, "x" * 20_000, 0)]
)
@pytest.mark.parametrize("kind", [JSON, PROTOBUF])
def test_what_describes_many_spans_is_bounded(count: int, text: str, kept: int, kind: str) -> None:
    attributes = [{"key": f"a{number}", "value": {"stringValue": text}} for number in range(count)]
    body = document(span())
    body["resourceSpans"][0]["resource"] = {"attributes": attributes}
    data = json.dumps(body).encode()
    if kind == PROTOBUF:
        pairs = [
            length_prefixed(0x0A, f"a{number}".encode()) + length_prefixed(0x12, length_prefixed(0x0A, text.encode()))
            for number in range(count)
        ]
        described = length_prefixed(0x0A, b"".join(length_prefixed(0x0A, pair) for pair in pairs))
        one = length_prefixed(0x0A, b"t" * 16) + length_prefixed(0x12, b"s" * 8)
        data = length_prefixed(0x0A, described + length_prefixed(0x12, length_prefixed(0x12, one)))
    (found,) = read_export(data, kind, 1000)[0]
    left_out = {names.CUT: count - kept} if kept < count else {}
    assert found.resource == {f"a{number}": text for number in range(kept)} | left_out


def test_numbers_that_no_span_can_hold() -> None:
    async def run() -> None:
        async with place() as here:
            body = document(span(1, attributes={"many": 10**20 - 1}))
            assert '"intValue": "99999999999999999999"' in json.dumps(body)
            assert (await send_json(here, body)).status == 200
            (kept,) = here.session.spans.spans
            assert kept.attributes["many"] == "99999999999999999999"
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=Span) == kept

    asyncio.run(run())


def test_an_agent_cant_reward_itself_by_a_span() -> None:
    async def run() -> None:
        async with place() as here:
            reward = {"agentlightning.reward.0.value": 1000}
            mine = agent_key(here.key.api_key, "solver", "t")
            await send_json(here, document(span(1, attributes=reward)), mine)
            await send_json(here, document(span(2, attributes={"agentops.task.output": '{"type":"reward","value":9}'})))
            assert here.session.tracker.finish(None).reward is None
        async with place() as here:
            await send_json(
                here, document(span(1, attributes={"agentlightning.reward.0.value": 3})), here.key.control_key
            )
            assert here.session.tracker.finish(None).reward == 3.0

    asyncio.run(run())
