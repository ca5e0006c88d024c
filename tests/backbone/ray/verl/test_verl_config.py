"""Each of our keys that means something to verl reaches it; the rest is refused or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ajet.backbone.plan import training_steps
from ajet.backbone.ray.facts import Machine, RunFacts
from ajet.backbone.ray.verl.config import check_honoured, pass_through, verl_settings
from ajet.config import make_config
from ajet.schema.errors import ConfigError

GPU = Machine("cuda", flash_attention=True)
CPU = Machine("cpu", flash_attention=False)
FACTS = RunFacts("/models/m", Path("/exp/checkpoints"), total_steps=9)


def settings(
    overrides: dict[str, Any] | None = None, machine: Machine = GPU, run: RunFacts = FACTS, **blocks: Any
) -> dict[str, Any]:
    return verl_settings(make_config({"rollout.engine": "vllm", **(overrides or {})}, **blocks), run, machine)


ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
COMMON = "trainer_common"


@pytest.mark.parametrize(
    ("ours", "value", "theirs", "arrives"),
    [
        ("rollout.temperature", 0.7, f"{ROLLOUT}.temperature", 0.7),
        ("rollout.top_p", 0.8, f"{ROLLOUT}.top_p", 0.8),
        ("rollout.top_k", 40, f"{ROLLOUT}.top_k", 40),
        ("rollout.max_num_seqs", 77, f"{ROLLOUT}.max_num_seqs", 77),
        ("rollout.max_model_len", 4321, f"{ROLLOUT}.max_model_len", 4321),
        ("rollout.tensor_model_parallel_size", 2, f"{ROLLOUT}.tensor_model_parallel_size", 2),
        ("rollout.num_repeat", 6, f"{ROLLOUT}.n", 6),
        ("rollout.seed", 9, f"{ROLLOUT}.seed", 9),
        ("rollout.engine", "vllm", f"{ROLLOUT}.name", "vllm"),
        ("rollout.engine", "sglang", f"{ROLLOUT}.name", "sglang"),
        ("rollout.name", "sglang", f"{ROLLOUT}.name", "vllm"),
        ("rollout.val_kwargs", {"do_sample": True, "temperature": 0.3}, f"{ROLLOUT}.val_kwargs.temperature", 0.3),
        ("rollout.val_kwargs", {"do_sample": False, "temperature": 0.3}, f"{ROLLOUT}.val_kwargs.temperature", 0.0),
        ("trainer_common.val_pass_n", 8, f"{ROLLOUT}.val_kwargs.temperature", 0.9),
        ("trainer_common.val_pass_n", 8, f"{ROLLOUT}.val_kwargs.n", 8),
        ("trainer_common.val_pass_n", 8, f"{ROLLOUT}.val_kwargs.do_sample", True),
        ("rollout.val_kwargs", {"top_p": 0.5}, f"{ROLLOUT}.val_kwargs.top_p", 0.5),
        ("rollout.val_kwargs", {"top_k": 5}, f"{ROLLOUT}.val_kwargs.top_k", 5),
        ("rollout.val_kwargs", {"num_repeat": 3}, f"{ROLLOUT}.val_kwargs.n", 3),
        ("data.train_batch_size", 12, "data.train_batch_size", 12),
        ("data.max_prompt_length", 111, "data.max_prompt_length", 111),
        ("data.max_response_length", 222, "data.max_response_length", 222),
        ("data.max_prompt_length", 111, f"{ROLLOUT}.prompt_length", 111),
        ("data.max_response_length", 222, f"{ROLLOUT}.response_length", 222),
        ("model.dtype", "float16", f"{ROLLOUT}.dtype", "float16"),
        ("model.dtype", "float16", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", "fp16"),
        ("model.attn", "sdpa", f"{MODEL}.override_config.attn_implementation", "sdpa"),
        ("model.attn", "sdpa", f"{MODEL}.use_remove_padding", False),
        ("model.lora", {"enabled": True, "rank": 8}, f"{MODEL}.lora_rank", 8),
        ("model.lora", {"enabled": True, "alpha": 64}, f"{MODEL}.lora_alpha", 64),
        ("model.lora", {"enabled": True, "target_modules": ["q_proj"]}, f"{MODEL}.target_modules", ["q_proj"]),
        ("model.lora", {"enabled": True}, f"{MODEL}.target_modules", "all-linear"),
        (f"{COMMON}.optim.clip_grad", 0.4, f"{ACTOR}.optim.clip_grad", 0.4),
        (f"{COMMON}.optim.clip_grad", 0.4, f"{ACTOR}.grad_clip", 0.4),
        (f"{COMMON}.ppo_epochs", 3, f"{ACTOR}.ppo_epochs", 3),
        (f"{COMMON}.use_kl_loss", False, f"{ACTOR}.use_kl_loss", False),
        (f"{COMMON}.kl_loss_coef", 0.0, f"{ACTOR}.use_kl_loss", False),
        (f"{COMMON}.algorithm.entropy_coef", 0.01, f"{ACTOR}.entropy_coeff", 0.01),
        (f"{COMMON}.mini_batch_num", 4, f"{ACTOR}.ppo_mini_batch_size", 8),
        (f"{COMMON}.micro_tokens", 40000, f"{ACTOR}.ppo_max_token_len_per_gpu", 40000),
        (f"{COMMON}.fsdp_config.param_offload", True, f"{ACTOR}.fsdp_config.param_offload", True),
        (f"{COMMON}.fsdp_config.optimizer_offload", True, f"{ACTOR}.fsdp_config.optimizer_offload", True),
        (f"{COMMON}.ulysses_sequence_parallel_size", 2, f"{ACTOR}.ulysses_sequence_parallel_size", 2),
        (f"{COMMON}.nnodes", 3, "trainer.nnodes", 3),
        (f"{COMMON}.nnodes", 3, f"{ROLLOUT}.agent.num_workers", 3),
        (f"{COMMON}.n_gpus_per_node", 4, "trainer.n_gpus_per_node", 4),
        (f"{COMMON}.save_freq", 7, "trainer.save_freq", 7),
        (f"{COMMON}.test_freq", 5, "trainer.test_freq", 5),
        (f"{COMMON}.test_freq", 0, "trainer.test_freq", -1),
        (f"{COMMON}.val_before_train", True, "trainer.val_before_train", True),
        (f"{COMMON}.val_only", True, "trainer.val_only", True),
        (f"{COMMON}.keep_checkpoints", 3, "trainer.max_actor_ckpt_to_keep", 3),
        (f"{COMMON}.keep_checkpoints", 1, "trainer.max_actor_ckpt_to_keep", 2),  # a kill must leave one
        (f"{COMMON}.seed", 5, "data.seed", 5),
        ("project_name", "p", "trainer.project_name", "p"),
        ("experiment_name", "e", "trainer.experiment_name", "e"),
    ],
)
def test_a_key_arrives(ours: str, value: Any, theirs: str, arrives: Any) -> None:
    assert settings({ours: value})[theirs] == arrives


def test_saving_only_at_the_end_is_saving_at_the_last_step() -> None:
    got = settings({f"{COMMON}.save_freq": -1})
    assert got["trainer.save_freq"] == got["trainer.total_training_steps"] == FACTS.total_steps


def test_epochs_become_steps() -> None:
    config = make_config({f"{COMMON}.total_epochs": 3, "data.train_batch_size": 10})
    assert training_steps(config, 64) == 20  # 192 tasks in batches of 10, the last one full
    assert training_steps(make_config({f"{COMMON}.total_training_steps": 9}), 64) == 9


def test_resuming() -> None:
    assert settings()["trainer.resume_mode"] == "auto"
    assert settings({f"{COMMON}.resume": "never"})["trainer.resume_mode"] == "disable"
    got = settings({f"{COMMON}.resume": "/c/global_step_3"})
    assert (got["trainer.resume_mode"], got["trainer.resume_from_path"]) == ("resume_path", "/c/global_step_3")


@pytest.mark.parametrize(("step", "lacks"), [(None, False), (4, False), (4, True), (9, True)])
def test_a_run_that_goes_on_begins_with_a_validation_that_was_cut_off(step: int | None, lacks: bool) -> None:
    facts = RunFacts("m", Path("c"), total_steps=9, resumed_step=step, lacks_validation=lacks)
    got = settings({f"{COMMON}.val_before_train": True}, run=facts)
    assert got["trainer.val_before_train"] is (step is None or lacks)
    assert got["trainer.val_only"] is (step == 9), "no step is left"


def test_without_validation_tasks_nothing_is_validated() -> None:
    got = settings(
        {f"{COMMON}.val_before_train": True, f"{COMMON}.test_freq": 3}, run=RunFacts("m", Path("c"), 4, validates=False)
    )
    assert (got["trainer.test_freq"], got["trainer.val_before_train"]) == (-1, False)


def test_on_the_cpu_the_embedded_engine_serves() -> None:
    got = settings(machine=CPU)
    assert got[f"{ROLLOUT}.name"] == "ajet_torch"
    assert got["trainer.device"] == "cpu"
    assert got["trainer.n_gpus_per_node"] == 1
    assert got[f"{MODEL}.use_remove_padding"] is False
    assert got[f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"] == "fp32"
    assert "embedded engine" in str(check_honoured(make_config({"rollout.engine": "vllm"}), CPU))


def test_a_gpu_without_flash_attention_pads() -> None:
    got = settings(machine=Machine("cuda", flash_attention=False))
    assert got[f"{MODEL}.override_config.attn_implementation"] == "sdpa"
    assert got[f"{MODEL}.use_remove_padding"] is False


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({f"{COMMON}.algorithm.use_kl_in_reward": True}, "use_kl_in_reward"),
        ({"verl.actor_rollout_ref.actor.optim.lr": 0.5}, "actor_rollout_ref.actor.optim.lr"),
        ({"verl.algorithm.gamma": 0.5}, "algorithm.gamma"),
        ({"verl.actor_rollout_ref.rollout.temperature": 0.5}, "ajet.rollout"),
        ({"verl.actor_rollout_ref.rollout.val_kwargs.top_p": 0.5}, "rollout.val_kwargs.top_p"),
        ({"verl.actor_rollout_ref.rollout.n": 8}, r"rollout\.n:"),
        ({"verl.trainer.resume_mode": "disable"}, "resume_mode"),
        ({"verl.trainer.logger": ["wandb"]}, "logger"),
        ({f"{COMMON}.optim.state_bits": 8}, "state_bits"),
        ({"model.lora": {"enabled": True, "base_bits": 4}}, r"lora\.base_bits"),
        ({f"{COMMON}.kl_reference_sync": 5}, "kl_reference_sync"),
        ({f"{COMMON}.algorithm.distillation": {"teacher": "big"}}, "distillation"),
        ({f"{COMMON}.kl_adaptive": {"target": 0.1}}, "kl_adaptive"),
        ({f"{COMMON}.early_stop.patience": 3}, r"early_stop\.patience"),
        ({f"{COMMON}.early_stop.target": 0.9}, r"early_stop\.target"),
        ({f"{COMMON}.algorithm.replay.groups": 2}, r"replay\.groups"),
        ({"task_reader.curriculum.enabled": True}, r"curriculum\.enabled"),
        ({"rollout.temperature": 1e-6}, "rollout.temperature"),
        ({"rollout.engine": "remote"}, "rollout.engine"),
        ({"rollout.temperature": 0.0}, "rollout.temperature"),
        ({"model.lora": {"enabled": True, "dropout": 0.1}}, "lora.dropout"),
        ({"verl.trainer.v1.trainer_mode": "separate_async"}, "parameter_sync_step"),
    ],
)
def test_what_verl_cannot_honour_is_refused_by_name(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings(overrides)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({f"{COMMON}.algorithm.policy_loss": "gspo"}, "policy_loss"),
        ({f"{COMMON}.algorithm.zero_variance_groups": "resample"}, "zero_variance_groups"),
    ],
)
def test_what_verl_honours_in_part_is_named(overrides: dict[str, Any], named: str) -> None:
    notes = check_honoured(make_config(overrides), GPU)
    assert any(named in note.key and not note.refused for note in notes)


def test_every_norm_goes_with_kl_and_entropy() -> None:
    for norm in ("token_mean", "sequence_mean", "dr_grpo"):
        overrides = {f"{COMMON}.algorithm.loss_norm": norm, f"{COMMON}.algorithm.entropy_coef": 0.1}
        assert not [note for note in check_honoured(make_config(overrides), GPU) if note.refused]


def test_the_users_own_verl_keys_pass_through_and_win() -> None:
    got = settings(
        {"verl": {"actor_rollout_ref": {"actor": {"optim": {"optimizer": "AdamW8bit"}}}}},
        trainer={"balance_batch": False},
        verl={"critic": {"ppo_epochs": 2}},
        actor_rollout_ref={"rollout": {"gpu_memory_utilization": 0.3, "nnodes": 2}},
    )
    assert got[f"{ACTOR}.optim.optimizer"] == "AdamW8bit"
    assert got["trainer.balance_batch"] is False
    assert got["critic.ppo_epochs"] == 2
    assert got[f"{ROLLOUT}.gpu_memory_utilization"] == 0.3


def test_a_users_own_block_is_not_verls() -> None:
    assert pass_through(make_config(frozen_lake={"size": 4})) == {}


def test_asynchronous_training_gets_the_asynchronous_sampler() -> None:
    assert settings()["trainer.v1.sampler.custom_sampler.name"] == "EpisodeSampler"
    got = settings(trainer={"v1": {"trainer_mode": "colocate_async"}})
    assert got["trainer.v1.sampler.custom_sampler.name"] == "AsyncEpisodeSampler"
