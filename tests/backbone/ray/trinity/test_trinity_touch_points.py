"""Each private place of Trinity that we touch is as we know it. When Trinity changes, this says where."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from support.ray_runs import enter_trinity_on_cpu, installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed("trinity-rft"), reason="needs Trinity: run `make test-trinity`"),
]
if installed("trinity-rft"):
    enter_trinity_on_cpu()


def source(thing: Any) -> str:
    return inspect.getsource(inspect.unwrap(thing))


def test_the_version() -> None:
    assert version("trinity-rft").startswith("0.6.")


def test_a_workflow_that_repeats_by_itself_gets_the_whole_group() -> None:
    from trinity.explorer.scheduler import Scheduler
    from trinity.explorer.workflow_runner import WorkflowRunner

    assert "workflow_instance.set_repeat_times(repeat_times, run_id_base)" in source(WorkflowRunner._run_task)
    assert "self.max_repeat_times is None" in inspect.getsource(Scheduler)


def test_advantages_that_need_groups_are_computed_after_all_operators() -> None:
    from trinity.buffer.pipelines.experience_pipeline import ExperiencePipeline

    text = source(ExperiencePipeline._set_algorithm_operators)
    assert "advantage_fn_cls(**algorithm_config.advantage_fn_args)" in text
    assert "self.operators.append(operator)" in text


def test_registries_take_import_paths() -> None:
    from trinity.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE, ENTROPY_LOSS_FN, POLICY_LOSS_FN, SAMPLE_STRATEGY
    from trinity.buffer.reader import READER
    from trinity.utils.monitor import MONITOR

    from ajet.backbone.ray.trinity import config as names

    for registry, name in (
        (ADVANTAGE_FN, names.CREDIT),
        (ALGORITHM_TYPE, names.ALGORITHM),
        (ALGORITHM_TYPE, names.ALGORITHM_WITHOUT_REFERENCE),
        (POLICY_LOSS_FN, names.LOSS),
        (POLICY_LOSS_FN, names.LOSS_WITHOUT_REFERENCE),
        (ENTROPY_LOSS_FN, names.ENTROPY),
        (SAMPLE_STRATEGY, names.SAMPLING),
        (READER, names.READER),
        (MONITOR, names.MONITOR),
    ):
        found = registry.get(name)
        assert f"{found.__module__}.{found.__name__}" == name


def test_trainer_and_explorer_have_the_steps_that_ours_extend() -> None:
    import trinity.trainer.trainer as module
    from trinity.explorer.explorer import Explorer

    assert "get_trainer_wrapper(config)" in source(module.Trainer.__init__)
    for name in ("train_step", "_sample_data", "sync_weight", "save_checkpoint"):
        assert inspect.iscoroutinefunction(getattr(module.Trainer, name))
    for name in ("explore_step", "sync_weight", "eval", "_finish_eval_step", "_finish_explore_step"):
        assert inspect.iscoroutinefunction(getattr(Explorer, name))
    text = source(Explorer.__init__)
    for attribute in ("model_allocator", "_inflight_train_steps", "pending_eval_tasks", "model_version"):
        assert f"self.{attribute}" in text


def test_the_gpu_trainer_reads_the_mini_batch_at_each_step() -> None:
    import trinity

    text = (Path(trinity.__file__).parent / "trainer/verl/trainer.py").read_text()
    assert "ppo_mini_batch_size = self.config.actor.ppo_mini_batch_size" in text


def test_every_key_that_we_set_is_one_that_trinity_has() -> None:
    from ajet.backbone.ray.facts import Machine, RunFacts
    from ajet.backbone.ray.trinity.config import CPU_GPUS, compose_trinity_config, trinity_settings
    from ajet.config import make_config
    from ajet.schema.errors import ConfigError

    facts = RunFacts("/m", Path("/c"), 13, payload="run", scratch=Path("/s"))
    config = make_config({"rollout.engine": "vllm", "model.lora": {"enabled": True}})
    assert compose_trinity_config(trinity_settings(config, facts, Machine("cuda"))).trainer.total_steps == 13
    cpu = Machine("cpu", flash_attention=False, logical_gpus=CPU_GPUS)
    assert compose_trinity_config(trinity_settings(make_config({}), facts, cpu)).cluster.gpu_per_node == 2
    with pytest.raises(ConfigError, match=r"did you mean synchronizer\.sync_interval"):
        compose_trinity_config({"synchronizer.sync_intervall": 1})
    with pytest.raises(ConfigError, match=r"Environment variable 'NO_SUCH_VARIABLE' not found.*full_key: model"):
        compose_trinity_config({"model.custom_chat_template": "${oc.env:NO_SUCH_VARIABLE}"})


def test_keys_that_trinity_does_not_have_are_told_together() -> None:
    from ajet.backbone.ray.trinity import planned_notes
    from ajet.config import make_config

    wrong = {"trainer": {"total_stepz": 2}, "explorer": {"rollout_modell": {"seed": 3}, "max_timeout": 9}}
    one, other = [str(note) for note in planned_notes(make_config({}, trinity=wrong)) if note.refused]
    assert one.startswith("ajet.trinity.trainer.total_stepz: ") and "did you mean trainer.total_steps?" in one
    assert other.startswith("ajet.trinity.explorer.rollout_modell.seed: ") and "explorer.rollout_model.seed?" in other
    listed = {"data_processor": {"experience_pipeline": {"operators": [{"name": "mine"}]}}}
    looked_up = {"model": {"custom_chat_template": "${oc.env:NO_SUCH_VARIABLE}"}}  # perhaps on another machine
    for known in (listed, looked_up):
        assert not [note for note in planned_notes(make_config({}, trinity=known)) if note.refused]
