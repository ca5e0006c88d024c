"""Everything that a run started is found and ended, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ajet.system import processes
from ajet.system.json_schemas import PROGRAM
from ajet.system.processes import (
    RAY_RUN,
    ChildProcess,
    end_all,
    end_recorded,
    processes_of,
    recorded,
    recorded_run,
    still_running,
)
from support import ROOT
from support.detached import is_gone
from support.waiting import wait_until


def test_everything_marked_is_ended_orphans_too() -> None:
    """The child starts a grandchild in its own session, which ignores SIGTERM, and ends."""
    mark = f"test-{os.getpid()}"
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    )
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True)"
    marked = {**os.environ, RAY_RUN: mark}
    with subprocess.Popen([sys.executable, "-c", code], env=marked, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        child.wait()
        assert len(processes_of(RAY_RUN, mark)) == 1
        assert end_all(RAY_RUN, mark, patience_s=0.5) == 1
        assert processes_of(RAY_RUN, mark) == set()


def test_a_process_that_lost_its_mark_is_found_in_its_session() -> None:
    """Like Ray's agents, which overwrite it with their title. Its parent has already ended."""
    mark = f"test-{os.getpid()}"
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], env={})"
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, RAY_RUN: mark}, start_new_session=True)
    parent.wait()
    assert processes_of(RAY_RUN, mark) == set()
    assert len(processes_of(RAY_RUN, mark, parent.pid)) == 1
    assert end_all(RAY_RUN, mark, session=parent.pid) == 1
    assert processes_of(RAY_RUN, mark, parent.pid) == set()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the environment as Linux shows it")
def test_a_mark_behind_an_overwritten_start_of_the_environment_is_found() -> None:
    """A process title that is longer than the arguments goes on over the first variables, and pads them with zeros."""
    mark = f"test-{os.getpid()}"
    code = (
        "import ctypes, time\n"
        "first = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), 'environ')[0]\n"
        "ctypes.memset(first, 0, 30)\n"
        "print('up', flush=True)\n"
        "time.sleep(99)\n"
    )
    environment = {"FIRST": "x" * 40, RAY_RUN: mark}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert RAY_RUN not in psutil.Process(process.pid).environ()
        assert {found.pid for found in processes_of(RAY_RUN, mark)} == {process.pid}
        assert end_all(RAY_RUN, mark) == 1


def test_the_leader_is_asked_first_and_a_reused_process_id_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AJET_STATE_DIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"]) as process:
        with recorded("mark", "sleeper", "p-", process.pid, "sleep"):
            (file,) = tmp_path.glob("*.json")
            record = json.loads(file.read_text())
            assert still_running() == ["p-sleeper"]
            file.write_text(json.dumps(record | {"started": record["started"] - 1}))
            assert still_running() == []
            assert end_recorded() == ["nothing that ajet started is still running"]
            assert process.poll() is None
            file.write_text(json.dumps(record))
            assert end_recorded("other") == ["nothing that ajet started is still running"]
            assert end_recorded("p-") == ["ended p-sleeper (1 process)"]
        assert process.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {"memory.max": "{limit}\n", "memory.current": "{used}", "memory.stat": "anon 1\n{cached}"}),
        (
            "0::/job/step\n",
            {"job/memory.max": "{limit}", "job/memory.current": "{used}", "job/memory.stat": "{cached}"},
        ),
        (
            "4:cpu,memory:/docker/abc\n0::/\n",  # a container of version 1, which is shown the host's path
            {
                "memory/memory.limit_in_bytes": "{limit}",
                "memory/memory.usage_in_bytes": "{used}",
                "memory/memory.stat": "active_file 1\ntotal_{cached}",
            },
        ),
        ("0::/job\n", {"job/memory.max": "max\n", "job/memory.current": "5", "job/memory.stat": ""}),
        ("0::/elsewhere\n", {}),
    ],
)
def test_memory_is_what_the_container_or_job_leaves(
    groups: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mebi = 1 << 20
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        values = {"limit": 100 * mebi, "used": 70 * mebi, "cached": f"inactive_file {20 * mebi}"}
        (tmp_path / name).write_text(content.format(**values))
    read_text, machine = Path.read_text, psutil.virtual_memory()
    monkeypatch.setattr(processes, "CGROUPS", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(Path, "read_text", lambda file: groups if str(file) == "/proc/self/cgroup" else read_text(file))
    limited = any("{limit}" in content for content in files.values())
    expected = (100 * mebi, 50 * mebi) if limited else (machine.total, machine.available)
    assert processes.main_memory() == expected


def test_a_run_ends_in_order_if_the_environment_was_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "AJET_STATE_DIR": str(tmp_path)})
    with recorded_run(tmp_path / "experiment"):
        os.environ.clear()


# ---------------------------------------------------------------- a child that answers questions

QUESTION = json.dumps({"schema": json.dumps({"type": "integer"}), "value": "text"}).encode() + b"\n"


def test_a_child_ends_with_an_owner_that_is_killed() -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from ajet.system.processes import ChildProcess\n"
        f"child = ChildProcess(Path({str(PROGRAM)!r}))\n"
        f"child.ask({QUESTION!r}, 60)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert not is_gone(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: is_gone(pid), 60)


@pytest.mark.skipif(os.sysconf("SC_OPEN_MAX") <= 1200, reason="no file numbers above 1023 here")
def test_a_child_is_asked_from_a_process_with_many_files() -> None:
    """File numbers above 1023, which `select` does not take."""
    child = ChildProcess(PROGRAM)
    low = child._answers
    child._answers = high = os.dup2(low, 1101)
    try:
        assert "breach" in json.loads(child.ask(QUESTION, 60))
    finally:
        child.end()
        os.close(high)
