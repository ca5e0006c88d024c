"""A search over an endless ladder of words, with the real journal. Run as a program, it goes on until it is killed.

usage: search_until_killed.py FOLDER      (prints `resumed ROUND`, then `round ROUND SCORE` once a round is committed)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from ajet.backbone.prompt.journal import FORMAT, PromptJournal
from ajet.prompt_tuning import Candidate, Purpose, Reply, Request, Search, Trial
from ajet.prompt_tuning.best_of import BestOf
from ajet.schema.resources import PromptSet, PromptTemplate

START = PromptSet({"solver": PromptTemplate("{question}")})
TASKS = [f"v{number}" for number in range(20)]


async def evaluate(
    candidates: Sequence[Candidate], tasks: Sequence[str], purpose: Purpose, draw: int, round: int
) -> list[list[Trial]]:
    """The longer the better."""
    await asyncio.sleep(0.002)
    return [[Trial(task, float(len(one.texts["solver"])), episodes=("e",)) for task in tasks] for one in candidates]


async def propose(request: Request) -> Reply:
    return Reply(request.candidate.texts["solver"] + "+" * (request.draw % 5 + 1))


def main(folder: Path) -> None:
    journal = PromptJournal(folder)
    history = journal.resume()
    if not history.started:
        journal.note("started", format=FORMAT, algorithm="best_of", settings={}, version=START.version, tasks={})
    print("resumed", history.earlier.round, flush=True)
    search = Search(
        START, ["t0"], TASKS, evaluate, propose, journal, rounds=10**9, earlier=history.earlier, on_round=told
    )
    asyncio.run(BestOf(proposals=3).run(search))


def told(search: Search) -> None:
    print("round", search.round, search.score_of(search.best), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
