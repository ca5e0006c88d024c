"""What holds for all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

with contextlib.suppress(ImportError):  # other environments have no hypothesis
    import hypothesis

    hypothesis.settings.register_profile("busy", deadline=None)  # no test depends on how busy the machine is
    hypothesis.settings.load_profile("busy")

# tests start hundreds of Python processes: without compiled files, each of them compiles ajet anew
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell that runs the tests in its background has them ignore Ctrl-C, and so would the programs they start
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is loaded while tests are collected stays: going through it again and again takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def anyio_backend() -> str:
    """Where a module says `pytestmark = pytest.mark.anyio`, its coroutines are tests too, on a loop each."""
    return "asyncio"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2 MB of disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """pytest-xdist ends the whole run over a report that isn't UTF-8: the name of a file in the message of an error
    can do that."""
    return _encodable((yield))


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Warnings are sent as reports are."""
    text = str(warning_message.message)
    if _encodable(text) != text:
        warning_message.message = warning_message.category(_encodable(text))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_encodable, value))
    return value
