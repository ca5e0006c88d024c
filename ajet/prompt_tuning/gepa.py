"""`GEPA`: reflective mutation on a Pareto front, with merges. The optimiser is the `gepa` package's, the adapter ours.

The package runs in a thread, and asks the adapter to score candidates and to propose texts; the search does both.
An iteration of the package is a round. What the adapter answered is the round's state: on a resume the package is run
again from the start with the same seed, and the adapter answers from the record until it ends. So nothing of the
package's own state is stored, and a resumed search takes the same decisions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from ajet.prompt_tuning.proposal import Ask, Candidate, Kind, SearchFailedError, changed
from ajet.prompt_tuning.search import Search, Sizes
from ajet.prompt_tuning.trial import BudgetExhausted, Purpose, Trial
from ajet.schema.errors import FRESH, MissingDependencyError
from ajet.schema.install import install_command

log = logging.getLogger("ajet.prompt_tuning.gepa")
T = TypeVar("T")

Texts = dict[str, str]


@dataclass(frozen=True, slots=True)
class GEPA:
    """The settings of the package's optimiser."""

    minibatch: int = 3
    merges: int = 5
    perfect_score: float = 1.0
    in_turn: bool = False
    """Whether only one of several templates changes in each iteration."""
    rounds: int = 30

    def least_episodes(self, sizes: Sizes) -> int:
        return sizes.validation + 2 * min(self.minibatch, sizes.search)

    async def run(self, search: Search) -> None:
        optimize = _package()
        adapter = SearchAdapter(search, asyncio.get_running_loop())
        options = self.options(search, adapter)
        working = asyncio.ensure_future(asyncio.to_thread(optimize, **options))
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            adapter.stop()
            await asyncio.wait([working])
            raise
        except Exception:
            if adapter.ending is None:
                raise
        if adapter.ending is not None:
            raise adapter.ending

    def options(self, search: Search, adapter: SearchAdapter) -> dict[str, Any]:
        return {
            "seed_candidate": search.start.texts,
            "trainset": list(search.search_tasks),
            "valset": list(search.validation_tasks),
            "adapter": adapter,
            "candidate_selection_strategy": "pareto",
            "perfect_score": self.perfect_score,
            "reflection_minibatch_size": min(self.minibatch, len(search.search_tasks)),
            "module_selector": "round_robin" if self.in_turn else "all",
            "use_merge": self.merges > 0,
            "max_merge_invocations": self.merges,
            "stop_callbacks": [adapter],
            "callbacks": [adapter],
            "logger": _Log(),
            "seed": search.seed,
        }


