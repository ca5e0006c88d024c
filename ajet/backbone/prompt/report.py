"""What a search says on the terminal: a line for each round, and the end."""

from __future__ import annotations

from pathlib import Path

from ajet.prompt_tuning.budget import Budget, Spent
from ajet.prompt_tuning.search import Search
from ajet.prompt_tuning.statistics import Comparison


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


def end_text(search: Search, comparison: Comparison | None, why: str, best_file: Path) -> str:
    """The report."""
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


def confirmation_text(comparison: Comparison | None) -> str:
    """What the unseen tasks say."""
    if comparison is None:
        return "not at all: no tasks were kept for it (prompt_tuning.confirmation_tasks), so the gain may be luck"
    one = comparison
    noise = "within noise" if one.within_noise else "more than noise"
    return (
        f"{one.before:.3f} → {one.after:.3f} on {one.tasks} unseen tasks: gain {one.gain:+.3f}, 95 % interval "
        f"{one.low:+.3f} to {one.high:+.3f}, p = {one.p:.3f}: {noise}"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
