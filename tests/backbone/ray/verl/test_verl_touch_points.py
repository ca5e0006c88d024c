"""Each private place of verl that we touch is as we know it. When verl changes, this says where. Needs verl."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from ajet.schema.errors import UserError
from support.ray_runs import installed

os.environ.setdefault("AJET_PLATFORM", "cpu")  # read when verl is imported
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
    assert parameters(ReplayBuffer._clear_groups) == {"self", "partition_id", "uids"}
    assert "self._clear_groups(partition_id, evicted_uids)" in inspect.getsource(ReplayBuffer._evict_terminal_groups)


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


def test_a_reply_that_was_stopped_says_which_weights_sampled_which_token() -> None:
    """verl's client goes on with it, here after two stops; what counts is verl's code, the server is played."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    from ajet.backbone.ray.verl.client import VersionsClient, with_versions
    from ajet.backbone.ray.verl.config import VERSIONS

    pieces = [([5, 6], "aborted", 3), ([], "aborted", 3), ([7], "aborted", 4), ([8, 2], "completed", 5)]
    asked: list[dict[str, Any]] = []

    class Generate:
        async def remote(self, **request: Any) -> TokenOutput:
            asked.append(request)
            ids, reason, version = pieces[len(asked) - 1]
            fields = {"global_steps": version}
            return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason=reason, extra_fields=fields)

    class Played(VersionsClient):
        async def _acquire_server(self, request_id: str, **_: Any) -> tuple[str, Any]:
            return "server", SimpleNamespace(generate=Generate())

        def _release_server(self, server_id: str, request_id: str | None = None) -> None: ...

    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
    reply = Played(config).generate("r", prompt_ids=[1], sampling_params={"max_tokens": 9, "seed": 8})
    output = asyncio.run(reply)
    assert output.token_ids == [5, 6, 7, 8, 2]
    assert output.extra_fields[VERSIONS] == [(0, 3), (2, 4), (3, 5)]
    assert [request["prompt_ids"] for request in asked] == [[1], [1, 5, 6], [1, 5, 6], [1, 5, 6, 7]]
    seeds = [request["sampling_params"]["seed"] for request in asked]
    assert seeds == [8, 8 ^ 2, 8 ^ 2, 8 ^ 3], "what goes on draws new random numbers"
    assert type(with_versions(FullyAsyncLLMServerClient(config))) is VersionsClient
    assert type(with_versions(LLMServerClient(config))) is LLMServerClient


def test_our_engine_and_estimator_are_known_by_name() -> None:
    import verl  # noqa: F401 - loads the plugin
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.workers.engine import EngineRegistry

    from ajet.backbone.ray.verl.config import ADVANTAGE_ESTIMATOR, ENGINE
    from ajet.backbone.ray.verl.train_engine import AjetTrainEngine, hand_through

    assert get_adv_estimator_fn(ADVANTAGE_ESTIMATOR) is hand_through
    assert EngineRegistry.get_engine_cls("language_model", ENGINE) is AjetTrainEngine


