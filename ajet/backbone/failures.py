"""What a run says and does about steps that went wrong.

`FailureWatch` looks at failed episodes: a judge that keeps failing ends the run, and so do an environment or a helper
model that is down, a workflow that never asks the tuned model, and several steps without a usable episode; dropped
episodes are allowed, but they select what is trained, which the log says. `GapWatch` warns of a trainer that doesn't
compute what the engine sampled.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.backbone.metrics import played, without_calls
from ajet.observe.progress_state import FailureTally
from ajet.schema.episode import Episode, EpisodeGroup, EpisodeStatus
from ajet.schema.errors import ConfigError, JudgeFailedError, NoModelCallError, ServiceFailedError
from ajet.task_judge.helper import HelperError
from ajet.task_runner.endings import dropped_by
from ajet.task_runner.environments import load_workflow

if TYPE_CHECKING:
    from ajet.config import Config

log = logging.getLogger("ajet.backbone")

OWN_CLIENT = re.compile(
    r"\b(Async)?((Azure)?OpenAI|Anthropic)\(|\bChat(OpenAI|Anthropic)\(|\bOpenAI\w*(Model|Client|Provider)\("
    r"|\bLiteLlm\(|\bLiteLLMModel\(|\bInferenceClient\(|\ba?completion\("
)
"""What makes a client that asks a provider, unless it is given the tuner's endpoint."""
ALL_CLIENTS = "tuner.as_raw_openai_sdk_client(), as_langchain_model() or as_agentscope_model()"
ENDPOINT = "tuner.as_oai_baseurl_apikey"
ADVICE = (
    f", or any client with the base_url, api_key and model of {ENDPOINT}(). If the workflow does so already, its calls "
    "fail and it hides their errors: let it raise them. Or its library answers from a cache: switch that off (DSPy: "
    "cache=False)"
)
OUTSIDE = "the base_url and api_key that POST /v1/episodes returns"


class ModelCallWatch:
    """One per run."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._recorded = False

    def look_at(self, when: str, episodes: Sequence[Episode]) -> None:
        """Raise `NoModelCallError` if episodes ended well, and none so far has a recorded model call.

        Where all failed before their first call, the failure is the cause. `when`: the step or validation, as a noun.
        """
        self._recorded |= any(episode.tree.calls or episode.outcomes for episode in episodes)
        silent = sum(map(without_calls, episodes))
        if silent and not self._recorded:
            raise NoModelCallError(
                f"no model call was recorded: {silent} of the {len(episodes)} episodes of {when} ended without an "
                f"error, and none asked the tuned model. Use the tuner's client: {advice(self._config)}"
            )


def advice(config: Config) -> str:
    """What to write instead; and in which line, if the workflow's file has one that makes a client."""
    where = config.ajet.task_runner.wrapper_type
    if where == "outside":
        return OUTSIDE
    if where == "remote" or config.ajet.rollout.agent is not None:
        return ALL_CLIENTS + ADVICE
    workflow = load_workflow(config)
    file = getattr(sys.modules.get(workflow.__module__), "__file__", None)
    text = "" if file is None else Path(file).read_text(encoding="utf-8", errors="replace")  # None: of a notebook
    lines = [] if ENDPOINT in text else text.splitlines()  # most likely its client is given the endpoint
    for number, line in enumerate(lines, 1):
        if OWN_CLIENT.search(line):
            return f"in {file}:{number}, instead of `{line.strip()}`, write {ALL_CLIENTS}{ADVICE}"
    return ALL_CLIENTS + ADVICE


MANY_DROPPED = 0.1
"""Share of a step's episodes above which the log says that dropping them selects what is trained."""


def warn_of(step: int, metrics: Mapping[str, float]) -> None:
    """Say what the metrics of a step, or of the validation after it, mean: episodes that asked no model, and a
    validation without a score."""
    validation = f"the validation after step {step}" if step else "the validation"
    for prefix, when in (("", f"step {step}" if step else "this run"), ("val/", validation)):
        if silent := metrics.get(f"{prefix}episode/without_calls"):
            log.warning(
                "%d of %d episodes of %s made no model call that was recorded, so nothing of them can be trained. If "
                "their agent asked a model, it did so without the tuner's client, with another episode's, or a cache "
                "of its library answered",
                *(silent, metrics[f"{prefix}episode/count"], when),
            )
    if metrics.get("val/failed_share") == 1:
        then = ": its checkpoint can't be the best one, and early_stop passes over it" if step else ""
        failed = metrics["val/episode/count"]
        log.warning("%s has no score, because all of its %d episodes failed%s", validation, failed, then)


BARREN_STEPS = 5
"""A run ends after this many steps in a row without a usable episode: something is wrong that training won't fix."""


