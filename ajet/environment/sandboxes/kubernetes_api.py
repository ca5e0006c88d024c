"""`Cluster`: the few requests to a Kubernetes API server that a sandbox needs, and the pod that it asks for.

What the server refuses, and a server that isn't there, is a `SandboxError` that says which request it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError

from ajet.config.kinds import no_option
from ajet.environment.sandboxes.cgroups import is_gone, owner
from ajet.environment.sandboxes.sandbox import (
    FIRST_UID,
    PATH,
    UIDS,
    WORKSPACE,
    Input,
    Kept,
    SandboxError,
    SandboxSettings,
    pieces_of,
)
from ajet.schema.errors import MissingDependencyError
from ajet.schema.install import install_command

CONTAINER = "sandbox"
LABEL = "ajet.sandbox"
NETWORK_LABEL = "ajet.sandbox.network"
OWNER = "ajet.sandbox/owner"
EXPIRES = "ajet.sandbox/expires"
_FIRST = "trap '' INT TERM; while :; do sleep 3600 & wait $!; done"
"""Process 1: it frees processes that have ended, and does nothing else. Commands are its user, and may not end it."""


_Text = Annotated[str, Field(min_length=1)]


class PodOptions(BaseModel, frozen=True, strict=True):
    """`options` of a Kubernetes sandbox."""

    namespace: _Text | None = None
    """None: that of the kubeconfig's context, or of the pod that we run in."""
    kubeconfig: _Text | None = None
    context: _Text | None = None
    node_selector: Mapping[str, str] = {}
    tolerations: Sequence[Mapping[str, Any]] = ()
    runtime_class: _Text | None = None
    """For example gVisor's or Kata's."""
    user: PositiveInt | None = None
    """Who commands run as, which is never root. None: a number that no other pod has."""
    pull_policy: _Text = "IfNotPresent"
    pull_secrets: Sequence[str] = ()
    start_seconds: PositiveFloat = 300.0
    """How long a node and the image may take."""

    @classmethod
    def of(cls, settings: SandboxSettings) -> PodOptions:
        """Raises `SandboxError` that names the option."""
        for name in settings.options:
            if name not in cls.model_fields:
                raise SandboxError(f"sandbox options: {no_option('kind kubernetes', name, cls.model_fields)}")
        try:
            return cls.model_validate(dict(settings.options))
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            raise SandboxError(f"sandbox options.{place}: {problem['msg']}, not {problem['input']!r}") from None


def is_left_over(phase: str, annotations: Mapping[str, str] | None) -> bool:
    """Whether a pod of ours belongs to nobody any more: it is over, or its owner on this machine is gone."""
    if phase in ("Succeeded", "Failed"):
        return True
    annotations = annotations or {}
    try:
        gone, expires = is_gone(json.loads(annotations[OWNER])), int(annotations[EXPIRES])
    except (KeyError, ValueError, TypeError):
        return False  # not made by this version: its own deadline ends it
    return gone or time.time() > expires


def pod(
    settings: SandboxSettings, options: PodOptions, name: str, owned_by: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The manifest. `owned_by`: a reference to the pod that we run in; the cluster removes this one with it."""
    seconds = math.ceil(settings.lifetime_seconds)
    user = options.user or FIRST_UID + secrets.randbelow(UIDS)
    metadata: dict[str, Any] = {
        "name": name,
        "labels": {LABEL: "1", NETWORK_LABEL: settings.network},
        "annotations": {OWNER: json.dumps(owner()), EXPIRES: str(int(time.time()) + seconds + 60)},
    }
    if owned_by is not None:
        metadata["ownerReferences"] = [dict(owned_by)]
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": seconds,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(settings, options)],
        "volumes": [
            {"name": volume, "emptyDir": {"medium": "Memory", "sizeLimit": f"{settings.disk_mb}Mi"}}
            for volume in ("workspace", "tmp")
        ],
    }
    if options.node_selector:
        spec["nodeSelector"] = dict(options.node_selector)
    if options.tolerations:
        spec["tolerations"] = [dict(each) for each in options.tolerations]
    if options.runtime_class:
        spec["runtimeClassName"] = options.runtime_class
    if options.pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in options.pull_secrets]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _container(settings: SandboxSettings, options: PodOptions) -> dict[str, Any]:
    amount = {"cpu": f"{math.ceil(settings.cpus * 1000)}m", "memory": f"{settings.memory_with_files_mb}Mi"}
    variables = {"PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8", **settings.environment}
    return {
        "name": CONTAINER,
        "image": settings.image,
        "imagePullPolicy": options.pull_policy,
        "command": ["/bin/sh", "-c", _FIRST],
        "workingDir": WORKSPACE,
        "env": [{"name": name, "value": value.replace("$(", "$$(")} for name, value in variables.items()],
        "resources": {"limits": amount, "requests": amount},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "workspace", "mountPath": WORKSPACE}, {"name": "tmp", "mountPath": "/tmp"}],
    }


def closed_network() -> dict[str, Any]:
    """The network policy of pods without network: nothing in, nothing out."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "ajet-sandbox"},
        "spec": {"podSelector": {"matchLabels": {NETWORK_LABEL: "none"}}, "policyTypes": ["Ingress", "Egress"]},
    }


