"""What 16 hostile clients with valid keys cost an honest one: the gateway's own part of a call over a scripted engine.

Each hostile client has an episode of its own and repeats one attack as fast as it is answered; they run in a process of
their own. Latency of an honest call every 10 ms, alone and beside them, in one run, and the CPU time that the service
loop spent between its request and its answer, which other programs on the machine disturb less; and the gateway's
memory. Also what a client without a key achieves with endless trailers and idle connections.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from common import write_result

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "gateway")]

from ajet.context_tracker import TrackerSettings
from support.gateway_parts import place
from support.raw_http import read_reply, request_bytes
from support.session_parts import USER, LineEngine, new_session

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": USER}
TRACKING = TrackerSettings(max_model_len=18_000, max_steps=1_000_000, checks=())
SECONDS = 10.0
CLIENTS = 16


def tool_calls(count: int) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"messages": [*USER, {"role": "assistant", "content": "", "tool_calls": [call] * count}, *USER]}


def schema(size: int) -> dict[str, Any]:
    properties = {f"property_{n}": {"type": "string", "enum": ["a", "b"]} for n in range(size // 60)}
    wanted = {"name": "x", "schema": {"type": "object", "properties": properties}}
    return {**BODY, "response_format": {"type": "json_schema", "json_schema": wanted}}


def attacks() -> list[tuple[str, str, bytes]]:
    """(name, path, body)."""
    slow = {"name": "x", "schema": {"type": "string", "pattern": "^(a+)+$"}}
    tool = {"type": "function", "function": {"name": "f", "description": "word " * 20_000, "parameters": {}}}
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        ("regex", CHAT, {**BODY, "response_format": {"type": "json_schema", "json_schema": slow}}),
        ("schema 0.1 MB", CHAT, schema(100_000)),
        ("schema 9 MB", CHAT, schema(9_000_000)),
        ("text 13 MB", "/v1/completions", {"prompt": "word " * 2_600_000}),
        ("text 0.5 MB", "/v1/completions", {"prompt": "word " * 100_000}),
        ("tool calls 200,000", CHAT, tool_calls(200_000)),
        ("tool calls 5,000", CHAT, tool_calls(5_000)),
        ("tools 12 MB", CHAT, {**BODY, "tools": [tool] * 120}),
        ("tools 0.4 MB", CHAT, {**BODY, "tools": [tool] * 4}),
        ("messages 0.4 MB", CHAT, {"messages": [{"role": "user", "content": "a"}] * 12_000}),
        ("template arguments 12 MB", CHAT, {**BODY, "chat_template_kwargs": {"x": "y" * 12_000_000}}),
        ("long prompts", CHAT, {"messages": [{"role": "user", "content": "word " * 15_000}]}),
    ]
    return [(name, path, json.dumps(body).encode()) for name, path, body in bodies]


async def attack(port: int, key: str, path: str, body: bytes, stop: Any) -> int:
    sent = 0
    while not stop.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request_bytes("POST", path, key, body))
            await asyncio.wait_for(read_reply(reader), 30)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            await asyncio.sleep(0.01)
        finally:
            writer.close()
        sent += 1
    return sent


def attack_all(port: int, keys: list[str], begun: Any, stop: Any, results: Any) -> None:
    async def run() -> None:
        chosen = list(itertools.islice(itertools.cycle(attacks()), len(keys)))
        begun.set()
        sent = await asyncio.gather(
            *(attack(port, key, path, body, stop) for key, (_, path, body) in zip(keys, chosen, strict=True))
        )
        results.put([(name, count) for (name, _, _), count in zip(chosen, sent, strict=True)])

    asyncio.run(run())


async def honest(port: int, key: str, seconds: float) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    timings, passed = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun, used = time.perf_counter(), time.thread_time()
        writer.write(request_bytes("POST", CHAT, key, BODY))
        assert (await read_reply(reader)).status == 200
        timings.append((time.perf_counter() - begun) * 1e3)
        passed.append((time.thread_time() - used) * 1e3)
        await asyncio.sleep(0.01)
    writer.close()
    timings.sort()
    passed.sort()
    return {
        "calls": len(timings),
        "p50_ms": round(statistics.median(timings), 2),
        "p99_ms": round(timings[int(len(timings) * 0.99)], 2),
        "longest_ms": round(timings[-1], 1),
        "cpu_p50_ms": round(statistics.median(passed), 2),
        "cpu_p99_ms": round(passed[int(len(passed) * 0.99)], 2),
    }


def memory_mb() -> float:
    return round(psutil.Process().memory_info().rss / 2**20, 1)


async def with_keys() -> dict[str, Any]:
    async with place(LineEngine("fine"), tracking=TRACKING) as here:

        async def an_episode() -> dict[str, float]:
            """An honest one, of as many seconds each time: the longer an episode, the dearer its calls."""
            key = here.gateway.register(new_session(LineEngine("fine"), tracking=TRACKING)).api_key
            return await honest(here.port, key, SECONDS)

        await honest(here.port, here.key.api_key, 2.0)
        gc.collect()
        gc.freeze()  # as the runner does after the first episode, and `ajet serve` after its start
        quiet = await an_episode()
        sessions = [new_session(LineEngine('"' + "a" * 40 + '!"'), tracking=TRACKING) for _ in range(CLIENTS)]
        keys = [here.gateway.register(session).api_key for session in sessions]
        before = memory_mb()
        context = multiprocessing.get_context("spawn")
        begun, stop, results = context.Event(), context.Event(), context.Queue()
        process = context.Process(target=attack_all, args=(here.port, keys, begun, stop, results), daemon=True)
        process.start()
        await asyncio.to_thread(begun.wait, 120)
        await asyncio.sleep(2.0)
        used, process_used = time.thread_time(), time.process_time()
        beside = await an_episode()
        used, process_used = time.thread_time() - used, time.process_time() - process_used
        stop.set()
        sent = await asyncio.to_thread(results.get, True, 120)
        process.join()
        return {
            "alone": quiet,
            "beside_16_hostile": beside,
            "p99_ratio": round(beside["p99_ms"] / quiet["p99_ms"], 2),
            "cpu_p99_ratio": round(beside["cpu_p99_ms"] / quiet["cpu_p99_ms"], 2),
            "cpu_s_of_the_loop": round(used, 2),
            "cpu_s_of_the_process": round(process_used, 2),
            "load_average": os.getloadavg()[0],
            "requests_of_the_hostile": sent,
            "memory_before_mb": before,
            "memory_after_mb": memory_mb(),
        }


async def without_a_key() -> dict[str, Any]:
    async with place(LineEngine("fine"), tracking=TRACKING) as here:
        before = memory_mb()
        _, writer = await asyncio.open_connection("127.0.0.1", here.port)
        writer.write(b"GET /healthz HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
        sent, trailer = 0, b"x-trailer: " + b"y" * 60_000 + b"\r\n"
        try:
            while sent < 500_000_000:
                writer.write(trailer)
                await writer.drain()
                sent += len(trailer)
        except ConnectionError:
            pass
        idle = [await asyncio.open_connection("127.0.0.1", here.port) for _ in range(1100)]
        served = await honest(here.port, here.key.api_key, 2.0)
        held = here.gateway.connections
        for _, one in idle:
            one.close()
        return {
            "trailers_taken_mb": round(sent / 2**20, 1),
            "memory_growth_mb": round(memory_mb() - before, 1),
            "idle_connections_opened": len(idle),
            "connections_held": held,
            "honest_beside_idle": served,
        }


async def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    figures = {"without_a_key": await without_a_key(), "with_keys": await with_keys()}
    print(write_result("hostile_clients", figures))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
