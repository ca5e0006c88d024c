"""The rules about what episodes run, where, and on which engine: agent, runner, environment, sandbox, services."""

from __future__ import annotations

from ajet.config.problems import Condition, ContradictionRule
from ajet.config.rollout import FOR_PROGRAMS, NOT_FOR_PROGRAMS
from ajet.config.root import AjetConfig

NEED_SANDBOX = {"bash", "file_editor", "python", "search"}
"""The ready tools that work in the episode's sandbox."""
RUNNER = "task_runner.wrapper_type"


def _remote(a: AjetConfig) -> bool:
    return a.task_runner.wrapper_type == "remote"


def _begun_outside(a: AjetConfig) -> bool:
    return a.task_runner.wrapper_type == "outside"


def _runs_program(a: AjetConfig) -> bool:
    return a.rollout.agent is not None and a.rollout.agent.type == "cli"


def _names_no_program(a: AjetConfig) -> bool:
    agent = a.rollout.agent
    return agent is not None and agent.type == "cli" and not agent.program and not agent.command


def _sets(a: AjetConfig, name: str) -> bool:
    """Whether a key of `rollout.agent` differs from its default."""
    agent = a.rollout.agent
    return agent is not None and getattr(agent, name) != type(agent).model_fields[name].default


def _needing_sandbox(a: AjetConfig) -> list[str]:
    """The parts of the agent that work in a sandbox."""
    agent = a.rollout.agent
    if agent is None:
        return []
    named = {name for tool in agent.tools for name in ([tool] if isinstance(tool, str) else tool)}
    return [*(["type: coding"] if agent.type == "coding" else []), *sorted(NEED_SANDBOX & named)]


def _agent_steps(a: AjetConfig) -> int:
    """How many model calls the agent's own loop may make."""
    agent = a.rollout.agent
    return 0 if agent is None or agent.type == "cli" else agent.max_steps


def _without_way_to_gateway(a: AjetConfig) -> str | None:
    """Why a program in the sandbox can't reach the gateway."""
    sandbox = a.rollout.sandbox
    if sandbox is None:
        return "there is no sandbox"
    return "this one has no network" if sandbox.network == "none" else None


def _in_pod(a: AjetConfig) -> bool:
    sandbox = a.rollout.sandbox
    return sandbox is not None and sandbox.kind == "kubernetes" and sandbox.network not in ("none", "host")


def _without_command(a: AjetConfig) -> str:
    return "; ".join(f"{name} has no `command`" for name, service in a.services.items() if not service.command)


def _without_one_place(a: AjetConfig) -> str:
    """What is wrong with where the environment is."""
    world = a.rollout.environment
    if world is None:
        return ""
    if world.source is not None and world.url is not None:
        return "has both a `source` and a `url`"
    named = world.source is not None or world.url is not None or a.task_reader.type == "env_service"
    return "" if named else "has neither a `source` (or `class`) nor a `url`"


def _not_elsewhere(name: str, what: str, fix: str) -> ContradictionRule:
    return ContradictionRule(
        (f"rollout.{name}", RUNNER),
        lambda a: _remote(a) and getattr(a.rollout, name) is not None,
        f"remote runners {what}",
        f"remove rollout.{name}, and {fix}",
    )


def _half_of_tls(group: str, when: Condition) -> ContradictionRule:
    keys = (f"{group}.tls_cert", f"{group}.tls_key")
    return ContradictionRule(keys, when, "a certificate and its private key go together", "set both")


def _not_outside(name: str) -> ContradictionRule:
    return ContradictionRule(
        (f"rollout.{name}", RUNNER),
        lambda a: _begun_outside(a) and getattr(a.rollout, name) is not None,
        "the program that begins an episode runs the agent, so this one would never run",
        f"remove rollout.{name}",
    )


