"""What a run looks at between steps and says at its end: validation, early stop, hints, exit code, table and plot."""

from __future__ import annotations

import logging
import math
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.backbone.metrics import by_group, episode_metrics, is_success, try_counts, usable
from ajet.backbone.plan import validation_repeats
from ajet.context_tracker import describe_reasons
from ajet.gateway.chat import validation_temperature
from ajet.observe.episode_codec import conversation, last_calls, message_text
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.episode_tables import EpisodeStoreError
from ajet.observe.experiment import typed
from ajet.observe.metrics import read_metrics
from ajet.observe.progress_state import FailureTally, RunningTotal, cost_texts
from ajet.schema.episode import CallTree, Episode, EpisodeGroup, EpisodeStatus, Ledger
from ajet.schema.errors import EXIT_FAILED, FRESH, ConfigError
from ajet.schema.install import clone_in_use
from ajet.schema.printable import printable

if TYPE_CHECKING:
    from ajet.config import Config

log = logging.getLogger(__name__)

NO_DIFFERENCE = "no step had a group whose episodes earned different rewards"
NO_SUCCESS = "no step had a group with a success and at least pass_k failures: choose tasks that are solved sometimes"
NO_MODEL = "no episode earned as much as ajet.trainer_common.algorithm.sft.min_reward ({:g})"
WIDTH = 60
WIDEST = 100
"""Columns of the report, also where no terminal says how many it has."""
ROWS = 12
LABEL = "{:<17}"
FIRST_TRIES = """
    SELECT task_id, step, reward, episode_id, min(id) AS id FROM episode
    WHERE validation = 1 AND step IN (:first, :last) AND reward IS NOT NULL GROUP BY task_id, step ORDER BY id
"""
"""Finds the first try of each question in each of two validations."""


def exit_code(config: Config, folder: Path, after: int) -> int:
    """The exit code of a run whose steps follow step `after`: an error if it trained nothing."""
    if trained_nothing(folder, after):
        log.error("%s", why_nothing_trained(config, folder, after))
        return EXIT_FAILED
    return 0


CUT_SHORT = {
    "outcome/length": "had a reply cut at its maximum length: raise ajet.rollout.max_response_length_in_one_turn",
    "outcome/overflow": "had a prompt too long for ajet.rollout.max_model_len: raise it",
    "outcome/max_steps": "used up ajet.rollout.multi_turn.max_steps: raise it",
    "outcome/abnormal": "had a reply that ajet.rollout.compute_madness_checklist refused: set [] for random weights",
    "episode/without_calls": "made no recorded model call: use the tuner's client, without a cache of replies",
}
"""What may have gone wrong in episodes, by metric, and what to change."""


def why_nothing_trained(config: Config, folder: Path, after: int, tally: FailureTally | None = None) -> str:
    """What the steps after `after` lacked, from their metrics and, if it is known, from why episodes failed.

    Rewards are to blame only if most episodes went well (one that was cut short gets what `failure_reward` says), or if
    all were paid the same."""
    steps = [step for step in read_metrics(folder / "metrics.jsonl") if step["step"] > after]

    def total(name: str) -> int:
        return int(sum(step.get(name, 0) for step in steps))

    def totals(group: str) -> Counter[str]:
        names = sorted({name for step in steps for name in step if name.startswith(group)})
        return Counter({name.removeprefix(group): total(name) for name in names})

    count, failures, masked = total("episode/count"), totals("failure/"), totals("masked/")
    ended = count - failures.pop("EpisodeCancelled", 0)  # the rest was stopped because of others
    failed = failures.total()
    algorithm = config.ajet.trainer_common.algorithm
    imitates, passes = algorithm.policy_loss == "sft", algorithm.adv_estimator == "pass_at_k"
    lacking = NO_MODEL.format(algorithm.sft.min_reward) if imitates else NO_SUCCESS if passes else NO_DIFFERENCE
    if masked and not total("ledger/trained"):
        lacking = f"no sampled token was to be trained (masked/{', masked/'.join(masked)})"
        lacking += ": no target_tag is in trainable_targets; see rollout.untrained_models" * ("not_trainable" in masked)
    elif total("credit/episodes_trained"):
        lacking = "no update had a finite gradient: lower ajet.trainer_common.optim.lr, or a coefficient of the loss"
    lines = [f"nothing was trained: {lacking if failed < ended or not failed else f'all {ended} episodes failed'}"]
    if failed:
        told = [f"{many} × {kind}" for kind, many in failures.most_common(3)] if tally is None else tally.lines()
        lines += [f"{failed} of {ended} episodes failed:"] * (failed < ended) + [f"  {line}" for line in told]
    cut_short = Counter({name: total(name) for name in CUT_SHORT})
    lines += [f"{many} of {count} episodes {CUT_SHORT[name]}" for name, many in cut_short.most_common() if many]
    low = [step["return/min"] for step in steps if "return/min" in step]
    high = [step["return/max"] for step in steps if "return/max" in step]
    alike = bool(low) and min(low) == max(high)
    well = 2 * max(failed, *cut_short.values()) <= count or (alike and low[0] > 0)
    if well and low and (imitates or lacking == NO_DIFFERENCE):
        same = f"every episode earned {low[0]:g}" if alike else "returns differ between tasks only"
        earned = f"the best earned {max(high):g}" if imitates else same
        lines.append(f"{earned}: look at how the reward is computed, and choose tasks that the model sometimes solves")
    again = "" if after else f"; to begin again: {FRESH}"
    return "\n    ".join([*lines, f"look at the episodes: ajet view {typed(folder)}{again}"])


