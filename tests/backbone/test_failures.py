"""What a run says about dropped episodes, missing scores and unlike engines, and when a failing judge ends it."""

from __future__ import annotations

import pytest

from ajet.backbone.failures import FailureWatch, GapWatch, warn_of
from ajet.config import Config
from ajet.schema.episode import ROOT, Call, CallTree, Episode, EpisodeStatus, Failure, Ledger
from ajet.schema.errors import ConfigError, JudgeFailedError, ServiceFailedError


def episodes(status: EpisodeStatus, count: int, failure: Failure | None = None) -> list[Episode]:
    reward = None if failure else 1.0
    call = Call(name="call-0", agent="a", target="a", turn=0, prompt_run=ROOT, prompt_tokens=0)
    tree = CallTree(calls=[call])
    return [Episode("e", "t", status, tree, Ledger(), reward=reward, failure=failure) for _ in range(count)]


def well(count: int) -> list[Episode]:
    return episodes(EpisodeStatus.COMPLETED, count)


CONFIG = Config.model_validate({"ajet": {"task_judge": {"max_error_share": 0.2}}})
UNJUDGED = Failure("OSError", "no answers", "Traceback: line 3")


def test_a_judge_may_fail_now_and_then() -> None:
    watch = FailureWatch(CONFIG)
    watch.look_at("step 1", [*well(8), *episodes(EpisodeStatus.JUDGE_ERROR, 2, UNJUDGED)])
    watch.look_at("step 2", [])
    with pytest.raises(JudgeFailedError, match=r"(?s)in 3 of 10 episodes of step 3.*was OSError: no answers$"):
        watch.look_at("step 3", [*well(7), *episodes(EpisodeStatus.JUDGE_ERROR, 3, UNJUDGED)])


REFUSED = Failure("APIConnectionError", "Connection error. (http://127.0.0.1:9/v1/chat/completions)")


def test_an_environment_or_a_helper_that_is_down_ends_the_run_after_its_first_step() -> None:
    config = Config.model_validate({"ajet": {"helper": {"base_url": "http://127.0.0.1:9/v1", "model": "m"}}})
    gone = episodes(EpisodeStatus.ENVIRONMENT_ERROR, 4, Failure("EnvironmentUnavailableError", "connection refused"))
    FailureWatch(config).look_at("step 1", [*well(1), *gone])
    with pytest.raises(
        ServiceFailedError, match=r"environment failed in all 4 episodes of step 1.*connection refused$"
    ):
        FailureWatch(config).look_at("step 1", gone)
    unhelped = episodes(EpisodeStatus.WORKFLOW_ERROR, 4, REFUSED)
    with pytest.raises(ServiceFailedError, match=r"helper model failed in all 4 .* ajet\.helper .*Connection error"):
        FailureWatch(config).look_at("step 1", unhelped)
    FailureWatch(CONFIG).look_at("step 1", unhelped)


def test_several_steps_without_a_usable_episode_end_the_run() -> None:
    watch = FailureWatch(CONFIG)
    failed = episodes(EpisodeStatus.WORKFLOW_ERROR, 2, Failure("KeyError", "'search'"))
    for step in range(1, 10):
        everyone = [*failed, *well(1)] if step == 5 else failed
        watch.look_at_step(step, everyone)
        watch.look_at(f"the validation after step {step}", failed)  # its episodes are another sum
    with pytest.raises(
        ConfigError, match=r"^5 steps in a row .* 20 of 21 .* failed:\n    20 × workflow_error, KeyError: 'se"
    ):
        watch.look_at_step(10, failed)


def test_many_drops_are_said_once_with_the_key(caplog: pytest.LogCaptureFixture) -> None:
    watch = FailureWatch(CONFIG)
    few = episodes(EpisodeStatus.WORKFLOW_ERROR, 1, Failure("KeyError", "x"))
    watch.look_at("step 1", [*well(9), *few])
    assert not caplog.records
    many = [*few, *episodes(EpisodeStatus.TIMEOUT, 2, Failure("EpisodeTimeout", "late"))]
    for step in (2, 3):
        watch.look_at(f"step {step}", [*well(7), *many])
    (said,) = caplog.records
    assert "3 of 10 episodes of step 2" in said.getMessage()
    assert "so means and training leave them out" in said.getMessage(), "true of a validation, too"
    assert "(2) after EpisodeTimeout. " in said.getMessage() and "ajet.failure_reward.timeout: -1" in said.getMessage()


def test_a_validation_without_a_score_is_said_in_words(caplog: pytest.LogCaptureFixture) -> None:
    warn_of(3, {"val/failed_share": 0.5, "val/episode/count": 8.0, "episode/without_calls": 0.0})
    assert not caplog.records
    warn_of(3, {"val/failed_share": 1.0, "val/episode/count": 8.0})
    (said,) = caplog.records
    assert "the validation after step 3 has no score, because all of its 8 episodes failed" in said.getMessage()


def test_a_gap_that_rounding_does_not_explain_is_said_once_with_its_likely_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = GapWatch("float32")
    watch.look_at(1, {"loss/sampler_gap_max": 0.002})
    watch.look_at(2, {"loss/sampler_gap_max": 0.9, "train/staleness/max": 1.0})
    watch.look_at(3, {})
    assert not caplog.records
    watch.look_at(4, {"loss/sampler_gap_max": 1.1, "train/staleness/max": 0.0})
    watch.look_at(5, {"loss/sampler_gap_max": 1.1})
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("step 4:") and "1.1 (loss/sampler_gap_max)" in told and "other weights" in told
    caplog.clear()
    GapWatch("bfloat16").look_at(1, {"loss/sampler_gap_max": 0.3})
    assert not caplog.records, "rounding may explain that"
    GapWatch("float32", "longrope").look_at(1, {"train/sampler_gap": 0.5})
    assert "rotary embedding (longrope)" in caplog.text and "train/sampler_gap" in caplog.text
