"""The vLLM engine's servers, as real processes: started, spoken to, given weights, watched, started again, stopped.

The processes are stand-ins (`fake_vllm_server.py`); `test_vllm_real.py` runs the real one where it is installed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from ajet.engine.base import Engine
from ajet.engine.vllm.server import (
    KEY_VARIABLE,
    SERVER_KEY,
    WORKER_FOLDER,
    VllmServer,
    VllmSettings,
    server_arguments,
    server_environment,
    vllm_command,
)
from ajet.engine.vllm.server_engine import VllmServerEngine, _check_noted
from ajet.schema.chat import Completion, GenerateRequest, Sampling, TokenChunk
from ajet.schema.errors import (
    ConfigError,
    EngineError,
    GenerationTimeoutError,
    InvalidRequestError,
    MissingDependencyError,
)
from ajet.system import http_client
from support import SUPPORT
from support.fake_vllm_server import DYING

FAKE = SUPPORT / "fake_vllm_server.py"


def new_engine(folder: Path, **options: Any) -> VllmServerEngine:
    def command(settings: VllmSettings, port: int) -> list[str]:
        return [sys.executable, str(FAKE), str(port), str(folder / "told")]

    defaults: dict[str, Any] = {"heartbeat_s": 0.2, "heartbeats_to_hang": 2, "start_timeout_s": 20.0}
    return VllmServerEngine(VllmSettings("m", log_folder=folder, **(defaults | options)), command)


def asked(prompt: int = 1, count: int = 3, session: str = "s", deadline: float | None = 20.0) -> GenerateRequest:
    return GenerateRequest([prompt], Sampling(max_tokens=count), session, deadline_s=deadline)


def told(folder: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / "told").read_text().splitlines()]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


OWNER = """
import asyncio, sys
from pathlib import Path
from ajet.engine.vllm.server import VllmServer
from ajet.engine.vllm.server import VllmSettings

async def own(folder, fake):
    settings = VllmSettings("m", log_folder=folder, start_timeout_s=20.0)
    server = VllmServer(settings, 0, lambda _, port: [sys.executable, fake, str(port), str(folder / "told")])
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(own(Path(sys.argv[1]), sys.argv[2]))
"""


WITH_A_WORKER = """
import os, runpy, signal, sys, time
from multiprocessing.shared_memory import SharedMemory

if os.fork() == 0:
    block = SharedMemory(create=True, size=8)
    def end(*_):
        time.sleep(0.5)
        block.unlink()
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    open(sys.argv[3], "w").write(block.name)
    time.sleep(60)
while not os.path.exists(sys.argv[3]):
    time.sleep(0.01)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.slow
def test_workers_that_end_after_their_server_remove_their_shared_memory(tmp_path: Path) -> None:
    note = tmp_path / "block"
    settings = VllmSettings("m", log_folder=tmp_path, start_timeout_s=20.0)
    command = [sys.executable, "-c", WITH_A_WORKER, str(FAKE)]
    server = VllmServer(settings, 0, lambda _, port: [*command, str(port), str(note)])

    async def start_and_stop() -> None:
        await server.start()
        await server.stop()

    asyncio.run(start_and_stop())
    block = Path("/dev/shm") / note.read_text()
    left = block.exists()
    block.unlink(missing_ok=True)
    assert not left


def test_what_has_ended_is_sent_no_more_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another program's by then."""
    settings = VllmSettings("m", log_folder=tmp_path, start_timeout_s=20.0)
    sent: list[Any] = []

    async def scenario() -> None:
        server = VllmServer(settings, 0, lambda _, port: [sys.executable, str(FAKE), str(port), str(tmp_path / "told")])
        await server.start()
        await server.stop()
        monkeypatch.setattr(os, "killpg", lambda *signal: sent.append(signal))
        await server.stop()

    asyncio.run(scenario())
    gc.collect()
    assert not sent