REQUEST_S = 30.0
HEARTBEAT_S = 20.0
"""How often a connection shows that it is alive: what lies between cuts silent ones."""
_STDIN, _STDOUT, _STDERR, _STATUS = b"\x00", 1, 2, 3
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Cluster:
    """A connection to the API server, for one namespace. On one event loop."""

    def __init__(self, library: Any, configuration: Any, namespace: str, inside: bool) -> None:
        self._library = library
        self._client = library.client.ApiClient(configuration)
        self._streams = library.stream.WsApiClient(configuration, heartbeat=HEARTBEAT_S)
        self._core = library.client.CoreV1Api(self._client)
        self._policies = library.client.NetworkingV1Api(self._client)
        self._inside = inside
        self.namespace = namespace

    @classmethod
    async def connect(cls, options: PodOptions) -> Cluster:
        """Read where the cluster is. Raises `SandboxError`."""
        library = await asyncio.to_thread(_library)
        configuration = library.client.Configuration()
        inside = options.kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ and _SERVICE_ACCOUNT.exists()
        namespace: str | None = None
        try:
            if inside:
                library.config.load_incluster_config(client_configuration=configuration)
                namespace = (_SERVICE_ACCOUNT / "namespace").read_text().strip()
            else:
                loader = await library.config.load_kube_config(
                    options.kubeconfig, options.context, configuration, persist_config=False
                )
                namespace = loader.current_context["context"].get("namespace")
        except (*library.config_errors, OSError, KeyError, ValueError, TypeError) as error:
            place = options.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
            raise SandboxError(f"sandbox kind kubernetes: no cluster is described in {place}: {error}") from None
        return cls(library, configuration, options.namespace or namespace or "default", inside)

    async def close(self) -> None:
        """End the connection."""
        await self._streams.close()
        await self._client.close()

    # ------------------------------------------------------------ pods

    async def create(self, manifest: dict[str, Any]) -> None:
        """Make a pod."""
        with self._asking("create a pod"):
            await self._core.create_namespaced_pod(self.namespace, manifest, _request_timeout=REQUEST_S)

    async def pod(self, name: str) -> Any | None:
        """A pod as the server sees it now. None: there is none."""
        with self._asking("read a pod"):
            try:
                return await self._core.read_namespaced_pod(name, self.namespace, _request_timeout=REQUEST_S)
            except self._library.client.ApiException as error:
                if error.status == 404:
                    return None
                raise

    async def delete(self, name: str) -> None:
        """Remove a pod, if it is there."""
        with self._asking("delete a pod"):
            try:
                await self._core.delete_namespaced_pod(
                    name, self.namespace, grace_period_seconds=1, _request_timeout=REQUEST_S
                )
            except self._library.client.ApiException as error:
                if error.status != 404:
                    raise

    async def sweep(self) -> None:
        """Remove pods of ours that belong to nobody any more."""
        with self._asking("list pods"):
            found = await self._core.list_namespaced_pod(
                self.namespace, label_selector=f"{LABEL}=1", _request_timeout=REQUEST_S
            )
        for each in found.items:
            if is_left_over(each.status.phase, each.metadata.annotations):
                await self.delete(each.metadata.name)

    async def own_pod(self) -> dict[str, Any] | None:
        """A reference to the pod that we run in, if we run in one of this namespace."""
        if not self._inside:
            return None
        found = await self.pod(socket.gethostname())
        if found is None:
            return None
        return {"apiVersion": "v1", "kind": "Pod", "name": found.metadata.name, "uid": found.metadata.uid}

    async def close_network(self) -> None:
        """See to it that pods without network have none. Raises `SandboxError` that says what to apply."""
        policy = closed_network()
        name = policy["metadata"]["name"]
        client = self._library.client
        with self._asking("read its network policies"):
            try:
                found = await self._policies.read_namespaced_network_policy(
                    name, self.namespace, _request_timeout=REQUEST_S
                )
                if self._client.sanitize_for_serialization(found)["spec"] != policy["spec"]:
                    raise SandboxError(
                        f"sandbox network: none: in namespace {self.namespace!r} there is another network policy "
                        f"of the name {name!r}; ours is {json.dumps(policy)}"
                    )
                return
            except client.ApiException as error:
                if error.status not in (403, 404):
                    raise
        try:
            await self._policies.create_namespaced_network_policy(self.namespace, policy, _request_timeout=REQUEST_S)
        except client.ApiException as error:
            if error.status != 409:  # another process has just made it
                raise SandboxError(
                    f"sandbox network: none: namespace {self.namespace!r} needs this network policy, which may not be "
                    f"made or read from here ({_said(error)}): kubectl apply -n {self.namespace} -f - <<< "
                    f"'{json.dumps(policy)}'. Or choose network: host"
                ) from None

    # ------------------------------------------------------------ commands

    async def run(
        self, name: str, line: Sequence[str], stdin: Sequence[bytes | Input], stdout: Kept, stderr: Kept
    ) -> int:
        """Run a command in a pod, to its end. Returns its exit code."""
        answer: dict[str, Any] | None = None
        with self._asking("run a command in a pod"):
            connecting = await self._library.client.CoreV1Api(self._streams).connect_get_namespaced_pod_exec(
                name,
                self.namespace,
                container=CONTAINER,
                command=list(line),
                stdin=True,
                stdout=True,
                stderr=True,
                tty=False,
                _preload_content=False,
            )
            async with connecting as connection:
                feeding = asyncio.create_task(_feed(connection, stdin))
                try:
                    async for channel, piece in _pieces(connection):
                        if channel == _STATUS:
                            answer = json.loads(piece)
                        elif channel in (_STDOUT, _STDERR):
                            (stdout if channel == _STDOUT else stderr).add(piece)
                finally:
                    feeding.cancel()
                    await asyncio.gather(feeding, return_exceptions=True)
        if answer is None:
            raise SandboxError("the connection to the pod broke while a command ran")
        return exit_code(answer)

    @contextlib.contextmanager
    def _asking(self, what: str) -> Any:
        """Errors of the library, as ours."""
        aiohttp = self._library.aiohttp
        failed = f"sandbox kind kubernetes: could not {what} in namespace {self.namespace!r}"
        try:
            yield
        except self._library.client.ApiException as error:
            raise SandboxError(f"{failed}: {_said(error)}") from None
        except aiohttp.WSServerHandshakeError as error:
            raise SandboxError(f"{failed}: {error.status} {error.message}") from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise SandboxError(f"{failed}: {type(error).__name__}: {error}") from None