class FailureWatch:
    """One per run."""

    def __init__(self, config: Config, *, trains: bool = True) -> None:
        """`trains`: whether it is the model that is tuned. Then dropped episodes select what is trained, and episodes
        without a model call teach nothing."""
        self._max_error_share = config.ajet.task_judge.max_error_share
        self._helper = config.ajet.helper.base_url
        self._calls = ModelCallWatch(config) if trains else None
        self._warned = not trains
        self._barren = 0
        self.tally = FailureTally()
        """Counts the episodes of training steps. Those of validations are another sum."""

    def look_at_step(self, step: int, episodes: Sequence[Episode]) -> None:
        """`look_at` for a training step. Raise `ConfigError` if it is one of several in a row without a usable episode,
        with the run's failures so far."""
        for episode in episodes:
            self.tally.add(episode)
        self.look_at(f"step {step}", episodes)
        self._barren = 0 if any(episode.usable for episode in episodes) else self._barren + 1
        if self._barren < BARREN_STEPS:
            return
        # cancelled episodes are a consequence: the rest of a group that can't become complete is stopped
        told = played(episodes) or episodes
        failures = [episode.failure.in_short for episode in told if episode.failure is not None]
        tally = self.tally
        why = "".join(f"\n    {line}" for line in tally.lines()) or f" {failures[-1] if failures else 'none given'}"
        raise ConfigError(
            f"{self._barren} steps in a row had no usable episode. {tally.failures} of {tally.episodes} episodes "
            f"failed:{why}\n    `--backbone=debug` runs two of them and shows each turn and traceback"
        )

    def look_at_groups(self, when: str, groups: Sequence[EpisodeGroup]) -> None:
        """`look_at` for all episodes of these groups."""
        self.look_at(when, [episode for group in groups for episode in (*group.episodes, *group.failed)])

    def look_at(self, when: str, episodes: Sequence[Episode]) -> None:
        """Raise `JudgeFailedError` if the judge failed too often, `ServiceFailedError` if the environment or the helper
        failed every time, and `NoModelCallError` if no model call was recorded; warn once if many episodes were
        dropped.

        `when`: the step or validation, as a noun.
        """
        counted = played(episodes)
        self._end_without_services(when, counted)
        self._warn_of_drops(when, counted)
        if self._calls is not None:
            self._calls.look_at(when, counted)
        unjudged = [episode for episode in counted if episode.status is EpisodeStatus.JUDGE_ERROR]
        if not unjudged or len(unjudged) <= self._max_error_share * len(counted):
            return
        raise JudgeFailedError(
            f"the judge failed in {len(unjudged)} of {len(counted)} episodes of {when}, more than "
            f"ajet.task_judge.max_error_share ({self._max_error_share:g}) allows. Their groups can't be trained, and "
            f"what is left is no fair sample. The traceback is in run.log. The last failure was {_last(unjudged)}"
        )

    def _end_without_services(self, when: str, counted: Sequence[Episode]) -> None:
        """A service that is down fails every episode, and training can't repair it: each further step only waits."""
        for down, what, key in (
            (lambda one: one.status is EpisodeStatus.ENVIRONMENT_ERROR, "the environment", "ajet.rollout.environment"),
            (self._without_helper, "the helper model", "ajet.helper"),
        ):
            if counted and all(map(down, counted)):
                raise ServiceFailedError(
                    f"{what} failed in all {len(counted)} episodes of {when}: see that it is up and that {key} names "
                    "it. The run can then be started again, and continues from its last checkpoint. The last failure "
                    f"was {_last(counted)}"
                )

    def _without_helper(self, episode: Episode) -> bool:
        if episode.failure is None:
            return False
        at = self._helper is not None and self._helper in episode.failure.message
        return at or episode.failure.kind == HelperError.__name__

    def _warn_of_drops(self, when: str, counted: Sequence[Episode]) -> None:
        dropped = [(key, episode) for episode in counted if (key := dropped_by(episode)) is not None]
        if self._warned or len(dropped) <= MANY_DROPPED * len(counted) or len(dropped) == len(counted):
            return
        self._warned = True
        kinds = Counter((key, episode.failure.kind if episode.failure else "unknown") for key, episode in dropped)
        (key, kind), count = kinds.most_common(1)[0]
        log.warning(
            "%d of %d episodes of %s failed, so means and training leave them out, most often (%d) after %s. If that "
            "is because of what the model wrote, ajet.failure_reward.%s: -1, for example, counts them",
            *(len(dropped), len(counted), when, count, kind, key),
        )


def _last(failed: Sequence[Episode]) -> str:
    failure = failed[-1].failure
    return "unknown" if failure is None else failure.in_short


GAP = 0.01
"""Difference of a log-probability, in float32. Rounding stays below 0.001, over thousands of tokens, too; a wrong
position, mask, weight or number format moves some token by more than this."""

GAP_METRICS = ("loss/sampler_gap_max", "train/sampler_gap")


class GapWatch:
    """One per run."""

    def __init__(self, dtype: str, rope: str | None = None) -> None:
        """`dtype`: what the trainer computes in. `rope`: a rotary embedding that depends on the length of a row."""
        self._warned = dtype != "float32"  # then rounding may explain any gap
        self._cause = "the engine has other weights, another number format or another implementation of the model"
        if rope is not None:
            self._cause = (
                f"the model's rotary embedding ({rope}) depends on the length, and the engine takes the factors of "
                "another length than a row of this call; a rollout.max_model_len within the original length avoids that"
            )

    def look_at(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn once if rounding can't be why the trainer's log-probabilities differ from the engine's."""
        name = next((name for name in GAP_METRICS if name in metrics), None)
        older = metrics.get("train/staleness/max", metrics.get("train/staleness", 0.0)) > 0  # which explains a gap
        if self._warned or older or name is None or not metrics[name] > GAP:
            return
        self._warned = True
        log.warning(
            "step %d: the trainer's probability of some token differs from the engine's by %.2g (%s), far more than "
            "rounding in float32. Most likely %s. The updates are off by as much",
            step,
            metrics[name],
            name,
            self._cause,
        )
