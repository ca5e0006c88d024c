"""About 160 faulty workflows: each ends its own episode, by a failure that has a name, and nothing else."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import io
import itertools
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from ajet import Workflow, WorkflowOutput
from ajet.observe.episode_codec import encode_episode
from ajet.observe.logs import Masker
from ajet.observe.metrics import aggregate_log_metrics
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.task import Task, WorkflowTask
from ajet.task_runner.attempt import TOO_MUCH, WorkflowResult, plain
from support.runner_fakes import runner_of


class Fault(NamedTuple):
    name: str
    do: Callable[[], Any]
    """What `execute` does in the end: it raises, or returns something."""
    harmless: bool = False
    """The episode completes all the same."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Endless(Exception):
    def __str__(self) -> str:
        return "x" * 50_000_000


class NoText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __float__(self) -> float:
        raise RuntimeError("no")


class Long:
    def __repr__(self) -> str:
        return "y" * 50_000_000


def raising(error: BaseException) -> Callable[[], Any]:
    def do() -> Any:
        raise error

    return do


def chained() -> Any:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    raise first


def deep_group() -> Any:
    group: Exception = ValueError("x")
    for _ in range(200):
        group = ExceptionGroup("g", [group])
    raise group


def recursion() -> Any:
    return recursion()


def output(**fields: Any) -> WorkflowOutput:
    """Fields as they are: `model_construct`, or an assignment afterwards, checks nothing."""
    return WorkflowOutput.model_construct(
        **{"reward": 1.0, "is_success": None, "metadata": {}, "log_metrics": {}, **fields}
    )


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


def nested(levels: int = 5000) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


BAD_TYPES: list[Any] = [5, "yes", b"x", [], [1], {"a": 1}, object(), Shy(), 1.5, 10**400, {1, 2}, (1,), print]
ODD_VALUES: dict[str, Callable[[], Any]] = {
    "cyclic": cyclic, "nested": nested, "10**400": lambda: 10**400, "huge text": lambda: "z" * 5_000_000,
    "shy": Shy, "long": Long, "nan": lambda: float("nan"), "inf": lambda: float("inf"), "bytes": lambda: b"\xff\x00",
    "surrogate": lambda: "\ud800", "complex": lambda: 1j, "class": lambda: Shy, "function": lambda: print,
    "generator": lambda: (n for n in range(3)), "set": lambda: {1, 2}, "many": lambda: list(range(300_000)),
    "odd keys": lambda: {1: 2, None: 3, (4, 5): 6, Shy(): 7}, "nul": lambda: "a\0b", "exception": lambda: Unspeakable(),
    "lock": lambda: __import__("threading").Lock(),
}  # fmt: skip


def stop_loop() -> Any:
    asyncio.get_running_loop().stop()
    return output()


async def stop_and_wait() -> Any:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    return output()


async def cancel_everything() -> Any:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0)


async def cancel_self() -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def leave_tasks_behind() -> Any:
    async def fail() -> None:
        raise Unspeakable

    for _ in range(5):
        asyncio.get_running_loop().create_task(fail())
    return output()


def close_loop() -> Any:
    asyncio.get_running_loop().close()


def odd_handler() -> Any:
    asyncio.get_running_loop().set_exception_handler(lambda *_: 1 / 0)
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    return output()


def faults() -> Iterator[Fault]:
    for name, kind in sorted(vars(builtins).items()):
        if isinstance(kind, type) and issubclass(kind, BaseException) and "Group" not in name:
            error = kind("utf-8", b"x", 0, 1, "y") if name == "UnicodeDecodeError" else None
            error = kind("utf-8", "x", 0, 1, "y") if name == "UnicodeEncodeError" else error
            error = kind("x", 0, 1, "y") if name == "UnicodeTranslateError" else error
            yield Fault(f"raises {name}", raising(error or kind("x")))
    for kind in (Unspeakable, Endless, NoText, asyncio.CancelledError, asyncio.InvalidStateError, TimeoutError):
        yield Fault(f"raises {kind.__name__}", raising(kind()))
    yield Fault("raises a chain that bites its tail", chained)
    yield Fault("raises nested groups", deep_group)
    yield Fault("recurses without end", recursion)
    for value in (None, *BAD_TYPES, WorkflowOutput):
        yield Fault(f"returns {type(value).__name__}", lambda value=value: value)
    for value in BAD_TYPES:
        if not isinstance(value, int | float) or value == 10**400:
            yield Fault(f"reward {type(value).__name__}", lambda value=value: output(reward=value))
    for reward in (True, float("nan"), float("inf"), [float("nan")], ["1"], [None], [[1.0]], [1.0] * 7):
        yield Fault(f"reward {reward!r:.20}", lambda reward=reward: output(reward=reward))
    for value in BAD_TYPES:
        yield Fault(f"is_success {type(value).__name__}", lambda value=value: output(is_success=value))
        if not isinstance(value, dict):
            yield Fault(f"metadata {type(value).__name__}", lambda value=value: output(metadata=value))
            yield Fault(f"log_metrics {type(value).__name__}", lambda value=value: output(log_metrics=value))
    for field in ("metadata", "log_metrics"):
        yield Fault(f"{field} None", lambda field=field: output(**{field: None}))
        for name, make in ODD_VALUES.items():
            yield Fault(
                f"{field} {name}", lambda field=field, make=make: output(**{field: {"v": make()}}), harmless=True
            )
    yield Fault("stops its loop", stop_loop, harmless=True)
    yield Fault("stops its loop and waits", stop_and_wait, harmless=True)
    yield Fault("closes its loop", close_loop)
    yield Fault("cancels everything", cancel_everything)
    yield Fault("cancels itself", cancel_self)
    yield Fault("leaves tasks behind", leave_tasks_behind, harmless=True)
    yield Fault("sets an odd handler", odd_handler, harmless=True)


