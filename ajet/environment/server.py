"""`EnvironmentServer`: serves the environment-service protocol over HTTP, with one process per instance.

POST with a JSON body: `/get_env_profile /create /step /evaluate /get_info /release`. GET: `/healthz` and `/metrics`.
Everything but `/healthz` needs the key, if one is set. Without a key, only requests to a loopback name are served, so
that no web page can reach the server.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from ajet.environment.environment import EnvironmentSettings
from ajet.environment.instances import InstanceError, InstanceLimits, Instances
from ajet.schema.errors import UserError
from ajet.system.http_messages import (
    Answer,
    HttpRequest,
    InvalidKeyError,
    is_loopback,
    json_answer,
    presented_key,
    without_port,
)
from ajet.system.http_server import Address, HttpServer

SETTINGS = "--host or --port"
JSON = b"application/json"
OK = "OK"


class EnvironmentServer:
    """Serves one kind of environment."""

    def __init__(
        self,
        settings: EnvironmentSettings,
        limits: InstanceLimits | None = None,
        *,
        api_key: str | None = None,
        base_dirs: Sequence[Path] = (),
    ) -> None:
        self.instances = Instances(settings, limits or InstanceLimits(), base_dirs)
        self._api_key = api_key
        self._http = HttpServer(self)
        self.name = ""
        self._endpoints = {
            "/get_env_profile": self._profile,
            "/create": self._create,
            "/step": self._step,
            "/evaluate": self._evaluate,
            "/get_info": self._info,
            "/release": self._release,
        }

    @property
    def address(self) -> Address:
        return self._http.address

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Import the environment and listen. Raises a `UserError`."""
        if not is_loopback(host) and not self._api_key:
            raise UserError(
                f"--host {host} lets other machines use the environments, so a key is needed\n"
                "    export ENV_KEY=$(openssl rand -hex 24), and add --api-key-env ENV_KEY"
            )
        self.name = await self.instances.start()
        try:
            await self._http.start(host, port, SETTINGS)
        except BaseException:
            await self.instances.aclose()
            raise

    async def aclose(self) -> None:
        """Stop listening and end all instances."""
        await self._http.aclose()
        await self.instances.aclose()

    # ------------------------------------------------------------ HTTP

    def admit(self, request: HttpRequest) -> Answer | None:
        if self._api_key is None:
            if not is_loopback(without_port(request.headers.get(b"host", b"").decode("latin-1"))):
                return _refusal(421, "this server answers to loopback names only: it has no key")
        elif request.path == "/healthz":
            request.unauthenticated = True
        else:
            try:
                given = presented_key(request)
            except InvalidKeyError:
                return _refusal(401, "no key: send 'Authorization: Bearer …'")
            if not hmac.compare_digest(given.encode(), self._api_key.encode()):
                return _refusal(401, "wrong key")
        if request.method == "POST" and not request.headers.get(b"content-type", b"").lower().startswith(JSON):
            return _refusal(415, "the content-type must be application/json")
        return None

    async def handle(self, request: HttpRequest) -> Answer:
        if request.method == "GET" and request.path == "/healthz":
            return Answer(200, OK.encode(), {"content-type": "text/plain"})
        if request.method == "GET" and request.path == "/metrics":
            return Answer(200, self._metrics().encode(), {"content-type": "text/plain; version=0.0.4"})
        endpoint = self._endpoints.get(request.path)
        if endpoint is None or request.method != "POST":
            return _refusal(
                404, f"there is no {request.method} {request.path[:200]}: POST to {' '.join(self._endpoints)}"
            )
        try:
            return json_answer(await endpoint(_body(request)))
        except InstanceError as error:
            cause = {"cause": "action"} if error.by_action else {}
            headers = {"retry-after": "1"} if error.status == 503 else {}
            return json_answer({"detail": str(error), **cause}, error.status, headers)

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        return _refusal(status, message)

    # ------------------------------------------------------------ endpoints

    async def _profile(self, body: dict[str, Any]) -> Any:
        split = _params(body).get("split", "train")
        return _success(await self.instances.task_ids(str(split)))

    async def _create(self, body: dict[str, Any]) -> Any:
        params = _params(body)
        metadata = params.get("metadata")
        task = {
            "task_id": "" if body.get("task_id") is None else str(body["task_id"]),
            "main_query": str(params.get("main_query", "")),
            "env_type": str(body.get("env_type") or ""),
            "metadata": metadata if isinstance(metadata, dict) else {},
        }
        return _success(await self.instances.create(_instance_id(body), task))

    async def _step(self, body: dict[str, Any]) -> Any:
        action = body.get("messages")
        if isinstance(action, list) and action:
            action = action[-1]
        if not isinstance(action, dict | str) or not action:
            raise InstanceError(400, "`messages` should be the action: an assistant message")
        return _success(await self.instances.ask(_instance_id(body), {"do": "step", "action": action}))

    async def _evaluate(self, body: dict[str, Any]) -> Any:
        request = {"do": "evaluate", "params": _params(body)}
        return _success(await self.instances.ask(_instance_id(body), request))

    async def _info(self, body: dict[str, Any]) -> Any:
        return _success(await self.instances.ask(_instance_id(body), {"do": "info"}))

    async def _release(self, body: dict[str, Any]) -> Any:
        return {"success": await self.instances.release(_instance_id(body)), "data": None}

    def _metrics(self) -> str:
        """The metrics in Prometheus' format."""
        lines = [
            "# TYPE ajet_env_instances gauge",
            f"ajet_env_instances {self.instances.running}",
            "# TYPE ajet_env_instances_limit gauge",
            f"ajet_env_instances_limit {self.instances.limits.instances}",
        ]
        for name, value in asdict(self.instances.counts).items():
            lines += [f"# TYPE ajet_env_{name}_total counter", f"ajet_env_{name}_total {value}"]
        return "\n".join(lines) + "\n"


def _body(request: HttpRequest) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(request.body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InstanceError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InstanceError(400, "the body should be a JSON object")
    return body


def _params(body: dict[str, Any]) -> dict[str, Any]:
    params = body.get("params")
    if params is None:
        return {}
    if not isinstance(params, dict):
        raise InstanceError(400, "`params` should be a JSON object")
    return params


def _instance_id(body: dict[str, Any]) -> str:
    instance_id = body.get("instance_id")
    if not isinstance(instance_id, str) or not 0 < len(instance_id) <= 200:
        raise InstanceError(400, "`instance_id` should be a text of 1 to 200 characters")
    return instance_id


def _success(data: Any) -> dict[str, Any]:
    return {"success": True, "data": data}


def _refusal(status: int, detail: str) -> Answer:
    return json_answer({"detail": detail}, status)
