"""What becomes of an episode whose reply was cut at its maximum length, and of one that nobody gave a reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ajet.backbone.metrics import episode_metrics
from ajet.config import make_config
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedCall, ScriptedEngine
from ajet.observe.progress_state import FailureTally
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.errors import EngineError
from ajet.schema.task import Task
from ajet.task_runner.runtime import Runtime
from ajet.trainer.credit import earned, summarise

FILE = """
import httpx
from ajet import Workflow, WorkflowOutput
from ajet.schema.errors import EnvironmentUnavailableError
from ajet.task_judge.base_judge import BaseJudge, Reward
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "Go"}]

class ByQuery(Workflow):
    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        return await globals()[workflow_task.task.main_query](client, tuner)

class MaxTokensReachedException(Exception):
    pass

async def ask(client):
    return await client.chat.completions.create(model="any", messages=QUESTION)

async def nothing(client, tuner):
    await ask(client)
    return WorkflowOutput()

async def given(client, tuner):
    await ask(client)
    tuner.reward(0.75)
    return WorkflowOutput()

async def number(client, tuner):
    await ask(client)
    return WorkflowOutput(reward=0.5)

async def nan(client, tuner):
    await ask(client)
    return WorkflowOutput(reward=float("nan"))

async def no_output(client, tuner):
    await ask(client)

async def own_error(client, tuner):
    await ask(client)
    raise MaxTokensReachedException("the answer is not complete")

async def given_then_error(client, tuner):
    tuner.reward(0.75)
    return await own_error(client, tuner)

async def parts(client, tuner):
    reply = await ask(client)
    tuner.reward(1.0, agent="default_agent")
    tuner.reward(0.5, call=reply.id)
    return WorkflowOutput(reward=2.0)

async def parts_then_error(client, tuner):
    await parts(client, tuner)
    raise MaxTokensReachedException("the answer is not complete")

async def bug(client, tuner):
    await ask(client)
    return {}["search"]

async def misspelt(client, tuner):
    reply = await ask(client)
    return WorkflowOutput(reward=lenght(reply))

async def no_such_method(client, tuner):
    return (await ask(client)).choices[0].text_of()

async def forgotten_await(client, tuner):
    async def score(): return 1.0
    await ask(client)
    return WorkflowOutput(reward=score())

async def service_is_down(client, tuner):
    await ask(client)
    httpx.post("http://127.0.0.1:9/score")

async def responses_stream(client, tuner):
    async with client.responses.stream(model="any", input="Go") as stream:
        async for event in stream:
            pass
        final = await stream.get_final_response()
    return WorkflowOutput(reward=float(len(final.output_text)))

class Answer(BaseModel):
    text: str

async def parsed(client, tuner):
    await client.chat.completions.parse(model="any", messages=QUESTION, response_format=Answer)
    return WorkflowOutput(reward=1.0)

async def engine_dies(client, tuner):
    await ask(client)
    await ask(client.with_options(max_retries=0))

async def environment_is_lost(client, tuner):
    await ask(client)
    raise EnvironmentUnavailableError("the service is gone")

async def three_turns(client, tuner):
    messages = list(QUESTION)
    for turn in range(3):
        reply = await client.chat.completions.create(model="any", messages=messages)
        messages += [{"role": "assistant", "content": reply.choices[0].message.content},
                     {"role": "user", "content": f"More {turn}"}]
    return WorkflowOutput(reward=[0.0, 0.5, 1.0])

