"""`search_lines`: what a search would do, for `ajet validate`. Nothing is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ajet.backbone.prompt.proposers import load_function
from ajet.backbone.prompt.settings import check_budget, make_algorithm
from ajet.backbone.prompt.split import split_tasks
from ajet.prompt_tuning.algorithm import Sizes
from ajet.schema.resources import read_prompts
from ajet.schema.task import Task

if TYPE_CHECKING:
    from ajet.config import Config


def search_lines(config: Config, training: Sequence[Task], validation: Sequence[Task]) -> Iterator[tuple[str, str]]:
    """Label and text. Raises the `UserError` with which the run would be refused."""
    tuning = config.ajet.prompt_tuning
    prompts = read_prompts(tuning.templates)
    algorithm = make_algorithm(config)
    if "->" in tuning.proposer:
        load_function(config)
    split = split_tasks(config, training, validation)
    sizes = Sizes(len(split.search), len(split.validation))
    check_budget(config, algorithm, sizes, len(split.confirmation))
    for name, template in prompts.templates.items():
        filled = ", ".join(sorted(template.placeholders)) or "none"
        yield "template", f"{name}: {len(template.template):,} characters, placeholders: {filled}"
    yield "search", f"{tuning.algorithm}, at most {algorithm.rounds} rounds; proposals by {_proposer(config)}"
    counts = f"{sizes.search} to search with, {sizes.validation} to validate, {len(split.confirmation)} to confirm"
    yield "tasks", f"{counts} (seen by no candidate before the end)"
    least = algorithm.least_episodes(sizes) * tuning.repeats
    limits = [
        f"{value:,} {name}" for name in ("episodes", "tokens", "money", "seconds") if (value := tuning.budget[name])
    ]
    yield "episodes", f"{least:,} for the start and the first round at least; budget: {', '.join(limits) or 'no limit'}"


def _proposer(config: Config) -> str:
    named = config.ajet.prompt_tuning.proposer
    return f"the helper model {config.ajet.helper.model}" if named == "helper" else named.rpartition("/")[2]
