"""An exception for a thread that waits doesn't stop the threads that a debugger follows."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from ajet.task_runner.thread_control import raise_in


class StopError(BaseException):
    pass


def nothing() -> None:
    """These threads need no waking."""


@pytest.mark.parametrize("follow", ["everything", "one frame"])
def test_traced_threads_go_on_while_another_waits(follow: str) -> None:
    # in a process of its own: threads that stop can't be ended
    ended = subprocess.run([sys.executable, __file__, follow], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.split("\n")[:2] == ["goes on", "still waits"], ended.stderr


def test_a_thread_that_executes_python_meets_it() -> None:
    met, stop = threading.Event(), threading.Event()

    def turn() -> None:
        while not stop.is_set():
            pass

    def meet() -> None:
        try:
            turn()  # in CPython 3.13, a loop's jump back isn't within the `try` around it
        except StopError:
            met.set()

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    while not met.wait(0.05) and thread.is_alive():
        raise_in(thread, StopError, unless=met.is_set, wake=nothing)
    thread.join()
    assert met.is_set()


def test_an_import_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slowly_imported.py").write_text("from held import begun, release\nbegun.set()\nrelease.wait()\n")
    held: Any = ModuleType("held")
    held.begun, held.release = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "held", held)
    monkeypatch.syspath_prepend(tmp_path)
    thread = threading.Thread(target=importlib.import_module, args=["slowly_imported"], daemon=True)
    thread.start()
    held.begun.wait()
    raise_in(thread, StopError, unless=lambda: False, wake=nothing)
    held.release.set()
    thread.join()
    assert sys.modules.pop("slowly_imported", None) is not None


def follow_calls(frame: FrameType, event: str, arg: object) -> object:
    return follow_calls


def say(text: str) -> None:
    print(text, flush=True)


def interrupt_one_that_waits(follow: str) -> None:
    ends, waits = os.pipe(), threading.Event()

    def wait() -> None:
        waits.set()
        os.read(ends[0], 1)

    thread = threading.Thread(target=wait, daemon=True)
    if follow == "everything":
        threading.settrace(follow_calls)
    sys.settrace(follow_calls)
    sys._getframe().f_trace = follow_calls
    thread.start()
    waits.wait()
    while os.path.basename(sys._current_frames()[thread.ident or 0].f_code.co_filename) != os.path.basename(__file__):
        pass  # it is still about to leave `set`
    raise_in(thread, StopError, unless=lambda: False, wake=nothing)
    say("goes on")
    say("still waits" if thread.is_alive() else "gone")
    os.write(ends[1], b".")


if __name__ == "__main__":
    interrupt_one_that_waits(sys.argv[1])