class Quarter(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        assert workflow_output.metadata.get("ended_early", "length") == "length"
        return 0.25, False

class Halves(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        return Reward(parts={"one": 0.5, "other": 1.0}, weights={"other": 2.0})
"""
LONG = "one two three four five six seven eight nine ten eleven twelve"
NO_REWARD = "the workflow returned reward=None and there is no judge"
RAISING = {
    "own_error": ("MaxTokensReachedException", "the answer is not complete"),
    "bug": ("KeyError", "'search'"),
    "responses_stream": ("RuntimeError", "response.completed"),
    "parsed": ("LengthFinishReasonError", "length limit was reached"),
}


def play(
    folder: Path, what: str, *replies: str, judge: bool = False, dead_from: int = 99, turn_tokens: int = 5, **keys: Any
) -> Episode:
    """One episode of the workflow of this name. Replies longer than `turn_tokens` are cut."""
    (folder / "own.py").write_text(FILE)
    config = make_config(
        {
            "model.path": "tiny:qwen2-0.3m",
            "rollout.user_workflow": f"{folder}/own.py->ByQuery",
            "rollout.max_response_length_in_one_turn": turn_tokens,
            "rollout.episode_retries": 0,
            "rollout.compute_madness_checklist": [],
            **({"task_judge.judge_protocol": f"{folder}/own.py->Quarter"} if judge else {}),
            **{key.replace("__", "."): value for key, value in keys.items()},
        }
    )
    said = replies or (LONG,)

    def reply(call: ScriptedCall) -> str:
        if call.index >= dead_from:
            raise EngineError("gone")
        return said[min(call.index, len(said) - 1)]

    def engine(_config: Any) -> ScriptedEngine:
        return ScriptedEngine(reply, ModelSource.resolve(config.ajet.model.path).tokenizer())

    with Runtime(config, make_engine=engine) as runtime:
        return runtime.run(runtime.pool.run_episode(Task(main_query=what, task_id="t")))


def assert_untrained(episode: Episode) -> None:
    assert episode.reward is None and not episode.usable and episode.tree.trained_tokens == 0


# ---------------------------------------------------------------- the workflow returned


@pytest.mark.parametrize("reply", ["Yes", LONG])
@pytest.mark.parametrize("keys", [{}, {"failure_reward__truncated": "mask"}, {"failure_reward__otherwise": 0.0}])
def test_none_without_a_judge_is_a_named_error_however_long_the_reply(
    tmp_path: Path, reply: str, keys: dict[str, Any]
) -> None:
    episode = play(tmp_path, "nothing", reply, **keys)
    assert ("length" in episode.outcomes) == (reply == LONG)
    assert episode.status is EpisodeStatus.WORKFLOW_ERROR and episode.failure is not None
    assert episode.failure.kind == "RewardError" and episode.failure.message.startswith(NO_REWARD)
    assert_untrained(episode)


@pytest.mark.parametrize(
    ("what", "judge", "truncated", "reward"),
    [
        ("number", False, "judge", 0.5),
        ("number", True, "mask", 0.5),
        ("given", False, "judge", 0.75),
        ("nothing", True, "judge", 0.25),
        ("nothing", True, "mask", 0.25),
        ("nothing", True, -2, -2.0),
        ("number", False, -2, -2.0),
        ("number", True, "drop", None),
    ],
)
def test_what_a_cut_reply_gets_if_the_workflow_returned(
    tmp_path: Path, what: str, judge: bool, truncated: Any, reward: float | None
) -> None:
    episode = play(tmp_path, what, judge=judge, failure_reward__truncated=truncated)
    assert (episode.status, episode.reward, episode.outcomes) == (EpisodeStatus.TRUNCATED, reward, ("length",))
    assert (episode.tree.trained_tokens > 0) == (truncated not in ("mask", "drop"))
    if truncated == "drop":
        assert episode.failure is not None and episode.failure.message == "ajet.failure_reward.truncated: drop"


@pytest.mark.parametrize(
    ("truncated", "reward", "parts"), [("judge", 2.5, {"one": 0.5, "other": 1.0}), (-2, -2.0, {}), ("drop", None, {})]
)
def test_a_reward_by_rule_has_no_parts(
    tmp_path: Path, truncated: Any, reward: float | None, parts: dict[str, float]
) -> None:
    judge = {"task_judge__judge_protocol": f"{tmp_path}/own.py->Halves"}
    episode = play(tmp_path, "nothing", failure_reward__truncated=truncated, **judge)
    assert (episode.reward, episode.reward_parts) == (reward, parts)
    assert ("reward/one" in episode_metrics([episode])) == bool(parts)


@pytest.mark.parametrize("what", ["parts", "parts_then_error"])
def test_a_number_for_a_cut_reply_is_its_only_reward(tmp_path: Path, what: str) -> None:
    episode = play(tmp_path, what, failure_reward__truncated=-2)
    assert (episode.reward, earned(summarise(episode))) == (-2.0, -2.0)
    episode = play(tmp_path, "parts", failure_reward__truncated="judge")
    assert (episode.reward, earned(summarise(episode))) == (2.0, 1.5)


@pytest.mark.parametrize(("what", "kind"), [("nan", "RewardError"), ("no_output", "WorkflowFault")])
def test_an_invalid_output_is_not_put_down_to_the_cut_reply(tmp_path: Path, what: str, kind: str) -> None:
    episode = play(tmp_path, what, judge=True)
    assert episode.status is EpisodeStatus.WORKFLOW_ERROR and episode.failure is not None
    assert episode.failure.kind == kind
    assert_untrained(episode)


# ---------------------------------------------------------------- the workflow raised


@pytest.mark.parametrize("what", RAISING)
def test_whatever_is_raised_after_a_cut_reply_counts_as_cut(tmp_path: Path, what: str) -> None:
    episode = play(tmp_path, what, judge=True)
    kind, says = RAISING[what]
    assert (episode.status, episode.reward, episode.is_success) == (EpisodeStatus.TRUNCATED, 0.25, False)
    assert episode.failure is not None and episode.failure.kind == kind
    assert "cut at its maximum length" in episode.failure.in_short
    assert says in episode.failure.message and episode.tree.trained_tokens > 0
    tally = FailureTally()
    tally.add(episode)
    assert all(word in tally.lines()[0] for word in ("truncated", kind, "cut at its maximum length"))
    metrics = episode_metrics([episode])
    assert metrics[f"failure/{kind}"] == metrics["outcome/length"] == metrics["status/truncated"] == 1


@pytest.mark.slow
def test_it_counts_as_cut_in_a_process_too(tmp_path: Path) -> None:
    episode = play(tmp_path, "own_error", judge=True, task_runner__wrapper_type="multi-processing")
    assert (episode.status, episode.reward) == (EpisodeStatus.TRUNCATED, 0.25)
    assert episode.failure is not None and episode.failure.kind == "MaxTokensReachedException"


@pytest.mark.parametrize(
    ("what", "keys", "reward", "trained"),
    [
        ("own_error", {"truncated": -2}, -2.0, True),
        ("own_error", {"otherwise": -0.5}, -0.5, True),
        ("own_error", {"otherwise": -0.5, "truncated": "mask"}, -0.5, False),
        ("given_then_error", {}, 0.75, True),
        ("given_then_error", {"truncated": "mask"}, 0.75, False),
        ("own_error", {"truncated": "drop"}, None, False),
    ],
)
def test_what_it_gets_without_a_judge(
    tmp_path: Path, what: str, keys: dict[str, Any], reward: float | None, trained: bool
) -> None:
    episode = play(tmp_path, what, **{f"failure_reward__{key}": value for key, value in keys.items()})
    assert (episode.status, episode.reward) == (EpisodeStatus.TRUNCATED, reward)
    assert (episode.tree.trained_tokens > 0) == trained


@pytest.mark.parametrize("truncated", ["judge", "mask"])
def test_if_nobody_gave_a_reward_the_failure_names_the_key_and_the_fix(tmp_path: Path, truncated: str) -> None:
    episode = play(tmp_path, "bug", failure_reward__truncated=truncated)
    assert episode.status is EpisodeStatus.TRUNCATED and episode.failure is not None
    assert episode.failure.kind == "KeyError" and "'search'" in episode.failure.message
    assert "no reward: see ajet.failure_reward.truncated" in episode.failure.in_short
    assert_untrained(episode)


def test_a_masked_error_has_no_reward_of_0_either(tmp_path: Path) -> None:
    episode = play(tmp_path, "bug", "Yes", failure_reward__workflow_error="mask")
    assert episode.status is EpisodeStatus.WORKFLOW_ERROR and episode.failure is not None
    assert "no reward: see ajet.failure_reward.workflow_error" in episode.failure.message
    assert_untrained(episode)


@pytest.mark.parametrize(
    ("what", "status"),
    [("engine_dies", EpisodeStatus.ENGINE_ERROR), ("environment_is_lost", EpisodeStatus.ENVIRONMENT_ERROR)],
)
def test_a_fault_after_a_cut_reply_is_a_fault(tmp_path: Path, what: str, status: EpisodeStatus) -> None:
    episode = play(tmp_path, what, judge=True, dead_from=1)
    assert episode.status is status and episode.failure is not None
    assert "cut at" not in episode.failure.message
    assert_untrained(episode)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("misspelt", "NameError: name 'lenght' is not defined"),
        ("no_such_method", "AttributeError: 'Choice' object has no attribute 'text_of'"),
        ("forgotten_await", "write `await` before the call"),
        ("service_is_down", "http://127.0.0.1:9/score"),
    ],
)
def test_a_bug_after_a_cut_reply_is_a_bug(tmp_path: Path, what: str, says: str) -> None:
    episode = play(tmp_path, what, judge=True)
    assert episode.status is EpisodeStatus.WORKFLOW_ERROR and episode.failure is not None
    assert says in episode.failure.in_short and "cut at" not in episode.failure.message
    assert_untrained(episode)


def test_an_error_after_a_later_whole_reply_is_the_workflows(tmp_path: Path) -> None:
    episode = play(tmp_path, "bug", "Yes", judge=True)
    assert episode.status is EpisodeStatus.WORKFLOW_ERROR
    assert_untrained(episode)


# ---------------------------------------------------------------- lists of rewards


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_list_of_rewards_counts_a_cut_reply_as_a_reply(tmp_path: Path, cut: int) -> None:
    replies = ["Yes", "No", "Maybe"]
    replies[cut] = LONG
    episode = play(tmp_path, "three_turns", *replies)
    assert episode.failure is None and episode.reward == 1.5
    assert [call.reward for call in episode.tree.calls] == [0.0, 0.5, 1.0]
