"""Contradictions in what episodes run, where, and on which engine: agent, runner, environment, sandbox, services."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ajet.config.problems import Contradiction
from ajet.config.root import AjetConfig

FOR_PROGRAMS = ("program", "command", "setup", "env", "files", "installed_in", "model_name")
NOT_FOR_PROGRAMS = (
    "tools", "format", "max_steps", "max_tokens", "max_output_chars", "when_full", "parallel_tool_calls"
)  # fmt: skip
"""Keys of `rollout.agent`."""
NEED_SANDBOX = {"bash", "file_editor", "python", "search"}
"""The ready tools that work in the episode's sandbox."""


def _environment(ajet: AjetConfig) -> Iterator[Contradiction]:
    world = ajet.rollout.environment
    if world is None or (world.source is None) != (world.url is None):
        return
    what = "has neither a `source` (or `class`) nor a `url`" if world.url is None else "has both a `source` and a `url`"
    keys = ("rollout.environment.url", "rollout.environment")
    yield Contradiction(keys, what, "name one place, for example `environment: gymnasium:CartPole-v1`")


def _remote(ajet: AjetConfig) -> Iterator[Contradiction]:
    """What runners elsewhere can't do."""
    if ajet.task_runner.wrapper_type != "remote":
        return
    key = "task_runner.wrapper_type"
    if ajet.backbone in ("verl", "trinity") and ajet.task_runner.remote.port == 0:
        yield Contradiction(
            ("task_runner.remote.port", "backbone"),
            f"{ajet.backbone} serves runners from a process that writes to a log, so nobody would learn the port",
            "name a port, for example 4747",
        )
    if ajet.backbone == "trinity" and ajet.rollout.n_vllm_engine > 1:
        yield Contradiction(
            ("rollout.n_vllm_engine", key),
            "with Trinity, runners elsewhere reach one engine, so the others would have nothing to do",
            "set it to 1, and raise rollout.tensor_model_parallel_size instead",
        )
    if ajet.rollout.agent is not None:
        yield Contradiction(
            ("rollout.agent", key),
            "runners elsewhere run a workflow of their own, so a ready agent of this config would never run",
            "remove rollout.agent, and give the runners a workflow that runs it",
        )
    if ajet.rollout.environment is not None:
        yield Contradiction(
            ("rollout.environment", key),
            "runners elsewhere open their own environments, so this one would never be opened",
            "remove rollout.environment, and open it in the runners' workflow",
        )
    if ajet.rollout.sandbox is not None:
        yield Contradiction(
            ("rollout.sandbox", key),
            "runners elsewhere open their own sandboxes, so this one would never be opened",
            "remove rollout.sandbox, and open it in the runners' workflow",
        )
    if bool(ajet.task_runner.remote.tls_cert) != bool(ajet.task_runner.remote.tls_key):
        yield Contradiction(
            ("task_runner.remote.tls_cert", "task_runner.remote.tls_key"),
            "a certificate and its private key go together",
            "set both",
        )


def _tls(ajet: AjetConfig) -> Iterator[Contradiction]:
    if bool(ajet.gateway.tls_cert) != bool(ajet.gateway.tls_key):
        yield Contradiction(
            ("gateway.tls_cert", "gateway.tls_key"), "a certificate and its private key go together", "set both"
        )


def _outside(ajet: AjetConfig) -> Iterator[Contradiction]:
    """What episodes that other programs begin can't do."""
    if ajet.task_runner.wrapper_type != "outside":
        return
    key = "task_runner.wrapper_type"
    if ajet.backbone not in (None, "local"):
        yield Contradiction(
            (key, "backbone"),
            f"{ajet.backbone} starts its episodes itself",
            "use --backbone=local, or another wrapper_type",
        )
    if ajet.trainer_common.total_training_steps is None:
        yield Contradiction(
            (key, "trainer_common.total_training_steps"),
            "episodes from outside have no end, and the run has no number of steps",
            "set trainer_common.total_training_steps",
        )
    for name in ("agent", "environment", "sandbox", "user_workflow"):
        if getattr(ajet.rollout, name) is not None:
            yield Contradiction(
                (f"rollout.{name}", key),
                "the program that begins an episode runs the agent, so this one would never run",
                f"remove rollout.{name}",
            )
    if ajet.task_reader.curriculum.enabled or ajet.trainer_common.val_only:
        yield Contradiction(
            (key, "task_reader.curriculum.enabled", "trainer_common.val_only"),
            "there are no tasks to choose from, nor to validate on",
            "turn curriculum and val_only off",
        )


