"""`RubricsJudge` (`judge_type: rubrics_auto_grader`): a helper model grades by rubrics that it wrote from examples.

The rubrics are written once, before the first episode, to a YAML file that is used from then on and may be edited.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.schema.errors import ConfigError
from ajet.task_judge.base_judge import JudgedEpisode
from ajet.task_judge.helper import Asker, HelperModel
from ajet.task_judge.llm_judge import (
    ABOUT,
    RANKING_FORM,
    Grader,
    ModelJudge,
    Scale,
    Template,
    form,
    refuse_single,
    temperature,
)
from ajet.task_judge.rubrics import Example, Rubrics, RubricsWriter, read_examples

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.config.judges import RubricsConfig

log = logging.getLogger("ajet.rubrics")

KEY = "ajet.task_judge.rubrics_auto_grader"
RUBRICS = "\n<rubrics>\n{rubrics}\n</rubrics>\n"
POINTWISE = ABOUT + RUBRICS + "\n<answer>\n{answer}\n</answer>\n\nGrade the answer by the rubrics.\n"
LISTWISE = ABOUT + RUBRICS + "\n{answers}\n\nRank the answers by the rubrics.\n"
REPORT_S = 10.0
"""The interval between progress messages in the log."""


class RubricsJudge(ModelJudge):
    """`ajet.task_judge.rubrics_auto_grader`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.section = section = config.ajet.task_judge.rubrics_auto_grader
        self.mode, self.success_threshold = section.grader_mode, section.success_threshold
        self.answer_field, self.reference_field = section.answer_field, section.reference_field
        self.scale = Scale(section.min_score, section.max_score)
        self.rubrics: Rubrics | None = None
        given = section.rubrics_file
        self.path = Path(given).expanduser() if given else config.cache_path / "rubrics.yaml"
        self._asker = Asker.of_run(
            config,
            HelperModel.chosen(config, section.model_name, f"{KEY}.model_name"),
            max_concurrent=section.max_concurrent,
            retries=section.max_retries,
            cache=section.cache,
        )
        self._templates = _templates(section, self.scale)

    def prepare(self) -> None:
        """Read the rubrics, or have them written."""
        self.rubrics = self.load_or_write()

    def needs_environment(self) -> bool:
        return "environment" in self._templates[0 if self.mode == "pointwise" else 1].names

    async def grader(self, episodes: Sequence[JudgedEpisode]) -> Grader:
        if self.rubrics is None:
            await asyncio.to_thread(self.prepare)
        assert self.rubrics is not None
        return self.grader_by(self.rubrics)

    def grader_by(self, rubrics: Rubrics) -> Grader:
        """A grader that uses these rubrics."""
        section, text = self.section, rubrics.as_text()
        pointwise, listwise = (
            Template(template.text.replace("{rubrics}", text.replace("{", "{ ")), template.key, more=("answers",))
            for template in self._templates
        )
        return Grader(
            self._asker,
            pointwise,
            listwise,
            self.scale,
            votes=section.votes,
            swap_order=section.swap_order,
            temperature=temperature(section.temperature, section.votes),
            max_tokens=section.max_tokens,
        )

    def load_or_write(self, *, again: bool = False) -> Rubrics:
        """Load the rubrics file, or write it if there is none. One process writes while others wait."""
        if self.path.is_file() and not again:
            return Rubrics.load(self.path)
        with _only_one(self.path):
            if self.path.is_file() and not again:
                return Rubrics.load(self.path)
            examples, others = self.examples("training"), self.examples("validation")
            if not examples:
                raise ConfigError(
                    f"{KEY}.jsonl_dataset_file.training.file_path: rubrics are written from graded "
                    f"examples, and none are given. Name a file of them, or one of rubrics in {KEY}.rubrics_file"
                )
            rubrics = self.write(examples, others)
            if self.path.is_file():
                self.path.replace(self.path.with_suffix(f".{time.strftime('%Y%m%d_%H%M%S')}.yaml"))
            rubrics.save(self.path)
        return rubrics

    def write(self, examples: Sequence[Example], tried_on: Sequence[Example] = ()) -> Rubrics:
        """Write new rubrics from graded examples, without touching any file."""
        section = self.section
        most = section.num_reference_samples
        progress = _Progress(self._asker)
        writer = RubricsWriter(self._asker, self.grader_by, section, progress)
        used = list(examples)[:most] if most else list(examples)
        try:
            rubrics = asyncio.run(writer.write(used, tried_on))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        progress.end(rubrics)
        return replace(rubrics, name=section.grader_name or "rubrics")

    def examples(self, split: str) -> list[Example]:
        """The graded examples in the configured file of this split; none if there is no such file."""
        section = self.section
        path = section.jsonl_dataset_file[split].file_path
        if path is None:
            return []
        return read_examples(
            Path(path),
            self.mode,
            query_field=section.query_field,
            answer_field=section.answer_field,
            low=section.min_score,
            high=section.max_score,
        )


class _Progress:
    """Logs the progress while rubrics are written."""

    def __init__(self, asker: Asker) -> None:
        self._asker, self._said_at = asker, 0.0

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._said_at >= REPORT_S or done == total:
            self._said_at = time.monotonic()
            log.info("rubrics: %d of %d examples, %s", done, total, self._asker.spent)

    def end(self, rubrics: Rubrics) -> None:
        about = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in rubrics.about.items())
        log.info("rubrics: %d written (%s); %s", len(rubrics.texts), about, self._asker.spent)


def _templates(section: RubricsConfig, scale: Scale) -> tuple[Template, Template]:
    own = section.custom_evaluation_prompt
    key = f"{KEY}.custom_evaluation_prompt"
    if isinstance(own, dict):
        if section.language not in own or not isinstance(own[section.language], str):
            raise ConfigError(f"{key}: there is no prompt for language {section.language!r}; there are {list(own)}")
        own = own[section.language]
    pointwise, listwise = POINTWISE, LISTWISE
    if own and section.grader_mode == "listwise":
        listwise = own
    elif own:
        pointwise = own
    needed = "{answers}" if section.grader_mode == "listwise" else "{answer}"
    chosen = listwise if section.grader_mode == "listwise" else pointwise
    for name in ("{rubrics}", needed):
        if name not in chosen:
            raise ConfigError(f"{key}: a {section.grader_mode} prompt needs {name}")
    more = ("rubrics", "answers")
    if section.grader_mode == "listwise":
        refuse_single(Template(listwise, key, more=more).names, key)
    return (
        Template(f"{pointwise}\n{form(scale)}", key, more=more),
        Template(f"{listwise}\n{RANKING_FORM}", key, more=more),
    )


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold the lock of this file, so that only one process writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
