"""What a worker does after the fork: one workflow, one judge, then it is gone.

Over its channel, a line of JSON each: it is sent the task, asks for access to the model when its workflow exists, says
when it begins to judge, and gives its verdict.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from ajet.config import Config
from ajet.schema.task import WorkflowTask
from ajet.task_judge.load import load_judge
from ajet.task_runner.verdict import Verdict, describe, perform
from ajet.tuner import AjetTuner
from ajet.workflow import Workflow

PR_SET_PDEATHSIG = 1
LINE_LIMIT = 64 * 1024 * 1024
"""Largest message between a worker and the process that runs the episodes."""


def run_worker(
    config: Config, workflow_class: type[Workflow], base_dirs: list[Path], channel: socket.socket, stderr: int
) -> None:
    """Never returns."""
    _detach(stderr)
    asyncio.run(_serve(config, workflow_class, base_dirs, channel))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the server's own exit handlers, and threads that user code left, are not to be waited for


def _detach(stderr: int) -> None:
    """Own session (so that all it starts can be killed), own stderr, no stdin, no life without the server."""
    server = os.getppid()
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    os.dup2(stderr, 2)
    os.close(stderr)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if "numpy" in sys.modules:  # Python's own generator is seeded anew by a fork, numpy's is not
        sys.modules["numpy"].random.seed()


async def _serve(config: Config, workflow_class: type[Workflow], base_dirs: list[Path], channel: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel, limit=LINE_LIMIT)

    def say(**message: Any) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    async def open_tuner(targets: list[str] | None) -> AjetTuner:
        say(targets=targets)
        access = json.loads(await reader.readline())
        return AjetTuner.remote(access["base_url"], access["api_key"], config, trainable_targets=targets)

    workflow_task = WorkflowTask.model_validate_json(await reader.readline())
    say(started=True)
    try:
        judge = load_judge(config, base_dirs)
    except Exception as error:  # noqa: BLE001 - the judge's constructor is user code
        verdict = Verdict(failure=describe(error), failed_in="judge")
    else:
        retries = config.ajet.rollout.episode_retries
        verdict = await perform(
            workflow_class,
            judge,
            workflow_task,
            open_tuner,
            judge_retries=retries,
            on_judge=lambda: say(judging=True),  # a crash from then on is the judge's
        )
    say(verdict=verdict.to_json())
    await writer.drain()
    writer.close()