def _agent(ajet: AjetConfig) -> Iterator[Contradiction]:
    rollout = ajet.rollout
    if rollout.agent is None:
        return
    if rollout.user_workflow is not None:
        yield Contradiction(
            ("rollout.agent", "rollout.user_workflow"),
            "an episode runs either the ready agent or user_workflow, and both are given",
            "remove one of the two",
        )
    named = {next(iter(tool)) if isinstance(tool, dict) and tool else tool for tool in rollout.agent.tools}
    needing = [*(["type: coding"] if rollout.agent.type == "coding" else []), *sorted(NEED_SANDBOX & named)]
    if needing and rollout.sandbox is None:
        yield Contradiction(
            ("rollout.agent.tools", "rollout.agent", "rollout.sandbox"),
            f"{', '.join(needing)} of the agent works in a sandbox, and there is none",
            "set rollout.sandbox, for example to bubblewrap",
        )
    if rollout.agent.type != "cli" and rollout.agent.max_steps > rollout.multi_turn.max_steps:
        yield Contradiction(
            ("rollout.agent.max_steps", "rollout.multi_turn.max_steps"),
            f"the agent may make {rollout.agent.max_steps} model calls, and rollout.multi_turn.max_steps allows "
            f"{rollout.multi_turn.max_steps} in an episode",
            f"set rollout.multi_turn.max_steps to {rollout.agent.max_steps} or more, or lower agent.max_steps",
        )


def _program(ajet: AjetConfig) -> Iterator[Contradiction]:
    """An agent that is a program, and keys of one kind of agent with the other."""
    agent, sandbox = ajet.rollout.agent, ajet.rollout.sandbox
    if agent is None:
        return
    program = agent.type == "cli"
    for name in NOT_FOR_PROGRAMS if program else FOR_PROGRAMS:
        if getattr(agent, name) != type(agent).model_fields[name].default:
            why = "a program has its own loop and tools" if program else "only a program is run so"
            yield Contradiction(
                (f"rollout.agent.{name}", "rollout.agent.type"),
                f"{name} has no effect with type: {agent.type}: {why}",
                f"remove {name}" + ("" if program else ", or set type: cli"),
            )
    if not program:
        return
    if not agent.program and not agent.command:
        what = "type: cli runs a program, and none is named"
        yield Contradiction(("rollout.agent.type",), what, "set `program: codex`, for example, or `command`")
    if sandbox is None or sandbox.network == "none":
        what = "the program works in a sandbox from which it reaches the gateway"
        there = "there is no sandbox" if sandbox is None else "this one has no network"
        keys = ("rollout.agent.type", "rollout.sandbox", "rollout.sandbox.network")
        yield Contradiction(keys, f"{what}, and {there}", "set rollout.sandbox: {kind: bubblewrap, network: gateway}")
    elif sandbox.kind == "kubernetes" and sandbox.network != "host":
        yield Contradiction(
            ("rollout.agent.type", "rollout.sandbox.kind"),
            "the program reaches the gateway from its sandbox, and a pod has no way to it",
            "use kind bubblewrap, docker or podman; or network: host, if pods can reach this machine's gateway",
        )


def _services(ajet: AjetConfig) -> Iterator[Contradiction]:
    for name, service in ajet.services.items():
        if not service.command:
            yield Contradiction(
                ("services",), f"{name} has no `command`", "say what starts it: `command: bash start.sh`"
            )


EPISODE_CHECKS: tuple[Callable[[AjetConfig], Iterator[Contradiction]], ...] = (
    _agent,
    _program,
    _remote,
    _outside,
    _tls,
    _environment,
    _services,
)


def _deterministic(ajet: AjetConfig) -> Iterator[Contradiction]:
    rollout = ajet.rollout
    if rollout.deterministic and rollout.engine != "torch":
        yield Contradiction(
            ("rollout.deterministic", "rollout.engine"),
            f"only the embedded engine repeats bit for bit, and rollout.engine is {rollout.engine}",
            "set rollout.engine: torch, or leave deterministic out",
        )


