"""Contradictions in which engine samples, where it runs, and how far ahead of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ajet.config.problems import Contradiction
from ajet.config.root import AjetConfig


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
    if vllm.mode == "in_process":
        for wrong, given in ((key, vllm.devices), ("rollout.n_vllm_engine", rollout.n_vllm_engine > 1)):
            if given:
                yield Contradiction(
                    (wrong, "rollout.vllm.mode"),
                    "vLLM in the process is one engine on the GPUs that the process can see",
                    f"leave {wrong} out, or set rollout.vllm.mode: server",
                )
        return
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
