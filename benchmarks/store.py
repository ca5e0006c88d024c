"""The rollout store: rollouts per second over HTTP, how long a claim takes, and what 200 kills lose.

With `--reference PYTHON`, an interpreter that has agentlightning 0.3.0, its store is measured by the same script with
the same batches.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

SPANS = 8
BATCH = 64
SECONDS = 8.0
AGENTS = 64
"""Of one client, at the same time."""
CLAIMERS = 100
CLAIMS = 300
KILLS = 200
ROOT = Path(__file__).parents[1]
INPUT = {"question": "What is the capital of France? " * 8, "answer": "Paris"}
ATTRIBUTES = {
    "gen_ai.request.model": "m",
    "gen_ai.prompt.0.content": "text " * 40,
    "agentlightning.reward.0.value": 1.0,
}


# ---------------------------------------------------------------- one batch, on each system


async def our_batch(store: Any, number: int) -> None:
    """Enqueue, claim, add spans, report and wait, for one batch."""
    from ajet.store.records import Span
    from ajet.store.requests import AttemptUpdate, NewRollout

    rollouts = await store.enqueue([NewRollout(input=INPUT) for _ in range(BATCH)])
    claimed = await store.claim("worker", limit=BATCH, wait_seconds=10)
    refs = [{"rollout_id": one.rollout.rollout_id, "attempt_id": one.attempt.attempt_id} for one in claimed]
    await store.add_spans(
        [
            Span(**ref, span_id=f"{index:016x}", name="call", attributes=ATTRIBUTES)
            for ref in refs
            for index in range(SPANS)
        ]
    )
    await store.update_attempts([AttemptUpdate(**ref, status="succeeded") for ref in refs])
    await store.wait([one.rollout_id for one in rollouts], timeout=10)


async def their_batch(store: Any, number: int) -> None:
    """The same with agentlightning's store: its batched methods where it has them."""
    from agentlightning.types import EnqueueRolloutRequest, Span

    rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=INPUT) for _ in range(BATCH)])
    claimed = await store.dequeue_many_rollouts(limit=BATCH, worker_id="worker")
    await store.add_many_spans(
        [
            Span.from_attributes(
                rollout_id=one.rollout_id,
                attempt_id=one.attempt.attempt_id,
                sequence_id=index + 1,
                name="call",
                attributes=ATTRIBUTES,
            )
            for one in claimed
            for index in range(SPANS)
        ]
    )
    for one in claimed:
        await store.update_attempt(one.rollout_id, one.attempt.attempt_id, status="succeeded")
    await store.wait_for_rollouts(rollout_ids=[one.rollout_id for one in rollouts], timeout=0.05)


async def one_by_one(url: str, key: str) -> float:
    """Rollouts per second of a client whose agents send each span in a request of its own, as it ends."""
    from ajet.store.client import StoreClient
    from ajet.store.records import Span
    from ajet.store.requests import NewRollout

    done, until = 0, time.perf_counter() + SECONDS

    async def agent(store: StoreClient) -> None:
        nonlocal done
        while time.perf_counter() < until:
            started = await store.start_rollout(NewRollout(input=INPUT))
            assert started.attempt is not None
            ref = {"rollout_id": started.rollout.rollout_id, "attempt_id": started.attempt.attempt_id}
            for index in range(SPANS):
                await store.add_spans([Span(**ref, span_id=f"{index:016x}", name="call", attributes=ATTRIBUTES)])
            await store.report(**ref, status="succeeded", result={"reward": 1.0})
            done += 1

    began = time.perf_counter()
    async with StoreClient(url, key) as store:
        await asyncio.gather(*(agent(store) for _ in range(AGENTS)))
    return done / (time.perf_counter() - began)


class Rate(NamedTuple):
    """How fast a store is, and what it costs in this process: other programs slow a clock, but hardly the CPU time."""

    rollouts_per_s: float
    cpu_ms: float
    """Per rollout."""


async def rate(store: Any, batch: Any) -> Rate:
    """With two batches under way at a time."""
    for number in range(2):
        await batch(store, number)
    done, until = 0, time.perf_counter() + SECONDS
    began, cpu = time.perf_counter(), time.process_time()

    async def work(number: int) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await batch(store, number)
            done += BATCH

    await asyncio.gather(work(0), work(1))
    return Rate(done / (time.perf_counter() - began), (time.process_time() - cpu) / done * 1000)


# ---------------------------------------------------------------- ours


