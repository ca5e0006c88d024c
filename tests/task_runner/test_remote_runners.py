"""`wrapper_type: remote`: real `ajet runner` processes that work, crash, hang, are killed, and come and go."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ajet.cli.main import main
from ajet.config import Config, make_config
from ajet.config.contradictions import contradictions
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.errors import EngineError
from ajet.schema.resources import PromptSet, PromptTemplate
from ajet.schema.task import Task, WorkflowTask
from ajet.store.client import StoreClient
from ajet.store.database_store import memory_store
from ajet.store.requests import ProtocolMismatchError, Role, StoreError
from ajet.store.server import StoreServer, issue
from ajet.task_judge.base_judge import load_judge
from ajet.task_runner.attempt import AttemptHandle
from ajet.task_runner.remote import KEY_VARIABLE, RemoteRunner, _config, _without_keys
from ajet.task_runner.runner import TaskRunner
from support.ports import free_port
from support.runner_fakes import LineEngine, SmallProvider
from support.waiting import until

NODE_RUNNER = Path(__file__).parents[2] / "tutorial" / "example_other_clients" / "runner.mjs"
KEY = "sk-ajet-" + "k" * 40
AJET = (sys.executable, "-m", "ajet", "runner", "--workflow", "agent.py->Agent")
CODE = """
from __future__ import annotations
import asyncio, os, sys, time
from pathlib import Path
from ajet import Workflow, WorkflowOutput

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        act, file = workflow_task.task.main_query, Path(workflow_task.task.metadata.get("file", "none"))
        if act == "raise":
            raise KeyError("mine")
        if act == "sys_exit":
            sys.exit(3)
        if act == "crash_once" and not file.exists():
            file.write_text("crashed")
            os._exit(7)
        if act == "hang_once" and not file.exists():
            file.write_text(str(os.getpid()))
            time.sleep(600)
        if act == "hang":
            file.write_text(str(os.getpid()))
            time.sleep(600)
        if act == "slow":
            file.write_text(str(os.getpid()))
            while not file.with_suffix(".go").exists():
                await asyncio.sleep(0.02)
        if act == "leave":
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
            return WorkflowOutput(reward=1)
        if act == "where":
            return WorkflowOutput(reward=1, metadata={
                "heavy": sorted({"torch", "transformers", "datasets"} & set(sys.modules)),
                "size": tuner.config.frozen_lake.size, "key": tuner.config.ajet.rollout.remote.api_key})
        if act == "judge":
            return WorkflowOutput(metadata={"answer": 42})
        if act == "template":
            return WorkflowOutput(reward=1, metadata={"text": tuner.prompt("solver").format(question="2+2")})
        client = tuner.as_raw_openai_sdk_client()
        if act == "overflow":
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 2000}])
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return WorkflowOutput(reward=len(reply.choices[0].message.content))
"""
JUDGE = """
from ajet.task_judge.base_judge import BaseJudge