def _only_for_programs(name: str) -> ContradictionRule:
    return ContradictionRule(
        (f"rollout.agent.{name}", "rollout.agent.type"),
        lambda a: not _runs_program(a) and _sets(a, name),
        f"{name} has no effect with type: {{rollout.agent.type}}: only a program is run so",
        f"remove {name}, or set type: cli",
    )


def _not_for_programs(name: str) -> ContradictionRule:
    return ContradictionRule(
        (f"rollout.agent.{name}", "rollout.agent.type"),
        lambda a: _runs_program(a) and _sets(a, name),
        f"{name} has no effect with type: cli: a program has its own loop and tools",
        f"remove {name}",
    )


EPISODE_RULES = (
    ContradictionRule(
        ("rollout.agent", "rollout.user_workflow"),
        lambda a: a.rollout.agent is not None and a.rollout.user_workflow is not None,
        "an episode runs either the ready agent or user_workflow, and both are given",
        "remove one of the two",
    ),
    ContradictionRule(
        ("rollout.agent.tools", "rollout.agent", "rollout.sandbox"),
        lambda a: _needing_sandbox(a) and a.rollout.sandbox is None,
        lambda a: f"{', '.join(_needing_sandbox(a))} of the agent works in a sandbox, and there is none",
        "set rollout.sandbox, for example to bubblewrap",
    ),
    ContradictionRule(
        ("rollout.agent.max_steps", "rollout.multi_turn.max_steps"),
        lambda a: _agent_steps(a) > a.rollout.multi_turn.max_steps,
        lambda a: (
            f"the agent may make {_agent_steps(a)} model calls, and rollout.multi_turn.max_steps allows "
            f"{a.rollout.multi_turn.max_steps} in an episode"
        ),
        lambda a: f"set rollout.multi_turn.max_steps to {_agent_steps(a)} or more, or lower agent.max_steps",
    ),
    *(_only_for_programs(name) for name in FOR_PROGRAMS),
    *(_not_for_programs(name) for name in NOT_FOR_PROGRAMS),
    ContradictionRule(
        ("rollout.agent.type",),
        _names_no_program,
        "type: cli runs a program, and none is named",
        "set `program: codex`, for example, or `command`",
    ),
    ContradictionRule(
        ("rollout.agent.type", "rollout.sandbox", "rollout.sandbox.network"),
        lambda a: _runs_program(a) and _without_way_to_gateway(a),
        lambda a: f"the program works in a sandbox from which it reaches the gateway, and {_without_way_to_gateway(a)}",
        "set rollout.sandbox: {{kind: bubblewrap, network: gateway}}",
    ),
    ContradictionRule(
        ("rollout.agent.type", "rollout.sandbox.kind"),
        lambda a: _runs_program(a) and _in_pod(a),
        "the program reaches the gateway from its sandbox, and a pod has no way to it",
        "use kind bubblewrap, docker or podman; or network: host, if pods can reach this machine's gateway",
    ),
    ContradictionRule(
        ("task_runner.remote.port", "backbone"),
        lambda a: _remote(a) and a.task_runner.remote.port == 0,
        "{backbone} serves runners from a process that writes to a log, so nobody would learn the port",
        "name a port, for example 4747",
        on=("verl", "trinity"),
    ),
    ContradictionRule(
        ("rollout.n_vllm_engine", RUNNER),
        lambda a: _remote(a) and a.rollout.n_vllm_engine > 1,
        "with Trinity, remote runners reach one engine, so the others would have nothing to do",
        "set it to 1, and raise rollout.tensor_model_parallel_size instead",
        on=("trinity",),
    ),
    _not_elsewhere(
        "agent",
        "run a workflow of their own, so a ready agent of this config would never run",
        "give the runners a workflow that runs it",
    ),
    _not_elsewhere(
        "environment",
        "open their own environments, so this one would never be opened",
        "open it in the runners' workflow",
    ),
    _not_elsewhere(
        "sandbox",
        "open their own sandboxes, so this one would never be opened",
        "open it in the runners' workflow",
    ),
    _half_of_tls(
        "task_runner.remote",
        lambda a: _remote(a) and bool(a.task_runner.remote.tls_cert) != bool(a.task_runner.remote.tls_key),
    ),
    _half_of_tls("gateway", lambda a: bool(a.gateway.tls_cert) != bool(a.gateway.tls_key)),
    ContradictionRule(
        ("task_runner.process_lifetime", RUNNER),
        lambda a: a.task_runner.process_lifetime == "run" and a.task_runner.wrapper_type != "multi-processing",
        "with wrapper_type: {task_runner.wrapper_type} no workflow has a process that could stay",
        "set wrapper_type: multi-processing, or leave process_lifetime out",
    ),
    ContradictionRule(
        (RUNNER, "backbone"),
        _begun_outside,
        "{backbone} starts its episodes itself",
        "use --backbone=local, or another wrapper_type",
        on=("debug", "verl", "trinity", "prompt"),
    ),
    ContradictionRule(
        (RUNNER, "trainer_common.total_training_steps"),
        lambda a: _begun_outside(a) and a.trainer_common.total_training_steps is None,
        "episodes from outside have no end, and the run has no number of steps",
        "set trainer_common.total_training_steps",
    ),
    *(_not_outside(name) for name in ("agent", "environment", "sandbox", "user_workflow")),
    ContradictionRule(
        (RUNNER, "task_reader.curriculum.enabled", "trainer_common.val_only"),
        lambda a: _begun_outside(a) and (a.task_reader.curriculum.enabled or a.trainer_common.val_only),
        "there are no tasks to choose from, nor to validate on",
        "turn curriculum and val_only off",
    ),
    ContradictionRule(
        ("rollout.environment.url", "rollout.environment"),
        _without_one_place,
        _without_one_place,
        "name one place, for example `environment: gymnasium:CartPole-v1`",
    ),
    ContradictionRule(
        ("services",),
        _without_command,
        _without_command,
        "say what starts it: `command: bash start.sh`",
    ),
)


