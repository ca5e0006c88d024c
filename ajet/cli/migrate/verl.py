"""verl's configuration (hydra YAML): a whole file, or what a run overrides. Unknown keys are passed through to verl."""

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
    Tree,
    named,
    response_length,
    same_names,
    switch,
    trackers,
    unless,
    warmup_ratio,
)
from ajet.config.old_keys import Dropped

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_COMMON, _ALGORITHM = "trainer_common", "trainer_common.algorithm"
_BY_TOKENS = Dropped("batches are split by tokens")
_CREDIT = Dropped("credit and loss are ajet's own: see ajet.trainer_common.algorithm")
_CRITIC = Dropped("there is no critic: advantages come from groups of episodes")
_JUDGE = Dropped("a reward is the workflow's, or a judge's: docs/judges.md")
_OURS = Dropped("ajet sets it for each run")
_READER = Dropped("a task reader of ajet's feeds verl: docs/tasks.md")
_BY_STD = "algorithm.norm_adv_by_std_in_grpo"
_ESTIMATOR = named(
    f"{_ALGORITHM}.adv_estimator",
    {name: name for name in ("grpo", "rloo", "reinforce_plus_plus")},
    "there is no critic, and algorithm.adv_estimator says how episodes are compared",
)
_WORKFLOW = Dropped("the workflow is the agent, and says how an episode goes: docs/workflows.md")


def _mini_batches(value: Any, given: Mapping[str, Any]) -> int:
    batch = given.get("data.train_batch_size")
    if not isinstance(batch, int) or not isinstance(value, int) or batch % value:
        raise NotOurs("trainer_common.mini_batch_num is the number of mini-batches: train_batch_size must be known")
    return batch // value


