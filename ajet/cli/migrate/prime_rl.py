"""prime-rl's TOML for a whole run, and its environments of verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ajet.cli.migrate.rules import ATTENTION, As, NotOurs, Rule, System, Tree, named
from ajet.config.old_keys import Dropped

_COMMON, _ALGORITHM, _OPTIM = "trainer_common", "trainer_common.algorithm", "trainer_common.optim"
_MACHINES = Dropped(
    "ajet starts engine and trainer itself: backbone, trainer_common.nnodes and n_gpus_per_node say where"
)
_ASYNC = Dropped("rollout.max_staleness says how far episodes may be behind the weights")
_PARALLEL = Dropped("how a model is split over GPUs is the backbone's: docs/verl.md")


def _environment(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    if len(value) != 1:
        names = ", ".join(str(source.get("name", "?")) for source in value)
        raise NotOurs(f"{len(value)} environments ({names}): a run has one; make a file for each")
    source = dict(value[0])
    if "env" not in source:
        raise NotOurs("it names no environment")
    return {
        "task_reader.type": "ajet.task_reader.verifiers_tasks->VerifiersReader",
        "task_reader.options.env": source["env"],
        "rollout.user_workflow": "ajet.task_runner.verifiers_workflow->VerifiersWorkflow",
    }


def _tasks(value: Any, given: Mapping[str, Any]) -> int:
    episodes = int(value)
    group = int(given.get("orchestrator.group_size") or given.get("orchestrator.rollouts_per_example") or 0)
    if not group:
        raise NotOurs("data.train_batch_size is the number of tasks, and the file doesn't say group_size")
    if episodes % group:
        raise NotOurs(f"{value} episodes in groups of {group} are no whole number of tasks: set data.train_batch_size")
    return episodes // group


def _lora(key: str) -> As:
    return As("", lambda value, _: {"model.lora.enabled": True, key: value})


RULES: dict[str, Rule] = {
    "max_steps": f"{_COMMON}.total_training_steps",
    "seq_len": "rollout.max_model_len",
    "orchestrator.seq_len": "rollout.max_model_len",
    "model.name": "model.path",
    "monitors.wandb.project": As(
        "", lambda value, _: {"project_name": value, f"{_COMMON}.logger": ["console", "wandb"]}
    ),
    "monitors.wandb.name": "experiment_name",
    "wandb.project": As("", lambda value, _: {"project_name": value, f"{_COMMON}.logger": ["console", "wandb"]}),
    "wandb.name": "experiment_name",
    "orchestrator.batch_size": As("data.train_batch_size", _tasks),
    "orchestrator.group_size": "rollout.num_repeat",
    "orchestrator.rollouts_per_example": "rollout.num_repeat",
    "orchestrator.max_off_policy_steps": "rollout.max_staleness",
    "orchestrator.concurrency.max_inflight": "rollout.max_env_worker",
    "orchestrator.concurrency.": _ASYNC,
    "orchestrator.train.sampling.max_completion_tokens": "rollout.max_response_length_in_one_turn",
    "orchestrator.train.sampling.temperature": "rollout.temperature",
    "orchestrator.train.sampling.top_p": "rollout.top_p",
    "orchestrator.train.source": As("", _environment),
    "orchestrator.eval.interval": f"{_COMMON}.test_freq",
    "orchestrator.eval.sampling.temperature": "rollout.val_kwargs.temperature",
    "orchestrator.eval.": Dropped("validation uses the reader's validation tasks: task_reader.options"),
    "orchestrator.algo.type": named(
        f"{_ALGORITHM}.adv_estimator", {"grpo": "grpo", "rloo": "rloo"}, "see ajet.trainer_common.algorithm"
    ),
    "orchestrator.algo.": Dropped("see ajet.trainer_common.algorithm, with distillation and overlong"),
    "orchestrator.renderer.": Dropped(
        "prompts are rendered by the model's own chat template, and checked token by token"
    ),
    "orchestrator.model.lora.": Dropped("model.lora says it, for engine and trainer"),
    "trainer.optim.lr": f"{_OPTIM}.lr",
    "trainer.optim.weight_decay": f"{_OPTIM}.weight_decay",
    "trainer.optim.max_norm": f"{_OPTIM}.clip_grad",
    "trainer.optim.type": Dropped("the optimiser is AdamW"),
    "trainer.model.lora": As("model.lora.enabled", lambda _value, _given: True),
    "trainer.model.lora.rank": _lora("model.lora.rank"),
    "trainer.model.lora.alpha": _lora("model.lora.alpha"),
    "trainer.model.lora.dropout": _lora("model.lora.dropout"),
    "trainer.model.lora.target_modules": _lora("model.lora.target_modules"),
    "trainer.model.seq_len": Dropped("rollout.max_model_len says it, for engine and trainer"),
    "trainer.model.attn": ATTENTION,
    "trainer.model.ac.": As("", lambda _value, _given: {f"{_COMMON}.gradient_checkpointing": True}),
    "trainer.model.": _PARALLEL,
    "ckpt.interval": f"{_COMMON}.save_freq",
    "ckpt.keep": f"{_COMMON}.keep_checkpoints",
    "ckpt.keep_last": f"{_COMMON}.keep_checkpoints",
    "inference.vllm.gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "inference.vllm.tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "inference.vllm.max_model_len": "rollout.max_model_len",
    "inference.vllm.data_parallel_size": "rollout.n_vllm_engine",
    "inference.vllm.tool_call_parser": Dropped("tool calls are read as the model's family writes them"),
    "inference.vllm.enable_lora": Dropped("model.lora says it, for engine and trainer"),
    "deployment.": _MACHINES,
    "slurm.": _MACHINES,
    "weight_broadcast.": _MACHINES,
    "resume.": Dropped("trainer_common.resume: the same command goes on from the last checkpoint"),
    "env_vars.": Dropped("set them where you start ajet"),
    "log.": Dropped("run.log holds everything"),
}


def _without_empty(tree: Tree) -> Tree:
    """Drop tables that hold nothing: they switch a part on, which here is always there, but for LoRA."""
    kept = {name: _without_empty(value) if isinstance(value, dict) else value for name, value in tree.items()}
    return {name: value for name, value in kept.items() if value != {} or name == "lora"}


SYSTEM = System(
    "prime-rl",
    lambda tree: "orchestrator" in tree,
    RULES,
    always={"rollout.engine": "vllm", "rollout.temperature": 1.0, f"{_COMMON}.use_kl_loss": False},
    prepare=_without_empty,
)
