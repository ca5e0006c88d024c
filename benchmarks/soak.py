"""One training run under faults, for minutes or hours, and an oracle that says whether anything was lost or cheated.

    python benchmarks/soak.py [--minutes 10] [--hours 8] [--seed 1]

The run is the quickstart's, with a step limit that it doesn't reach. A seeded generator kills its engine and trainer
(they are one process), its workers and its runners, and a rollout store beside it; stops them for seconds; fills their
disk; moves their clock; sends clients that are slow, hostile or malformed; and the workflow returns NaN, raises, dies,
cheats, leaves detached processes behind and sends prompts of 6 MB. After each kill the run is resumed, with its
workflows in threads, in processes, or on runners elsewhere, in turn. The oracle (`tests/support/soak_oracle.py`)
compares what was kept with what the workflows and clients were told, and the curve with that of a calm run before it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from _soak_store import SoakStore
from _soak_workflow import DETACHED
from common import ROOT, free_port, write_result

sys.path.insert(0, str(ROOT / "tests"))

from support.soak_oracle import Life, findings

WRAPPERS = ("asyncio", "multi-processing", "remote")
DISK_MB, DISK_MB_PER_MINUTE = 256, 16
COMPARED_STEPS = 40
COMPARED = slice(COMPARED_STEPS - 10, COMPARED_STEPS)
BAND = 0.1
"""How far below the calm run's mean reward the other's may be."""
FAULTS = {"worker": 6, "hostile": 6, "disk": 3, "clock": 3, "store": 3, "stop": 3, "kill": 2, "term": 1}
"""How often each is drawn, relative to the others."""
PAUSE_S = (2.0, 9.0)
LEAST_LIFE = 20
"""Steps, for memory and descriptors to be compared."""
START_S, END_S = 180.0, 60.0


INTERRUPTED = 130
"""The exit code of a run that was asked to stop."""


class Ended(Exception):
    """The run ended, or stopped making progress."""


class Soak:
    """One run and what is done to it."""

    def __init__(self, folder: Path, seed: int, disk_mb: int, *, faults: bool) -> None:
        """`disk_mb`: 0 if it isn't a disk of its own, which is then never filled."""
        self.folder = folder
        self.draw = random.Random(seed)
        self.disk_mb = disk_mb
        self.faults = faults
        self.ports = {"gateway": free_port(), "runners": free_port()}
        self.mark = secrets.token_hex(8)
        self.clock = folder.parent / f"{folder.name}.clock"
        self.told = folder.parent / f"{folder.name}.told"
        self.output = folder.parent / f"{folder.name}.output"
        self.clock.write_bytes(struct.pack("d", 0.0))
        self.told.touch()
        self.done: Counter[str] = Counter()
        self.lives: list[Life] = []
        self.exit_codes: list[int] = []
        self.run: subprocess.Popen[bytes] | None = None
        self.runners: list[subprocess.Popen[bytes]] = []
        self.store = SoakStore(folder, free_port(), self.output, self._environment())

    @property
    def experiment(self) -> Path:
        return self.folder / "soak"

    def start(self) -> None:
        """Start the run, or resume it, and the runners that it needs."""
        wrapper = WRAPPERS[len(self.lives) % len(WRAPPERS)] if self.faults else WRAPPERS[0]
        environment = {**self._environment(), "SOAK_ISOLATED": str(int(wrapper != "asyncio"))}
        settings = [
            "experiment_name=soak", "trainer_common.total_training_steps=100000", "trainer_common.save_freq=1",
            "trainer_common.test_freq=0", "trainer_common.val_before_train=false",
            "rollout.user_workflow=benchmarks/_soak_workflow.py->SoakWorkflow", f"task_runner.wrapper_type={wrapper}",
            f"gateway.port={self.ports['gateway']}", f"task_runner.remote.port={self.ports['runners']}",
            "task_runner.remote.lease=3", "rollout.episode_timeout=120",
        ]  # fmt: skip
        if wrapper == "multi-processing":
            settings.append("rollout.max_env_worker=4")
        command = [sys.executable, "-m", "ajet", "--conf", "configs/quickstart.yaml", "--exp-dir", str(self.folder)]
        with self.output.open("ab") as out:
            self.began = out.tell()
            self.run = subprocess.Popen([*command, *settings], cwd=ROOT, env=environment, stdout=out, stderr=out)
            if wrapper == "remote":
                at = f"http://127.0.0.1:{self.ports['runners']}"
                self._runner = (
                    [sys.executable, "-m", "ajet", "runner", "--connect", at, "--workers", "3",
                     "--workflow", "benchmarks/_soak_workflow.py->SoakWorkflow"], environment,
                )  # fmt: skip
                self.runners = [self._start_runner() for _ in range(2)]
        self.lives.append(Life(self.run.pid, wrapper))
        self.until_step(1, START_S, in_life=True)

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks' / '_soak_site'}:{ROOT}", "OMP_NUM_THREADS": "1",
            "SOAK_CLOCK": str(self.clock), "SOAK_LOG": str(self.told), "SOAK_MARK": self.mark,
            "SOAK_FAULTS": str(int(self.faults)), "AJET_RUNNER_KEY": f"sk-ajet-{self.mark * 4}",
            "AJET_STATE_DIR": str(self.folder.parent / "state"),
        }  # fmt: skip

    def _start_runner(self) -> subprocess.Popen[bytes]:
        command, environment = self._runner
        with self.output.open("ab") as out:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)

    def steps(self) -> int:
        """How many steps have ended."""
        with suppress(FileNotFoundError):
            return (self.experiment / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    @property
    def lived(self) -> int:
        """How many steps have ended since the last start."""
        with self.output.open("rb") as said:
            said.seek(self.began)
            return said.read().count(b"\nstep ")

    def until_step(self, step: int, patience_s: float, *, in_life: bool = False) -> None:
        """Wait until this many steps have ended. Raises if the run ends, or doesn't get there."""
        until = time.monotonic() + patience_s
        while (self.lived if in_life else self.steps()) < step:
            assert self.run is not None
            if self.run.poll() is not None:
                raise Ended(f"the run ended with {self.run.returncode}:\n{tail(self.output)}")
            if time.monotonic() > until:
                raise Ended(f"no step {step} within {patience_s:.0f} s:\n{tail(self.output)}")
            time.sleep(0.2)

    def end(self, number: int) -> int:
        """Send a signal to the run; its exit code. Runners end with it."""
        if self.run is None:
            return 0
        self.run.send_signal(number)
        try:
            code = self.run.wait(END_S)
        except subprocess.TimeoutExpired:
            self.run.kill()
            code = self.run.wait()
        for runner in self.runners:
            runner.terminate()
        for runner in self.runners:
            with suppress(subprocess.TimeoutExpired):
                runner.wait(END_S)
            runner.kill()
        self.runners = []
        return code

    # ------------------------------------------------------------ faults

    def misbehave(self, until: float) -> None:
        """Faults, until the time is over. Raises Ended."""
        while time.monotonic() < until:
            time.sleep(self.draw.uniform(*PAUSE_S))
            fault = self.draw.choices(list(FAULTS), list(FAULTS.values()))[0]
            if (fault in ("kill", "term") and self.lived < LEAST_LIFE) or (fault == "disk" and not self.disk_mb):
                continue
            self.done[fault] += 1
            getattr(self, f"_{fault}")()
            assert self.run is not None
            if self.run.poll() is not None:
                raise Ended(f"the run ended with {self.run.returncode} after {fault}:\n{tail(self.output)}")

    def _kill(self) -> None:
        self._restart(signal.SIGKILL)

    def _stop(self) -> None:
        """A process stands still, as on a machine that swaps."""
        assert self.run is not None
        process = self.draw.choice([self.run, *self.runners])
        process.send_signal(signal.SIGSTOP)
        time.sleep(self.draw.uniform(1, 5))
        process.send_signal(signal.SIGCONT)

    def _term(self) -> None:
        self.exit_codes.append(self._restart(signal.SIGTERM))

    def _restart(self, number: int) -> int:
        code = self.end(number)
        if number == signal.SIGKILL:  # nobody is left who could end what its workflows detached
            for process in alive(self.mark):
                if process.cmdline() == DETACHED:
                    process.kill()
                    self.done["detached from a killed run"] += 1
        self.start()
        return code

    def _worker(self) -> None:
        assert self.run is not None
        if self.runners:
            place = self.draw.randrange(len(self.runners))
            for process in [*psutil.Process(self.runners[place].pid).children(recursive=True), self.runners[place]]:
                with suppress(psutil.Error, ProcessLookupError):
                    process.kill()
            self.runners[place].wait()
            self.runners[place] = self._start_runner()
            return
        with suppress(psutil.Error):
            workers = [child for child in psutil.Process(self.run.pid).children(recursive=True) if not child.children()]
            if workers:
                self.draw.choice(workers).kill()

    def _disk(self) -> None:
        filler = self.folder / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            for _ in range(self.disk_mb * 16):
                file.write(bytes(65_536))
            while True:
                file.write(bytes(512))
        time.sleep(self.draw.uniform(1, 4))
        filler.unlink()

    def _clock(self) -> None:
        jump = self.draw.choice([-86_400.0, -3.0, 0.0, 3.0, 3600.0, 86_400.0 * 400])
        with self.clock.open("r+b") as file:  # in place: the programs have it mapped
            file.write(struct.pack("d", jump))

    def _store(self) -> None:
        self.store.kill()

    def _hostile(self) -> None:
        seed = self.draw.random()
        threads = [
            threading.Thread(target=hostile, args=(self.ports["gateway"], seed + n), daemon=True) for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)


def hostile(port: int, seed: float) -> None:
    """One client that keeps no rule."""
    draw = random.Random(seed)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-ajet-" + b"A" * 60 + b"\r\n"
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        match draw.randrange(6):
            case 0:
                client.sendall(draw.randbytes(100_000))
            case 1:
                client.sendall(head + b"transfer-encoding: chunked\r\n\r\n0\r\n")
                for _ in range(2000):
                    client.sendall(b"x: " + b"y" * 4000 + b"\r\n")
            case 2:
                for _ in range(2000):
                    client.sendall(b"x: " + b"y" * 4000 + b"\r\n")
            case 3:
                client.sendall(head + b"content-length: 100000000\r\n\r\n" + b"[" * 1_000_000)
            case 4:
                for byte in head[:40]:
                    client.sendall(bytes([byte]))
                    time.sleep(0.1)
            case 5:
                client.sendall(head + b'content-length: 20\r\n\r\n{"messages": [[[[[[[ ')
        client.recv(1000)


# ---------------------------------------------------------------- around it


def tail(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-30:])


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """A file system of its own, if this user may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


def alive(mark: str) -> Iterator[psutil.Process]:
    """Processes of this soak that are there."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SOAK_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def left_over(mark: str) -> list[str]:
    return [" ".join(process.cmdline())[:120] for process in alive(mark)]


