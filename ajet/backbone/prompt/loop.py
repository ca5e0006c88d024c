"""`PromptRun`: validate the start, search, keep the best on disk, and confirm it on tasks that no candidate has seen.

Rounds are this backbone's steps. Nothing is trained: no optimiser is loaded. `EpisodeTrials` tries candidates by
running episodes in the pool, and records them; what the terminal says of rounds and the end stands here, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.backbone import LaunchOptions
from ajet.backbone.failures import FailureWatch
from ajet.backbone.metrics import FAULTS, episode_metrics, is_success
from ajet.backbone.plan import BEFORE_THE_FIRST
from ajet.backbone.prompt.journal import FORMAT, PromptJournal, TemplateComparison
from ajet.backbone.prompt.settings import (
    PatientProposer,
    check_budget,
    load_function,
    make_algorithm,
    make_budget,
    make_proposer,
    split_tasks,
)
from ajet.observe.episode_codec import conversation, last_calls
from ajet.observe.logs import ONLY_TO_FILE, Masker
from ajet.observe.metrics import read_metrics
from ajet.observe.progress import Progress
from ajet.observe.progress_state import RunningTotal
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.run_files import was_cut_off
from ajet.prompt_tuning.proposal import Candidate
from ajet.prompt_tuning.search import Search, Sizes
from ajet.prompt_tuning.trial import Budget, BudgetExhausted, Purpose, Spent, Trial
from ajet.schema.episode import Episode, EpisodeGroup, EpisodeStatus
from ajet.schema.errors import EXIT_FAILED, FRESH, ConfigError, concurrently
from ajet.schema.resources import read_prompts
from ajet.schema.task import Task
from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks
from ajet.task_runner.runtime import Runtime
from ajet.trainer.credit import earned, summarise

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.observe.experiment import ExperimentFolder

log = logging.getLogger("ajet.backbone.prompt")

SAID = 2_000
"""Characters of a piece of feedback: a judge's reasons fit, a dump of everything doesn't."""
UNSCORED = (*FAULTS, EpisodeStatus.CANCELLED)
"""How an episode ends that says nothing about its templates."""


class EpisodeTrials:
    """`Evaluate`, over a runtime. Used on the service loop."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        tasks: Mapping[str, Task],
        recorder: EpisodeRecorder,
        progress: Progress,
        masker: Masker,
    ) -> None:
        self._runtime, self._tasks, self._recorder, self._progress = runtime, tasks, recorder, progress
        self._masker = masker
        self._repeats = config.ajet.prompt_tuning.repeats
        self._threshold = config.ajet.task_judge.success_threshold
        self._watch = FailureWatch(config, trains=False)
        self.episodes: list[tuple[Purpose, Episode]] = []
        """The episodes of the current round. Reading them empties the list."""

    async def __call__(
        self, candidates: Sequence[Candidate], tasks: Sequence[str], purpose: Purpose, draw: int, round: int
    ) -> list[list[Trial]]:
        pairs = [(candidate, task) for candidate in candidates for task in tasks]
        self._progress.phase(str(purpose), len(pairs) * self._repeats)
        tried = await concurrently(
            self._try(candidate, task, purpose, round, index, draw) for index, (candidate, task) in enumerate(pairs)
        )
        await asyncio.to_thread(self._recorder.flush)  # what counts for a candidate must survive a kill
        groups, trials = [group for group, _ in tried], [trial for _, trial in tried]
        self.episodes += [(purpose, one) for group in groups for one in (*group.episodes, *group.failed)]
        self._watch.look_at_groups(f"round {round} ({purpose})", groups)
        return [trials[first : first + len(tasks)] for first in range(0, len(trials), len(tasks))]

    async def _try(
        self, candidate: Candidate, task: str, purpose: Purpose, round: int, index: int, draw: int
    ) -> tuple[EpisodeGroup, Trial]:
        """Run a task; record and read its episodes while the others run."""
        group = await self._runtime.pool.run_group(
            self._tasks[task],
            num_repeat=self._repeats,
            batch_index=index,
            step=draw,
            validation=True,
            group_id=f"{round}-{purpose}-{draw}-{candidate.id}-{task}",
            prompts=candidate.prompts,
        )
        for episode in (*group.episodes, *group.failed):
            self._recorder.record(episode, round, validation=purpose is not Purpose.SEARCH, task=self._tasks[task])
        return group, self._trial(task, group, read=purpose is Purpose.SEARCH)

    def _trial(self, task: str, group: EpisodeGroup, read: bool) -> Trial:
        episodes = sorted([*group.episodes, *group.failed], key=lambda episode: episode.repeat)
        counted = [episode for episode in episodes if episode.status not in UNSCORED]
        rewards = [earned(summarise(episode)) if episode.usable else 0.0 for episode in counted]
        used = [episode.prompts_used for episode in episodes]
        failed = next((episode.failure for episode in episodes if episode.failure is not None), None)
        return Trial(
            task_id=task,
            reward=sum(rewards) / len(rewards) if any(episode.usable for episode in counted) else None,
            success=_share([is_success(episode, self._threshold) for episode in counted]),
            failure="" if failed is None else self._masker.text(failed.in_short),
            fault=not counted,
            feedback=self._masker.text("\n".join(dict.fromkeys(text for one in counted for text in feedback_of(one)))),
            query=self._tasks[task].main_query,
            conversations=tuple(
                conversation(episode.tree, call) for episode in counted for call in last_calls(episode.tree)
            )
            if read
            else (),
            episodes=tuple(episode.episode_id for episode in episodes),
            tokens=_tokens(episodes),
            prompts_used=None if None in used else frozenset(name for names in used for name in names or ()),
        )