def test_a_server_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), str(FAKE)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        server = int(owner.stdout.readline())
        assert (Path("/proc") / str(server)).exists()
        owner.kill()
        owner.wait()
    asyncio.run(until(lambda: not _runs(server)))


def _runs(pid: int) -> bool:
    """Neither gone nor a zombie that its new parent has not yet waited for."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_draws_streams_and_stops_its_processes(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = new_engine(tmp_path, replicas=2)
        assert isinstance(engine, Engine)
        chunks: list[TokenChunk] = []
        reply = await engine.generate(asked(), chunks.append)
        assert (reply.token_ids, reply.finish_reason) == ([7, 8, 9], "length")
        assert len(chunks) == 3
        pids = [replica.server.pid for replica in engine._replicas]
        with pytest.raises(InvalidRequestError):
            await engine.generate(GenerateRequest([], Sampling()))
        await engine.aclose()
        for pid in pids:
            assert pid is not None
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(asked())

    asyncio.run(scenario())
    assert "listening" in (tmp_path / "vllm-0.log").read_text()


@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY"])
def test_no_proxy_is_asked_for_a_server_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in (f"{one}_proxy" for one in ("no", "http", "all")):
        monkeypatch.delenv(each, raising=False)
        monkeypatch.delenv(each.upper(), raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there

    async def scenario() -> Completion:
        engine = new_engine(tmp_path)
        reply = await engine.generate(asked())
        await engine.aclose()
        return reply

    assert asyncio.run(scenario()).token_ids == [7, 8, 9]


def test_an_episode_stays_on_one_replica_and_episodes_spread(tmp_path: Path) -> None:
    engine = new_engine(tmp_path, replicas=3)
    homes = [engine._replica_of(f"episode-{index}") for index in range(30)]
    assert homes == [engine._replica_of(f"episode-{index}") for index in range(30)]
    assert len({id(home) for home in homes}) == 3


def test_weights_are_loaded_and_old_prefixes_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = new_engine(tmp_path)
        await engine.load_weights(tmp_path, 4)
        paths = [path for path, _ in told(tmp_path)]
        assert paths == ["/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache", "/resume"]
        assert told(tmp_path)[1][1]["kwargs"]["weights_path"] == str(tmp_path)
        assert (await engine.generate(asked())).versions == [(0, 4)]
        with pytest.raises(EngineError, match="pass a folder"):
            await engine.load_weights(None, 6)
        assert (await engine.generate(asked())).versions == [(0, 4)]
        await engine.aclose()

    asyncio.run(scenario())


def test_an_adapter_gets_a_name_of_its_own_for_each_version(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_text("{}")

    async def scenario() -> None:
        engine = new_engine(tmp_path)
        await engine.load_weights(adapter, 1)
        await engine.load_weights(adapter, 2)
        assert (await engine.generate(asked())).versions == [(0, 2)]
        await engine.aclose()

    asyncio.run(scenario())
    said = [(path, body["lora_name"]) for path, body in told(tmp_path)]
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert said == [(load, "ajet-1"), (load, "ajet-2"), (unload, "ajet-1")]


def test_a_pause_can_leave_the_gpu_to_the_trainer(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = new_engine(tmp_path, sleep=True)
        await engine.ready()
        await engine.pause()
        await engine.resume()
        await engine.aclose()

    asyncio.run(scenario())
    assert [path for path, _ in told(tmp_path)] == ["/sleep?level=1", "/wake_up"]


def test_each_replica_has_its_own_gpus() -> None:
    settings = VllmSettings("m", replicas=2, tensor_parallel=2, devices=(4, 5, 6, 7))
    shown = [server_environment(settings, replica)["CUDA_VISIBLE_DEVICES"] for replica in range(2)]
    assert shown == ["4,5", "6,7"]
    assert "CUDA_VISIBLE_DEVICES" not in server_environment(VllmSettings("m"))


@pytest.mark.parametrize("fatal", [666, 667])
def test_a_server_that_dies_or_hangs_is_started_again_with_the_newest_weights(tmp_path: Path, fatal: int) -> None:
    async def scenario() -> None:
        engine = new_engine(tmp_path)
        await engine.load_weights(tmp_path, 1)
        server = engine._replicas[0].server
        if fatal == 666:
            with pytest.raises(EngineError):
                await engine.generate(asked(fatal))
        else:
            await engine.generate(asked(fatal))
        await until(lambda: server.starts == 2)
        while True:
            try:
                reply = await engine.generate(asked())
            except EngineError:
                await asyncio.sleep(0.02)
            else:
                break
        assert len(told(tmp_path)) == 8  # it answered nobody before it had the weights
        assert (reply.token_ids, reply.versions) == ([7, 8, 9], [(0, 1)])
        await engine.aclose()

    asyncio.run(scenario())


def test_a_stopped_server_is_named_while_a_request_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_client, "SILENT_S", 0.1)

    async def scenario() -> list[int]:
        engine = new_engine(tmp_path, heartbeat_s=20.0)
        await engine.ready()
        (replica,) = engine._replicas
        assert replica.server.pid is not None
        os.kill(replica.server.pid, signal.SIGSTOP)
        reply = asyncio.create_task(engine.generate(asked()))
        await until(lambda: "has sent nothing since" in caplog.text)
        os.kill(replica.server.pid, signal.SIGCONT)
        try:
            return (await reply).token_ids
        finally:
            await engine.aclose()

    assert asyncio.run(scenario()) == [7, 8, 9]
    (named,) = [record.message for record in caplog.records if "has sent nothing" in record.message]
    assert "it is restarted if it misses 2 health checks, and episodes end at their deadlines" in named
    assert "vllm-0.log" in named and "answers again" in caplog.text


def test_a_server_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = new_engine(tmp_path, max_restarts=0)
        await engine.ready()
        with pytest.raises(EngineError):
            await engine.generate(asked(666))
        await until(lambda: engine._dead is not None)
        with pytest.raises(EngineError, match=r"vllm-0\.log"):
            await engine.generate(asked())
        await engine.aclose()

    asyncio.run(scenario())


def test_a_watch_that_ends_leaves_nobody_waiting(tmp_path: Path) -> None:
    """The log is gone that says why the server died."""

    async def scenario() -> None:
        engine = new_engine(tmp_path)
        await engine.ready()
        (tmp_path / "vllm-0.log").unlink()
        with pytest.raises(EngineError):
            await engine.generate(asked(666))
        with pytest.raises(EngineError, match=r"vllm-0\.log"):
            await engine.generate(asked())
        await engine.aclose()

    asyncio.run(scenario())


def test_a_server_that_dies_of_its_first_request_is_not_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = new_engine(tmp_path)
        await engine.ready()
        with pytest.raises(EngineError):
            await engine.generate(asked(665))
        await until(lambda: engine._dead is not None)
        (replica,) = engine._replicas
        assert replica.server.starts == 1
        with pytest.raises(
            EngineError, match=r"RuntimeError: no kernel for this shape \(log: .*vllm-0\.log\)$"
        ) as caught:
            await engine.generate(asked())
        assert "pid=" not in str(caught.value)
        await engine.aclose()

    asyncio.run(scenario())


def test_a_server_that_dies_of_an_error_after_it_has_worked_is_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = new_engine(tmp_path)
        await engine.generate(asked())
        with pytest.raises(EngineError):
            await engine.generate(asked(665))
        assert (await engine.generate(asked())).token_ids == [7, 8, 9]
        assert engine._replicas[0].server.starts == 2
        await engine.aclose()

    asyncio.run(scenario())


def test_a_server_that_is_killed_before_its_first_request_is_started_again(tmp_path: Path) -> None:
    """What its log had said before, a warning that quotes an error, is no reason."""

    async def scenario() -> None:
        engine = new_engine(tmp_path)
        await engine.ready()
        (replica,) = engine._replicas
        with replica.server.log_file.open("a") as said:
            said.write(DYING.splitlines()[0] + "\n")
        assert replica.server.pid is not None
        os.kill(replica.server.pid, signal.SIGKILL)
        await until(lambda: replica.server.starts == 2)
        assert (await engine.generate(asked())).token_ids == [7, 8, 9]
        await engine.aclose()

    asyncio.run(scenario())


def test_an_argument_that_vllm_refuses_is_a_wrong_key(tmp_path: Path) -> None:
    def command(settings: VllmSettings, port: int) -> list[str]:
        said = "api_server.py: error: unrecognized arguments: --enforce-eagre"
        return [sys.executable, "-c", f"print({said!r}); raise SystemExit(2)"]

    with pytest.raises(ConfigError, match=r"^rollout\.vllm\.extra_args: unrecognized arguments: --enforce-eagre"):
        asyncio.run(VllmServerEngine(VllmSettings("m", log_folder=tmp_path), command).ready())


def python_with(folder: Path, package: str) -> str:
    """A "Python" in which this package of vLLM is installed."""
    script = folder / package
    script.write_text(f"#!/bin/sh\necho \"[('vllm', '{package}')]\"\n")
    script.chmod(0o755)
    return str(script)


def test_the_cpu_build_is_given_what_it_needs_and_the_user_overrides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_COMPILE_DISABLE", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    mine = ("--enable-chunked-prefill",)
    settings = VllmSettings("m", python=python_with(tmp_path, "0.32.0+cpu"), extra_args=mine)
    arguments = server_arguments(settings, 1)
    assert "--no-enable-chunked-prefill" in arguments and arguments[-1] == "--enable-chunked-prefill"
    assert arguments[len(arguments) - 1 - arguments[::-1].index("--dtype") + 1] == "float32"
    assert "float32" not in server_arguments(replace(settings, dtype="bfloat16"), 1)
    variables = server_environment(settings)
    assert (variables["TORCH_COMPILE_DISABLE"], variables["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "nobind")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    assert "TORCH_COMPILE_DISABLE" not in server_environment(settings)
    on_gpu = replace(settings, python=python_with(tmp_path, "0.32.0"), extra_args=())
    assert "--no-enable-chunked-prefill" not in server_arguments(on_gpu, 1)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in server_environment(on_gpu)


def test_what_the_cpu_build_is_given_is_said_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        engine = new_engine(tmp_path, replicas=2, python=python_with(tmp_path, "0.32.0+cpu"))
        await engine.ready()
        await engine.aclose()

    with caplog.at_level("INFO"):
        asyncio.run(scenario())
    (said,) = [record.message for record in caplog.records if "CPU build" in record.message]
    assert "VLLM_CPU_OMP_THREADS_BIND=nobind" in said and "--no-enable-chunked-prefill" in said


def test_the_cpu_build_can_not_note_experts(tmp_path: Path) -> None:
    engine = new_engine(tmp_path, notes_experts=True, python=python_with(tmp_path, "0.32.0+cpu"))
    with pytest.raises(ConfigError, match=r"^ajet\.rollout\.routing_replay: vLLM's CPU build doesn't say"):
        asyncio.run(engine.ready())


def test_cancelling_closing_in_and_pausing(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = new_engine(tmp_path)
        await engine.ready()
        with pytest.raises(GenerationTimeoutError):
            await engine.generate(asked(count=10_000, deadline=0.1))
        task = asyncio.create_task(engine.generate(asked(count=50)))
        await until(lambda: bool(engine._gate._in_flight))
        await engine.pause()
        assert not engine._gate._in_flight
        await task
        held = asyncio.create_task(engine.generate(asked()))
        await asyncio.sleep(0.05)
        assert not held.done()
        await engine.resume()
        assert (await held).token_ids
        await engine.aclose()

    asyncio.run(scenario())


def test_a_python_without_vllm_is_named(tmp_path: Path) -> None:
    settings = VllmSettings("m", log_folder=tmp_path, python="/no/such/python")
    with pytest.raises(MissingDependencyError, match=r"rollout\.vllm\.python"):
        asyncio.run(VllmServerEngine(settings).ready())


def test_a_server_that_ends_while_starting_shows_its_log(tmp_path: Path) -> None:
    def command(settings: VllmSettings, port: int) -> list[str]:
        return [sys.executable, "-c", "print('no such model'); raise SystemExit(1)"]

    with pytest.raises(EngineError, match="no such model"):
        asyncio.run(VllmServerEngine(VllmSettings("m", log_folder=tmp_path), command).ready())


def test_a_setting_that_vllm_refuses_is_said_with_the_reason(tmp_path: Path) -> None:
    """pydantic's error names its class in one line, and the reason in the next."""
    program = (
        "print('ValidationError: 1 validation error for VllmConfig'); "
        "print('  Value error, no such parser [type=value_error, input_value=1, input_type=int]'); "
        "print('    For further information visit https://errors.pydantic.dev/2.14/v/value_error'); raise SystemExit(1)"
    )

    def command(settings: VllmSettings, port: int) -> list[str]:
        return [sys.executable, "-c", program]

    with pytest.raises(EngineError, match=r"ended while starting: Value error, no such parser \(log: "):
        asyncio.run(VllmServerEngine(VllmSettings("m", log_folder=tmp_path), command).ready())


