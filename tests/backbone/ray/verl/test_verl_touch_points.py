"""Each private place of verl that we touch is as we know it. When verl changes, this says where. Needs verl."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
from ray_runs import installed

os.environ.setdefault("VERL_PLATFORM", "cpu")  # read when verl is imported
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed("verl"), reason="needs verl: run `make test-verl`"),
]


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_the_version() -> None:
    assert version("verl").startswith("0.9.")


def test_rollout_adapters_are_a_dict_by_name_and_mode() -> None:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    assert ("vllm", "async") in _ROLLOUT_REGISTRY


def test_process_group_and_offload_are_looked_up_where_they_are_replaced() -> None:
    import verl.utils.distributed as distributed
    import verl.workers.engine.fsdp.transformer_impl as fsdp

    assert parameters(distributed.initialize_global_process_group_ray) == {"timeout_second", "backend"}
    assert hasattr(fsdp, "CPUOffloadPolicy")
    assert hasattr(fsdp, "FSDPEngineWithLMHead")


def test_the_replay_buffers_have_the_steps_that_the_sampler_extends() -> None:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

    for buffer in (ReplayBuffer, ReplayBufferAsync):
        assert parameters(buffer.sample) >= {"global_steps", "partition_id", "batch_size"}
        assert "self._materialize_batch(" in inspect.getsource(inspect.unwrap(buffer.sample))
    assert parameters(ReplayBuffer._materialize_batch) == {
        "self", "partition_id", "selected_prompt_uids", "partition_snapshot",
    }  # fmt: skip
    assert parameters(ReplayBuffer._wait_for_next_poll) == {"self", "partition_id", "last_debug_time"}


def test_the_trainer_reads_the_mini_batch_at_each_step() -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    for step in (PPOTrainer._update_actor, PPOTrainer._get_required_batch_multiple):
        source = inspect.getsource(step)
        assert "self.config.actor_rollout_ref.actor.ppo_mini_batch_size" in source
        assert "self.config.actor_rollout_ref.rollout.n" in source


def test_trainer_and_manager_share_one_configuration() -> None:
    import verl.trainer.main_ppo

    source = inspect.getsource(verl.trainer.main_ppo)
    assert "trainer_cls(config=config)" in source
    assert "self.config = config" in source


def test_the_manager_is_built_as_ours_expects() -> None:
    from verl.experimental.agent_loop import AgentLoopManager

    source = inspect.getsource(AgentLoopManager._init_agent_loop_workers)
    assert "self.agent_loop_workers_class.options" in source


def test_losses_and_estimator_are_known_by_name() -> None:
    import verl  # noqa: F401 - loads the plugin
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    for name in ("ppo", "gspo", "cispo", "sft"):
        assert get_policy_loss_fn(f"ajet_{name}") is not None
    assert get_adv_estimator_fn("ajet_credit") is not None


def test_a_process_of_verls_own_loads_the_plugin() -> None:
    code = "import verl, sys; sys.exit('ajet.backbone.ray.verl.plugin' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_every_key_that_we_set_is_one_that_verl_has() -> None:
    from pathlib import Path

    from ajet.backbone.ray.mapping import Machine, RunFacts
    from ajet.backbone.ray.verl.config import compose_verl_config, verl_settings
    from ajet.config import make_config
    from ajet.schema.errors import ConfigError

    config = make_config({"rollout.engine": "vllm", "model.lora": {"enabled": True}})
    for machine in (Machine("cuda"), Machine("cpu")):
        settings = verl_settings(config, RunFacts("/m", Path("/c"), 13), machine)
        composed = compose_verl_config(settings, given=settings)
        assert composed.trainer.total_training_steps == 13
        assert composed.actor_rollout_ref.actor.policy_loss.loss_mode == "ajet_ppo"
    with pytest.raises(ConfigError, match=r"did you mean actor_rollout_ref\.actor\.optim\.lr"):
        compose_verl_config({}, given={"actor_rollout_ref.actor.optim.lrr": 1})