def trained_nothing(folder: Path, after: int) -> bool:
    """Whether there are steps after `after`, and none had an episode to learn from."""
    counts = [
        step["credit/episodes_trained"]
        for step in read_metrics(folder / "metrics.jsonl")
        if step["step"] > after and "credit/episodes_trained" in step
    ]
    return bool(counts) and not any(counts)


def show_report(config: Config, folder: Path, *, quiet: bool = False) -> None:
    """Print the report of a finished run and write `return.png` to its folder."""
    steps = read_metrics(folder / "metrics.jsonl")
    plot = write_plot(steps, folder / "return.png", folder.name)
    if quiet:
        return
    clone, yaml = clone_in_use(), config.yaml_path
    example = clone is not None and yaml is not None and yaml.resolve().is_relative_to(clone)
    width = shutil.get_terminal_size((WIDEST, 24)).columns
    temperatures = config.ajet.rollout.temperature, validation_temperature(config)
    whole = config.ajet.recorder.keep != "failures"
    print(report_text(steps, folder, plot, temperatures, width=width, example=example, whole=whole))


def report_text(
    steps: list[dict[str, Any]],
    folder: Path,
    plot: Path | None,
    temperatures: tuple[float, float] = (1.0, 1.0),
    *,
    width: int = WIDEST,
    example: bool = False,
    whole: bool = True,
) -> str:
    """The report as text, for a terminal of so many columns. `temperatures`: of training and of validation. `example`:
    the run is one of ours, so that a project of the user's own comes next. `whole`: the episodes that went well are
    recorded, too."""
    from ajet.observe.progress_live import sparkline

    returns = [step["train/return/mean"] for step in steps if "train/return/mean" in step]
    validated = [step for step in steps if "val/failed_share" in step]
    lines = [""]
    if validated:
        lines += ["step   validation return   success   failed   training return"]
        lines += [_row(step) for step in _thinned(validated)]
        training, validation = temperatures
        if training != validation:
            lines.append(f"validation samples at temperature {validation:g}, training at {training:g}: so they differ")
        lines.append("")
    room = min(width, WIDEST) - len(LABEL.format(""))
    if whole and (story := before_and_after(steps, folder / "episodes.sqlite", room)):
        lines += [*story, ""]
    held = _held_returns(steps) if len(validated) > 1 else []  # one is in the table, and makes no curve
    for label, values in (("training return", returns), ("validation", held)):
        if values:
            bars = sparkline(_averaged(values, max(min(WIDTH, room - 12), 8)), WIDTH)
            lines.append(f"{LABEL.format(label)}{values[0]:.3f} {bars} {values[-1]:.3f}")
    total = RunningTotal.of(steps)
    spent = [f"{total.seconds:.0f} s in steps and validation", *cost_texts(total.figures())]
    lines += [f"{LABEL.format('time')}{', '.join(spent)}", ""]
    if plot is not None:
        lines.append(f"{LABEL.format('plot')}{plot}")
    weights, name = folder / "hf", typed(folder)
    lines += [f"{LABEL.format('weights')}{weights if weights.exists() else 'none saved'}", "", "Next:"]
    commands = {f"ajet view {name}": "every episode, token by token"}
    if weights.exists():
        commands[f"ajet chat {name}"] = "talk to the trained model"
    if example:
        commands["ajet init my-agent"] = "a project for your own agent"
    elif weights.exists():
        commands[f"ajet export weights {name} FOLDER"] = "for transformers and vLLM"
    lines += [f"  {command:<{max(map(len, commands))}}    # {why}" for command, why in commands.items()]
    return "\n".join(lines)