class SearchAdapter:
    """gepa's adapter, stopper and callback over a `Search`. Its methods are called in the package's thread."""

    def __init__(self, search: Search, loop: asyncio.AbstractEventLoop) -> None:
        self.ending: BaseException | None = None
        """Why the package must stop."""
        self._search, self._loop = search, loop
        self._recorded = deque(search.states)
        self._answers: deque[dict[str, Any]] = deque()
        """Recorded answers of the iteration that is repeated."""
        self._repeating = False
        self._calls: list[dict[str, Any]] = []
        """Answers of the iteration that goes on."""
        self._read: list[Trial] = []
        self._running: Future[Any] | None = None
        self._stopping = Lock()
        """Held where `stop` must not come between the look at `ending` and the start of what it would cancel."""
        self._by_texts = {_key(candidate.texts): candidate for candidate in search.candidates.values()}

    def stop(self) -> None:
        """End whatever the package waits for. Called from the search's loop."""
        with self._stopping:
            self.ending = self.ending or CancelledError()
            if self._running is not None:
                self._running.cancel()

    # ------------------------------------------------------------ gepa's adapter

    def evaluate(self, batch: list[str], candidate: Texts, capture_traces: bool = False) -> Any:
        """Score a candidate. Traces are always there: they cost nothing."""
        from gepa.core.adapter import EvaluationBatch

        if self._repeating:
            scores = [float(score) for score in self._next("scores")]
            trials = [Trial(task, score) for task, score in zip(batch, scores, strict=True)]
        else:
            trials = self._wait(self._score(self._candidate(candidate), batch))
            scores = self._values(trials)
            self._calls.append({"scores": scores})
        return EvaluationBatch(outputs=[trial.episodes for trial in trials], scores=scores, trajectories=trials)

    def make_reflective_dataset(
        self, candidate: Texts, eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Remember what was seen: the questions to the proposer are the search's."""
        self._read = list(eval_batch.trajectories)
        records = [{"task": trial.query, "reward": trial.reward, "feedback": trial.feedback} for trial in self._read]
        return dict.fromkeys(components_to_update, records)

    def propose_new_texts(
        self, candidate: Texts, reflective_dataset: Mapping[str, Any], components_to_update: list[str]
    ) -> Texts:
        """New texts; none if the proposal was refused."""
        if self._repeating:
            return dict(self._next("texts"))
        texts = self._wait(self._propose(self._candidate(candidate), tuple(components_to_update)))
        self._calls.append({"texts": texts})
        return texts

    # ------------------------------------------------------------ gepa's stopper and callbacks

    def __call__(self, gepa_state: Any) -> bool:
        if self.ending is not None:
            return True
        return not self._recorded and not self._search.more_rounds

    def on_iteration_start(self, event: Any) -> None:
        self._calls = []
        self._repeating = bool(self._recorded)
        if self._repeating:
            self._answers = deque(self._recorded.popleft()["calls"])
            return
        try:
            self._search.begin_round()
        except BudgetExhausted as error:  # the package would only log it
            self.ending = error

    def on_iteration_end(self, event: Any) -> None:
        """Called after a failed iteration as well, which doesn't count."""
        if self._repeating or self.ending is not None:
            return
        try:
            self._wait(self._search.end_round({"calls": self._calls}))
        except Exception as error:  # noqa: BLE001 - the package would only log it; `run` raises it
            self.ending = error

    # ------------------------------------------------------------ on the search's loop

    async def _score(self, candidate: Candidate, tasks: list[str]) -> list[Trial]:
        search = self._search
        if set(tasks) == set(search.validation_tasks):
            score = await search.validate(candidate)
            search.consider(score)
            by_task = {trial.task_id: trial for trial in score.trials}
            return [by_task[task] for task in tasks]
        purpose = Purpose.BATCH if set(tasks) <= set(search.validation_tasks) else Purpose.SEARCH
        (score,) = await search.score([candidate], tasks, purpose)  # parent and child: the same draw
        return list(score.trials)

    async def _propose(self, parent: Candidate, names: tuple[str, ...]) -> Texts:
        feedback = "\n".join(dict.fromkeys(trial.feedback for trial in self._read if trial.feedback))
        ask = Ask(Kind.REFLECT, parent, names, tuple(self._read), feedback)
        admitted = self._search.admit(await self._search.draft([ask]))
        if not admitted:
            return {}
        (fresh,) = admitted
        self._by_texts[_key(fresh.texts)] = fresh
        return {name: fresh.texts[name] for name in names if fresh.texts[name] != parent.texts[name]}

    # ------------------------------------------------------------ in the package's thread

    def _candidate(self, texts: Texts) -> Candidate:
        """The candidate with these texts: known, or merged from known ones."""
        known = self._by_texts.get(_key(texts))
        if known is None:
            parents = self._parents(texts)
            known = self._wait(self._merged(texts, parents))
            self._by_texts[_key(texts)] = known
        return known

    async def _merged(self, texts: Texts, parents: tuple[str, ...]) -> Candidate:
        return self._search.add(changed(self._search.start.prompts, texts), parents, "merge")

    def _parents(self, texts: Texts) -> tuple[str, ...]:
        """The youngest validated candidates that each text is from: the package merges no others."""
        pool = [one for one in self._search.candidates.values() if self._search.validation_of(one) is not None]
        found = [[one.id for one in pool if one.texts[name] == text][-1] for name, text in texts.items()]
        return tuple(dict.fromkeys(found))

    def _values(self, trials: Sequence[Trial]) -> list[float]:
        """The package needs a number for each task. A fault is none."""
        values = [trial.value for trial in trials]
        if any(value is None for value in values):
            lost = [trial for trial in trials if trial.fault]
            self.ending = SearchFailedError(
                f"gepa needs a score for every task, and {len(lost)} of {len(trials)} episodes could not be scored, "
                f"for reasons of neither templates nor model. The last: {lost[-1].failure}\n"
                "    run the same command again to go on, or raise ajet.rollout.episode_retries"
            )
            raise self.ending
        return [value for value in values if value is not None]

    def _next(self, kind: str) -> Any:
        if not self._answers or kind not in self._answers[0]:
            self.ending = SearchFailedError(
                "the recorded search can't be repeated: another version of the gepa package, or a changed history, "
                f"asks other questions. Start over with {FRESH}"
            )
            raise self.ending
        return self._answers.popleft()[kind]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        with self._stopping:
            if self.ending is not None:
                work.close()
                raise self.ending
            running = self._running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            result: T = running.result()
            return result
        except BaseException as error:
            self.ending = self.ending or error  # the package swallows what a proposal raises
            raise
        finally:
            self._running = None


class _Log:
    """Writes the package's messages to the debug log."""

    def log(self, message: str) -> None:
        log.debug("%s", message)


def _key(texts: Texts) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(texts.items()))


def _package() -> Any:
    try:
        from gepa.api import optimize
    except ImportError:
        raise MissingDependencyError(
            f"prompt_tuning.algorithm: gepa needs the gepa package\n    {install_command('gepa')}"
        ) from None
    return optimize