class Judge(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        if "ended_early" in workflow_output.metadata:
            return -0.5, False
        return workflow_output.metadata["answer"] / 2, True
"""

Scene = Callable[[TaskRunner, "Started"], Awaitable[None]]


class Started:
    """Runners that a test starts, and ends."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.programs: list[subprocess.Popen[bytes]] = []

    def runner(self, workers: int = 1, *more: str) -> subprocess.Popen[bytes]:
        program = subprocess.Popen(
            [*AJET, "--connect", self.url, "--workers", str(workers), "--name", f"r{len(self.programs)}", *more],
            cwd=self.folder,
            env={**os.environ, KEY_VARIABLE: KEY},
            stderr=(self.folder / f"runner-{len(self.programs)}.log").open("wb"),
        )
        self.programs.append(program)
        return program

    def end(self) -> None:
        for program in self.programs:
            children = psutil.Process(program.pid).children(recursive=True) if program.poll() is None else []
            program.kill()
            program.wait()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


def play(folder: Path, scene: Scene, monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException, **keys: Any) -> None:
    """Run `scene` with a trainer that serves episodes to runners."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    (folder / "agent.py").write_text(textwrap.dedent(CODE))
    (folder / "judge.py").write_text(textwrap.dedent(JUDGE))
    config = make_config(
        {
            "task_judge.judge_protocol": f"{folder}/judge.py->Judge",
            "task_runner.wrapper_type": "remote",
            "task_runner.remote.port": 0,
            "task_runner.remote.lease": 2,
            "rollout.user_workflow": f"{folder}/agent.py->Agent",
            "rollout.remote.api_key": "sk-secret",
            **{key.replace("__", "."): value for key, value in keys.items()},
        },
        frozen_lake={"size": 8},
    )

    async def run() -> None:
        sessions = SmallProvider(config, LineEngine(*(lines or ("hello",))))
        attempts = RemoteRunner(config, sessions, load_judge(config))
        await attempts.start()
        started = Started(folder, attempts.url)
        try:
            async with asyncio.timeout(120):
                await scene(TaskRunner(sessions, attempts), started)
        finally:
            started.end()
            await attempts.aclose()
            if sessions.gateway is not None:
                await sessions.gateway.aclose()

    asyncio.run(run())


async def episode(runner: TaskRunner, act: str, file: Path | None = None, **options: Any) -> Episode:
    metadata = {} if file is None else {"file": str(file)}
    return await runner.run(WorkflowTask(task=Task(task_id="t", main_query=act, metadata=metadata)), **options)


@pytest.mark.slow
def test_a_runner_elsewhere_runs_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(runner: TaskRunner, started: Started) -> None:
        started.runner(2)
        done, where, judged, raised, exited, overflow = await asyncio.gather(
            *(episode(runner, act) for act in ("call", "where", "judge", "raise", "sys_exit", "overflow"))
        )
        assert (done.status, done.reward) == (EpisodeStatus.COMPLETED, 5.0)
        assert where.metadata == {"heavy": [], "size": 8, "key": None}, "no torch, the user's own keys, no secret"
        assert (judged.reward, judged.is_success) == (21.0, True), "the judge runs with the trainer"
        assert raised.status is EpisodeStatus.WORKFLOW_ERROR
        assert raised.failure is not None
        assert "agent.py" in raised.failure.traceback
        assert "KeyError: 'mine'" in raised.failure.traceback
        assert exited.failure is not None
        assert (exited.status, exited.failure.kind) == (EpisodeStatus.WORKFLOW_ERROR, "SystemExit")
        assert (overflow.status, overflow.reward) == (EpisodeStatus.TRUNCATED, -0.5)

    play(tmp_path, scene, monkeypatch)


def test_a_runner_gets_a_config_that_it_can_read_without_keys() -> None:
    env = {"DB_PASSWORD": "hidden-1", "db_token": "hidden-2", "OPENAI_KEY": "hidden-3", "PLAIN": "shown"}
    config = make_config(
        {"helper.api_key": "hidden-4", "services": {"db": {"command": "serve", "env": env}}},
        mine={"accessToken": "hidden-5", "prompt_key": "question"},
    )
    given = Config.model_validate(_without_keys(config.model_dump(mode="json")))
    assert "hidden" not in given.model_dump_json()
    assert (given.ajet.services["db"].env, given.ajet.helper.api_key) == ({"PLAIN": "shown"}, None)
    mine: Any = given.mine  # type: ignore[attr-defined]
    assert (mine.accessToken, mine.prompt_key) == (None, "question")


def test_a_configuration_of_another_version_is_refused_by_its_key_and_a_store_by_its_kind() -> None:
    async def main() -> None:
        async with memory_store() as store:
            with pytest.raises(StoreError, match="that is a store, not a run"):
                await _config(store, {}, None)
            await store.publish_resources({"config": {"ajet": {"rollout": {"key_of_tomorrow": 3}}}})
            says = r"ajet\.rollout\.key_of_tomorrow: .*\n.*the same version of ajet"
            with pytest.raises(ProtocolMismatchError, match=says):
                await _config(store, {}, None)
            await store.publish_resources({"prompt": "own"})
            with pytest.raises(StoreError, match="that is a store, not a run"):
                await _config(store, {}, None)

    asyncio.run(main())


@pytest.mark.slow
def test_the_users_module_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = "\nPath('imports').open('a').write(f'{os.getpid()}\\n')\n"
    monkeypatch.setattr(f"{__name__}.CODE", CODE + counting)

    async def scene(runner: TaskRunner, started: Started) -> None:
        program = started.runner(3)
        crashed = await episode(runner, "crash_once", tmp_path / "crash")
        assert (crashed.status, crashed.attempts) == (EpisodeStatus.COMPLETED, 2)
        assert (tmp_path / "imports").read_text() == f"{program.pid}\n"
        await until(lambda: len(psutil.Process(program.pid).children()) == 3)
        program.terminate()  # workers wait for episodes: they end, and the runner with them
        assert await asyncio.to_thread(program.wait, 60) == 0

    play(tmp_path, scene, monkeypatch)


@pytest.mark.slow
def test_a_wrong_key_and_a_wrong_address_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scene(runner: TaskRunner, started: Started) -> None:
        wrong = {**os.environ, KEY_VARIABLE: "sk-ajet-" + "w" * 40}
        command = [*AJET, "--connect", started.url, "--workers", "2"]
        program = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, env=wrong, stderr=subprocess.PIPE)
        said = (await program.communicate())[1].decode()
        assert program.returncode == 2
        assert f"{KEY_VARIABLE}: the run at {started.url} refuses this key" in said

    play(tmp_path, scene, monkeypatch)
    for address in ("127.0.0.1:4747", "ftp://127.0.0.1", "http://"):
        assert main(["runner", "--workflow", "agent.py->Agent", "--connect", address]) == 2
        assert f"--connect: {address!r} is not an address: it looks like http://host:port" in capsys.readouterr().err


def test_a_key_that_the_run_has_made_up_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)

    async def run() -> None:
        config = make_config({"task_runner.wrapper_type": "remote", "task_runner.remote.port": 0})
        attempts = RemoteRunner(config, SmallProvider(config, LineEngine("hello")), None)
        await attempts.start()
        said = capsys.readouterr().err
        key = said.partition(f"{KEY_VARIABLE}=")[2].split()[0]
        async with StoreClient(attempts.url, key) as store:
            assert (await store.info()).roles == ["runner"]
        await attempts.aclose()

    asyncio.run(run())


@pytest.mark.slow
def test_what_dies_or_is_killed_costs_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(runner: TaskRunner, started: Started) -> None:
        first = started.runner(1)
        crashed = await episode(runner, "crash_once", tmp_path / "crash")
        assert (crashed.status, crashed.attempts, crashed.reward) == (EpisodeStatus.COMPLETED, 2, 5.0)
        hung = asyncio.create_task(episode(runner, "hang_once", tmp_path / "hang"))
        await until(lambda: (tmp_path / "hang").exists() and (tmp_path / "hang").read_text())
        os.kill(first.pid, signal.SIGKILL)  # the runner and its worker, at once
        os.kill(int((tmp_path / "hang").read_text()), signal.SIGKILL)
        started.runner(1)
        again = await hung
        assert (again.status, again.attempts) == (EpisodeStatus.COMPLETED, 2)

    play(tmp_path, scene, monkeypatch)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_runner_whose_episode_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(runner: TaskRunner, started: Started) -> None:
        program, file = started.runner(2), tmp_path / "pid"
        hanging = asyncio.create_task(episode(runner, "hang", file))
        await until(lambda: file.exists() and file.read_text())
        worker = psutil.Process(int(file.read_text()))
        program.send_signal(signal.SIGINT)
        await until(lambda: psutil.Process(program.pid).children() == [worker])  # the idle one has ended
        program.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(program.wait, 60) == 0
        assert not worker.is_running()
        hanging.cancel()

    play(tmp_path, scene, monkeypatch)


@pytest.mark.slow
def test_a_runner_that_stays_lost_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(runner: TaskRunner, started: Started) -> None:
        started.runner(1)
        waiting = asyncio.create_task(episode(runner, "hang", tmp_path / "pid"))
        await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGSTOP)
        lost = await waiting
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        assert lost.status is EpisodeStatus.ENGINE_ERROR
        assert lost.failure is not None
        assert "r0-0 was not heard of for 2 s (task_runner.remote.lease)" in lost.failure.message

    play(tmp_path, scene, monkeypatch, rollout__episode_retries=0)


def test_a_runner_that_asks_for_access_again_gets_it() -> None:
    """Its first request had waited too long for the session, while the tokenizer was loaded."""

    async def main() -> None:
        sessions = SmallProvider(make_config({"task_runner.wrapper_type": "remote"}), LineEngine("x"))
        loaded, opened = asyncio.Event(), 0

        async def open_session(_targets: list[str] | None) -> Any:
            nonlocal opened
            opened += 1
            await loaded.wait()
            return "session"

        async def access(session: Any) -> Any:
            return f"key of the {session}"

        sessions.access = access  # type: ignore[method-assign]
        runner = RemoteRunner(sessions.config, sessions, None)
        attempt: Any = runner.begin(AttemptHandle(WorkflowTask(task=Task()), open_session, lambda _: None))
        first = asyncio.create_task(attempt.access(None))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        loaded.set()
        assert (await attempt.access(None), opened) == ("key of the session", 1)

    asyncio.run(main())


@pytest.mark.slow
def test_a_deadline_ends_the_code_and_the_worker_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(runner: TaskRunner, started: Started) -> None:
        started.runner(1)
        late = await episode(runner, "hang", tmp_path / "pid")
        assert late.status is EpisodeStatus.TIMEOUT
        pid = int((tmp_path / "pid").read_text())
        await until(lambda: not psutil.pid_exists(pid))
        runner._timeout_s = 60
        assert (await episode(runner, "call")).status is EpisodeStatus.COMPLETED

    play(tmp_path, scene, monkeypatch, rollout__episode_timeout=3)


@pytest.mark.slow
def test_an_episode_begins_when_a_runner_can_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All wait for the first runner, and only one of them begins when it comes. The others' time is not running."""

    async def scene(runner: TaskRunner, started: Started) -> None:
        assert isinstance(runner.attempts, RemoteRunner)
        stop = asyncio.Event()
        files = [tmp_path / f"slow-{number}" for number in range(4)]
        playing = [asyncio.create_task(episode(runner, "slow", file, stop=stop)) for file in files]
        await asyncio.sleep(0.1)
        started.runner()
        await until(lambda: any(file.exists() for file in files))
        assert len(runner.attempts._attempts) == 1
        for file in files:
            file.with_suffix(".go").touch()
        ends = await asyncio.gather(*playing)
        assert {one.status for one in ends} == {EpisodeStatus.COMPLETED}
        started.programs[0].send_signal(signal.SIGTERM)
        await asyncio.to_thread(started.programs[0].wait)
        waiting = asyncio.create_task(episode(runner, "slow", tmp_path / "never", stop=stop))
        await asyncio.sleep(0.1)
        stop.set()
        assert (await waiting).status is EpisodeStatus.CANCELLED

    play(tmp_path, scene, monkeypatch)


@pytest.mark.slow
def test_what_a_workflow_leaves_running_delays_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(runner: TaskRunner, started: Started) -> None:
        started.runner()
        for _ in range(2):
            left = await episode(runner, "leave")
            assert (left.status, left.reward) == (EpisodeStatus.COMPLETED, 1.0)

    play(tmp_path, scene, monkeypatch, rollout__episode_timeout=15)


@pytest.mark.slow
def test_sigterm_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(runner: TaskRunner, started: Started) -> None:
        program = started.runner(1)
        slow = asyncio.create_task(episode(runner, "slow", tmp_path / "slow"))
        await until(lambda: (tmp_path / "slow").exists())
        program.terminate()
        waiting = asyncio.create_task(episode(runner, "call"))
        (tmp_path / "slow.go").touch()
        assert (await slow).status is EpisodeStatus.COMPLETED
        assert await asyncio.to_thread(program.wait, 60) == 0
        started.runner(1)  # another one comes, and takes what is left
        assert (await waiting).status is EpisodeStatus.COMPLETED

    play(tmp_path, scene, monkeypatch)


def _ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_runners_whose_run_is_gone_can_be_stopped(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for it for ten minutes. Killed, they leave no workers behind that do."""

    async def scene(runner: TaskRunner, started: Started) -> None:
        program = started.runner(2)
        assert (await episode(runner, "call")).status is EpisodeStatus.COMPLETED
        await runner.attempts.aclose()
        workers = psutil.Process(program.pid).children()
        assert len(workers) == 2
        program.send_signal(number)
        assert await asyncio.to_thread(program.wait, 60) in (0, -number)
        await until(lambda: all(_ended(worker) for worker in workers), 60)

    play(tmp_path, scene, monkeypatch)


def test_a_run_without_runners_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(runner: TaskRunner, started: Started) -> None:
        stop = asyncio.Event()
        waiting = asyncio.create_task(episode(runner, "call", stop=stop))
        await asyncio.sleep(0.05)
        stop.set()
        assert (await waiting).status is EpisodeStatus.CANCELLED

    play(tmp_path, scene, monkeypatch)


@pytest.mark.slow
def test_engine_faults_are_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(runner: TaskRunner, started: Started) -> None:
        started.runner(1)
        assert (await episode(runner, "call")).attempts == 2

    play(tmp_path, scene, monkeypatch, EngineError("gone"), "hello")


def test_a_runners_key_opens_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(runner: TaskRunner, started: Started) -> None:
        async with StoreClient(started.url, KEY, patience_seconds=0) as store:
            for asked in ({}, {"ticket": "x", "rollout_id": "r", "attempt_id": "a"}, {"ticket": ["x"]}):
                with pytest.raises(StoreError):
                    await store.extension("open", asked)
            with pytest.raises(StoreError, match="needs writer"):
                await store.enqueue_one(1)

    play(tmp_path, scene, monkeypatch)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"backbone": "verl", "task_runner.remote.port": 0}, "name a port"),
        ({"backbone": "trinity", "rollout.n_vllm_engine": 2}, "set it to 1"),
        ({"rollout.environment": "gymnasium:CartPole-v1"}, "remove rollout.environment"),
        ({"task_runner.remote.tls_cert": "x"}, "go together"),
    ],
)
def test_what_runners_elsewhere_cannot_do_is_refused(keys: dict[str, Any], says: str) -> None:
    ajet = make_config({"rollout.user_workflow": "a->B", "task_runner.wrapper_type": "remote", **keys}).ajet
    assert any(says in found.fix + found.what for found in contradictions(ajet, ajet.backbone or "local"))


@pytest.mark.parametrize(
    ("arguments", "key", "code", "says"),
    [
        (["--connect", "http://127.0.0.1:1"], "", 2, f"{KEY_VARIABLE} is not set"),
        (["--connect", "127.0.0.1:1"], KEY, 2, "'127.0.0.1:1' is not an address: it looks like http://host:port"),
        (["--connect", "http://127.0.0.1:1", "--patience", "soon"], KEY, 2, "'soon' is not a length of time"),
        (["--connect", "https://127.0.0.1:1", "--ca", "no.pem"], KEY, 2, "--ca no.pem: No such file"),
        (["--connect", "https://127.0.0.1:1", "--ca", "agent.py"], KEY, 2, "--ca agent.py: "),
        (["--connect", "http://127.0.0.1:1", "--patience", "0s"], KEY, 1, "can't be reached"),
        (["--connect", "http://127.0.0.1:1", "--workflow", "none.py->Agent"], KEY, 2, "no file 'none.py'"),
    ],
)
def test_what_a_user_gets_wrong(
    arguments: list[str],
    key: str,
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "agent.py").write_text(textwrap.dedent(CODE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(KEY_VARIABLE, key)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert main(["runner", "--workflow", "agent.py->Agent", *arguments]) == code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert says in capfd.readouterr().err


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_an_agent_in_another_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    async def scene(runner: TaskRunner, started: Started) -> None:
        environment = {**os.environ, KEY_VARIABLE: KEY}
        started.programs.append(subprocess.Popen(["node", str(NODE_RUNNER), started.url], env=environment))
        task = Task(task_id="t", main_query="hi", metadata={"answer": "ell"})
        done = await runner.run(WorkflowTask(task=task))
        assert (done.status, done.reward) == (EpisodeStatus.COMPLETED, 1.0)
        assert done.metadata == {"answer": "hello"}
        failed = await runner.run(WorkflowTask(task=Task(task_id="t", main_query="x" * 5000)))
        assert failed.status is EpisodeStatus.TRUNCATED

    play(tmp_path, scene, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["http://127.0.0.1:1", "0"], "error: http://127.0.0.1:1: "),
        (["127.0.0.1:4747"], "error: 127.0.0.1:4747: "),
        (["http://127.0.0.1:{free}", "0"], "ECONNREFUSED"),
        (["http://127.0.0.1:{free}", "soon"], "'soon' is no number of seconds"),
    ],
)
def test_a_runner_in_another_language_says_what_is_wrong(arguments: list[str], says: str) -> None:
    node = shutil.which("node") or pytest.skip("needs Node")
    command = [node, str(NODE_RUNNER), *(one.format(free=free_port()) for one in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.startswith("error: ")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_a_runner_in_another_language_waits_for_the_trainer() -> None:
    port = free_port()

    async def scene() -> None:
        async with memory_store() as store:
            key = await store.tables(lambda tables: issue(tables, "runner", [Role.RUNNER]))
            program = await asyncio.create_subprocess_exec(
                "node", str(NODE_RUNNER), f"http://127.0.0.1:{port}",
                env={**os.environ, KEY_VARIABLE: key}, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert program.stderr is not None
            assert b"waiting for it" in await program.stderr.readline()
            server = StoreServer(store)
            await server.start(port=port)
            try:
                task = {"ticket": "none", "task": {"task": {"main_query": "hi", "metadata": {}}}}
                rollout = await store.enqueue_one(task)
                (ended,) = await store.wait([rollout.rollout_id], timeout=60)
                assert ended.attempt is not None
                assert '"finished":false' in ended.attempt.result  # a store alone opens no episodes
                program.terminate()
                assert await program.wait() == 0
            finally:
                if program.returncode is None:
                    program.kill()
                    await program.wait()
                await server.aclose()

    asyncio.run(asyncio.wait_for(scene(), 120))


@pytest.mark.slow
def test_a_runner_gets_the_templates_of_the_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(runner: TaskRunner, started: Started) -> None:
        started.runner()
        prompts = PromptSet({"solver": PromptTemplate("Tried: {question}"), "unused": PromptTemplate("")})
        task = WorkflowTask(task=Task(main_query="template", task_id="t"), task_id="t", prompts=prompts)
        done = await runner.run(task)
        assert done.metadata["text"] == "Tried: 2+2"
        assert (done.prompt_version, done.prompts_used) == (prompts.version, ["solver"])

    play(tmp_path, scene, monkeypatch)