def before_and_after(steps: list[dict[str, Any]], file: Path, width: int) -> list[str]:
    """A question's replies at the first and at the last validation, and how many questions were answered better and
    worse. The one with the largest gain is shown. Nothing without two validations whose episodes were recorded."""
    validated = [step["step"] for step in steps if "val/return/mean" in step]
    if len(validated) < 2 or not file.exists():
        return []
    first, last = validated[0], validated[-1]
    try:
        with closing(EpisodeStore(file)) as store:
            tries = store.rows(FIRST_TRIES, {"first": first, "last": last})
            before, after = ({row["task_id"]: row for row in tries if row["step"] == step} for step in (first, last))
            gains = {task: after[task]["reward"] - before[task]["reward"] for task in before if task in after}
            if not gains:
                return []
            task = max(gains, key=lambda task: gains[task])
            recorded = [store.get(tried[task]["episode_id"]) for tried in (before, after)]
    except EpisodeStoreError as error:
        log.warning("the report shows no episodes: %s", error)
        return []
    lines = [f"{LABEL.format('question')}{_shortened(recorded[0].query or _trail(recorded[0].episode)[0], width)}"]
    for record in recorded:
        when = f"after step {record.step}" if record.step else "before training"
        reward = f"   reward {record.episode.reward:.3g}"
        said = _shortened(" → ".join(_trail(record.episode)[1:]), width - len(reward))
        lines.append(f"{LABEL.format(when)}{said}{reward}")
    better, worse = (sum(gain * sign > 0 for gain in gains.values()) for sign in (1, -1))
    return [
        *lines,
        f"{LABEL.format('')}{better} of {len(gains)} questions answered better than at first, {worse} worse",
    ]


def _trail(episode: Episode) -> list[str]:
    """What was asked and what followed, in the longest conversation: replies, tool calls, their results."""
    tree = episode.tree
    messages = max((conversation(tree, call) for call in last_calls(tree)), key=len, default=[])
    return [message_text(one) for one in messages if one.get("role") not in ("system", "developer")] or [""]


def _shortened(text: str, width: int) -> str:
    """Put a text into one line, without its middle if it is long."""
    from rich.cells import cell_len, set_cell_size

    text = printable(" ".join(text.split()))
    if cell_len(text) <= width:
        return text
    half = max((width - 3) // 2, 4)
    return f"{set_cell_size(text, half).rstrip()} … {set_cell_size(text[::-1], half)[::-1].lstrip()}"


def _held_returns(steps: list[dict[str, Any]]) -> list[float]:
    """The validation return at each step from the first that has it; a step without it has that of the step before."""
    values: list[float] = []
    for step in steps:
        if "val/return/mean" in step or values:
            values.append(step.get("val/return/mean", values[-1] if values else 0.0))
    return values


def _row(step: dict[str, Any]) -> str:
    """A validation: its return has no value if all of its episodes failed."""
    cells = [
        (f"{step[name]:.{digits}{kind}}" if name in step else "-").rjust(width)
        for name, digits, kind, width in (
            ("val/return/mean", 3, "f", 17),
            ("val/success", 3, "f", 7),
            ("val/failed_share", 0, "%", 6),
            ("train/return/mean", 3, "f", 15),
        )
    ]
    return "   ".join([f"{step['step']:4}", *cells])


def _averaged(values: list[float], most: int) -> list[float]:
    """The values, averaged down to at most so many."""
    count = min(most, len(values))
    bounds = [round(index * len(values) / count) for index in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]


def write_plot(steps: list[dict[str, Any]], path: Path, title: str) -> Path | None:
    """Returns over steps as a PNG. None without matplotlib, or if there is nothing to plot."""
    trained = [(step["step"], step["train/return/mean"]) for step in steps if "train/return/mean" in step]
    validated = [(step["step"], step["val/return/mean"]) for step in steps if "val/return/mean" in step]
    if not trained and not validated:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for points, label, marker in ((trained, "training", ""), (validated, "validation", "o")):
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, label=label)
    axes.set(xlabel="step", ylabel="mean return")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        with warnings.catch_warnings(action="ignore"):  # of characters of the title that no font here has
            figure.savefig(path, dpi=130)
    except OSError as error:
        path.unlink(missing_ok=True)
        log.warning("the plot %s can't be written: %s", path, error.strerror)
        return None
    return path


