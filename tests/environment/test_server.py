"""Our server of environments and the client, over real sockets and processes: crashes, hangs, expiry, keys, abuse."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ajet.environment.environment import NOTHING_OBSERVED, EnvironmentSettings, find_source
from ajet.environment.instances import InstanceError, InstanceLimits
from ajet.environment.leased import LeasedEnvironment
from ajet.environment.server import EnvironmentServer
from ajet.environment.service_environment import ServiceClient
from ajet.schema.errors import EnvironmentFault, EnvironmentUnavailableError, UserError
from ajet.schema.task import Task
from ajet.system.http_client import HttpAnswer, HttpClient
from support import SUPPORT
from support.detached import is_gone
from support.waiting import until, wait_until

HERE = Path(__file__).parent
WORLDS = SUPPORT / "worlds.py"
KEY = "a-key-for-tests"


_before: list[psutil.Process] = []


def serve(scene: Callable[[EnvironmentServer], Awaitable[None]], kind: str = "Counter", **keys: Any) -> None:
    """Run a scene with a server of these environments."""

    async def main() -> None:
        limits = InstanceLimits(**{"instances": 4, "step_s": 30.0, **keys.get("limits", {})})
        settings = EnvironmentSettings(keys.get("source", f"{WORLDS}->{kind}"), options=keys.get("options", {}))
        server = EnvironmentServer(settings, limits, api_key=keys.get("api_key"))
        _before[:] = psutil.Process().children(recursive=True)
        await server.start()
        try:
            await scene(server)
        finally:
            await server.aclose()

    asyncio.run(main())


def lease(server: EnvironmentServer, name: str = "e", api_key: str | None = None) -> LeasedEnvironment:
    source = find_source(EnvironmentSettings(url=server.address.url, api_key=api_key, timeout_s=20))
    return LeasedEnvironment(source, Task(task_id="t"), name)


def raw(server: EnvironmentServer, path: str, body: Any, **headers: str) -> HttpAnswer:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HttpClient(server.address.url, headers).request("POST", path, content, 20)


def children() -> list[psutil.Process]:
    """The living processes of the present scene; other tests may have left some to this process."""
    living = psutil.Process().children(recursive=True)
    return [child for child in living if child not in _before and not is_gone(child.pid)]


@pytest.mark.parametrize("kind", ["Counter", "AsyncCounter"])
def test_an_episode_over_http(kind: str) -> None:
    async def scene(server: EnvironmentServer) -> None:
        def episode() -> None:
            assert ServiceClient(server.address.url).profile("any", "dev") == ["dev-0", "dev-1", "dev-2"]
            env = lease(server).open()
            assert env.observation == [{"role": "user", "content": "Count to 3."}]
            assert tuple(env.step("one")) == ("1", 0.25, False, {"count": 1})
            assert env.step({"role": "assistant", "content": [{"type": "text", "text": "two"}]}).observation == "2"
            assert env.evaluate("e", {"sparse": False}) == 0.5
            env.reset()
            assert env.step("one").observation == "1"
            env.close()
            assert env.record.events[-1].error == ""

        await asyncio.to_thread(episode)
        await until(lambda: server.instances.running == 0)
        assert server.instances.counts.created == server.instances.counts.released == 2

    serve(scene, kind)


def test_an_error_in_the_environment_ends_its_request_and_nothing_else() -> None:
    async def scene(server: EnvironmentServer) -> None:
        def episode() -> None:
            env = lease(server).open()
            for said, complaint in (
                *(("raise", "KeyError: 'mine'"), ("nan", "not nan"), ("text", "not a StepResult")),
                ("keys", "keys must be str.* not tuple"),
                ("recurse", "RecursionError: maximum recursion depth"),
            ):
                with pytest.raises(EnvironmentFault, match=complaint) as caught:
                    env.step(said)
                assert not isinstance(caught.value, EnvironmentUnavailableError)
                assert re.search(complaint, str(caught.value).partition("\n")[0])  # a run's last screen shows this line
            assert env.step("one").observation == "1"
            env.close()

        await asyncio.to_thread(episode)

    serve(scene)


def test_what_is_observed_may_be_a_number_or_have_no_truth_value() -> None:
    async def scene(server: EnvironmentServer) -> None:
        def episode() -> None:
            env = lease(server).open()
            assert env.step("zero").observation == "0"
            assert "several" in env.step("array").observation
            assert env.step("nothing").observation == NOTHING_OBSERVED
            env.close()

        await asyncio.to_thread(episode)

    serve(scene)


def test_half_a_surrogate_pair_passes_escaped_and_an_action_is_always_a_message() -> None:
    async def scene(server: EnvironmentServer) -> None:
        def episode() -> None:
            env = lease(server).open()
            escaped = "half \\ud83d"
            assert tuple(env.step("half \ud83d")) == (escaped, 0.0, False, {escaped: escaped})
            parts = {"role": "assistant", "content": [{"type": "text", "text": "one"}]}
            for number, action in enumerate((parts, [parts], "one"), start=1):
                body = json.dumps({"instance_id": "e", "messages": action}).encode()
                answer = HttpClient(server.address.url).request("POST", "/step", body, 30)
                assert json.loads(answer.body)["data"]["state"][0]["content"] == str(number)
            env.close()

        await asyncio.to_thread(episode)

    serve(scene)


def test_a_crash_or_hang_ends_its_instance_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def scene(server: EnvironmentServer) -> None:
        def episode() -> None:
            other = lease(server, "other").open()
            for number, (said, complaint) in enumerate(
                (("exit", "exited with code 3"), ("hang", "took longer than 1 s"))
            ):
                env = lease(server, f"e{number}").open()
                with pytest.raises(EnvironmentFault, match=complaint) as caught:
                    env.step(said)
                assert not isinstance(caught.value, EnvironmentUnavailableError)  # its action caused it
                with pytest.raises(EnvironmentFault, match=f"has ended.*{complaint}"):
                    env.step("one")
                env.close()
            assert "was not released" not in caplog.text  # it has ended already
            assert other.step("one").observation == "1"
            other.close()

        await asyncio.to_thread(episode)
        await until(lambda: server.instances.running == 0)

    serve(scene, limits={"step_s": 1.0})


def test_what_has_detached_itself_dies_with_its_instance(tmp_path: Path) -> None:
    def gone(name: str) -> bool:
        return is_gone(int((tmp_path / name).read_text()))

    async def scene(server: EnvironmentServer) -> None:
        closed = await asyncio.to_thread(lease(server, "closed").open)
        open_still = await asyncio.to_thread(lease(server, "open").open)
        await asyncio.to_thread(closed.step, str(tmp_path / "closed"))
        await asyncio.to_thread(open_still.step, str(tmp_path / "open"))
        await asyncio.to_thread(closed.close)
        await until(lambda: gone("closed"))
        assert not gone("open")

    serve(scene, "Detaching")
    wait_until(lambda: gone("open"))


@pytest.mark.parametrize(("said", "complaint"), [("nan", "not nan"), ("exit", "exited with code 3 during `evaluate`")])
def test_judging_is_no_action_of_the_model(said: str, complaint: str) -> None:
    async def scene(server: EnvironmentServer) -> None:
        def episode() -> None:
            env = lease(server).open()
            env.step(said)
            with pytest.raises(EnvironmentUnavailableError, match=complaint):
                env.evaluate()
            env.close()

        await asyncio.to_thread(episode)

    serve(scene, "Misjudging")


def test_a_killed_instance_is_lost_through_no_action() -> None:
    async def scene(server: EnvironmentServer) -> None:
        def episode() -> None:
            env = lease(server).open()
            os.kill(int(env.step("pid").observation), signal.SIGKILL)
            with pytest.raises(EnvironmentUnavailableError, match="killed by SIGKILL"):
                env.step("one")

        await asyncio.to_thread(episode)
        assert server.instances.running == 0

    serve(scene)


def test_idle_instances_expire_and_dead_ones_are_noticed() -> None:
    async def scene(server: EnvironmentServer) -> None:
        env = lease(server)
        await asyncio.to_thread(env.open)
        await until(lambda: server.instances.running == 0)
        assert server.instances.counts.expired == 1 and server.instances.counts.died == 0
        with pytest.raises(EnvironmentUnavailableError, match=r"not used for 0\.2 s"):
            await env.astep("one")

    serve(scene, limits={"idle_s": 0.2})


def test_when_all_places_are_taken_a_client_waits() -> None:
    async def scene(server: EnvironmentServer) -> None:
        first, second = lease(server, "first"), lease(server, "second")
        await asyncio.to_thread(first.open)
        waiting = asyncio.create_task(asyncio.to_thread(second.open))
        await until(lambda: server.instances.counts.refused > 1)
        assert not waiting.done()
        await asyncio.to_thread(first.close)
        await waiting
        await asyncio.to_thread(second.close)

    serve(scene, limits={"instances": 1})


def test_an_instance_that_is_released_while_it_starts_takes_no_place() -> None:
    async def scene(server: EnvironmentServer) -> None:
        task = {"task_id": "t", "main_query": "", "env_type": "", "metadata": {}}
        starting = asyncio.create_task(server.instances.create("e", task))
        await asyncio.sleep(0)  # it has begun, and waits for its process
        assert await server.instances.release("e")
        with pytest.raises(InstanceError, match="was released before it had started"):
            await starting
        assert server.instances.running == 0
        assert await server.instances.create("e", task)

    serve(scene)


def test_a_client_that_leaves_in_the_middle_of_a_step_can_still_release() -> None:
    async def scene(server: EnvironmentServer) -> None:
        env = lease(server)
        await asyncio.to_thread(env.open)
        step = json.dumps({"instance_id": "e", "messages": {"role": "assistant", "content": "hang"}})
        _, writer = await asyncio.open_connection("127.0.0.1", server.address.port)
        head = (
            f"POST /step HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(step)}"
        )
        writer.write(f"{head}\r\n\r\n{step}".encode())
        await until(lambda: any(instance.turn.locked() for instance in server.instances._open.values()))
        writer.close()
        await asyncio.to_thread(env.close)
        assert server.instances.running == 0
        await until(lambda: len(children()) == 1)  # the clean process

    serve(scene)


def test_an_id_that_is_used_again_is_another_instance() -> None:
    """The first one's end, which is noticed late, is not the second one's."""

    async def scene(server: EnvironmentServer) -> None:
        for _ in range(5):
            first = lease(server)
            await asyncio.to_thread(first.open)
            (old,) = server.instances._open.values()
            hanging = asyncio.create_task(first.astep("hang"))
            await until(old.turn.locked)
            await server.instances.release("e")
            await server.instances.create("e", {"task_id": "t"})
            await asyncio.wait([hanging])
            assert isinstance(hanging.exception(), EnvironmentUnavailableError)
            async with old.turn:
                pass
            assert await server.instances.ask("e", {"do": "step", "action": "one"})
            await server.instances.release("e")

    serve(scene)


def test_when_the_clean_process_dies_there_is_another() -> None:
    async def scene(server: EnvironmentServer) -> None:
        env = lease(server, "before")
        await asyncio.to_thread(env.open)
        assert server.instances._server is not None
        server.instances._server._process.kill()
        await until(lambda: not children())
        with pytest.raises(EnvironmentUnavailableError):
            await env.astep("one")
        again = lease(server, "after")
        await asyncio.to_thread(again.open)
        assert (await again.astep("one")).observation == "1"

    serve(scene)


def test_memory_is_limited() -> None:
    async def scene(server: EnvironmentServer) -> None:
        with pytest.raises(EnvironmentFault, match="MemoryError"):
            await asyncio.to_thread(lease(server).open)
        assert server.instances.running == 0

    serve(scene, "Large", limits={"memory_bytes": 512 * 1024**2})


def test_keys() -> None:
    async def scene(server: EnvironmentServer) -> None:
        def requests() -> None:
            assert raw(server, "/create", {}).status == 401
            assert raw(server, "/create", {}, authorization="Bearer wrong").status == 401
            with pytest.raises(EnvironmentUnavailableError, match="refuses the key"):
                lease(server, api_key="wrong").open()
            env = lease(server, api_key=KEY).open()
            env.close()
            with pytest.raises(EnvironmentUnavailableError):
                lease(server).open()
            client = HttpClient(server.address.url)
            assert client.request("GET", "/healthz") == HttpAnswer(200, b"OK")
            assert client.request("GET", "/metrics").status == 401
            metrics = HttpClient(server.address.url, {"x-api-key": KEY}).request("GET", "/metrics").body
            assert b"\najet_env_created_total 1\n" in metrics

        await asyncio.to_thread(requests)

    serve(scene, api_key=KEY)


def test_without_a_key_it_stays_on_this_machine() -> None:
    async def scene(server: EnvironmentServer) -> None:
        assert (await asyncio.to_thread(raw, server, "/create", {}, host="evil.example")).status in (400, 421)
        with pytest.raises(UserError, match=r"--host 0\.0\.0\.0 lets other machines use"):
            await EnvironmentServer(EnvironmentSettings("x")).start("0.0.0.0")

    serve(scene)


def test_nonsense_is_refused_with_a_reason() -> None:
    cases: list[tuple[str, Any, int, str]] = [
        ("/create", b"{", 400, "not JSON"),
        ("/create", [], 400, "should be a JSON object"),
        ("/create", {}, 400, "`instance_id` should be"),
        ("/create", {"instance_id": "x" * 300}, 400, "`instance_id` should be"),
        ("/create", {"instance_id": "x", "params": 3}, 400, "`params` should be"),
        ("/step", {"instance_id": "x"}, 400, "`messages` should be"),
        ("/step", {"instance_id": "x", "messages": "go"}, 400, "there is no instance 'x'"),
        ("/evaluate", {"instance_id": "x"}, 400, "there is no instance 'x'"),
        ("/nothing", {}, 404, "POST to /get_env_profile"),
    ]

    async def scene(server: EnvironmentServer) -> None:
        def requests() -> None:
            for path, body, status, detail in cases:
                answer = raw(server, path, body)
                assert answer.status == status and detail in json.loads(answer.body)["detail"], path
            assert json.loads(raw(server, "/release", {"instance_id": "x"}).body) == {"success": False, "data": None}
            assert raw(server, "/create", b"[" * 100_000).status == 400

        await asyncio.to_thread(requests)

    serve(scene)


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        (f"{WORLDS}->Nobody", "has no 'Nobody'; there is:"),
        ("gymnasium:Nothing-v0", "gymnasium can't make"),
        ("CartPole", "names no environment"),
    ],
)
def test_what_cannot_be_served_is_refused(target: str, complaint: str) -> None:
    async def nothing(server: EnvironmentServer) -> None: ...

    with pytest.raises(UserError, match=f"(?s){complaint}"):
        serve(nothing, source=target)


def test_a_server_that_ends_lets_its_environments_close(tmp_path: Path) -> None:
    async def scene(server: EnvironmentServer) -> None:
        def play() -> None:
            lease(server, "open").open()
            lease(server, "closing").open().close()

        await asyncio.to_thread(play)

    log = tmp_path / "log"
    serve(scene, "Lingering", options={"log": str(log)})
    assert log.read_text().split() == ["reset", "reset", "close", "close"]


@pytest.mark.slow
def test_the_command_serves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ajet", "env", "serve", f"{WORLDS}->Counter", "--port", "0", "--workers", "2"]
    with subprocess.Popen(
        [*command, "--option", "size=1"], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ}
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("Counter at http://127.0.0.1:") and "at most 2 at a time" in line
        source = find_source(EnvironmentSettings(url=line.split()[2].rstrip(",")))
        env = LeasedEnvironment(source, Task(task_id="t"), "e").open()
        started = psutil.Process(server.pid).children(recursive=True)
        assert len(started) == 2
        assert env.step("one").done
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
        wait_until(lambda: not any(process.is_running() for process in started))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--workers", "0"], "--workers: '0': write a whole number, at least 1"),
        (["--memory", "lots"], "write a size such as"),
        (["--option", "size"], "write KEY=VALUE"),
        (["--option", "colour=red"], "`options` don't fit Counter"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from ajet.cli.main import main

    assert main(["env", "serve", f"{WORLDS}->Counter", "--port", "0", *arguments]) == 2
    assert complaint in capsys.readouterr().err