def _clip(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    found = {"low": f"{_ACTOR}.clip_ratio_low", "high": f"{_ACTOR}.clip_ratio_high"}
    open_ = {f"{_ALGORITHM}.clip_{side}": value for side, key in found.items() if given.get(key) is None}
    if not open_:
        raise NotOurs("clip_ratio_low and clip_ratio_high count")
    return open_


def _files(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    files = [value] if isinstance(value, str) else list(value)
    if len(files) != 1:
        raise NotOurs("several files: put them into one folder, and name it in huggingface_dat_repo.dataset_path")
    reader = "task_reader.huggingface_dat_repo"
    return {"task_reader.type": "huggingface_dat_repo", f"{reader}.dataset_path": files[0]}


def _lora_rank(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    if not value:
        raise NotOurs("0: all weights are trained, as by default")
    return {"model.lora.enabled": True, "model.lora.rank": value}


def _estimator(value: Any, given: Mapping[str, Any]) -> Any:
    return "drgrpo" if value == "grpo" and given.get(_BY_STD) is False else _ESTIMATOR.convert(value, given)


def _not_by_std(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    if value is not False:
        raise NotOurs("true: as grpo does by default")
    if given.get("algorithm.adv_estimator") in ("rloo", "reinforce_plus_plus"):
        raise NotOurs("it is about grpo alone")
    return {f"{_ALGORITHM}.adv_estimator": "drgrpo"}


def _kl_loss(value: Any, given: Mapping[str, Any]) -> Any:
    return True if given.get("algorithm.use_kl_in_reward") is True else value


def _resume_path(value: Any, given: Mapping[str, Any]) -> Any:
    if given.get("trainer.resume_mode") != "resume_path":
        raise NotOurs("verl reads it with resume_mode: resume_path alone")
    return value


RULES: dict[str, Rule] = {
    **same_names("data", "data", "train_batch_size", "max_prompt_length"),
    "data.max_response_length": As("", response_length),
    **same_names("data", "task_reader", "shuffle", "seed"),
    "data.train_files": As("", _files),
    "data.val_files": Dropped("huggingface_dat_repo.validation_split names a split of the same data set"),
    "data.prompt_key": Dropped("task_reader.fields names the columns"),
    "data.": _READER,
    f"{_MODEL}.path": "model.path",
    f"{_MODEL}.enable_gradient_checkpointing": f"{_COMMON}.gradient_checkpointing",
    f"{_MODEL}.lora_rank": As("", _lora_rank),
    f"{_MODEL}.lora_alpha": "model.lora.alpha",
    f"{_MODEL}.target_modules": "model.lora.target_modules",
    f"{_MODEL}.use_remove_padding": _OURS,
    f"{_MODEL}.override_config.attn_implementation": ATTENTION,
    **same_names(_ACTOR, _COMMON, "ppo_epochs", "kl_loss_coef", "kl_loss_type", "ulysses_sequence_parallel_size"),
    **same_names(_ACTOR, _COMMON, "fsdp_config.param_offload", "fsdp_config.optimizer_offload"),
    **same_names(f"{_ACTOR}.optim", f"{_COMMON}.optim", "lr", "weight_decay", "betas", "clip_grad", "min_lr_ratio"),
    f"{_ACTOR}.ppo_mini_batch_size": As(f"{_COMMON}.mini_batch_num", _mini_batches),
    f"{_ACTOR}.ppo_micro_batch_size": _BY_TOKENS,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": _BY_TOKENS,
    f"{_ACTOR}.ppo_infer_micro_batch_size_per_gpu": _BY_TOKENS,
    f"{_ACTOR}.use_dynamic_bsz": _BY_TOKENS,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": f"{_COMMON}.micro_tokens",
    f"{_ACTOR}.shuffle": _OURS,
    f"{_ACTOR}.strategy": _OURS,
    f"{_ACTOR}.entropy_coeff": f"{_ALGORITHM}.entropy_coef",
    f"{_ACTOR}.use_kl_loss": As(f"{_COMMON}.use_kl_loss", _kl_loss),
    f"{_ACTOR}.clip_ratio": As("", _clip),
    f"{_ACTOR}.clip_ratio_low": f"{_ALGORITHM}.clip_low",
    f"{_ACTOR}.clip_ratio_high": f"{_ALGORITHM}.clip_high",
    f"{_ACTOR}.clip_ratio_c": f"{_ALGORITHM}.clip_dual",
    f"{_ACTOR}.loss_agg_mode": named(
        f"{_ALGORITHM}.loss_norm",
        {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "dr_grpo"},
        "algorithm.loss_norm is token_mean, sequence_mean or dr_grpo",
    ),
    f"{_ACTOR}.loss_scale_factor": _CREDIT,
    f"{_ACTOR}.policy_loss.loss_mode": named(
        f"{_ALGORITHM}.policy_loss",
        {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"},
        "algorithm.policy_loss is ppo, gspo, cispo or sft",
    ),
    f"{_ACTOR}.policy_loss.": _CREDIT,
    f"{_ACTOR}.grad_clip": f"{_COMMON}.optim.clip_grad",
    f"{_ACTOR}.data_loader_seed": f"{_COMMON}.seed",
    f"{_ACTOR}.use_torch_compile": _OURS,
    f"{_ACTOR}.checkpoint.": _OURS,
    **dict.fromkeys(
        (f"{_ACTOR}.fsdp_config.{name}" for name in ("strategy", "dtype", "model_dtype", "use_torch_compile", "seed")),
        _OURS,
    ),
    f"{_ACTOR}.optim.lr_warmup_steps": unless(f"{_COMMON}.optim.lr_warmup_steps", -1, "-1: the ratio counts"),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": warmup_ratio(f"{_ACTOR}.optim.lr_warmup_steps"),
    f"{_ACTOR}.optim.lr_scheduler_type": SCHEDULER,
    f"{_ACTOR}.optim.warmup_style": SCHEDULER,
    f"{_ACTOR}.optim.": Dropped("the optimiser is ajet's own: see ajet.trainer_common.optim"),
    f"{_ROLLOUT}.name": named(
        "rollout.engine", {"vllm": "vllm", "sglang": "sglang"}, "rollout.engine is torch, vllm or sglang"
    ),
    **same_names(_ROLLOUT, "rollout", "temperature", "top_p", "top_k", "seed"),
    **same_names(_ROLLOUT, "rollout", "max_model_len", "max_num_seqs", "tensor_model_parallel_size"),
    **same_names(f"{_ROLLOUT}.val_kwargs", "rollout.val_kwargs", "temperature", "top_p", "top_k", "do_sample"),
    f"{_ROLLOUT}.n": "rollout.num_repeat",
    f"{_ROLLOUT}.dtype": "model.dtype",
    f"{_ROLLOUT}.val_kwargs.n": "rollout.val_kwargs.num_repeat",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": "rollout.multi_turn.max_steps",
    f"{_ROLLOUT}.multi_turn.": _WORKFLOW,
    f"{_ROLLOUT}.agent.": _WORKFLOW,
    **dict.fromkeys(
        (
            f"{_ROLLOUT}.{name}"
            for name in (
                "mode",
                "prompt_length",
                "response_length",
                "max_num_batched_tokens",
                "calculate_log_probs",
                "logprobs_mode",
                "do_sample",
                "log_prob_use_dynamic_bsz",
                "log_prob_max_token_len_per_gpu",
            )
        ),
        _OURS,
    ),
    f"{_ROLLOUT}.log_prob_micro_batch_size": _BY_TOKENS,
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": _BY_TOKENS,
    "actor_rollout_ref.ref.": Dropped("the reference is computed as the actor is"),
    "algorithm.adv_estimator": As(f"{_ALGORITHM}.adv_estimator", _estimator),
    "algorithm.gamma": Dropped("verl discounts tokens, and not with grpo or rloo; rollout.gamma discounts model calls"),
    _BY_STD: As("", _not_by_std),
    "algorithm.use_kl_in_reward": switch({f"{_COMMON}.use_kl_loss": True}, "false: as by default on verl"),
    "algorithm.filter_groups.enable": switch(
        {f"{_ALGORITHM}.zero_variance_groups": "resample"}, "false: such groups are skipped"
    ),
    "algorithm.": _CREDIT,
    "trainer.project_name": "project_name",
    "trainer.experiment_name": "experiment_name",
    "trainer.logger": As(f"{_COMMON}.logger", trackers),
    **same_names("trainer", _COMMON, "nnodes", "n_gpus_per_node", "total_epochs", "total_training_steps"),
    **same_names("trainer", _COMMON, "save_freq", "test_freq", "val_before_train", "val_only"),
    "trainer.max_actor_ckpt_to_keep": f"{_COMMON}.keep_checkpoints",
    "trainer.resume_mode": named(
        f"{_COMMON}.resume", {"auto": "auto", "disable": "never"}, "trainer_common.resume names the checkpoint itself"
    ),
    "trainer.resume_from_path": As(f"{_COMMON}.resume", _resume_path),
    "trainer.default_local_dir": Dropped(
        "checkpoints are in the experiment's folder, or trainer_common.checkpoint_base_dir"
    ),
    "trainer.device": _OURS,
    "trainer.use_v1": _OURS,
    "trainer.critic_warmup": _CRITIC,
    "trainer.max_critic_ckpt_to_keep": _CRITIC,
    "trainer.v1.sampler.": _OURS,
    "critic.": _CRITIC,
    **dict.fromkeys(
        ("reward.", "reward_model.", "reward_manager.", "custom_reward_function.", "sandbox_fusion."), _JUDGE
    ),
    "distillation.": Dropped("see ajet.trainer_common.algorithm.distillation"),
    "transfer_queue.enable": _OURS,
    "defaults": Dropped(
        "hydra's composition: verl's own defaults apply; give the composed file to keep what others say"
    ),
    "hydra.": Dropped("hydra's own; a run's folder is ajet's"),
}


def _without_targets(tree: Tree) -> Tree:
    """Drop `_target_`, which names verl's own classes for hydra."""
    return {
        key: _without_targets(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if key != "_target_"
    }


SYSTEM = System(
    "verl",
    lambda tree: "actor_rollout_ref" in tree,
    RULES,
    always={"backbone": "verl", f"{_COMMON}.use_kl_loss": False, "rollout.temperature": 1.0},
    rest="verl",
    prepare=_without_targets,
)