def test_a_server_that_names_no_experts_is_an_error(tmp_path: Path) -> None:
    """And so are weights that change during a reply that comes whole."""
    engine = new_engine(tmp_path, notes_experts=True)

    async def scene() -> None:
        try:
            await engine.generate(asked())
        finally:
            await engine.aclose()

    with pytest.raises(EngineError, match=r"leave rollout\.routing_replay out"):
        asyncio.run(scene())
    noted = Completion([7], [-0.5], "stop", experts=np.zeros((1, 1, 1), np.int16))
    _check_noted(noted, 0)
    with pytest.raises(EngineError, match="the weights changed during a reply"):
        _check_noted(replace(noted, versions=[(0, 1)]), 0)


def test_the_server_is_asked_for_logprobs_at_the_temperature() -> None:
    arguments = server_arguments(VllmSettings("m", extra_args=("--enforce-eager",)), 1234)
    assert arguments[arguments.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert arguments[-1] == "--enforce-eager"


def open_to_all(request: Request) -> Response:
    return PlainTextResponse("done")


def test_only_the_key_opens_the_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = SERVER_KEY.rpartition(".")
    monkeypatch.setattr(sys, "path", [str(WORKER_FOLDER), *sys.path])
    monkeypatch.setenv(KEY_VARIABLE, "right")
    paths = ("/health", "/collective_rpc", "/pause", "/v1/completions")
    app = Starlette(routes=[Route(path, open_to_all, methods=["GET", "POST"]) for path in paths])
    app.add_middleware(getattr(__import__(module), name))
    client = TestClient(app)
    assert client.get("/health").text == "done"
    for path in paths[1:]:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}, {"x-api-key": "right"}):
            assert client.post(path, headers=headers).status_code == 401, (path, headers)
        assert client.post(path, headers={"authorization": "Bearer right"}).text == "done"
        assert client.post(path, headers={"host": "x/health?"}).status_code == 401


def test_each_server_is_started_with_a_key_of_its_own() -> None:
    settings = VllmSettings("m")
    servers = [VllmServer(settings, index) for index in range(2)]
    assert len({server.key for server in servers}) == 2
    assert server_environment(settings, 0, servers[0].key)[KEY_VARIABLE] == servers[0].key
    command = vllm_command(settings, 1)
    assert command[command.index("--middleware") + 1] == SERVER_KEY
    assert servers[0].key not in command, "other users see command lines"
