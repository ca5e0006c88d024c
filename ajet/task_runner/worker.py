"""`ForkServer`, which forks workers, and what runs in one: `serve_attempt`, a workflow and its judge.

Its channel carries one JSON object per line. The worker receives the task, asks for access to the model once its
workflow exists, asks how the episode ended if the workflow raised, reports when judging begins and what its
environment was asked, and sends the result. A worker that stays then says that it is free.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from ajet.config import Config
from ajet.environment.leased import LeasedEnvironment
from ajet.schema.episode import EnvironmentEvent
from ajet.schema.task import WorkflowTask
from ajet.schema.user_code import import_class
from ajet.system.forking import ForkingServer
from ajet.task_judge.base_judge import JUDGE_KEY, BaseJudge, load_judge
from ajet.task_runner.attempt import EarlyEnding, WorkflowResult
from ajet.task_runner.environments import LeasedSandbox, find_environment, find_sandbox, load_workflow
from ajet.task_runner.results import describe, run_workflow
from ajet.task_runner.thread_control import end_loop, run_with_pauses
from ajet.task_runner.tuner import AjetTuner

LINE_LIMIT = 64 * 1024 * 1024
"""Size limit of a message between a worker and the process that runs the episodes."""
FREE = {"free": True}
"""What a worker that stays says when it has cleared up after an attempt."""


def _own_streams(stderr: int) -> None:
    """Its own stderr, also for the stack that `dump` asks for, and no stdin."""
    os.dup2(stderr, 2)
    os.close(stderr)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


async def serve_attempt(server: ForkServer, channel: socket.socket) -> None:
    """Run the attempt whose task comes over the channel, and send its result."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=LINE_LIMIT)
    loop, own_thread = asyncio.get_running_loop(), threading.get_ident()

    def send(**message: Any) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    def tell(event: EnvironmentEvent) -> None:
        """Each event at once: this process may be killed at any time."""
        if threading.get_ident() == own_thread:
            send(environment=asdict(event))
        else:
            loop.call_soon_threadsafe(lambda: send(environment=asdict(event)))

    async def open_tuner(targets: list[str] | None) -> AjetTuner:
        send(targets=targets)
        access = json.loads(await reader.readline())
        keys = {"api_key": access["api_key"], "control_key": access["control_key"]}
        return AjetTuner.remote(access["base_url"], config=server.config, trainable_targets=targets, **keys)

    async def ask_ending(explained: bool) -> EarlyEnding | None:
        send(raised=True, explained=explained)
        ending = json.loads(await reader.readline())
        return None if ending is None else EarlyEnding(*ending)

    workflow_task = WorkflowTask.model_validate_json(await reader.readline())
    send(started=True)
    environment = None
    if server.environments is not None:
        environment = LeasedEnvironment(server.environments, workflow_task.task, workflow_task.episode_uuid, tell)
    try:
        judge = load_judge(server.config, server.base_dirs)
    except Exception as error:  # noqa: BLE001 - the judge's constructor is user code
        result = WorkflowResult(failure=describe(error), failed_in="judge")
    else:
        retries = server.config.ajet.rollout.episode_retries
        result = await run_workflow(
            server.workflow_class,
            judge,
            workflow_task,
            open_tuner,
            judge_retries=retries,
            ask_ending=ask_ending,
            on_judge=lambda: send(judging=True),  # the judge is to blame for a crash from here on
            environment=environment,
            sandbox=None if server.sandboxes is None else LeasedSandbox(server.sandboxes, workflow_task.task.metadata),
        )
    send(result=result.to_json())
    await writer.drain()
    writer.close()


class ForkServer(ForkingServer):
    """The server, with the user's code imported."""

    descriptors = 2
    threads_warning = "importing the workflow started threads ({names}); they do not run in its workers"

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        super().__init__(control)
        self.config = Config.model_validate(setup["config"])
        self.base_dirs = [Path(folder) for folder in setup["base_dirs"]]
        self.workflow_class = load_workflow(self.config, self.base_dirs)
        judge = self.config.ajet.task_judge.judge_protocol
        if judge is not None:
            import_class(judge, BaseJudge, key=JUDGE_KEY, base_dirs=self.base_dirs)
        self.environments = find_environment(self.config, self.base_dirs)
        self.sandboxes = find_sandbox(self.config, self.base_dirs)
        from ajet.task_runner.tuner.clients import rehearse  # it loads the clients' libraries: nothing for the parent

        rehearse()

    def command(self, do: str, process: int) -> None:
        os.kill(process, signal.SIGUSR1)  # `dump`: faulthandler prints its stack

    def child(self, *descriptors: int) -> NoReturn:
        """Run one attempt, or, if workers stay, one after another until there are no more."""
        channel, stderr = socket.socket(fileno=descriptors[0]), descriptors[1]
        _own_streams(stderr)
        while channel.recv(1, socket.MSG_PEEK):
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
            try:
                run_with_pauses(loop, serve_attempt(self, channel.dup()))
            finally:
                end_loop(loop)
            sys.stdout.flush()
            sys.stderr.flush()
            if self.config.ajet.task_runner.process_lifetime == "episode":
                break
            channel.setblocking(True)
            channel.sendall(json.dumps(FREE).encode() + b"\n")
        os._exit(0)  # skip the server's exit handlers, and don't wait for threads that user code left
