"""Pods as sandboxes, against the tests' own small API server (`kubernetes_server.py`): not Kubernetes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio")
pytest.importorskip("aiohttp")

import ajet
from ajet.agents.task_tests import Verdict, bring_files, judge_by_tests
from ajet.environment.sandboxes import Sandbox, SandboxError, SandboxSettings, check_sandbox, open_sandbox
from ajet.environment.sandboxes.kubernetes_api import PodOptions, closed_network, pod
from support import kubernetes_server
from support.kubernetes_server import KubernetesServer

needs_node = pytest.mark.skipif(not kubernetes_server.AVAILABLE, reason="needs root, bwrap, nsenter and setpriv")


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path_factory.mktemp("cluster")) as server:
        yield server


@pytest.fixture
def server(module_server: KubernetesServer, monkeypatch: pytest.MonkeyPatch) -> KubernetesServer:
    module_server.forbidden.clear()
    monkeypatch.setattr("ajet.environment.sandboxes.kubernetes._swept", {"at": float("-inf")})
    return module_server


def settings_of(server: KubernetesServer, options: dict[str, Any] | None = None, **more: Any) -> SandboxSettings:
    given = {"kubeconfig": server.kubeconfig, **(options or {})}
    made = {"image": "busybox", "memory_mb": 64, "disk_mb": 8, "exec_seconds": 20.0, "options": given, **more}
    return SandboxSettings(kind="kubernetes", **made)


def use(settings: SandboxSettings, work: Any) -> Any:
    async def main() -> Any:
        async with open_sandbox(settings) as sandbox:
            return await work(sandbox)

    return asyncio.run(main())


@needs_node
def test_commands_and_files(server: KubernetesServer) -> None:
    async def work(sandbox: Sandbox) -> None:
        done = await sandbox.exec("echo out; echo err >&2; pwd; exit 3", cwd="/tmp")
        assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\n/tmp\n", b"err\n")
        assert (await sandbox.exec(["printf", "%s|", "a b", "", "$HOME", "'", "x\ny"])).stdout == b"a b||$HOME|'|x\ny|"
        assert (await sandbox.exec("cat | wc -c", stdin=b"\0\n" * 100_000)).stdout == b"200000\n"
        assert (await sandbox.exec("cat", stdin=b"end")).stdout == b"end"
        assert (await sandbox.exec("cat")).stdout == b""
        assert (await sandbox.exec("echo $A $B", env={"A": "1 2", "B": "$A"})).stdout == b"1 2 $A\n"
        assert (await sandbox.exec(["no-such-program"])).exit_code == 127
        gone = await sandbox.exec("true", cwd="nowhere")
        assert gone.exit_code == 1 and b"cannot work in /workspace/nowhere" in gone.stderr
        content = bytes(range(256)) * 300
        await sandbox.write("a folder/binary", content)
        assert await sandbox.read("a folder/binary") == content
        await sandbox.write("/tmp/empty", b"")
        assert await sandbox.read("/tmp/empty") == b""
        for path, error in (("nothing", FileNotFoundError), ("a folder", IsADirectoryError), ("", FileNotFoundError)):
            with pytest.raises(error):
                await sandbox.read(path)
        with pytest.raises(OSError, match="Read-only"):
            await sandbox.write("/usr/x", b"")

    use(settings_of(server), work)
    assert not server.pods


@pytest.mark.slow
@needs_node
def test_limits(server: KubernetesServer) -> None:
    pieces: list[bytes] = []

    async def work(sandbox: Sandbox) -> None:
        started = time.monotonic()
        slow = await sandbox.exec("echo begun; sleep 60 & sleep 61", timeout=1.0)
        assert slow.timed_out and slow.exit_code == 124 and slow.stdout == b"begun\n"
        assert time.monotonic() - started < 30
        left = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert b"sleep 6" not in left.stdout.replace(b"sleep 61' '", b"").replace(b"sleep 3600", b"")
        long = await sandbox.exec("yes | head -c 3000000", on_output=pieces.append)
        assert long.truncated and len(long.stdout) < 1_100_000
        bomb = await sandbox.exec("for i in $(seq 60); do sleep 30 & done; wait", timeout=8)
        assert b"fork" in bomb.stderr.lower() or b"resource" in bomb.stderr.lower()
        assert (await sandbox.exec("dd if=/dev/zero of=big bs=1M count=100")).exit_code != 0
        assert dict(sandbox.limits)["processes"] == "prlimit"

    use(settings_of(server, processes=16), work)
    assert sum(map(len, pieces)) == 3_000_000


@needs_node
def test_cancelling_ends_the_command(server: KubernetesServer) -> None:
    async def work(sandbox: Sandbox) -> None:
        begun = asyncio.Event()
        running = asyncio.create_task(
            sandbox.exec("echo begun; exec sleep 300", on_output=lambda piece: begun.set() if piece else None)
        )
        await asyncio.wait_for(begun.wait(), 20)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        while b"sleep 300 " in (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout:
            await asyncio.sleep(0.05)

    use(settings_of(server), work)


@needs_node
def test_a_pod_that_ends_is_an_error_that_says_why(server: KubernetesServer) -> None:
    async def removed(sandbox: Sandbox) -> None:
        name = next(iter(server.pods))
        server._loop.call_soon_threadsafe(lambda: server.pods.pop(name).end())
        while server.pods:
            await asyncio.sleep(0.01)
        with pytest.raises(SandboxError, match="was removed"):
            await sandbox.exec("true")

    use(settings_of(server), removed)

    async def expired(sandbox: Sandbox) -> None:
        while next(iter(server.pods.values())).status["phase"] == "Running":
            await asyncio.sleep(0.05)
        with pytest.raises(SandboxError, match="lifetime_seconds"):
            await sandbox.exec("true")

    use(settings_of(server, {"start_seconds": 0.5}, lifetime_seconds=1.0), expired)


def test_pods_that_never_start(server: KubernetesServer) -> None:
    with pytest.raises(SandboxError, match="did not start: ErrImagePull: pull access denied"):
        use(settings_of(server, image="missing:1"), None)
    with pytest.raises(SandboxError, match=r"did not start within 0.6 s: Unschedulable: 0/1 nodes are available"):
        use(settings_of(server, {"node_selector": {"disk": "ssd"}, "start_seconds": 0.6}), None)
    assert not server.pods


@pytest.mark.slow
@needs_node
def test_what_a_killed_owner_left_is_removed(server: KubernetesServer, tmp_path: Path) -> None:
    program = tmp_path / "owner.py"
    program.write_text(
        "import asyncio, sys\nfrom ajet.environment.sandboxes import SandboxSettings, open_sandbox\n"
        "async def main():\n"
        f"    options = {{'kubeconfig': {server.kubeconfig!r}}}\n"
        "    sandbox = await open_sandbox(SandboxSettings(kind='kubernetes', image='busybox', options=options))\n"
        "    print('made', flush=True)\n    await asyncio.sleep(600)\nasyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(ajet.__file__).parents[1])}
    line = [sys.executable, str(program)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "made\n"
        (left,) = server.pods
        use(settings_of(server), lambda sandbox: sandbox.exec("true"))
        assert list(server.pods) == [left], "its owner still lives"
        owner.kill()
    check_sandbox(settings_of(server))
    assert not server.pods


def test_the_network_is_closed_by_a_policy(server: KubernetesServer) -> None:
    server.policies.clear()
    check_sandbox(settings_of(server))
    assert list(server.policies) == ["ajet-sandbox"]
    assert server.policies["ajet-sandbox"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    server.policies["ajet-sandbox"]["spec"]["egress"] = [{}]
    with pytest.raises(SandboxError, match="there is another network policy"):
        check_sandbox(settings_of(server))
    server.policies.clear()
    server.forbidden = {"POST networkpolicies", "GET networkpolicies"}
    with pytest.raises(SandboxError, match=r"needs this network policy.*403 .*kubectl apply -n agents"):
        check_sandbox(settings_of(server))
    check_sandbox(settings_of(server, network="host"))


def test_what_is_wrong_is_said_before_a_run(server: KubernetesServer, tmp_path: Path) -> None:
    def refused(words: str, options: dict[str, Any] | None = None, **more: Any) -> None:
        with pytest.raises(SandboxError, match=words):
            check_sandbox(settings_of(server, options, **more))

    refused("needs an image", image=None)
    refused("network: gateway is not there for kind kubernetes", network="gateway")
    refused("read_only: a pod can't see folders of this machine", read_only=("/opt",))
    refused("no option 'node_selectr'; did you mean 'node_selector'", {"node_selectr": {}})
    refused(r"options.user: Input should be greater than 0, not 0", {"user": 0})
    refused(r"options.node_selector: Input should be a valid dictionary", {"node_selector": ["ssd"]})
    refused(r"options.tolerations: .*, not 'all'", {"tolerations": "all"})
    refused(r"options.pull_secrets: .*, not 'registry'", {"pull_secrets": "registry"})
    refused(r"options.namespace: .* at least 1 character, not ''", {"namespace": ""})
    refused(r"options.start_seconds: Input should be .*, not True", {"start_seconds": True})
    refused("no cluster is described in .*nowhere", {"kubeconfig": str(tmp_path / "nowhere")})
    wrong = json.loads(Path(server.kubeconfig).read_text())
    wrong["users"][0]["user"]["token"] = "another"
    (tmp_path / "wrong").write_text(json.dumps(wrong))
    refused("could not list pods in namespace 'agents': 401 Unauthorized", {"kubeconfig": str(tmp_path / "wrong")})
    wrong["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    (tmp_path / "dead").write_text(json.dumps(wrong))
    refused("could not list pods .*Cannot connect to host", {"kubeconfig": str(tmp_path / "dead")})
    (tmp_path / "garbage").write_text("]")
    refused("no cluster is described in .*garbage", {"kubeconfig": str(tmp_path / "garbage")})


def test_the_manifests_are_what_the_library_knows() -> None:
    """The real API's own models, made from its specification, understand every field."""
    import kubernetes_asyncio.client as client

    options = {
        "node_selector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "runtime_class": "gvisor",
        "pull_secrets": ["registry"],
    }
    settings = SandboxSettings(kind="kubernetes", image="busybox", options=options, environment={"A": "$(B)"})
    owned_by = {"apiVersion": "v1", "kind": "Pod", "name": "trainer", "uid": "1"}
    manifest = pod(settings, PodOptions.of(settings), "ajet-1", owned_by)

    class Reply:
        def __init__(self, value: Any) -> None:
            self.data = json.dumps(value)

    async def same(value: Any, kind: str) -> bool:
        async with client.ApiClient(client.Configuration()) as api:
            return bool(api.sanitize_for_serialization(api.deserialize(Reply(value), kind)) == value)

    assert asyncio.run(same(manifest, "V1Pod"))
    assert asyncio.run(same(closed_network(), "V1NetworkPolicy"))
    spec = manifest["spec"]
    assert spec["automountServiceAccountToken"] is False and spec["securityContext"]["runAsNonRoot"]
    assert spec["containers"][0]["env"][-1] == {"name": "A", "value": "$$(B)"}


