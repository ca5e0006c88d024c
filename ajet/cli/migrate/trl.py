"""TRL's YAML for `trl grpo` and scripts with `TrlParser`: the fields of GRPOConfig, ModelConfig and ScriptArguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ajet.cli.migrate.rules import (
    ATTENTION,
    SCHEDULER,
    As,
    NotOurs,
    Rule,
    System,
    named,
    response_length,
    switch,
    trackers,
    warmup_ratio,
)
from ajet.config.old_keys import Dropped

_COMMON, _ALGORITHM, _OPTIM = "trainer_common", "trainer_common.algorithm", "trainer_common.optim"
_SOURCE = "task_reader.huggingface_dat_repo"
_BY_TOKENS = Dropped("batches are split by tokens")
_JUDGE = Dropped("a reward is the workflow's, or a judge's; several are parts of a composite: docs/judges.md")
_LOSS = Dropped("ajet has no such term in its loss")
_DEVICE, _STEPS, _PARTS = "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"
_WHOLE = "generation_batch_size"
TRL_GENERATIONS, TRL_DEVICE, TRL_SYNC = 8, 8, 512
"""Replies to a prompt and to a device, and steps between two copies of the reference, where a file doesn't say."""


def _tasks(_: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is sampled at once: `generation_batch_size`, or a device's replies times the steps that share them."""
    repeat = given.get("num_generations") or TRL_GENERATIONS
    steps = int(given.get(_PARTS) or given.get(_STEPS) or 1)
    replies = int(given.get(_WHOLE) or int(given.get(_DEVICE) or TRL_DEVICE) * steps)
    if replies % int(repeat):
        raise NotOurs(
            f"{replies} replies in groups of {repeat} are no whole number of tasks: set data.train_batch_size"
        )
    unsaid = {} if given.get("num_generations") else {"rollout.num_repeat": TRL_GENERATIONS}
    return {"data.train_batch_size": replies // int(repeat), **unsaid}


def _unless_said_by(*others: str) -> As:
    """The batch, if no key that says more of it is given."""

    def convert(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        if found := [key for key in others if given.get(key)]:
            updates = "; trainer_common.mini_batch_num is the updates to a batch" if found[0] == _WHOLE else ""
            raise NotOurs(f"data.train_batch_size is the number of tasks, which {found[0]} says{updates}")
        return _tasks(value, given)

    return As("", convert)


def _parts(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """A batch that is sampled at once is trained on in several updates."""
    parts, rest = divmod(int(value), int(given.get(_STEPS) or 1))
    if rest:
        raise NotOurs(f"it is no multiple of {_STEPS}: trainer_common.mini_batch_num is the updates to a batch")
    return {f"{_COMMON}.mini_batch_num": parts, **({} if given.get(_DEVICE) else _tasks(value, given))}


def _sync(value: Any, given: Mapping[str, Any]) -> int:
    if not value:
        raise NotOurs("false: as by default")
    steps: int = _batches(given.get("ref_model_sync_steps") or TRL_SYNC, given)
    return steps


def _warmup(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """A share of all steps below 1, else their number."""
    if 0 < value < 1:
        return {f"{_OPTIM}.lr_warmup_ratio": value}
    return {f"{_OPTIM}.lr_warmup_steps": _batches(value, given) if value else 0}


def _beta(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_COMMON}.use_kl_loss": value > 0, **({f"{_COMMON}.kl_loss_coef": value} if value else {})}


def _data_set(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"task_reader.type": "huggingface_dat_repo", f"{_SOURCE}.dataset_path": value}


def _every(key: str, strategy: str) -> As:
    def convert(value: Any, given: Mapping[str, Any]) -> Any:
        if given.get(strategy) in ("no", False):
            return -1
        if given.get(strategy) == "epoch" or not isinstance(value, int):
            raise NotOurs(f"{key} counts steps")
        return _batches(value, given)

    return As(key, convert)


def _batches(value: Any, given: Mapping[str, Any]) -> Any:
    """Its steps are updates. All those of a batch, `num_iterations` times its parts, are a step of ours."""
    if value == -1:
        raise NotOurs("-1: the epochs count")
    parts = max(1, int(given.get(_PARTS) or 1) // int(given.get(_STEPS) or 1))
    return max(1, value // (int(given.get("num_iterations") or 1) * parts))


def _betas(place: int) -> As:
    def convert(value: Any, given: Mapping[str, Any]) -> list[Any]:
        betas = [given.get("adam_beta1") or 0.9, given.get("adam_beta2") or 0.999]
        betas[place] = value
        return betas

    return As(f"{_OPTIM}.betas", convert)


RULES: dict[str, Rule] = {
    "model_name_or_path": "model.path",
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": ATTENTION,
    "use_peft": "model.lora.enabled",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_target_modules": "model.lora.target_modules",
    "load_in_4bit": switch({"model.lora.base_bits": 4}),
    "dataset_name": As("", _data_set),
    "dataset_config": f"{_SOURCE}.dataset_name",
    "dataset_train_split": f"{_SOURCE}.training_split",
    "dataset_test_split": f"{_SOURCE}.validation_split",
    "reward_model_name_or_path": _JUDGE,
    "reward_funcs": _JUDGE,
    "reward_weights": _JUDGE,
    _DEVICE: _unless_said_by(_WHOLE),
    _STEPS: _unless_said_by(_WHOLE, _DEVICE, _PARTS),
    _WHOLE: As("", _tasks),
    _PARTS: As("", _parts),
    "per_device_eval_batch_size": _BY_TOKENS,
    "num_generations": "rollout.num_repeat",
    "num_generations_eval": "rollout.val_kwargs.num_repeat",
    "max_prompt_length": "data.max_prompt_length",
    "max_completion_length": As("", response_length),
    "shuffle_dataset": "task_reader.shuffle",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": As("rollout.top_k", lambda value, _: value or -1),
    "max_tool_calling_iterations": "rollout.multi_turn.max_steps",
    "use_vllm": switch({"rollout.engine": "vllm"}),
    "vllm_gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "vllm_max_model_length": "rollout.max_model_len",
    "vllm_tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "vllm_enable_sleep_mode": "rollout.vllm.sleep",
    "vllm_mode": Dropped("ajet starts vLLM's servers itself"),
    "vllm_importance_sampling_cap": f"{_ALGORITHM}.rollout_correction.cap",
    "vllm_importance_sampling_clip_max": f"{_ALGORITHM}.rollout_correction.cap",
    "beta": As("", _beta),
    "num_iterations": f"{_COMMON}.ppo_epochs",
    "epsilon": f"{_ALGORITHM}.clip_low",
    "epsilon_high": f"{_ALGORITHM}.clip_high",
    "delta": f"{_ALGORITHM}.clip_dual",
    "entropy_coef": f"{_ALGORITHM}.entropy_coef",
    "importance_sampling_level": named(
        f"{_ALGORITHM}.policy_loss", {"token": "ppo", "sequence": "gspo"}, "algorithm.policy_loss says what there is"
    ),
    "loss_type": named(
        f"{_ALGORITHM}.loss_norm",
        {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "dr_grpo"},
        "algorithm.loss_norm is token_mean, sequence_mean or dr_grpo; algorithm.policy_loss has cispo",
    ),
    "scale_rewards": named(
        f"{_ALGORITHM}.adv_estimator",
        {"group": "grpo", True: "grpo", "none": "drgrpo", False: "drgrpo"},
        "algorithm.adv_estimator compares the episodes of a group",
    ),
    "mask_truncated_completions": switch({"failure_reward.truncated": "mask"}),
    "sync_ref_model": As(f"{_COMMON}.kl_reference_sync", _sync),
    "ref_model_sync_steps": Dropped("trainer_common.kl_reference_sync says it, if sync_ref_model is true"),
    "top_entropy_quantile": _LOSS,
    "router_aux_loss_coef": _LOSS,
    "learning_rate": f"{_OPTIM}.lr",
    "weight_decay": f"{_OPTIM}.weight_decay",
    "adam_beta1": _betas(0),
    "adam_beta2": _betas(1),
    "adam_epsilon": f"{_OPTIM}.eps",
    "max_grad_norm": f"{_OPTIM}.clip_grad",
    "warmup_steps": As("", _warmup),
    "warmup_ratio": warmup_ratio("warmup_steps"),
    "lr_scheduler_type": SCHEDULER,
    "num_train_epochs": As(f"{_COMMON}.total_epochs", lambda value, _: max(1, round(value))),
    "max_steps": As(f"{_COMMON}.total_training_steps", _batches),
    "save_steps": _every(f"{_COMMON}.save_freq", "save_strategy"),
    "save_strategy": Dropped("trainer_common.save_freq counts steps"),
    "save_total_limit": f"{_COMMON}.keep_checkpoints",
    "eval_steps": _every(f"{_COMMON}.test_freq", "eval_strategy"),
    "eval_strategy": Dropped("trainer_common.test_freq counts steps"),
    "eval_on_start": f"{_COMMON}.val_before_train",
    "gradient_checkpointing": f"{_COMMON}.gradient_checkpointing",
    "gradient_checkpointing_kwargs.": Dropped("trainer_common.gradient_checkpointing is on, off or auto"),
    "bf16": switch({"model.dtype": "bfloat16"}),
    "fp16": switch({"model.dtype": "float16"}),
    "seed": f"{_COMMON}.seed",
    "run_name": "experiment_name",
    "output_dir": Dropped("--exp-dir names the folder of all experiments; a run's own is named after it"),
    "report_to": As(f"{_COMMON}.logger", trackers),
    "logging_steps": Dropped("each step is logged"),
    "logging_first_step": Dropped("each step is logged"),
    "log_completions": Dropped("each episode is recorded: `ajet view`"),
    "remove_unused_columns": Dropped("a task keeps all its columns as metadata"),
    "push_to_hub": Dropped("`ajet export weights` writes a folder that can be uploaded"),
    "hub_model_id": Dropped("`ajet export weights` writes a folder that can be uploaded"),
}

SYSTEM = System(
    "TRL",
    lambda tree: "model_name_or_path" in tree or {"learning_rate", "num_generations"} & tree.keys() != set(),
    RULES,
    always={f"{_COMMON}.use_kl_loss": False, "rollout.temperature": 1.0},
)