FAULTS = list(faults())


class Faulty(Workflow):
    async def execute(self, workflow_task: WorkflowTask, tuner: Any) -> Any:
        if workflow_task.task_id == "honest":
            return WorkflowOutput(reward=1.0)
        value = FAULTS[int(workflow_task.task_id)].do()
        return await value if asyncio.iscoroutine(value) else value


async def episode_of(runner: Any, task_id: str) -> Episode:
    episode: Episode = await runner.run(WorkflowTask(task=Task(task_id=task_id), task_id=task_id))
    return episode


def written(episode: Episode) -> None:
    """What the recorder and the metrics do with an episode."""
    aggregate_log_metrics([episode.log_metrics])
    masker = Masker()
    episode.metadata, episode.log_metrics = masker.value(episode.metadata), masker.value(episode.log_metrics)
    assert len(encode_episode(episode)) < 20_000_000


@pytest.mark.slow
def test_every_fault_ends_its_episode_alone_with_a_name() -> None:
    assert len(FAULTS) >= 160

    async def run() -> None:
        runner = runner_of(Faulty)
        for number, fault in enumerate(FAULTS):
            episode = await asyncio.wait_for(episode_of(runner, str(number)), 60)
            written(episode)
            if fault.harmless:
                assert episode.reward == 1.0 or episode.failure is not None, fault.name
            else:
                assert episode.reward is None and episode.status is not EpisodeStatus.COMPLETED, fault.name
                assert episode.failure is not None and episode.failure.kind and episode.failure.message, fault.name
                assert len(episode.failure.message) + len(episode.failure.traceback) < 500_000, fault.name
            if number % 20 == 0:
                assert (await episode_of(runner, "honest")).reward == 1.0, fault.name
        episodes = await asyncio.gather(*(episode_of(runner, "honest") for _ in range(4)))
        assert [one.reward for one in episodes] == [1.0] * 4
        await runner.attempts.aclose()

    asyncio.run(run())


# ---------------------------------------------------------------- what all threads share


def close_stdout() -> None:
    sys.stdout.close()


CHANGES: dict[str, tuple[Callable[[], Any], str]] = {
    "chdir": (lambda: os.chdir("/"), "the working directory (to /)"),
    "stdout": (close_stdout, "sys.stdout (closed)"),
    "timeout": (lambda: socket.setdefaulttimeout(0.001), "the sockets' default timeout"),
    "recursion": (lambda: sys.setrecursionlimit(600), "the recursion limit (to 600)"),
    "logging": (lambda: logging.disable(logging.CRITICAL), "logging (disabled up to level 50)"),
}


class Changing(Workflow):
    async def execute(self, workflow_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
        CHANGES[workflow_task.task_id][0]()
        return WorkflowOutput(reward=1.0)


@pytest.mark.parametrize("change", CHANGES)
def test_what_all_threads_share_is_put_back_and_named(
    change: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", open(os.dup(1), "w"))  # noqa: SIM115 - the workflow closes it
    before = (os.getcwd(), socket.getdefaulttimeout(), sys.getrecursionlimit())

    async def run() -> None:
        runner = runner_of(Changing)
        assert (await episode_of(runner, change)).reward == 1.0
        assert (os.getcwd(), socket.getdefaulttimeout(), sys.getrecursionlimit()) == before
        print("still open", flush=True)

    asyncio.run(run())
    assert CHANGES[change][1] in caplog.text and "ajet-episode-1" in caplog.text
    assert logging.root.manager.disable == 0


class Capturing(Workflow):
    """The first to enter is the first to leave, so that the second puts back what the first had put there."""

    async def execute(self, workflow_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
        number = int(workflow_task.task_id)
        await asyncio.sleep(0.1 * number)
        with contextlib.redirect_stdout(io.StringIO()):
            await asyncio.sleep(0.3)
        return WorkflowOutput(reward=1.0)


def test_standard_output_that_workflows_leave_replaced_is_put_back_when_the_last_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = sys.stdout

    async def run() -> None:
        runner = runner_of(Capturing)

        async def two() -> None:
            episodes = await asyncio.gather(episode_of(runner, "0"), episode_of(runner, "1"))
            assert [one.reward for one in episodes] == [1.0, 1.0]

        with contextlib.redirect_stdout(io.StringIO()) as programs:  # as a notebook's cell may
            await two()
            assert sys.stdout is programs
        await two()
        assert sys.stdout is before
        await runner.attempts.aclose()

    asyncio.run(run())
    assert sys.stdout is before
    assert caplog.text.count("user code has replaced sys.stdout") == 1


def test_numbers_and_names_are_kept_as_they_are() -> None:
    kept = {"a": [1, 2.5, None, True, {"b": "text"}], "c": json.loads("[1]")}
    assert plain(kept) == kept
    assert list(itertools.islice(plain({"x": cyclic()})["x"], 1)) == ["self"]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_arrays_become_lists_so_that_their_numbers_reach_a_metric_from_any_process(kind: str) -> None:
    library = pytest.importorskip(kind)
    array = library.asarray([1.0, 2.5])
    kept = plain({"a": array, "scalar": array.mean(), "many": library.zeros((400, 300)), "none": library.zeros((0,))})
    assert kept == {"a": [1.0, 2.5], "scalar": 1.75, "many": TOO_MUCH, "none": []}
    metrics = aggregate_log_metrics([WorkflowResult.from_json(WorkflowResult(log_metrics=kept).to_json()).log_metrics])
    assert metrics == {"user/a": 1.75, "user/a/min": 1.0, "user/a/max": 2.5, "user/scalar": 1.75}