def serve(path: Path, port: int = 0) -> tuple[subprocess.Popen[str], str, dict[str, str]]:
    """`ajet store` in a process of its own. Its address, and the keys it printed."""
    program = subprocess.Popen(
        [sys.executable, "-m", "ajet", "store", "--path", str(path), "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert program.stdout is not None
    keys = {}
    for line in program.stdout:
        words = line.split()
        if len(words) == 2 and words[1].startswith("sk-ajet-"):
            keys[words[0]] = words[1]
        if "(Ctrl-C to stop)" in line:
            return program, words[words.index("at") + 1], keys
    raise RuntimeError("the store did not start")


def all_roles(path: Path) -> str:
    """A key for everything."""
    command = [sys.executable, "-m", "ajet", "store", "keys", "make", "bench", "--path", str(path)]
    for role in ("writer", "reader", "runner"):
        command += ["--role", role]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    return ran.stdout.strip()


async def throughput(url: str, key: str) -> Rate:
    from ajet.store.client import StoreClient

    async with StoreClient(url, key) as store:
        return await rate(store, our_batch)


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def count(url: str, key: str) -> int:
    """Rollouts that the store holds."""
    from ajet.store.client import StoreClient

    async with StoreClient(url, key) as store:
        return sum((await store.statistics()).rollouts.values())


def span_by_span(server: int, url: str, key: str) -> dict[str, float]:
    """The best of three runs, with what they cost."""
    done = asyncio.run(count(url, key))
    before = [cpu_seconds(server), cpu_seconds(os.getpid())]
    figures = {"span_by_span_rollouts_per_s": max(asyncio.run(one_by_one(url, key)) for _ in range(3))}
    done = asyncio.run(count(url, key)) - done
    for side, pid, start in zip(("server", "client"), (server, os.getpid()), before, strict=True):
        figures[f"span_by_span_{side}_cpu_ms"] = (cpu_seconds(pid) - start) / done * 1000
    return figures


async def in_process() -> Rate:
    from ajet.store.database_store import memory_store

    async with memory_store() as store:
        return await rate(store, our_batch)


async def claim_latency(url: str, key: str) -> dict[str, float]:
    """100 runners wait. Rollouts arrive one at a time; how long from the enqueue's answer to the claim's? And how long
    does a claim take that finds a rollout waiting, while the 100 wait for others?"""
    from ajet.store.client import StoreClient

    async with StoreClient(url, key) as store:
        arrived: asyncio.Queue[tuple[str, float]] = asyncio.Queue()

        async def wait_for_work(number: int) -> None:
            while True:
                for one in await store.claim(f"w{number}", wait_seconds=30):
                    arrived.put_nowait((one.rollout.rollout_id, time.perf_counter()))

        waiting = [asyncio.create_task(wait_for_work(number)) for number in range(CLAIMERS)]
        await asyncio.sleep(1.5)
        taken, whole = [], []
        for _ in range(CLAIMS):
            began = time.perf_counter()
            rollout = await store.enqueue_one(INPUT)
            answered = time.perf_counter()
            rollout_id, when = await arrived.get()
            assert rollout_id == rollout.rollout_id
            taken.append(max(0.0, when - answered))
            whole.append(when - began)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return {
        "claim_p50_ms": statistics.median(taken) * 1000,
        "claim_p99_ms": statistics.quantiles(taken, n=100)[98] * 1000,
        "enqueue_to_claim_p50_ms": statistics.median(whole) * 1000,
    }


# ---------------------------------------------------------------- kills


RUNNER = """
import asyncio, sys
from ajet.store.client import StoreClient
from ajet.store.records import Span

async def main(url, key):
    async with StoreClient(url, key) as store:
        while True:
            for one in await store.claim(f"runner-{sys.argv[3]}", limit=4, wait_seconds=5):
                ids = dict(rollout_id=one.rollout.rollout_id, attempt_id=one.attempt.attempt_id)
                print("run", ids["rollout_id"], flush=True)
                await store.add_spans([Span(**ids, span_id=str(n), name="n") for n in range(2)])
                print("span", ids["rollout_id"], ids["attempt_id"], flush=True)
                attempt = await store.report(**ids, status="succeeded")
                if attempt.status == "succeeded":
                    print("succeeded", ids["rollout_id"], flush=True)

asyncio.run(main(*sys.argv[1:3]))
"""


async def kills(folder: Path, count: int) -> dict[str, Any]:
    """Kill the server or a runner again and again while rollouts are enqueued and executed. What was acknowledged?"""
    from ajet.store.client import StoreClient
    from ajet.store.records import RolloutConfig
    from ajet.store.requests import NewRollout

    path = folder / "kills.sqlite"
    server, url, _ = serve(path)
    key, port = all_roles(path), int(url.rsplit(":", 1)[1])
    await asyncio.sleep(3)  # until the server has read the key
    log = (folder / "runners.log").open("ab", buffering=0)
    draw = random.Random(0)

    def start(number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", RUNNER, url, key, str(number)],
            stdout=log,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    runners = [start(number) for number in range(2)]
    acknowledged: list[str] = []
    config = RolloutConfig(unresponsive_seconds=2, max_attempts=100, retry_condition=("unresponsive",))
    server_kills = 0
    async with StoreClient(url, key, patience_seconds=120) as store:
        stop = asyncio.Event()

        async def enqueue() -> None:
            while not stop.is_set():
                acknowledged.extend(
                    one.rollout_id
                    for one in await store.enqueue([NewRollout(input=1, config=config) for _ in range(4)])
                )
                await asyncio.sleep(0.05)

        enqueuing = asyncio.create_task(enqueue())
        for kill in range(count):
            await asyncio.sleep(draw.uniform(0.1, 0.5))
            if draw.random() < 0.5:
                server_kills += 1
                server.send_signal(signal.SIGKILL)
                server.wait()
                server, _, _ = await asyncio.to_thread(serve, path, port)
            else:
                number = draw.randrange(len(runners))
                runners[number].send_signal(signal.SIGKILL)
                runners[number].wait()
                runners[number] = start(number)
            if kill % 20 == 19:
                print(f"  {kill + 1} kills, {len(acknowledged)} rollouts", flush=True)
        stop.set()
        await enqueuing
        ended = await store.wait(acknowledged, timeout=180)
        log.close()
        told = [line.split() for line in (folder / "runners.log").read_text().splitlines() if line.count(" ")]
        lost_spans = again = 0
        first_success: dict[str, int] = {}
        for place, words in enumerate(told):
            if words[0] == "succeeded":
                first_success.setdefault(words[1], place)
        for place, words in enumerate(told):
            again += words[0] == "run" and first_success.get(words[1], place) < place
        for words in told:
            if words[0] == "span" and (await store.query_spans(words[1], words[2])).total != 2:
                lost_spans += 1
        unfinished = len(acknowledged) - sum(one.rollout.status == "succeeded" for one in ended)
        lost_successes = sum(
            one.rollout.status != "succeeded" for one in ended if one.rollout.rollout_id in first_success
        )
    for program in [*runners, server]:
        program.kill()
        program.wait()
    return {
        "kills": count,
        "of_the_server": server_kills,
        "acknowledged_rollouts": len(acknowledged),
        "lost_rollouts": unfinished,
        "acknowledged_span_batches": sum(words[0] == "span" for words in told),
        "lost_span_batches": lost_spans,
        "acknowledged_successes": len(first_success),
        "lost_successes": lost_successes,
        "run_again_after_success": again,
    }


# ---------------------------------------------------------------- the reference


async def reference_in_process() -> Rate:
    """Runs in the other interpreter, with nothing of ours."""
    import agentlightning as agl

    return await rate(agl.InMemoryLightningStore(), their_batch)


async def reference_http(url: str) -> Rate:
    import agentlightning as agl

    client = agl.LightningStoreClient(url, request_timeout=120)
    for _ in range(120):  # its server needs a while to start
        with contextlib.suppress(Exception):
            await client.statistics()
            break
        await asyncio.sleep(1)
    try:
        return await rate(client, their_batch)
    finally:
        await client.close()


def measure_reference(python: str) -> dict[str, Any]:
    """The other system's figures, from its own interpreter: in its process, and over HTTP with `agl store`."""
    from common import free_port

    port = free_port()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network at every start
    server = subprocess.Popen(
        [str(Path(python).parent / "agl"), "store", "--host", "127.0.0.1", "--port", str(port), "--log-level", "ERROR"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        ran = subprocess.run(
            [python, __file__, "--as-reference", f"http://127.0.0.1:{port}"],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    finally:
        server.kill()
        server.wait()
    if ran.returncode:
        raise RuntimeError(ran.stderr[-3000:])
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reference", metavar="PYTHON", help="an interpreter with agentlightning 0.3.0")
    parser.add_argument("--as-reference", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=KILLS)
    arguments = parser.parse_args()
    if arguments.as_reference:
        http = asyncio.run(reference_http(arguments.as_reference))
        here = asyncio.run(reference_in_process())
        print(
            json.dumps(
                {
                    "http_in_memory_rollouts_per_s": http.rollouts_per_s,
                    "in_process_rollouts_per_s": here.rollouts_per_s,
                    "in_process_cpu_ms_per_rollout": here.cpu_ms,
                }
            )
        )
        return

    from common import write_result

    figures: dict[str, Any] = {"spans": SPANS, "batch": BATCH, "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server, url, _ = serve(folder / "store.sqlite")
        try:
            key = all_roles(folder / "store.sqlite")
            time.sleep(3)  # until the server has read the key
            before = [cpu_seconds(server.pid), cpu_seconds(os.getpid())]
            figures["http_sqlite_rollouts_per_s"] = max(
                asyncio.run(throughput(url, key)) for _ in range(3)
            ).rollouts_per_s
            done = asyncio.run(count(url, key))
            for side, pid, start in zip(("server", "client"), (server.pid, os.getpid()), before, strict=True):
                figures[f"{side}_cpu_ms_per_rollout"] = (cpu_seconds(pid) - start) / done * 1000
            figures |= span_by_span(server.pid, url, key)
            figures |= asyncio.run(claim_latency(url, key))
        finally:
            server.kill()
            server.wait()
        here = [asyncio.run(in_process()) for _ in range(3)]
        figures["in_memory_rollouts_per_s"] = max(one.rollouts_per_s for one in here)
        figures["in_memory_cpu_ms_per_rollout"] = min(one.cpu_ms for one in here)
        print(json.dumps(figures, indent=2), flush=True)
        if arguments.reference:
            figures["reference"] = measure_reference(arguments.reference)
            print(json.dumps(figures["reference"], indent=2), flush=True)
        if arguments.kills:
            figures["kills"] = asyncio.run(kills(folder, arguments.kills))
    figures["load_after"] = os.getloadavg()[0]
    write_result("store", figures)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
