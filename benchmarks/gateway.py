"""What the gateway adds to a model call: latency and CPU time over an engine that costs nothing; memory per episode.

The stub engine answers with 50 tokens, so everything that is measured belongs to AgentJet: HTTP, JSON, keys, rendering,
tracking, parsing. With one call at a time it answers immediately. With many it takes as long as the request's
`max_tokens` says (50 plus random milliseconds), so that the calls really overlap, and its reply begins with the
microseconds it actually took, which are subtracted (timers are up to a millisecond late). A raw asyncio client (bytes
in, bytes out) plays the agents in another process, so that its cost is not counted. Bodies have 20 messages and 2
tools. Each conversation grows as agents' conversations do, so the tracker mostly extends recorded calls. Garbage is
collected as in a run and in `ajet serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from common import write_result

from ajet.context_tracker import ContextTracker, Renderer, TrackerSettings
from ajet.engine.model_source import ModelSource
from ajet.gateway import EpisodeKey, Gateway, GatewaySettings
from ajet.gateway.chat import EpisodeSession, SessionSettings, pick_parser
from ajet.schema.chat import Completion, EngineCapabilities, GenerateRequest
from ajet.task_runner.runtime import GARBAGE

REPLY_TOKENS = 50
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use this to {name} something, whenever that is what the task asks for.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "what"}, "limit": {"type": "integer"}},
                "required": ["query"],
            },
        },
    }
    for name in ("search", "calculate")
]
WORDS = "the answer to this is found by looking at what was asked before and then adding up all of the numbers in it"


class StubEngine:
    """Draws 50 tokens, in the time the request says, and tells in them how long it took."""

    capabilities = EngineCapabilities("stub")

    def __init__(self, tokenizer: Any) -> None:
        self._end = tokenizer.eos_token_id
        # ids of digits, made beforehand: an engine that tokenizes would be counted as the gateway's work
        self._digits = {digit: tokenizer.encode(digit, add_special_tokens=False) for digit in "0123456789"}
        self._words = tokenizer.encode((" " + WORDS) * 8, add_special_tokens=False)
        self._logprobs = [-0.5] * REPLY_TOKENS
        self.waits = False

    async def generate(self, request: GenerateRequest, on_tokens: Any = None) -> Completion:
        begun = time.perf_counter()
        if self.waits:
            await asyncio.sleep(((request.sampling.max_tokens or 0) - REPLY_TOKENS) / 1e3)
        took = [token for digit in f"{(time.perf_counter() - begun) * 1e6:.0f}" for token in self._digits[digit]]
        ids = [*took, *self._words[: REPLY_TOKENS - 1 - len(took)], self._end]
        return Completion(ids, list(self._logprobs), "stop", self._end)


class Host:
    """A gateway with episodes over the stub engine."""

    def __init__(self, engine: Any = None, name: str = "tiny:qwen2") -> None:
        self.tokenizer = ModelSource.resolve(name).tokenizer()
        self.renderer = Renderer(self.tokenizer)
        self.engine = engine or StubEngine(self.tokenizer)
        self.parser = pick_parser(self.tokenizer)
        self.gateway = Gateway(GatewaySettings(max_concurrent_per_episode=1000))

    def episode(self, number: int) -> EpisodeKey:
        tracking = TrackerSettings(max_model_len=1_000_000, max_steps=1_000_000, checks=())
        session = EpisodeSession(
            episode_id=f"episode-{number}",
            tracker=ContextTracker(self.renderer, tracking),
            renderer=self.renderer,
            engine=self.engine,
            parser=self.parser,
            settings=SessionSettings(),
        )
        return self.gateway.register(session)


# ---------------------------------------------------------------- the client, in its own process


def history(length: int) -> list[dict[str, Any]]:
    roles = ["system", *(["user", "assistant"] * length)]
    return [{"role": role, "content": f"{number}: {WORDS}"} for number, role in enumerate(roles[:length])]


async def converse(port: int, key: str, calls: int, engine_ms: int, stub: bool, timings: list[float]) -> None:
    """One agent: a conversation of 20 messages that grows by two with each call and starts anew after ten."""
    host = "127.0.0.1"
    draw = random.Random(key)
    await asyncio.sleep(draw.random() * engine_ms / 1e3)
    reader, writer = await asyncio.open_connection(host, port)
    messages = history(20)
    for number in range(calls):
        if number % 10 == 0:
            messages = history(20)
        takes = draw.randint(engine_ms // 2, engine_ms * 3 // 2) if engine_ms else 0
        body = json.dumps(
            {"model": "m", "messages": messages, "tools": TOOLS, "max_tokens": REPLY_TOKENS + takes}
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode()
        begun = time.perf_counter()
        writer.write(head + body)
        status = await reader.readuntil(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 200"), status
        length = int(status.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        answer = await reader.readexactly(length)
        took = time.perf_counter() - begun
        reply = json.loads(answer)["choices"][0]["message"]
        timings.append(took - (int(reply["content"].split()[0]) / 1e6 if stub else 0))
        messages = [*messages, reply, {"role": "user", "content": f"and {number}?"}]
    writer.close()


def client(port: int, keys: list[str], calls: int, engine_ms: int, stub: bool, results: Any) -> None:
    async def run() -> None:
        timings: list[float] = []
        await asyncio.gather(*(converse(port, key, calls, engine_ms, stub, timings) for key in keys))
        results.put(timings)

    asyncio.run(run())


async def measure(host: Host, concurrency: int, calls: int, engine_ms: int = 0) -> dict[str, float]:
    """`calls` for each of `concurrency` agents, each in its own episode."""
    keys = [host.episode(number).api_key for number in range(concurrency)]
    port = _port(host)
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    stub = isinstance(host.engine, StubEngine)
    process = context.Process(target=client, args=(port, keys, calls, engine_ms, stub, results))
    if isinstance(host.engine, StubEngine):
        host.engine.waits = engine_ms > 0
    gc.collect()
    process.start()
    while not process.is_alive():
        await asyncio.sleep(0.01)
    idle = time.process_time()
    timings = await asyncio.to_thread(results.get, True, 300)
    cpu = time.process_time() - idle
    process.join()
    timings.sort()
    return {
        "concurrency": concurrency,
        "engine_ms": engine_ms,
        "calls": len(timings),
        "added_p50_ms": round(statistics.median(timings) * 1e3, 3),
        "added_p99_ms": round(timings[int(len(timings) * 0.99)] * 1e3, 3),
        "cpu_ms_per_request": round(cpu / len(timings) * 1e3, 3),
    }


async def held(host: Host, episodes: int) -> dict[str, float]:
    """Memory of episodes that are open and have made two calls each, in a process of their own."""
    gc.collect()
    before = resident_mb()
    keys = [host.episode(number).api_key for number in range(episodes)]
    port = _port(host)
    timings: list[float] = []
    gate = asyncio.Semaphore(64)

    async def two_calls(key: str) -> None:
        async with gate:
            await converse(port, key, 2, 0, True, timings)

    await asyncio.gather(*map(two_calls, keys))
    after = resident_mb()
    return {
        "episodes": episodes,
        "calls": len(timings),
        "kb_per_episode": round((after - before) * 1e3 / episodes, 1),
        "resident_mb": round(after, 1),
    }


async def apart(episodes: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    process = context.Process(target=hold, args=(episodes, results))
    process.start()
    figures: dict[str, float] = await asyncio.to_thread(results.get, True, 300)
    process.join()
    return figures


def hold(episodes: int, results: Any) -> None:
    async def run() -> None:
        host = Host()
        await host.gateway.start()
        await converse(_port(host), host.episode(-1).api_key, 2, 0, True, [])  # what is loaded once, is loaded now
        results.put(await held(host, episodes))
        await host.gateway.aclose()

    asyncio.run(run())


def _port(host: Host) -> int:
    return int(host.gateway.base_url.rpartition(":")[2].partition("/")[0])


def resident_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 1e6


async def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="fewer calls, nothing written")
    quick = options.parse_args().quick
    figures: dict[str, Any] = {"body": "20+ messages, 2 tools", "reply_tokens": REPLY_TOKENS, "tracking": True}
    host = Host()
    await host.gateway.start()
    await measure(host, 4, 50)  # warm
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE)
    figures["stub_engine"] = [
        await measure(host, concurrency, calls // (4 if quick else 1), engine_ms)
        for concurrency, calls, engine_ms in ((1, 1000, 0), (16, 120, 50), (256, 12, 800))
    ]
    await host.gateway.aclose()
    figures["open_episodes"] = [await apart(episodes) for episodes in ((200,) if quick else (1000, 5000))]
    print(json.dumps(figures, indent=2), flush=True)
    if not quick:
        figures["embedded_engine"] = await embedded()
        print(figures["embedded_engine"], write_result("gateway", figures))


async def embedded() -> list[dict[str, float]]:
    """The same with the embedded engine drawing every token, for information."""
    from ajet.config import load_config
    from ajet.task_runner.model import build_engine

    name = "tiny:qwen2"
    example = Path(__file__).parents[1] / "tutorial" / "example_math_agent" / "math_agent.yaml"
    config = load_config(example, [f"model.path={name}", "rollout.max_model_len=16384"])
    engine = build_engine(config)
    await engine.ready()
    host = Host(engine, name)
    await host.gateway.start()
    figures = [await measure(host, concurrency, 10) for concurrency in (1, 16)]
    await host.gateway.aclose()
    await engine.aclose()
    return figures


if __name__ == "__main__":
    asyncio.run(main())
