"""A small API server of the tests' own, with one node: not Kubernetes, but what our sandboxes ask of it.

Requests and replies have the form of the real API (v1, networking.k8s.io/v1, exec over a websocket with channels). A
pod is a bubblewrap with its first process in it; a command enters that one's namespaces, as the pod's user.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

TOKEN = "token-of-the-tests"
AVAILABLE = os.geteuid() == 0 and all(map(shutil.which, ("bwrap", "nsenter", "setpriv")))
"""Whether pods can run here."""


class Pod:
    """One pod, and the process that it is."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.manifest = manifest
        self.status: dict[str, Any] = {"phase": "Pending"}
        self.inside = 0
        self.process: asyncio.subprocess.Process | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def container(self) -> dict[str, Any]:
        return dict(self.manifest["spec"]["containers"][0])

    @property
    def user(self) -> int:
        return int(self.manifest["spec"]["securityContext"]["runAsUser"])

    def shown(self) -> dict[str, Any]:
        return {**self.manifest, "status": self.status}

    async def live(self) -> None:
        """From creation to the end."""
        if "missing" in self.container["image"]:
            waiting = {"reason": "ErrImagePull", "message": "pull access denied"}
            self.status["containerStatuses"] = [
                {
                    "name": "sandbox",
                    "image": "",
                    "imageID": "",
                    "ready": False,
                    "restartCount": 0,
                    "state": {"waiting": waiting},
                }
            ]
            return
        if self.manifest["spec"].get("nodeSelector"):
            message = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            self.status["conditions"] = [condition]
            return
        limit = self.manifest["spec"]["volumes"][0]["emptyDir"]["sizeLimit"].removesuffix("Mi")
        told, tell = os.pipe()
        sizes = ["--perms", "0777", "--size", str(int(limit) << 20), "--tmpfs"]
        line = [
            *("bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--as-pid-1"),
            *("--die-with-parent", "--info-fd", str(tell), "--ro-bind", "/usr", "/usr"),
            *(part for name in ("bin", "sbin", "lib", "lib64") for part in ("--symlink", f"usr/{name}", f"/{name}")),
            *("--proc", "/proc", "--dev", "/dev", *sizes, "/workspace", *sizes, "/tmp", "--remount-ro", "/"),
            *("setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", "--no-new-privs"),
            *self.container["command"],
        ]
        self.process = await asyncio.create_subprocess_exec(*line, pass_fds=[tell], start_new_session=True)
        os.close(tell)
        with open(told) as file:
            self.inside = json.loads(await asyncio.to_thread(file.read))["child-pid"]
        # bubblewrap tells the process before it has made its mounts: until the pod's own program runs, nobody may enter
        with contextlib.suppress(OSError):  # it has ended already
            while os.path.basename(os.readlink(f"/proc/{self.inside}/exe")) in ("bwrap", "setpriv"):
                await asyncio.sleep(0.005)
        self.status["phase"] = "Running"
        try:
            async with asyncio.timeout(self.manifest["spec"]["activeDeadlineSeconds"]):
                code = await self.process.wait()
            self.status["phase"] = "Failed" if code else "Succeeded"
        except TimeoutError:
            self.end()
            self.status.update(phase="Failed", reason="DeadlineExceeded")

    def end(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                if self.inside:  # as another user, it no longer dies with its parent; all within die with it
                    os.kill(self.inside, signal.SIGKILL)
                self.process.kill()

    async def run(self, command: list[str]) -> asyncio.subprocess.Process:
        variables = [f"{each['name']}={each['value'].replace('$$(', '$(')}" for each in self.container["env"]]
        enter = ["--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd"]
        return await asyncio.create_subprocess_exec(
            *("nsenter", "--target", str(self.inside), *enter, "--setuid", str(self.user), "--setgid", str(self.user)),
            *("env", "-i", *variables, *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )


class KubernetesServer:
    """A context manager: the server in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.pods: dict[str, Pod] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self.made: list[dict[str, Any]] = []
        """All manifests that were ever created."""
        self.forbidden: set[str] = set()
        self._folder = folder
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.port = 0

    @property
    def kubeconfig(self) -> str:
        file = self._folder / "kubeconfig"
        text = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "contexts": [{"name": "tests", "context": {"cluster": "c", "user": "u", "namespace": "agents"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
        }
        file.write_text(json.dumps(text))
        return str(file)

    def __enter__(self) -> KubernetesServer:
        self._thread.start()
        self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            for pod in self.pods.values():
                pod.end()
                if pod.task is not None:
                    await pod.task
            await self._runner.cleanup()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)

    def _serve(self) -> None:
        # the kernel ends what is told to die with its parent when the thread that started it ends
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._authorised], client_max_size=1 << 24)
        pods = "/api/v1/namespaces/agents/pods"
        policies = "/apis/networking.k8s.io/v1/namespaces/agents/networkpolicies"
        app.router.add_get(pods, self._list)
        app.router.add_post(pods, self._create)
        app.router.add_get(pods + "/{name}", self._read)
        app.router.add_delete(pods + "/{name}", self._delete)
        app.router.add_get(pods + "/{name}/exec", self._exec)
        app.router.add_get(policies + "/{name}", self._policy)
        app.router.add_post(policies, self._make_policy)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._ready.set()

    @web.middleware
    async def _authorised(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _refused(401, "Unauthorized")
        what = request.path.split("/agents/", 1)[-1].split("/")[0]
        if f"{request.method} {what}" in self.forbidden:
            return _refused(403, f'{what} is forbidden: User "tests" cannot {request.method.lower()} {what}')
        return await handler(request)  # type: ignore[no-any-return]

    async def _list(self, request: web.Request) -> web.Response:
        key, _, value = request.query.get("labelSelector", "").partition("=")
        found = [pod.shown() for pod in self.pods.values() if pod.manifest["metadata"]["labels"].get(key) == value]
        return web.json_response({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": found})

    async def _create(self, request: web.Request) -> web.Response:
        manifest = await request.json()
        name = manifest["metadata"]["name"]
        self.made.append(manifest)
        self.pods[name] = pod = Pod(manifest)
        pod.task = asyncio.create_task(pod.live())
        return web.json_response(pod.shown(), status=201)

    async def _read(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        return web.json_response(pod.shown()) if pod else _refused(404, "pods not found")

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self.pods.pop(request.match_info["name"], None)
        if pod is None:
            return _refused(404, "pods not found")
        pod.end()
        return web.json_response(pod.shown())

    async def _policy(self, request: web.Request) -> web.Response:
        policy = self.policies.get(request.match_info["name"])
        return web.json_response(policy) if policy else _refused(404, "networkpolicies not found")

    async def _make_policy(self, request: web.Request) -> web.Response:
        policy = await request.json()
        self.policies[policy["metadata"]["name"]] = policy
        return web.json_response(policy, status=201)

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods.get(request.match_info["name"])
        if pod is None or pod.status["phase"] != "Running":
            return _refused(404 if pod is None else 400, "container not running")
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        process = await pod.run(request.query.getall("command"))
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None

        async def send(channel: int, stream: asyncio.StreamReader) -> None:
            while piece := await stream.read(1 << 15):
                await socket.send_bytes(bytes([channel]) + piece)

        async def take(stdin: asyncio.StreamWriter) -> None:
            async for message in socket:
                if message.type == WSMsgType.BINARY and message.data[0] == 0:
                    with contextlib.suppress(ConnectionError):
                        stdin.write(message.data[1:])
                        await stdin.drain()

        taking = asyncio.create_task(take(process.stdin))
        with contextlib.suppress(ConnectionError):  # the client has gone; as in Kubernetes, the command goes on
            await asyncio.gather(send(1, process.stdout), send(2, process.stderr))
        code = await process.wait()
        status: dict[str, Any] = {"metadata": {}, "status": "Success"}
        if code:
            code = code if code > 0 else 128 - code
            causes = [{"reason": "ExitCode", "message": str(code)}]
            words = f"command terminated with non-zero exit code: exit status {code}"
            status = {"status": "Failure", "reason": "NonZeroExitCode", "message": words, "details": {"causes": causes}}
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(b"\x03" + json.dumps(status).encode())
        taking.cancel()
        await socket.close()
        return socket


def _refused(code: int, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return web.json_response(body, status=code)
