"""`PromptRun`: validate the start, search, keep the best on disk, and confirm it on tasks that no candidate has seen.

Rounds are this backbone's steps. Nothing is trained: no optimiser is loaded.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ajet.backbone import LaunchOptions
from ajet.backbone.episode_metrics import episode_metrics
from ajet.backbone.prompt.episodes import EpisodeTrials
from ajet.backbone.prompt.journal import FORMAT, History, PromptJournal
from ajet.backbone.prompt.patience import PatientProposer
from ajet.backbone.prompt.proposers import load_function, make_proposer
from ajet.backbone.prompt.report import end_text, round_line, standing
from ajet.backbone.prompt.settings import check_budget, make_algorithm, make_budget
from ajet.backbone.prompt.split import split_tasks
from ajet.observe.progress import Progress
from ajet.observe.recorder import EpisodeRecorder, RecorderSettings
from ajet.prompt_tuning.algorithm import Sizes
from ajet.prompt_tuning.budget import BudgetExhausted, Spent
from ajet.prompt_tuning.checks import Checks
from ajet.prompt_tuning.search import Search
from ajet.prompt_tuning.statistics import Comparison, compare
from ajet.prompt_tuning.trial import Purpose
from ajet.runtime.runtime import Runtime
from ajet.schema.errors import ConfigError
from ajet.schema.resources import read_prompts
from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.observe.experiment import ExperimentFolder

log = logging.getLogger("ajet.backbone.prompt")

EXIT_NO_PROPOSAL = 1
ALL_ROUNDS = "all rounds were run"


class PromptRun:
    """One run of the prompt backbone."""

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
        self._refuse_what_changed()
        self.progress = Progress.create(options.progress_mode())
        self.recorder = EpisodeRecorder(
            experiment.episodes, RecorderSettings.from_config(config), masker=experiment.masker
        )
        self.runtime = Runtime(config, on_episode=self.progress.episode)
        self.trials = EpisodeTrials(
            config, self.runtime, self.split.all, self.recorder, self.progress, experiment.masker
        )
        self.why = ALL_ROUNDS

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
        return EXIT_NO_PROPOSAL if len(search.candidates) == 1 and search.refused_in_all else 0

    def _searched(self) -> Search:
        """Search and confirm. All episodes are recorded when it returns."""
        try:
            with self.progress, self.runtime:
                search = self._search()
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
        spent = Spent.from_record(self.history.spent) if resumed else None
        if resumed:
            self.experiment.rewind(earlier.round)
            self.recorder.rewind(earlier.round)
        else:
            self._note_start()
        rounds = self.algorithm.rounds
        self.progress.start(self.experiment.name, "prompt", rounds, earlier.round, self.options.viewer, unit="round")
        ajet = self.config.ajet
        self.progress.phase("load", detail=f"{ajet.model.path}, engine {ajet.rollout.engine}")
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
            checks=Checks(self.start, self.tuning.max_template_length),
            retries=self.tuning.proposal_retries,
            seed=ajet.rollout.seed,
            earlier=earlier,
            on_round=self._on_round,
            episodes_per_trial=self.tuning.repeats,
        )

    def _note_start(self) -> None:
        split = self.split
        self.journal.note(
            "started",
            format=FORMAT,
            algorithm=self.tuning.algorithm,
            settings=self._settings(),
            version=self.start.version,
            tasks=self._task_names(),
            queries={name: task.main_query for name, task in split.all.items()},
        )

    def _settings(self) -> dict[str, Any]:
        """What a resumed run may not change."""
        kept = self.tuning.model_dump(mode="json", exclude={"templates", "budget", "rounds", "proposer_timeout"})
        return {**kept, "seed": self.config.ajet.rollout.seed}

    def _task_names(self) -> dict[str, list[str]]:
        split = self.split
        named = {"search": split.search, "validation": split.validation, "confirmation": split.confirmation}
        return {what: list(tasks) for what, tasks in named.items()}

    def _refuse_what_changed(self) -> None:
        """A search compares candidates on the same tasks, from one start."""
        history: History = self.history
        started = history.started
        if not started:
            return
        folder = self.experiment.path
        again = "to start over, use --fresh (in Python: Trainer(fresh=True)), or choose another experiment_name"
        if started["version"] != self.start.version:
            raise ConfigError(
                f"ajet.prompt_tuning.templates: the search in {folder} began with other templates (version "
                f"{started['version']}, now {self.start.version}): restore them to resume it; {again}"
            )
        before, now = started["settings"], self._settings()
        changed = [key for key in now if before.get(key) != now[key]]
        if changed:
            raise ConfigError(
                f"ajet.prompt_tuning.{changed[0]}: the search in {folder} began with {before.get(changed[0])!r}, now "
                f"it is {now[changed[0]]!r}: restore it to resume; {again}"
            )
        if started["tasks"] != self._task_names():
            raise ConfigError(f"ajet.task_reader: the search in {folder} began with other tasks: {again}")
        ended, limits = history.ended, self.tuning.budget.model_dump(mode="json")
        if ended is not None and ended["rounds"] >= self.algorithm.rounds and ended["limits"] == limits:
            raise ConfigError(
                f"{folder} is complete: {ended['reason']}. Its best templates are in {self.journal.best}. To continue, "
                f"raise ajet.prompt_tuning.rounds or the budget; {again}"
            )

    # ------------------------------------------------------------ running

    async def _tune(self, search: Search) -> None:
        try:
            await self.algorithm.run(search)
        except BudgetExhausted as error:
            self.why = str(error)
            search.end_unfinished_round()
            return
        self.why = search.ended_because or ALL_ROUNDS

    def _on_round(self, search: Search) -> None:
        """Metrics and a line on the terminal."""
        episodes, self.trials.episodes = self.trials.episodes, []
        threshold = self.config.ajet.task_judge.success_threshold
        read = [episode for purpose, episode in episodes if purpose is Purpose.SEARCH]
        metrics = episode_metrics(read or [episode for _, episode in episodes], success_threshold=threshold)
        best, spent = search.validation_of(search.best), search.budget.spent
        if best is not None and best.mean is not None:
            metrics |= {"val/return/mean": best.mean, "val/success": best.success or 0.0}
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

    async def _confirm(self, search: Search) -> Comparison | None:
        """Compare the best with the start on unseen tasks."""
        tasks = list(self.split.confirmation)
        score = search.validation_of(search.best)
        if search.best is search.start or not tasks or score is None:
            return None
        search.budget.confirm()
        before, after = await search.score([search.start, search.best], tasks, Purpose.CONFIRMATION)
        comparison = compare(before, after)
        if comparison is None:
            log.warning("the best templates could not be confirmed: no task counts for both, see the failures above")
            return None
        record = {"start": search.start.id, "best": search.best.id, **comparison.to_record()}
        await asyncio.to_thread(self.journal.confirm, search.best, score, record)
        self.experiment.metrics.log(
            search.round,
            {
                "prompt/confirmed/before": comparison.before,
                "prompt/confirmed/after": comparison.after,
                "prompt/confirmed/low": comparison.low,
                "prompt/confirmed/high": comparison.high,
            },
        )
        return comparison
