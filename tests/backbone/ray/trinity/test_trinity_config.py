"""Each of our keys that means something to Trinity reaches it; the rest is refused or named. Needs no Trinity."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ajet.backbone.ray.facts import Machine, RunFacts
from ajet.backbone.ray.trinity import TrinityAdapter
from ajet.backbone.ray.trinity.config import (
    CPU_GPUS,
    CREDIT,
    LOSS,
    LOSS_WITHOUT_REFERENCE,
    READER,
    check_honoured,
    max_staleness,
    run_mode,
    trainer_replicas,
    trinity_settings,
)
from ajet.config import make_config
from ajet.schema.errors import ConfigError

GPU = Machine("cuda", flash_attention=True)
CPU = Machine("cpu", flash_attention=False, logical_gpus=CPU_GPUS)
FACTS = RunFacts("/models/m", Path("/exp/checkpoints"), 13, payload="run", scratch=Path("/scratch"))
MODEL = "explorer.rollout_model"
COMMON = "trainer_common"


def settings(overrides: dict[str, Any] | None = None, machine: Machine = GPU, **blocks: Any) -> dict[str, Any]:
    return trinity_settings(make_config({"rollout.engine": "vllm", **(overrides or {})}, **blocks), FACTS, machine)


@pytest.mark.parametrize(
    ("ours", "value", "theirs", "arrives"),
    [
        ("rollout.temperature", 0.7, "model.temperature", 0.7),
        ("rollout.top_p", 0.8, "model.top_p", 0.8),
        ("rollout.top_k", 40, "model.top_k", 40),
        ("rollout.max_model_len", 4321, "model.max_model_len", 4321),
        ("rollout.num_repeat", 6, "algorithm.repeat_times", 6),
        ("rollout.seed", 9, f"{MODEL}.seed", 9),
        ("rollout.engine", "sglang", f"{MODEL}.engine_type", "sglang"),
        ("rollout.n_vllm_engine", 3, f"{MODEL}.engine_num", 3),
        ("rollout.tensor_model_parallel_size", 2, f"{MODEL}.tensor_parallel_size", 2),
        ("data.train_batch_size", 12, "buffer.batch_size", 12),
        ("data.max_prompt_length", 111, "model.max_prompt_tokens", 111),
        ("model.dtype", "float16", f"{MODEL}.dtype", "float16"),
        (f"{COMMON}.optim.lr", 3e-4, "algorithm.optimizer.lr", 3e-4),
        (f"{COMMON}.optim.weight_decay", 0.2, "algorithm.optimizer.weight_decay", 0.2),
        (f"{COMMON}.optim.clip_grad", 0.5, "trainer.grad_clip", 0.5),
        (f"{COMMON}.optim.lr_warmup_steps", 4, "algorithm.optimizer.lr_warmup_steps", 4),
        (f"{COMMON}.optim.lr_scheduler_type", "cosine", "algorithm.optimizer.lr_scheduler_type", "cosine"),
        (f"{COMMON}.save_freq", 7, "trainer.save_interval", 7),
        (f"{COMMON}.save_freq", -1, "trainer.save_interval", 0),
        (f"{COMMON}.test_freq", 6, "explorer.eval_interval", 6),
        (f"{COMMON}.test_freq", 20, "explorer.eval_interval", 13),
        (f"{COMMON}.test_freq", -1, "explorer.eval_interval", 14),
        (f"{COMMON}.val_before_train", True, "explorer.eval_on_startup", True),
        (f"{COMMON}.keep_checkpoints", 5, "trainer.max_checkpoints_to_keep", 5),
        (f"{COMMON}.nnodes", 2, "cluster.node_num", 2),
        (f"{COMMON}.n_gpus_per_node", 4, "cluster.gpu_per_node", 4),
        (f"{COMMON}.fsdp_config.param_offload", True, "trainer.param_offload", True),
        (f"{COMMON}.fsdp_config.optimizer_offload", True, "trainer.optimizer_offload", True),
        (f"{COMMON}.optim.lr", None, "algorithm.optimizer.lr", 1e-6),
        (f"{COMMON}.optim.min_lr_ratio", 0.2, "algorithm.optimizer.min_lr_ratio", 0.2),
        (f"{COMMON}.use_kl_loss", True, "algorithm.policy_loss_fn", LOSS),
        (f"{COMMON}.use_kl_loss", False, "algorithm.policy_loss_fn", LOSS_WITHOUT_REFERENCE),
        (f"{COMMON}.algorithm.entropy_coef", 0.1, "algorithm.entropy_loss_fn_args", {"entropy_coef": 0.1, "scale": 7}),
        (f"{COMMON}.mini_batch_num", 2, "trainer.balance_batch", False),
        (f"{COMMON}.micro_tokens", 99_999, "trainer.max_token_len_per_gpu", 99_999),
        (f"{COMMON}.resume", "never", "continue_from_checkpoint", False),
    ],
)
def test_a_key_reaches_trinity(ours: str, value: Any, theirs: str, arrives: Any) -> None:
    assert settings({ours: value})[theirs] == arrives


def test_loss_credit_and_sampling_are_ours() -> None:
    given = settings({f"{COMMON}.mini_batch_num": 3, f"{COMMON}.algorithm.loss_norm": "dr_grpo"})
    assert given["algorithm.policy_loss_fn_args"] == {"payload": "run", "scale": 7}
    assert given["algorithm.kl_loss_fn"] == "none"
    sampling = given["algorithm.sample_strategy_args"]
    assert (sampling["ranks"], sampling["updates"], sampling["norm"]) == (7, 3, "dr_grpo")
    assert given["algorithm.advantage_fn"] == CREDIT
    assert given["buffer.explorer_input.tasksets"][0]["storage_type"] == READER


@pytest.mark.parametrize(
    "key",
    ["algorithm.kl_loss_fn", "algorithm.policy_loss_fn_args.kind", "model.temperature", "monitor.monitor_type", "name"],
)
def test_what_is_ours_is_not_trinitys_to_change(key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        settings({f"trinity.{key}": "x"})


def test_an_optimiser_key_of_trinitys_arrives_where_its_optimiser_is_used() -> None:
    key = "algorithm.optimizer.optimizer_type"
    assert settings({f"trinity.{key}": "sgd"})[key] == "sgd"
    with pytest.raises(ConfigError, match=r"algorithm\.optimizer\.optimizer_type"):
        trinity_settings(make_config({f"trinity.{key}": "sgd"}), FACTS, CPU)


def test_on_the_cpu_weights_go_through_memory() -> None:
    given = settings(machine=CPU)
    assert given["synchronizer.sync_method"] == "memory"
    assert (given["cluster.node_num"], given["cluster.gpu_per_node"]) == (1, 2)
    assert settings()["synchronizer.sync_method"] == "nccl"


def test_explorer_and_trainer_apart_meet_on_disk() -> None:
    for mode in ("explore", "train"):
        given = settings(trinity={"mode": mode})
        assert given["buffer.trainer_input.experience_buffer"]["storage_type"] == "sql"
        assert given["synchronizer.sync_method"] == "checkpoint"
        assert given["mode"] == mode
    with pytest.raises(ConfigError, match="both, explore, train"):
        settings(trinity={"mode": "trian"})
    assert run_mode(make_config({})) == "both"


def test_what_the_user_wrote_for_trinity_wins() -> None:
    given = settings(
        {"trinity": {"synchronizer": {"sync_interval": 4}}},
        trinity={"synchronizer": {"sync_interval": 3, "sync_offset": 2}},
    )
    assert (given["synchronizer.sync_interval"], given["synchronizer.sync_offset"]) == (4, 2)
    assert settings(trinity={"trainer": {}, "explorer": {"rollout_model": {}}}) == settings(), "empty groups"


def test_staleness_is_bounded_when_nothing_else_waits() -> None:
    style = {"synchronizer": {"sync_style": "fully_async"}}
    assert max_staleness(make_config({}, trinity=style)) == 1
    assert max_staleness(make_config({})) is None
    given = {**style, "algorithm": {"sample_strategy_args": {"max_staleness": 3}}}
    assert max_staleness(make_config({}, trinity=given)) == 3
    assert settings(trinity=style)["buffer.explorer_input.eval_tasksets"] == []
    configs = [make_config({}, trinity=given) for given in ({}, style, {"mode": "train"})]
    assert list(map(TrinityAdapter().validates, configs)) == [True, False, False]
    for wrong in (-1, "soon"):  # the explorer would wait for ever
        with pytest.raises(ConfigError, match=f"max_staleness: {wrong!r} is no whole number"):
            settings(trinity={"algorithm": {"sample_strategy_args": {"max_staleness": wrong}}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{COMMON}.algorithm.use_kl_in_reward", True),
        (f"{COMMON}.resume", "/somewhere/step_3"),
        (f"{COMMON}.optim.lr_scheduler_type", "linear"),
        (f"{COMMON}.optim.eps", 1e-5),
        (f"{COMMON}.optim.state_bits", 8),
        (f"{COMMON}.ppo_epochs", 2),
        (f"{COMMON}.kl_reference_sync", 5),
        (f"{COMMON}.algorithm.distillation.teacher", "big"),
        (f"{COMMON}.kl_adaptive.target", 0.1),
        (f"{COMMON}.early_stop.patience", 3),
        (f"{COMMON}.early_stop.target", 0.9),
        (f"{COMMON}.algorithm.replay.groups", 2),
        ("task_reader.curriculum.enabled", True),
        (f"{COMMON}.algorithm.rollout_correction.mode", "masked"),
        ("rollout.engine", "scripted"),
        ("rollout.temperature", 0.0),
        (f"{COMMON}.val_only", True),
    ],
)
def test_what_trinity_can_not_honour_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        settings({key: value})


def test_what_is_honoured_in_part_is_named() -> None:
    notes = {note.key for note in check_honoured(make_config(), CPU)}
    assert "ajet.rollout.engine" in notes


def test_engines_leave_gpus_to_the_trainer() -> None:
    assert trainer_replicas(make_config({"rollout.n_vllm_engine": 2}), GPU) == 6
    assert trainer_replicas(make_config({f"{COMMON}.n_gpus_per_node": 1}), GPU) == 1
    with pytest.raises(ConfigError, match="takes all 8 GPUs"):
        trainer_replicas(make_config({"rollout.n_vllm_engine": 8}), GPU)
    with pytest.raises(ConfigError, match="does not divide the 7"):
        trainer_replicas(make_config({f"{COMMON}.ulysses_sequence_parallel_size": 2}), GPU)


def test_the_backbone_is_imported_without_trinity_or_torch() -> None:
    code = (
        "import sys, ajet.backbone.ray.trinity\n"
        "heavy = {'torch', 'ray', 'trinity', 'transformers', 'vllm'} & set(sys.modules)\n"
        "sys.exit(' '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
