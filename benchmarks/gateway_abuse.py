"""What hostile clients achieve: 10,000 wrong keys, and 500 clients with slow headers and 500 with slow bodies.

The slow clients run in a separate process. The latency of honest clients is measured with and without them, in one run.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import resource
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import write_result

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "gateway")]

from test_hostile_clients import CHAT, wrong_keys

from ajet.context_tracker import TrackerSettings
from ajet.system.http_protocol import HttpLimits
from support.gateway_parts import Place, place
from support.raw_http import read_reply, request_bytes
from support.session_parts import USER

BODY = {"model": "m", "messages": USER}
DEADLINE_S = 5.0
TRACKING = TrackerSettings(max_model_len=100_000, max_steps=1_000_000, checks=())


async def refuse_keys(count: int) -> dict[str, Any]:
    async with place() as here:
        keys = wrong_keys(here.key.api_key, count)
        statuses: Counter[int] = Counter()

        async def try_some(some: list[str]) -> None:
            for key in some:
                reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
                writer.write(request_bytes("POST", CHAT, key.encode().decode("latin-1"), BODY))
                statuses[(await read_reply(reader)).status] += 1
                writer.close()

        begun = time.process_time()
        await asyncio.gather(*(try_some(keys[start::20]) for start in range(20)))
        return {
            "keys": count,
            "statuses": dict(statuses),
            "calls_recorded": len(here.session.tracker.calls),
            "engine_requests": len(here.engine.requests),
            "cpu_ms_per_refusal_with_its_client": round((time.process_time() - begun) / count * 1e3, 3),
        }


async def honest(here: Place, seconds: float) -> list[float]:
    """One request every 10 ms over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    timings = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        writer.write(request_bytes("POST", CHAT, here.key.api_key, BODY))
        assert (await read_reply(reader)).status == 200
        timings.append(time.perf_counter() - begun)
        await asyncio.sleep(0.01)
    writer.close()
    return timings


async def drip(port: int, start: bytes) -> float:
    """Send about a byte a second until cut; seconds that took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = time.perf_counter()
    writer.write(start)
    ended = asyncio.ensure_future(reader.read())
    while not ended.done():
        await asyncio.wait([ended], timeout=random.uniform(0.5, 1.5))
        if not ended.done():
            writer.write(b"x")
    writer.close()
    return time.perf_counter() - begun


def drip_all(port: int, starts: list[bytes], results: Any) -> None:
    async def run() -> None:
        results.put(await asyncio.gather(*(drip(port, start) for start in starts)))

    allow_many_files()
    asyncio.run(run())


async def slow_clients(count: int) -> dict[str, Any]:
    limits = HttpLimits(header_deadline_s=DEADLINE_S, body_deadline_s=DEADLINE_S)
    async with place(limits=limits, tracking=TRACKING) as here:
        await honest(here, 1.0)
        alone = await honest(here, DEADLINE_S)
        slow_head = f"POST {CHAT} HTTP/1.1\r\nauthorization: Bearer {here.key.api_key}\r\nx-slow: "
        slow_body = f"POST {CHAT} HTTP/1.1\r\nauthorization: Bearer {here.key.api_key}\r\ncontent-length: 9999\r\n\r\n"
        context = multiprocessing.get_context("spawn")
        results: Any = context.Queue()
        starts = [slow_head.encode()] * count + [slow_body.encode()] * count
        process = context.Process(target=drip_all, args=(here.port, starts, results))
        process.start()
        while here.gateway.connections < 2 * count:
            await asyncio.sleep(0.05)
        beside = await honest(here, DEADLINE_S - 2.0)
        lasted = await asyncio.to_thread(results.get, True, 60)
        process.join()
        return {
            "slow_header_clients": count,
            "slow_body_clients": count,
            "deadline_s": DEADLINE_S,
            "cut": sum(seconds < DEADLINE_S + 3.0 for seconds in lasted),
            "longest_s": round(max(lasted), 2),
            "honest_alone_ms": percentiles(alone),
            "honest_beside_ms": percentiles(beside),
        }


def percentiles(timings: list[float]) -> dict[str, float]:
    timings = sorted(timings)
    p99 = timings[int(len(timings) * 0.99)]
    return {"p50": round(statistics.median(timings) * 1e3, 2), "p99": round(p99 * 1e3, 2)}


def allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))


async def main() -> None:
    allow_many_files()
    figures = {"wrong_keys": await refuse_keys(10_000), "slow_clients": await slow_clients(500)}
    print(write_result("gateway_abuse", figures))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