def test_on_gpus_our_engine_comes_before_verls() -> None:
    code = (
        "from verl.workers.engine import EngineRegistry\n"
        "engines = EngineRegistry._engines['language_model']['fsdp2']\n"
        "print(sorted(str(key) for key, engine in engines.items() if engine.__name__ == 'AjetTrainEngine'))"
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("AJET_PLATFORM", "VERL_PLATFORM")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert "[\"('cuda', 'amd')\", \"('cuda', 'nvidia')\"]" in done.stdout, done.stderr


def test_the_steps_that_our_engine_replaces() -> None:
    from verl.workers.engine.base import BaseEngine
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
    from verl.workers.engine_workers import TrainingWorker

    text = inspect.getsource(BaseEngine.train_batch)
    assert "self.forward_backward_batch(data, loss_function" in text
    assert "self.optimizer_step()" in text
    text = inspect.getsource(FSDPEngine)
    assert "self._build_optimizer(module)" in text
    assert "self._build_lr_scheduler(optimizer)" in text
    assert "return self._merged_lora_per_tensor_param(), None" in text
    assert "update_lr_scheduler=batch_idx == total_num_iterations - 1" in inspect.getsource(
        inspect.unwrap(TrainingWorker.train_mini_batch)
    )


def test_of_a_resumed_run_only_the_newest_checkpoints_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's manager forgets those that were there before."""
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from ajet.backbone.ray.verl.train_engine import AjetTrainEngine

    for age, name in enumerate(("global_step_12", "global_step_9", "global_step_3", "global_step_best")):
        (tmp_path / name / "actor").mkdir(parents=True)
        os.utime(tmp_path / name / "actor", (1000 - age, 1000 - age))
    (tmp_path / "global_step_15" / "actor").mkdir(parents=True)
    engine: Any = object.__new__(AjetTrainEngine)
    engine._ours = True
    engine.checkpoint_manager = manager = object.__new__(BaseCheckpointManager)
    monkeypatch.setattr(FSDPEngine, "save_checkpoint", lambda self, path, keep: manager.register_checkpoint(path, keep))
    engine.save_checkpoint(str(tmp_path / "global_step_15" / "actor"), 2)
    left = {path.parent.name for path in tmp_path.glob("*/actor")}
    assert left == {"global_step_12", "global_step_15", "global_step_best"}


def test_rows_stay_where_they_were_put() -> None:
    """verl cuts a batch by rank and then by update; its sorting is our rows' own method, and it adds none."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from ajet.backbone.ray.verl.sampler import PlacedRows

    assert "batch.reorder(" in inspect.getsource(PPOTrainer._balance_batch)
    rows = PlacedRows(keys=["a", "b"], tags=[{}, {}], partition_id="train")
    rows.reorder([1, 0])
    assert rows.keys == ["a", "b"]


def test_a_process_of_verls_own_loads_the_plugin() -> None:
    code = "import verl, sys; sys.exit('ajet.backbone.ray.verl.plugin' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_every_key_that_we_set_is_one_that_verl_has() -> None:
    from pathlib import Path

    from ajet.backbone.ray.facts import Machine, RunFacts
    from ajet.backbone.ray.verl.config import compose_verl_config, verl_settings
    from ajet.config import make_config
    from ajet.schema.errors import ConfigError

    config = make_config({"rollout.engine": "vllm", "model.lora": {"enabled": True}})
    for machine in (Machine("cuda"), Machine("cpu")):
        settings = verl_settings(config, RunFacts("/m", Path("/c"), 13), machine)
        composed = compose_verl_config(settings, given=settings)
        assert composed.trainer.total_training_steps == 13
        assert composed.actor_rollout_ref.actor.policy_loss.loss_mode == "ajet"
        empty = {"trainer": {}, "actor_rollout_ref.model.override_config": {}}
        assert compose_verl_config(settings | empty, given=empty) == composed, "empty groups set nothing"
    with pytest.raises(ConfigError, match=r"did you mean actor_rollout_ref\.actor\.optim\.lr"):
        compose_verl_config({}, given={"actor_rollout_ref.actor.optim.lrr": 1})
    for key, value in (("trainer", None), ("actor_rollout_ref.actor", 3)):
        with pytest.raises(ConfigError, match=f"verl's '{key}' is a group of keys, not (empty|3)"):
            compose_verl_config({}, given={key: value})
    for value in (None, "${critic.optim}"):
        assert compose_verl_config({}, given={"algorithm.rollout_correction": value})


def test_keys_that_verl_does_not_have_are_told_before_verl_is_imported() -> None:
    code = """
import sys
from ajet.backbone.ray.verl import planned_notes
from ajet.config import make_config

wrong = {"actor_rollout_ref": {"actor": {"ppo_epoch": 2}}, "trainer": {"balance_bach": True, "balance_batch": True}}
print(*(str(note) for note in planned_notes(make_config({}, verl=wrong)) if note.refused), sep="\\n")
assert not {"verl", "torch", "ray"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    one, other = done.stdout.splitlines()
    assert one.startswith("ajet.verl.actor_rollout_ref.actor.ppo_epoch: verl has no key")
    assert "did you mean actor_rollout_ref.actor.ppo_epochs?" in one
    assert other.startswith("ajet.verl.trainer.balance_bach: ") and "did you mean trainer.balance_batch?" in other


def test_a_cluster_where_another_run_of_verl_is_at_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from ajet.backbone.ray.verl.driver import QUEUE, look_at_cluster

    queues: list[dict[str, str]] = []

    def get_actor(name: str, namespace: str) -> None:
        if {"name": name, "namespace": namespace} not in queues:
            raise ValueError("no such actor")

    ended: list[bool] = []
    monkeypatch.setattr(ray, "init", lambda address: None)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    monkeypatch.setattr(ray, "get_actor", get_actor)
    look_at_cluster("10.0.0.1:6379", nodes=0)
    made = inspect.getsource(import_module("transfer_queue.interface"))
    assert f'name="{QUEUE["name"]}", namespace="{QUEUE["namespace"]}"' in made
    queues.append(QUEUE)
    with pytest.raises(UserError, match=r"another run of verl .* 10\.0\.0\.1:6379.* one queue of rows"):
        look_at_cluster("10.0.0.1:6379", nodes=0)
    assert len(ended) == 2
