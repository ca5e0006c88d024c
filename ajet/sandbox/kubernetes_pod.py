"""`pod`: the manifest of one sandbox, and `PodOptions`: what only a Kubernetes sandbox can be told.

The pod has no service account token, no privileges, a read-only root and a user that no other pod of its node has;
files are in memory. The cluster ends it at its deadline, even if nobody of ours is left.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from ajet.sandbox.cgroups import started
from ajet.sandbox.sandbox import SandboxError, SandboxSettings

WORKSPACE = "/workspace"
CONTAINER = "sandbox"
LABEL = "ajet.sandbox"
NETWORK_LABEL = "ajet.sandbox.network"
OWNER = "ajet.sandbox/owner"
EXPIRES = "ajet.sandbox/expires"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FIRST_UID = 0x6A000000
_UIDS = 0x01000000
_FIRST = "trap '' INT TERM; while :; do sleep 3600 & wait $!; done"
"""Process 1: it frees processes that have ended, and does nothing else. Commands are its user, and may not end it."""


@dataclass(frozen=True, slots=True)
class PodOptions:
    """`options` of a Kubernetes sandbox."""

    namespace: str | None = None
    """None: that of the kubeconfig's context, or of the pod that we run in."""
    kubeconfig: str | None = None
    context: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    runtime_class: str | None = None
    """For example gVisor's or Kata's."""
    user: int | None = None
    """Who commands run as. None: a number that no other pod has."""
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    start_seconds: float = 300.0
    """How long a node and the image may take."""

    @classmethod
    def of(cls, settings: SandboxSettings) -> PodOptions:
        """Raises `SandboxError` that names the option."""
        expected = {each.name: each for each in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in settings.options.items():
            if name not in expected:
                near = get_close_matches(name, expected, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"options: {', '.join(expected)}"
                raise SandboxError(f"sandbox options: kind kubernetes has no option {name!r}; {hint}")
            values[name] = _checked(name, value)
        return cls(**values)


def _checked(name: str, value: Any) -> Any:
    if name in ("tolerations", "pull_secrets"):
        inner = Mapping if name == "tolerations" else str
        right = isinstance(value, list | tuple) and all(isinstance(each, inner) for each in value)
        value = tuple(value) if right else value
        words = "a list"
    elif name == "node_selector":
        right = isinstance(value, Mapping) and all(isinstance(each, str) for each in value.values())
        words = "names with texts, as in {disk: ssd}"
    elif name == "user":
        right = value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
        words = "a number above 0: commands don't run as root"
    elif name == "start_seconds":
        right = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        words = "seconds"
    else:
        right = value is None or (isinstance(value, str) and bool(value))
        words = "text"
    if not right:
        raise SandboxError(f"sandbox options.{name}: expected {words}, not {value!r}")
    return value


def owner() -> dict[str, Any]:
    """Who made a pod: a process of a machine."""
    return {"host": socket.gethostname(), "process": os.getpid(), "started": started(os.getpid())}


def is_left_over(manifest: Mapping[str, Any]) -> bool:
    """Whether a pod of ours belongs to nobody any more: it is over, or its owner on this machine is gone."""
    if manifest.get("phase") in ("Succeeded", "Failed"):
        return True
    annotations = manifest.get("annotations") or {}
    try:
        made_by, expires = json.loads(annotations[OWNER]), int(annotations[EXPIRES])
        gone = made_by["host"] == socket.gethostname() and started(made_by["process"]) != made_by["started"]
    except (KeyError, ValueError, TypeError):
        return False  # not made by this version: its own deadline ends it
    return gone or time.time() > expires


def new_name() -> str:
    """A pod's name."""
    return f"ajet-{secrets.token_hex(8)}"


def pod(
    settings: SandboxSettings, options: PodOptions, name: str, owned_by: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The manifest. `owned_by`: a reference to the pod that we run in; the cluster removes this one with it."""
    seconds = math.ceil(settings.lifetime_seconds)
    user = options.user or _FIRST_UID + secrets.randbelow(_UIDS)
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
