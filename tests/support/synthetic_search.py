"""A search for prompt templates over made-up episodes: the real search, journal and recorder, and no model."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ajet.backbone.prompt.journal import FORMAT, PromptJournal
from ajet.config import Config
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.recorder import EpisodeRecorder
from ajet.prompt_tuning.apo import APO
from ajet.prompt_tuning.proposal import Candidate, Kind, Reply, Request
from ajet.prompt_tuning.search import Search
from ajet.prompt_tuning.trial import Budget, Limits, Purpose, Trial
from ajet.schema.episode import EpisodeStatus, Failure
from ajet.schema.resources import read_prompts
from support.synthetic_run import Vocabulary, math_episode, task_of

HINTS = ("Add last.", "Count boxes.", "Check the sum.", "Box it.")
START = "You solve problems.\n{question}"
TASKS = {
    "search": [f"apples-{number:04d}" for number in range(8)],
    "validation": [f"apples-{number:04d}" for number in range(8, 16)],
    "confirmation": [f"apples-{number:04d}" for number in range(16, 20)],
}


class Trials:
    """`Evaluate`: an episode solves its task if the template has the task's hint. Task 11 always fails."""

    def __init__(self, recorder: EpisodeRecorder) -> None:
        self._recorder, self._vocabulary, self._rng = recorder, Vocabulary(), random.Random(0)
        self.queries: dict[str, str] = {}

    async def __call__(
        self, candidates: Sequence[Candidate], tasks: Sequence[str], purpose: Purpose, draw: int, round: int
    ) -> list[list[Trial]]:
        return [[self._trial(candidate, task, purpose, round) for task in tasks] for candidate in candidates]

    def _trial(self, candidate: Candidate, task: str, purpose: Purpose, round: int) -> Trial:
        number = int(task[-4:])
        hint, failed = HINTS[number % len(HINTS)], number == 11
        solved = hint in candidate.texts["solver"] and not failed
        made = math_episode(self._vocabulary, self._rng, task=number, step=round, skill=float(solved))
        episode = replace(
            made, reward=None if failed else float(solved), is_success=solved, prompt_version=candidate.version,
            prompts_used=["solver"], status=EpisodeStatus.WORKFLOW_ERROR if failed else EpisodeStatus.COMPLETED,
            failure=Failure("KeyError", "no such box", "") if failed else None,
        )  # fmt: skip
        assert self._recorder.record(episode, round, validation=purpose is not Purpose.SEARCH, task=task_of(episode))
        self.queries[task] = task_of(episode).main_query
        return Trial(
            task, episode.reward, float(solved), failure="KeyError: no such box" if failed else "",
            feedback="" if solved else f"missing: {hint}", query=self.queries[task],
            episodes=(episode.episode_id,), tokens=(40, 20), prompts_used=frozenset({"solver"}),
        )  # fmt: skip


class Proposer:
    """Repeats the feedback as its criticism, and adds the hint that is missing; loses the placeholder now and then."""

    def __init__(self, extra: str = "") -> None:
        self._extra, self._count = extra, itertools.count()

    async def __call__(self, request: Request) -> Reply:
        if request.kind is Kind.CRITIQUE:
            return Reply("\n".join(sorted({trial.feedback for trial in request.trials if trial.feedback})) or "Well.")
        if next(self._count) % 4 == 2:
            return Reply("I would rather not.", 10, 5)
        hints = [hint for hint in HINTS if hint in request.feedback and hint not in request.candidate.texts["solver"]]
        text = request.candidate.texts["solver"]
        return Reply(text.replace("\n", f" {hints[0] if hints else 'Be brave.'}{self._extra}\n"), 10, 5)


def write_search(root: Path, name: str = "searched", *, rounds: int = 3, extra: str = "", end: bool = True) -> Path:
    """A whole folder of a search. `end=False`: as it is while the search goes on, or after a kill."""
    start = read_prompts({"solver": START})
    config = Config.model_validate({"ajet": {"experiment_name": name, "model": {"path": "tiny:chat"}}})
    with ExperimentFolder.open(config, exp_dir=root, backbone="prompt") as folder:
        recorder = EpisodeRecorder(folder.episodes)
        journal, trials = PromptJournal(folder.path), Trials(recorder)
        journal.resume()
        names = [task for tasks in TASKS.values() for task in tasks]
        queries = {task: f"Question of {task}" for task in names}
        journal.note("started", format=FORMAT, algorithm="apo", settings={}, version="", tasks=TASKS, queries=queries)

        def log(search: Search) -> None:
            folder.metrics.log(search.round, {"val/return/mean": search.score_of(search.best) or 0.0})

        search = Search(
            start, TASKS["search"], TASKS["validation"], trials, Proposer(extra), journal, rounds=rounds,
            budget=Budget(Limits(episodes=900)), retries=0, on_round=log,
        )  # fmt: skip
        with ThreadPoolExecutor(1) as thread:  # Playwright has a loop in the tests' own
            thread.submit(asyncio.run, _run(search, journal, end)).result()
        recorder.close()
        journal.close()
    return folder.path


async def _run(search: Search, journal: PromptJournal, end: bool) -> None:
    await APO(beam_width=2, branch_factor=2, critique_batch=3, score_batch=4, rounds=search.rounds).run(search)
    if not end:
        search.begin_round()
        search.add(read_prompts({"solver": "Unfinished.\n{question}"}), (search.best.id,), "edit", "It was too long.")
        await search.score([search.best], TASKS["search"][:2], Purpose.SEARCH)
        return
    search.budget.confirm()
    await search.score([search.start, search.best], TASKS["confirmation"], Purpose.CONFIRMATION)
    best = search.validation_of(search.best)
    assert best is not None
    comparison = {
        "tasks": 4, "before": 0.0, "after": 0.75, "low": 0.1, "high": 1.4, "p": 0.12, "better": 3, "worse": 0,
        "gain": 0.75, "within_noise": True,
    }  # fmt: skip
    journal.confirm(search.best, best, {"start": "c0", "best": search.best.id, **comparison})
    spent = search.budget.spent.to_record()
    journal.commit(
        "ended", reason="all rounds were run", round=search.round, rounds=search.rounds, limits={}, spent=spent
    )