def _needed_gpus(a: AjetConfig) -> int:
    return a.rollout.n_vllm_engine * a.rollout.tensor_model_parallel_size


def _overlapping(key: str, when: Condition, why: str, fix: str) -> ContradictionRule:
    """What can't run ahead of the trainer, or could not be corrected for having done so."""
    return ContradictionRule(
        ("rollout.max_staleness", key),
        lambda a: a.rollout.max_staleness and when(a),
        f"max_staleness {{rollout.max_staleness}} draws episodes while a step is trained, and {why}",
        f"{fix}, or max_staleness: 0",
        on=("local",),
    )


ENGINE_RULES = (
    ContradictionRule(
        ("rollout.deterministic", "rollout.engine"),
        lambda a: a.rollout.deterministic and a.rollout.engine != "torch",
        "only the embedded engine repeats bit for bit, and rollout.engine is {rollout.engine}",
        "set rollout.engine: torch, or leave deterministic out",
    ),
    ContradictionRule(
        ("rollout.routing_replay", "rollout.engine"),
        lambda a: a.rollout.routing_replay and a.rollout.engine not in ("torch", "vllm"),
        "only the embedded engine and vLLM say which experts they chose, and rollout.engine is {rollout.engine}",
        "set rollout.engine: torch or vllm, or leave routing_replay out",
        on=("local",),
    ),
    ContradictionRule(
        ("rollout.routing_replay", "backbone"),
        lambda a: a.rollout.routing_replay,
        "verl follows recorded routes only with Megatron and VeOmni, and here {backbone} trains with FSDP",
        "leave routing_replay out, or use --backbone=local",
        on=("verl", "trinity"),
    ),
    ContradictionRule(
        ("rollout.routing_replay", "trainer_common.compile"),
        lambda a: a.rollout.routing_replay and a.trainer_common.compile,
        "compiled layers choose their experts themselves",
        "leave one of them out",
        on=("local",),
    ),
    # GPUs of vLLM and the trainer; which of them exist is known only when the run begins
    ContradictionRule(
        ("rollout.vllm.devices",),
        lambda a: a.rollout.engine == "vllm" and len(set(a.rollout.vllm.devices)) < len(a.rollout.vllm.devices),
        "{rollout.vllm.devices} names a GPU twice",
        "name each GPU once",
        on=("debug", "local", "prompt"),
    ),
    ContradictionRule(
        ("rollout.vllm.devices", "rollout.n_vllm_engine", "rollout.tensor_model_parallel_size"),
        lambda a: a.rollout.engine == "vllm" and 0 < len(a.rollout.vllm.devices) < _needed_gpus(a),
        lambda a: (
            f"{a.rollout.n_vllm_engine} engines on {a.rollout.tensor_model_parallel_size} GPUs each need "
            f"{_needed_gpus(a)}, and {a.rollout.vllm.devices} are {len(a.rollout.vllm.devices)}"
        ),
        lambda a: f"name {_needed_gpus(a)} GPUs, or lower n_vllm_engine or tensor_model_parallel_size",
        on=("debug", "local", "prompt"),
    ),
    ContradictionRule(
        ("rollout.vllm.sleep", "trainer_common.gpu"),
        lambda a: (
            a.rollout.engine == "vllm"
            and a.rollout.vllm.sleep
            and a.rollout.vllm.devices
            and a.trainer_common.gpu not in (None, *a.rollout.vllm.devices)
        ),
        "vLLM would sleep for a trainer that works elsewhere: GPU {trainer_common.gpu} is not among "
        "{rollout.vllm.devices}",
        "leave rollout.vllm.sleep out",
        on=("debug", "local", "prompt"),
    ),
    ContradictionRule(
        ("model.lora.base_bits", "model.lora.enabled"),
        lambda a: a.model.lora.base_bits is not None and not a.model.lora.enabled,
        "weights in 4 bits can't be trained: adapters beside them can, and model.lora.enabled is false",
        "set model.lora.enabled: true, or leave base_bits out",
        on=("local",),
    ),
    ContradictionRule(
        ("model.lora.base_bits", "rollout.engine"),
        lambda a: a.model.lora.base_bits is not None and a.rollout.engine != "torch",
        "{rollout.engine} has weights of its own, with more than 4 bits: it would sample another policy",
        "set rollout.engine: torch, which computes with the trainer's weights, or leave base_bits out",
        on=("local",),
    ),
    _overlapping(
        "rollout.engine",
        lambda a: a.rollout.engine == "torch",
        "the embedded engine computes with the trainer's own weights, so only one of them can work at a time",
        "set rollout.engine: vllm",
    ),
    _overlapping(
        "rollout.vllm.sleep",
        lambda a: a.rollout.engine == "vllm" and a.rollout.vllm.sleep,
        "an engine that sleeps during updates draws nothing meanwhile",
        "leave rollout.vllm.sleep out",
    ),
    _overlapping(
        "trainer_common.algorithm.rollout_correction.mode",
        lambda a: a.trainer_common.algorithm.rollout_correction.mode == "none",
        "without a correction, tokens of earlier versions would count as if the present one had sampled them",
        "set rollout_correction.mode: token_tis",
    ),
    _overlapping(
        "trainer_common.algorithm.use_kl_in_reward",
        lambda a: a.trainer_common.algorithm.use_kl_in_reward,
        "the divergence of the present version can't be read off replies of an earlier one",
        "set use_kl_in_reward: false",
    ),
    _overlapping(
        RUNNER,
        _begun_outside,
        "episodes from outside begin whenever their program likes",
        "set task_runner.outside.max_staleness, which says how old they may be",
    ),
    ContradictionRule(
        ("model.lora.enabled", "rollout.engine"),
        lambda a: a.rollout.engine == "sglang" and a.model.lora.enabled,
        "adapters can't be brought to SGLang's servers",
        "set rollout.engine: torch or vllm, or train whole weights",
        on=("local",),
    ),
)