def _thinned(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Select at most `ROWS` of the steps, including the first and the last."""
    if len(steps) <= ROWS:
        return steps
    return [steps[round(index * (len(steps) - 1) / (ROWS - 1))] for index in range(ROWS)]


def validation_metrics(groups: Sequence[EpisodeGroup], threshold: float) -> dict[str, float]:
    """Under `val/`: mean return and reward, success, pass@k, all-pass@k, by tag; all over the usable episodes.

    `val/failed_share` is the share of the others. If every episode failed, there is no score.
    """
    episodes = [episode for group in groups for episode in (*group.episodes, *group.failed)]
    metrics = episode_metrics(episodes, prefix="val/", success_threshold=threshold)
    if "val/episode/failed_share" in metrics:
        metrics["val/failed_share"] = metrics["val/episode/failed_share"]
    tried = [[is_success(episode, threshold) for episode in group] for group in by_group(usable(episodes))]
    if not tried:
        return metrics
    metrics["val/success"] = metrics["val/success/rate"]
    for k in try_counts(tried):
        enough = [(sum(group), len(group)) for group in tried if len(group) >= k]
        metrics[f"val/all_pass@{k}"] = sum(math.comb(p, k) / math.comb(n, k) for p, n in enough) / len(enough)
    return metrics


PLACE = "ajet.trainer_common.early_stop"
MEASURED = ("best", "best_step", "latest", "since")
"""What a checkpoint keeps of an early stop, beside the metric's name."""
OF_EPISODES = re.compile("val/(reward|tag|user|time|episode|status|outcome|failure|masked|dropped|fork)/")
"""How metrics begin of which only a validation's episodes tell whether there are any."""


@dataclass(slots=True)
class EarlyStop:
    """Follows one metric of the validations; higher is better."""

    metric: str
    _: KW_ONLY
    patience: int | None
    min_delta: float
    target: float | None
    best: float | None = None
    best_step: int = 0
    latest: float | None = None
    since: int = 0
    """Validations since the best one."""

    @classmethod
    def from_config(cls, config: Config, validation_tasks: int) -> EarlyStop:
        """Raises if it needs validations and there is nothing to validate on, or if no validation has its metric."""
        given = config.ajet.trainer_common.early_stop
        asked = next((name for name in ("target", "patience") if given[name] is not None), None)
        if asked is not None and not validation_tasks:
            raise ConfigError(
                f"{PLACE}.{asked} looks at validations, and there are no validation tasks: give ajet.task_reader "
                "validation tasks, or leave early_stop out"
            )
        stop = cls(given.metric, patience=given.patience, min_delta=given.min_delta, target=given.target)
        if asked is not None and not OF_EPISODES.match(given.metric):
            example = Episode("", "", EpisodeStatus.COMPLETED, CallTree(), Ledger(), reward=0.0)
            stop._value(validation_metrics([EpisodeGroup("", "", [example] * validation_repeats(config))], 1.0))
        return stop

    @property
    def active(self) -> bool:
        return self.patience is not None or self.target is not None

    def look_at(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a validation. One without a score, because all of its episodes failed, says nothing."""
        if not self.active or "val/success" not in metrics:
            return
        value = self.latest = self._value(metrics)
        if self.best is None or value > self.best + self.min_delta:
            self.best, self.best_step, self.since = value, step, 0
        else:
            self.since += 1

    def _value(self, metrics: Mapping[str, float]) -> float:
        if self.metric in metrics:
            return metrics[self.metric]
        near = get_close_matches(self.metric, metrics, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(metrics))}"
        raise ConfigError(f"{PLACE}.metric: a validation has no metric {self.metric!r}; {hint}")

    @property
    def reason(self) -> str | None:
        """Why the run should end now, and which key says so; None: it should go on."""
        if self.latest is None or self.best is None:
            return None
        if self.target is not None and self.latest >= self.target:
            return f"{self.metric} is {self.latest:.4g} ({PLACE}.target: {self.target:g})"
        if self.patience is not None and self.since >= self.patience:
            return (
                f"{self.metric} has not risen above {self.best:.4g}, its value after step {self.best_step}, in "
                f"{self.since} validations ({PLACE}.patience: {self.patience})"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("metric", *MEASURED)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue. If another metric was followed until now, its values mean nothing here."""
        if state["metric"] == self.metric:
            self.best, self.best_step, self.latest, self.since = (state[name] for name in MEASURED)


MANY_ABANDONED = 0.5
"""Share of a step's sampled tokens above which the log mentions that they are masked."""


class Hints:
    """What the log says about the run's episodes, once each: why calls branch, and that many tokens aren't trained."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._abandoned = False

    def look_at(self, step: int, episodes: Sequence[Episode]) -> None:
        """Log what is new in this step's episodes."""
        trees = [episode.tree for episode in episodes]
        found = {call.fork.reason for tree in trees for call in tree.calls if call.fork is not None}
        if not found <= self._reasons:
            self._reasons |= found
            for line in describe_reasons(trees):
                log.info("step %d, calls that continue no earlier call: %s", step, line)
        captured = sum(episode.ledger.captured for episode in episodes)
        abandoned = sum(episode.ledger.masked.get("abandoned", 0) for episode in episodes)
        if not self._abandoned and abandoned > MANY_ABANDONED * captured:
            self._abandoned = True
            log.warning(
                "step %d: %d of %d sampled tokens are not trained, because a later reply to the same prompt replaced "
                "them (masked/abandoned). If your agent repeats prompts on purpose, not to retry, set "
                "ajet.rollout.abandoned_calls: train",
                step,
                abandoned,
                captured,
            )
