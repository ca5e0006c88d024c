"""Judges that decide once episodes have ended: in groups, in threads and processes, and when they fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ajet.backbone.metrics import episode_metrics
from ajet.config import Config, make_config
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedEngine
from ajet.observe.episode_codec import decode_episode, encode_episode
from ajet.schema.episode import Episode, EpisodeGroup, EpisodeStatus
from ajet.schema.errors import ConfigError
from ajet.schema.task import Task
from ajet.task_runner.runtime import Runtime

FILE = """
from ajet import Workflow, WorkflowOutput
from ajet.task_judge.base_judge import Later, Reward
from ajet.task_judge.base_judge import GroupJudge

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        await client.chat.completions.create(messages=[{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(metadata={"number": workflow_task.task_thread_index})

class ByPlace(GroupJudge):
    def compute_reward(self, workflow_task, workflow_output):
        return Later({"seen": workflow_task.task.main_query})
    async def compute_group_rewards(self, episodes):
        assert all(len(each.calls) == 1 and each.last_reply == "well" for each in episodes)
        numbers = [each.workflow_output.metadata["number"] for each in episodes]
        return [Reward({"place": number - min(numbers), "size": len(episodes)}, {"size": 10}, notes=each.later.kept)
                for number, each in zip(numbers, episodes)]

class Raises(GroupJudge):
    def compute_group_rewards(self, episodes):
        raise OSError("the judge is out")

class TooFew(GroupJudge):
    def compute_group_rewards(self, episodes):
        return [1.0]

class Hangs(GroupJudge):
    per_episode = True
    def compute_group_rewards(self, episodes):
        import time
        while True:
            time.sleep(0.01)
"""


def config_of(tmp_path: Path, judge: str, **keys: Any) -> Config:
    (tmp_path / "own.py").write_text(FILE)
    return make_config(
        {
            "model.path": "tiny:qwen2-0.3m",
            "rollout.user_workflow": f"{tmp_path}/own.py->Agent",
            "rollout.num_repeat": 3,
            "rollout.max_env_worker": 2,
            "rollout.episode_retries": 0,
            "task_judge.judge_protocol": f"{tmp_path}/own.py->{judge}",
            **{key.replace("__", "."): value for key, value in keys.items()},
        }
    )


def run(config: Config, ended: list[Episode] | None = None) -> EpisodeGroup:
    def engine(config: Config) -> ScriptedEngine:
        return ScriptedEngine(lambda _call: "well", ModelSource.resolve(config.ajet.model.path).tokenizer())

    noted = ended if ended is not None else []
    with Runtime(config, make_engine=engine, on_episode=noted.append) as runtime:
        return runtime.run(runtime.pool.run_group(Task(main_query="Go", task_id="t")))


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["asyncio", pytest.param("multi-processing", marks=pytest.mark.slow)])
def test_a_group_is_judged_together_with_its_calls(tmp_path: Path, wrapper: str) -> None:
    ended: list[Episode] = []
    group = run(config_of(tmp_path, "ByPlace", task_runner__wrapper_type=wrapper), ended)
    assert group.complete and [episode.reward for episode in group.episodes] == [30, 31, 32]
    one = group.episodes[2]
    assert (one.reward_parts, one.reward_weights) == ({"place": 2, "size": 3}, {"place": 1, "size": 10})
    assert one.metadata == {"number": 2, "judge": {"seen": "Go"}} and one.status is EpisodeStatus.COMPLETED
    assert len(ended) == 3 and decode_episode(encode_episode(one)).reward_parts == one.reward_parts
    metrics = episode_metrics(group.episodes)
    assert (metrics["reward/place"], metrics["reward/size"], metrics["reward/mean"]) == (1, 3, 31)


@pytest.mark.parametrize(("judge", "why"), [("Raises", "the judge is out"), ("TooFew", "a list of 3 rewards")])
def test_a_judge_that_fails_gives_no_reward(tmp_path: Path, judge: str, why: str) -> None:
    group = run(config_of(tmp_path, judge))
    assert not group.complete and not group.episodes and len(group.failed) == 3
    for episode in group.failed:
        assert (episode.status, episode.reward) == (EpisodeStatus.JUDGE_ERROR, None)
        assert episode.failure is not None and why in episode.failure.message
        assert episode.tree.trained_tokens == 0 and episode.ledger.trained == 0
        episode.ledger.balance()


def test_a_judge_that_hangs_is_a_judge_error(tmp_path: Path) -> None:
    group = run(config_of(tmp_path, "Hangs", rollout__episode_timeout=0.5, rollout__num_repeat=1))
    (episode,) = group.failed
    assert episode.status is EpisodeStatus.JUDGE_ERROR and episode.failure is not None
    assert "did not decide within 0.5 s" in episode.failure.message


def test_choosing_by_reward_and_judging_groups_exclude_each_other(tmp_path: Path) -> None:
    oversample = {"rollout__enable_oversample": True, "rollout__oversample_keep": "first_ended"}
    with pytest.raises(ConfigError, match="oversample_keep: first_ended chooses episodes by their rewards"):
        run(config_of(tmp_path, "ByPlace", **oversample))


def test_what_oversampling_leaves_over_is_not_judged(tmp_path: Path) -> None:
    group = run(config_of(tmp_path, "ByPlace", rollout__enable_oversample=True))
    assert [episode.reward for episode in group.episodes] == [30, 31, 32]
    assert all(episode.reward is None for episode in group.failed)