def watch(soak: Soak, stop: threading.Event) -> None:
    """Note memory and descriptors of the run every few seconds."""
    while not stop.wait(2.0):
        with suppress(psutil.Error, FileNotFoundError, IndexError):
            life = soak.lives[-1]
            process = psutil.Process(life.pid)
            life.samples.append((soak.lived, process.memory_info().rss >> 20, process.num_fds()))


def soaked(place: Path, seed: int, minutes: float, *, faults: bool) -> dict[str, Any]:
    """Run it, and what the oracle says."""
    folder = place / ("faults" if faults else "calm")
    disk_mb = int(DISK_MB + DISK_MB_PER_MINUTE * minutes)
    with small_disk(folder, disk_mb) as mounted:
        soak, stop = Soak(folder, seed, disk_mb if mounted else 0, faults=faults), threading.Event()
        wrong: list[str] = []
        try:
            threading.Thread(target=watch, args=(soak, stop), daemon=True).start()
            soak.store.start()
            soak.start()
            soak.until_step(3, START_S)
            if faults:
                soak.misbehave(time.monotonic() + minutes * 60)
            soak.until_step(COMPARED_STEPS, 60 * max(minutes, 10))
        except Ended as ended:
            wrong.append(str(ended))
        finally:
            stop.set()
            code = soak.end(signal.SIGTERM)
            store_code, of_the_store = soak.store.end()
        if not wrong:
            soak.exit_codes.append(code)
        wrong += [f"exit code {code}" for code in soak.exit_codes if code != INTERRUPTED]
        wrong += of_the_store + ([f"the store's exit code: {store_code}"] if store_code else [])
        time.sleep(1.0)
        wrong += [f"left over: {one}" for one in left_over(soak.mark)]
        found = findings(soak.experiment, soak.told, soak.output, soak.lives)
        found["wrong"] = wrong + found["wrong"]
        lives = dict(Counter(life.wrapper for life in soak.lives))
        disk = disk_mb if mounted else None
        return {"faults": dict(soak.done), "lives": lives, "disk_mb": disk, "store": dict(soak.store.counts), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hours", type=float, help="instead of --minutes")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    minutes = arguments.minutes if arguments.hours is None else 60 * arguments.hours
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="ajet-soak-") as name:
        calm = soaked(Path(name), arguments.seed, 0, faults=False)
        loads.append(os.getloadavg()[0])
        storm = soaked(Path(name), arguments.seed, minutes, faults=True)
    loads.append(os.getloadavg()[0])
    means = {kind: round(fmean(run["curve"][COMPARED] or [0.0]), 3) for kind, run in (("calm", calm), ("storm", storm))}
    bad = [*calm["wrong"], *storm["wrong"]]
    if means["storm"] < means["calm"] - BAND:
        bad.append(f"the reward of steps 31 to 40 is {means['storm']}, and {means['calm']} without faults")
    figures = {
        "minutes": minutes, "seed": arguments.seed, "load_average": [round(load, 1) for load in loads], "wrong": bad,
        "reward_of_steps_31_to_40": means, "calm": calm, "storm": storm,
    }  # fmt: skip
    write_result("soak", figures)
    for run in (calm, storm):
        del run["curve"], run["wrong"]
    print(json.dumps(figures, indent=2))
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