def feedback_of(episode: Episode) -> list[str]:
    """What was said about an episode: `feedback` in the workflow's metadata, the judge's notes, and its parts."""
    said = [_text(episode.metadata[key]) for key in ("feedback", "judge") if episode.metadata.get(key)]
    if episode.reward_parts:
        said.append(", ".join(f"{name}: {value:g}" for name, value in episode.reward_parts.items()))
    return [text[:SAID] for text in said]


def _text(value: Any) -> str:
    """Notes are nested texts and numbers: one line for each."""
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {_text(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return "\n".join(map(_text, value))
    return str(value)


def _tokens(episodes: Sequence[Episode]) -> tuple[int, int]:
    spent = [episode.tree.spent for episode in episodes]
    return sum(prompt for prompt, _ in spent), sum(replies for _, replies in spent)


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def round_line(search: Search) -> str:
    """What a round came to: best, proposals, and what is spent and left of the budget."""
    if search.round == 0:
        return f"start: {score_text(search.score_of(search.start))} on {len(search.validation_tasks)} validation tasks"
    fresh = sum(candidate.round == search.round for candidate in search.candidates.values())
    refused = f", {search.refused} refused" if search.refused else ""
    best, *left = standing(search).split(" · ")
    return "  " + " · ".join([f"best {best}", f"{fresh} new{refused}", spent_text(search.budget.spent), *left])


def standing(search: Search) -> str:
    """The best so far, and what is left of the budget."""
    best, left = f"{search.best.id} {score_text(search.score_of(search.best))}", left_text(search.budget)
    return f"{best} · left: {left}" if left else best


def left_text(budget: Budget) -> str:
    """What is left of each limit; empty without limits."""
    units = {"episodes": "episodes", "tokens": "tokens", "money": "money", "seconds": "s"}
    return ", ".join(f"{_number(value)} {units[name]}" for name, value in budget.left.items())


def spent_text(spent: Spent) -> str:
    """`120 episodes, 45,210 tokens, 0.031 money`."""
    parts = [f"{spent.episodes:,} episodes", f"{spent.tokens:,} tokens"]
    return ", ".join([*parts, f"{spent.money:.4g} money"] if spent.money else parts)


def score_text(score: float | None) -> str:
    return "no score" if score is None else f"{score:.3f}"


def end_text(search: Search, comparison: TemplateComparison | None, why: str, best_file: Path) -> str:
    best, start = search.best, search.start
    lines = ["", f"ended      {why}"]
    if best is start:
        tried = len(search.candidates) - 1
        lines.append(f"best       the templates as they were: none of {tried} proposals was better")
        if not tried and search.refused_in_all:
            lines.append(f"refused    {search.refused_in_all}, without an episode; the last: {search.why_refused}")
    else:
        before, after = score_text(search.score_of(start)), score_text(search.score_of(best))
        lines.append(f"best       {best.id} (version {best.version}), found in round {best.round}")
        lines.append(f"validation {before} → {after} on {len(search.validation_tasks)} tasks, which chose it")
        lines.append(f"confirmed  {confirmation_text(comparison)}")
    lines.append(f"spent      {spent_text(search.budget.spent)}, {search.budget.spent.seconds:.0f} s")
    lines.append(f"templates  {best_file}")
    return "\n".join(lines)


def confirmation_text(comparison: TemplateComparison | None) -> str:
    if comparison is None:
        return "not at all: no tasks were kept for it (prompt_tuning.confirmation_tasks), so the gain may be luck"
    gain = comparison.gain
    noise = "within noise" if comparison.within_noise else "more than noise"
    p = "p < 0.001" if gain.p < 0.0005 else f"p = {gain.p:.3f}"
    return (
        f"{comparison.before:.3f} → {comparison.after:.3f} on {gain.tasks} unseen tasks: gain {gain.value:+.3f}, 95 % "
        f"interval {gain.low:+.3f} to {gain.high:+.3f}, {p}: {noise}"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


ALL_ROUNDS = "all rounds were run"


class PromptRun:
    def __init__(self, config: Config, experiment: ExperimentFolder, options: LaunchOptions) -> None:
        self.config, self.experiment, self.options = config, experiment, options
        self.tuning = config.ajet.prompt_tuning
        self.start = read_prompts(self.tuning.templates)
        self.algorithm = make_algorithm(config)
        if "->" in self.tuning.proposer:
            load_function(config)  # what is wrong with it ends the run here
        reader = build_reader(config)
        self.split = split_tasks(config, read_training_tasks(reader), read_validation_tasks(reader))
        sizes = Sizes(len(self.split.search), len(self.split.validation))
        check_budget(config, self.algorithm, sizes, len(self.split.confirmation))
        self.journal = PromptJournal(experiment.path, experiment.masker)
        self.history = self.journal.resume()
        self.why = ""
        """Why the search has ended; empty while it goes on."""
        self._refuse_what_changed()
        self.progress = Progress.create(options.progress_mode())
        self.recorder = EpisodeRecorder(experiment.episodes, config.ajet, masker=experiment.masker)
        self.runtime = Runtime(config, on_episode=self.progress.episode)
        self.trials = EpisodeTrials(
            config, self.runtime, self.split.all, self.recorder, self.progress, experiment.masker
        )
        self.round_began = time.monotonic()

    def run(self) -> int:
        """0: the search has ended; 1: not one proposal could be tried."""
        try:
            search = self._searched()
            limits = self.tuning.budget.model_dump(mode="json")
            spent = search.budget.spent.to_record()
            self.journal.commit(
                "ended", reason=self.why, round=search.round, rounds=search.rounds, limits=limits, spent=spent
            )
        finally:
            self.journal.close()
        if len(search.candidates) == 1 and search.refused_in_all:
            why = "no proposal could be tried: %d were refused, the last because %s"
            log.error(why, search.refused_in_all, search.why_refused, extra={ONLY_TO_FILE: True})  # the report says it
            return EXIT_FAILED
        return 0

    def _searched(self) -> Search:
        """Search and confirm. All episodes are recorded when it returns."""
        try:
            with self.progress, self.runtime:
                search = self._search()
                self.runtime.engine_ready()  # the time that it takes to load is no episode's
                self.recorder.use_tokenizer(self.runtime.model().tokenizer)
                self.runtime.run(self._tune(search))
                comparison = self.runtime.run(self._confirm(search))
                self.progress.message(end_text(search, comparison, self.why, self.journal.best))
                return search
        finally:
            self.recorder.close()

    # ------------------------------------------------------------ starting

    def _search(self) -> Search:
        """The search, as the history left it."""
        earlier = self.history.earlier
        resumed = bool(self.history.started)
        spent = Spent.from_record(self.history.spent) if self.history.spent else None
        if self.experiment.resumed:
            last = earlier.round if resumed else BEFORE_THE_FIRST
            self.experiment.rewind(last)
            self.recorder.rewind(last)
        self.progress.state.spent = RunningTotal.of(read_metrics(self.experiment.path / "metrics.jsonl"))
        if not resumed:
            self.journal.note("started", format=FORMAT, **self._started())
        rounds = self.algorithm.rounds
        self.progress.start(self.experiment.name, "prompt", rounds, earlier.round, self.options.viewer, unit="round")
        ajet = self.config.ajet
        hosted = ajet.rollout.remote.model if ajet.rollout.engine == "remote" else None
        self.progress.phase("load", detail=f"{hosted or ajet.model.path}, engine {ajet.rollout.engine}")
        return Search(
            self.start,
            list(self.split.search),
            list(self.split.validation),
            self.trials,
            PatientProposer(make_proposer(self.config, self.runtime), self.tuning.proposer_timeout, self.progress),
            self.journal,
            rounds=rounds,
            tune=self.tuning.tune,
            budget=make_budget(self.config, len(self.split.confirmation), spent),
            retries=self.tuning.proposal_retries,
            seed=ajet.rollout.seed,
            earlier=earlier,
            on_round=self._on_round,
            episodes_per_trial=self.tuning.repeats,
        )

    def _started(self) -> dict[str, Any]:
        """What a resumed run may not change: it compares candidates on the same tasks, from one start."""
        kept = self.tuning.model_dump(mode="json", exclude={"templates", "budget", "rounds", "proposer_timeout"})
        split = self.split
        named = {"search": split.search, "validation": split.validation, "confirmation": split.confirmation}
        return {
            "algorithm": self.tuning.algorithm,
            "settings": {**kept, "seed": self.config.ajet.rollout.seed},
            "version": self.start.version,
            "tasks": {what: list(tasks) for what, tasks in named.items()},
            "queries": {name: task.main_query for name, task in split.all.items()},
        }

    def _refuse_what_changed(self) -> None:
        if not (started := self.history.started):
            return
        now = self._started()
        folder = self.experiment.path
        again = f"to start over, use {FRESH}, or choose another experiment_name"
        if started["version"] != now["version"]:
            raise ConfigError(
                f"ajet.prompt_tuning.templates: the search in {folder} began with other templates (version "
                f"{started['version']}, now {now['version']}): restore them to resume it; {again}"
            )
        for key, value in now["settings"].items():
            if (before := started["settings"].get(key)) != value:
                raise ConfigError(
                    f"ajet.prompt_tuning.{key}: the search in {folder} began with {before!r}, now it is {value!r}: "
                    f"restore it to resume; {again}"
                )
        if started["tasks"] != now["tasks"] or started["queries"] != now["queries"]:
            raise ConfigError(f"ajet.task_reader: the search in {folder} began with other tasks: {again}")
        ended, limits = self.history.ended, self.tuning.budget.model_dump(mode="json")
        if ended is not None and ended["rounds"] >= self.algorithm.rounds and ended["limits"] == limits:
            if was_cut_off(folder):  # the search has ended, and the run has not
                self.why = ended["reason"]
                return
            raise ConfigError(
                f"{folder} is complete: {ended['reason']}. Its best templates are in {self.journal.best}. To continue, "
                f"raise ajet.prompt_tuning.rounds or the budget; {again}"
            )

    # ------------------------------------------------------------ running

    async def _tune(self, search: Search) -> None:
        if self.why:
            return
        try:
            await self.algorithm.run(search)
        except BudgetExhausted as error:
            self.why = str(error)
            search.end_unfinished_round(self.why)
            return
        self.why = search.ended_because or ALL_ROUNDS

    def _on_round(self, search: Search) -> None:
        episodes, self.trials.episodes = self.trials.episodes, []
        threshold = self.config.ajet.task_judge.success_threshold
        read = [episode for purpose, episode in episodes if purpose is Purpose.SEARCH]
        metrics = episode_metrics(read or [episode for _, episode in episodes], success_threshold=threshold)
        best, spent = search.validation_of(search.best), search.budget.spent
        if best is not None and best.mean is not None:
            metrics |= {"val/return/mean": best.mean, "val/success": best.success or 0.0}
        began, self.round_began = self.round_began, time.monotonic()
        if search.round:
            metrics["time/step"] = self.round_began - began
        metrics |= {
            "prompt/candidates": float(len(search.candidates)),
            "prompt/refused": float(search.refused),
            "prompt/episodes": float(spent.episodes),
            "prompt/tokens": float(spent.tokens),
            "prompt/questions": float(spent.questions),
            "prompt/money": spent.money,
            "prompt/seconds": spent.seconds,
        }
        metrics |= {f"prompt/left/{name}": left for name, left in search.budget.left.items()}
        self.experiment.metrics.log(search.round, metrics)
        self.progress.standing(standing(search))
        if search.round:
            self.progress.step(search.round, metrics)
        self.progress.message(round_line(search))

    async def _confirm(self, search: Search) -> TemplateComparison | None:
        tasks = list(self.split.confirmation)
        score = search.validation_of(search.best)
        if search.best is search.start or not tasks or score is None:
            return None
        if (known := self.history.confirmed) is not None and search.round == self.history.earlier.round:
            return TemplateComparison.from_record(known)  # the run was cut off behind it
        search.budget.confirm()
        before, after = await search.score([search.start, search.best], tasks, Purpose.CONFIRMATION)
        comparison = TemplateComparison.of(before, after)
        if comparison is None:
            log.warning("the best templates could not be confirmed: no task counts for both, see the failures above")
            return None
        record = {"start": search.start.id, "best": search.best.id, **comparison.to_record()}
        await asyncio.to_thread(self.journal.confirm, search.best, score, record)
        metrics = {
            "prompt/confirmed/before": comparison.before,
            "prompt/confirmed/after": comparison.after,
            "prompt/confirmed/low": comparison.gain.low,
            "prompt/confirmed/high": comparison.gain.high,
        }
        self.experiment.metrics.log(search.round, metrics)
        return comparison