@pytest.mark.slow
@needs_node
@pytest.mark.parametrize(
    ("module", "passed"), [("N = 2", True), ("import os; os._exit(0)", False), ("import time; time.sleep(99)", False)]
)
def test_the_tests_of_a_result_run_in_pods_of_their_own(server: KubernetesServer, module: str, passed: bool) -> None:
    task = {"files": {"n.py": module}, "test_files": {"t.py": "import n\nassert n.N == 2\n"}}
    made = len(server.made)

    async def work(sandbox: Sandbox) -> Verdict:
        await bring_files(sandbox, task)
        await sandbox.exec("rm t.py; mkdir -p t.py/x; mkfifo p; ln -s / up; (sleep 99 &) ; cat /dev/zero > /tmp/z")
        return await judge_by_tests(sandbox, task, "python3 t.py", seconds=10 if "sleep" in module else 120)

    verdict = use(settings_of(server), work)
    assert verdict.passed is passed, verdict
    assert len(server.made) == made + 3 and not server.pods


@needs_node
def test_a_command_cant_end_the_pod_by_a_signal(server: KubernetesServer) -> None:
    async def work(sandbox: Sandbox) -> None:
        await sandbox.exec("for n in HUP INT QUIT TERM KILL USR1 ALRM; do kill -$n 1; kill -$n -1; done")
        for _ in range(100):  # the stream ends before the loop does, which ends other commands, too
            if (await sandbox.exec("echo there")).stdout == b"there\n":
                return
            await asyncio.sleep(0.1)
        raise AssertionError("the pod has ended")

    use(settings_of(server), work)


@needs_node
def test_a_full_disk_takes_no_memory_from_processes(server: KubernetesServer) -> None:
    manifest = pod(settings_of(server), PodOptions(), "n", None)
    assert manifest["spec"]["containers"][0]["resources"]["limits"]["memory"] == f"{64 + 2 * 8 + 64}Mi"
