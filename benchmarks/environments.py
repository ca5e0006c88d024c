"""What a step over HTTP costs, and whether anything is left after random processes were killed.

Cost: 64 agents in threads take 1,000 steps each in environments served by `ajet env serve`, and pause between steps as
an agent that waits for its model does. The cost is compared with the same agents and pauses, and a tenth of the steps,
in environments of the same process. Kills: 16 processes of agents play without end, while 200 random processes, agents
and environments alike, are killed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from common import write_result

from ajet.environment.environment import EnvironmentSettings, EnvironmentSource, find_source
from ajet.environment.leased import LeasedEnvironment
from ajet.schema.errors import EnvironmentFault
from ajet.schema.task import Task
from ajet.system.http_client import HttpClient

WORLD = f"{Path(__file__).parent / '_environment_world.py'}->World"
AGENTS = int(os.environ.get("AGENTS", "64"))
STEPS = int(os.environ.get("STEPS", "1000"))
PAUSE_S = 0.3
"""Mean pause between the steps of an agent: a short reply of a small model."""
KILLS = int(os.environ.get("KILLS", "200"))
PLAYERS = 16
IDLE_S = 3.0
ACTION = {"role": "assistant", "content": "go on " * 20}


@contextmanager
def served(*flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """`ajet env serve`: its address and its process."""
    command = [sys.executable, "-m", "ajet", "env", "serve", WORLD, "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://[^\s,]+", server.stdout.readline())
        assert found is not None
        try:
            yield found[0], psutil.Process(server.pid)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(20)


def play(source: EnvironmentSource, number: int, steps: int, seconds: list[float]) -> None:
    """One agent: its steps, and the time each took."""
    rng = random.Random(number)
    env = LeasedEnvironment(source, Task(task_id=str(number)), f"agent-{number}-{time.time_ns()}").open()
    try:
        for _ in range(steps):
            time.sleep(rng.uniform(0, 2 * PAUSE_S))
            began = time.perf_counter()
            env.step(ACTION)
            seconds.append(time.perf_counter() - began)
    finally:
        env.close()


def step_times(source: EnvironmentSource, steps: int) -> list[float]:
    """All agents at the same time."""
    seconds: list[list[float]] = [[] for _ in range(AGENTS)]
    threads = [threading.Thread(target=play, args=(source, number, steps, seconds[number])) for number in range(AGENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(time for own in seconds for time in own)


def cost() -> dict[str, object]:
    """Milliseconds per step over HTTP and in the process."""
    load = []
    with served("--workers", str(AGENTS)) as (url, _):
        load.append(os.getloadavg()[0])
        began = time.perf_counter()
        over_http = step_times(find_source(EnvironmentSettings(url=url)), STEPS)
        elapsed = time.perf_counter() - began
        load.append(os.getloadavg()[0])
    here = step_times(find_source(EnvironmentSettings(WORLD)), max(STEPS // 10, 1))
    load.append(os.getloadavg()[0])

    def at(times: list[float], share: float) -> float:
        return 1000 * times[int(share * (len(times) - 1))]

    return {
        "agents": AGENTS,
        "steps_each": STEPS,
        "mean_pause_s": PAUSE_S,
        "steps_per_second": len(over_http) / elapsed,
        "http_ms": {"p50": at(over_http, 0.5), "p95": at(over_http, 0.95), "p99": at(over_http, 0.99)},
        "in_process_ms": {"p50": at(here, 0.5), "p95": at(here, 0.95), "p99": at(here, 0.99)},
        "added_p50_ms": at(over_http, 0.5) - at(here, 0.5),
        "load_average": load,
        "scheduling": "real-time (SCHED_RR)" if os.sched_getscheduler(0) == os.SCHED_RR else "normal",
    }


def player(url: str) -> int:
    """A process that plays episodes until it is killed. Returns its id."""
    process = os.fork()
    if process:
        return process
    try:
        source = find_source(EnvironmentSettings(url=url, timeout_s=20))
        while True:
            env = LeasedEnvironment(source, Task(task_id="t"), f"player-{os.getpid()}-{time.time_ns()}")
            try:
                env.open()
                for _ in range(20):
                    env.step(ACTION)
                    time.sleep(0.02)
            except EnvironmentFault:
                pass  # its environment was killed
            finally:
                env.close()
    finally:
        os._exit(0)


def metric(url: str, name: str) -> int:
    """One of the server's counters."""
    body = HttpClient(url).request("GET", "/metrics").body.decode()
    found = re.search(rf"^{name} (\S+)$", body, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def kills() -> dict[str, object]:
    """Kill random processes of agents and environments."""
    rng = random.Random(0)
    killed = {"agents": 0, "environments": 0}
    with served("--workers", str(2 * PLAYERS), "--idle", str(IDLE_S)) as (url, server):
        (clean,) = server.children()
        players = [player(url) for _ in range(PLAYERS)]
        while sum(killed.values()) < KILLS:
            time.sleep(rng.uniform(0.02, 0.15))
            environments = [process.pid for process in clean.children()]
            if rng.random() < 0.5 or not environments:
                victim = rng.choice(players)
                os.kill(victim, signal.SIGKILL)
                os.waitpid(victim, 0)
                players[players.index(victim)] = player(url)
                killed["agents"] += 1
            else:
                try:
                    os.kill(rng.choice(environments), signal.SIGKILL)
                except ProcessLookupError:
                    continue  # its episode has just ended
                killed["environments"] += 1
        for process in players:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        began = time.perf_counter()
        while metric(url, "ajet_env_instances") and time.perf_counter() - began < 60:
            time.sleep(0.1)
        free_s = time.perf_counter() - began
        names = ("created", "released", "expired", "died")
        counts = {name: metric(url, f"ajet_env_{name}_total") for name in names}
        left = metric(url, "ajet_env_instances")
        time.sleep(1.0)
        processes = len([child for child in clean.children() if child.status() != psutil.STATUS_ZOMBIE])
    return {
        "killed": killed,
        **counts,
        "leases_left": left,
        "processes_left": processes,
        "idle_limit_s": IDLE_S,
        "all_free_after_s": free_s,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        figures = {"kills": kills(), "cost": cost()}
    print(figures)
    if AGENTS == 64 and STEPS == 1000 and KILLS == 200:
        write_result("environments", figures)
    cost_of = figures["cost"]
    print(f"added per step: {cost_of['added_p50_ms']:.2f} ms (p50)")
    assert statistics.fsum([figures["kills"]["leases_left"], figures["kills"]["processes_left"]]) == 0  # type: ignore[list-item]


if __name__ == "__main__":
    main()