def _devices(ajet: AjetConfig) -> Iterator[Contradiction]:
    """GPUs of vLLM and the trainer. Which of them exist is known only when the run begins."""
    rollout, vllm = ajet.rollout, ajet.rollout.vllm
    if rollout.engine != "vllm" or ajet.backbone in ("verl", "trinity"):
        return
    key = "rollout.vllm.devices"
    needed = rollout.n_vllm_engine * rollout.tensor_model_parallel_size
    if len(set(vllm.devices)) < len(vllm.devices):
        yield Contradiction((key,), f"{vllm.devices} names a GPU twice", "name each GPU once")
    elif vllm.devices and len(vllm.devices) < needed:
        yield Contradiction(
            (key, "rollout.n_vllm_engine", "rollout.tensor_model_parallel_size"),
            f"{rollout.n_vllm_engine} engines on {rollout.tensor_model_parallel_size} GPUs each need {needed}, and "
            f"{vllm.devices} are {len(vllm.devices)}",
            f"name {needed} GPUs, or lower n_vllm_engine or tensor_model_parallel_size",
        )
    gpu = ajet.trainer_common.gpu
    if vllm.sleep and vllm.devices and gpu is not None and gpu not in vllm.devices:
        yield Contradiction(
            ("rollout.vllm.sleep", "trainer_common.gpu"),
            f"vLLM would sleep for a trainer that works elsewhere: GPU {gpu} is not among {vllm.devices}",
            "leave rollout.vllm.sleep out",
        )


def _overlap(ajet: AjetConfig) -> Iterator[Contradiction]:
    """What can't run ahead of the trainer, or could not be corrected for having done so."""
    rollout, algorithm = ajet.rollout, ajet.trainer_common.algorithm
    key, place = "rollout.max_staleness", "trainer_common.algorithm"
    if not rollout.max_staleness or (ajet.backbone or "local") != "local":
        return
    unfit = {
        "rollout.engine": (
            rollout.engine == "torch",
            "the embedded engine computes with the trainer's own weights, so only one of them can work at a time",
            "set rollout.engine: vllm",
        ),
        "rollout.vllm.sleep": (
            rollout.engine == "vllm" and rollout.vllm.sleep,
            "an engine that sleeps during updates draws nothing meanwhile",
            "leave rollout.vllm.sleep out",
        ),
        f"{place}.rollout_correction.mode": (
            algorithm.rollout_correction.mode == "none",
            "without a correction, tokens of earlier versions would count as if the present one had sampled them",
            "set rollout_correction.mode: token_tis",
        ),
        f"{place}.use_kl_in_reward": (
            algorithm.use_kl_in_reward,
            "the divergence of the present version can't be read off replies of an earlier one",
            "set use_kl_in_reward: false",
        ),
        "task_runner.wrapper_type": (
            ajet.task_runner.wrapper_type == "outside",
            "episodes from outside begin whenever their program likes",
            "set task_runner.outside.max_staleness, which says how old they may be",
        ),
    }
    for other, (applies, why, fix) in unfit.items():
        if applies:
            yield Contradiction(
                (key, other),
                f"max_staleness {rollout.max_staleness} draws episodes while a step is trained, and {why}",
                f"{fix}, or max_staleness: 0",
            )


def _sglang(ajet: AjetConfig) -> Iterator[Contradiction]:
    if ajet.rollout.engine == "sglang" and ajet.model.lora.enabled and (ajet.backbone or "local") == "local":
        yield Contradiction(
            ("model.lora.enabled", "rollout.engine"),
            "adapters can't be brought to SGLang's servers",
            "set rollout.engine: torch or vllm, or train whole weights",
        )


def _four_bits(ajet: AjetConfig) -> Iterator[Contradiction]:
    if ajet.model.lora.base_bits is None or (ajet.backbone or "local") != "local":
        return
    if not ajet.model.lora.enabled:
        yield Contradiction(
            ("model.lora.base_bits", "model.lora.enabled"),
            "weights in 4 bits can't be trained: adapters beside them can, and model.lora.enabled is false",
            "set model.lora.enabled: true, or leave base_bits out",
        )
    if ajet.rollout.engine != "torch":
        yield Contradiction(
            ("model.lora.base_bits", "rollout.engine"),
            f"{ajet.rollout.engine} has weights of its own, with more than 4 bits: it would sample another policy",
            "set rollout.engine: torch, which computes with the trainer's weights, or leave base_bits out",
        )


ENGINE_CHECKS: tuple[Callable[[AjetConfig], Iterator[Contradiction]], ...] = (
    _deterministic,
    _devices,
    _four_bits,
    _overlap,
    _sglang,
)