def exit_code(answer: dict[str, Any]) -> int:
    """What the server says at a command's end."""
    if answer.get("status") == "Success":
        return 0
    causes = (answer.get("details") or {}).get("causes") or []
    for cause in causes:
        if cause.get("reason") == "ExitCode" and str(cause.get("message", "")).isdecimal():
            return int(cause["message"])
    raise SandboxError(f"the pod could not run a command: {str(answer.get('message', answer))[:500]}")


async def _feed(connection: Any, stdin: Sequence[bytes | Input]) -> None:
    with contextlib.suppress(ConnectionError):  # the command has ended, and its answer is there
        for content in stdin:
            async for piece in pieces_of(content):
                await connection.send_bytes(_STDIN + bytes(piece))


async def _pieces(connection: Any) -> AsyncIterator[tuple[int, bytes]]:
    async for message in connection:
        content = message.data.encode() if isinstance(message.data, str) else message.data
        if isinstance(content, bytes | bytearray) and content:
            yield content[0], bytes(content[1:])


def _said(error: Any) -> str:
    """The server's own words."""
    text = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    with contextlib.suppress(ValueError, AttributeError):
        text = json.loads(text)["message"] if text else ""
    return f"{error.status} {text or error.reason}"[:500]


def _library() -> Any:
    """The library, imported when it is needed: that takes seconds."""
    try:
        import aiohttp
        import yaml
        from kubernetes_asyncio import client, config, stream
    except ImportError:
        raise MissingDependencyError(
            f"sandbox kind kubernetes needs the package kubernetes_asyncio: {install_command('kubernetes')}"
        ) from None
    errors = (config.ConfigException, yaml.YAMLError)
    return SimpleNamespace(aiohttp=aiohttp, client=client, config=config, stream=stream, config_errors=errors)
