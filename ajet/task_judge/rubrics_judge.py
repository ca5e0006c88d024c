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
from ajet.task_judge.helper import Asker, HelperModel
from ajet.task_judge.llm_judge import ABOUT, Grader, ModelJudge, Template, whole_templates
from ajet.task_judge.rubrics import Example, Rubrics, RubricsWriter, read_examples

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.config.judges import RubricsConfig

log = logging.getLogger("ajet.rubrics")

KEY = "ajet.task_judge.rubrics_auto_grader"
RUBRICS = "\n<rubrics>\n{rubrics}\n</rubrics>\n"
POINTWISE = ABOUT + RUBRICS + "\n<answer>\n{answer}\n</answer>\n\nGrade the answer by the rubrics.\n"
LISTWISE = ABOUT + RUBRICS + "\n{answers}\n\nRank the answers by the rubrics.\n"


class RubricsJudge(ModelJudge):
    """`ajet.task_judge.rubrics_auto_grader`."""

    section: RubricsConfig

    def __init__(self, config: Config) -> None:
        section = config.ajet.task_judge.rubrics_auto_grader
        self._asker = Asker.of_run(
            config,
            HelperModel.chosen(config, section.model_name, f"{KEY}.model_name"),
            max_concurrent=section.max_concurrent,
            retries=section.max_retries,
            cache=section.cache,
        )
        super().__init__(config, section, self._asker, _templates(section), section.grader_mode)
        self.rubrics: Rubrics | None = None
        given = section.rubrics_file
        self.path = Path(given).expanduser() if given else config.cache_path / "rubrics.yaml"

    def prepare(self) -> None:
        """Read the rubrics, or have them written."""
        self.rubrics = self.load_or_write()

    async def grader(self) -> Grader:
        if self.rubrics is None:
            await asyncio.to_thread(self.prepare)
        assert self.rubrics is not None
        return self.grader_by(self.rubrics)

    def grader_by(self, rubrics: Rubrics) -> Grader:
        """A grader that uses these rubrics."""
        text = rubrics.as_text().replace("{", "{ ")
        pointwise, listwise = (
            Template(template.text.replace("{rubrics}", text), template.key, more=("answers",))
            for template in (self._grader.pointwise, self._grader.listwise)
        )
        return replace(self._grader, pointwise=pointwise, listwise=listwise)

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
        used = list(examples)[:most] if most else list(examples)
        rubrics = asyncio.run(RubricsWriter(self._asker, self.grader_by, section).write(used, tried_on))
        about = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in rubrics.about.items())
        log.info("rubrics: %d written (%s); %s", len(rubrics.texts), about, self._asker.spent)
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


def _templates(section: RubricsConfig) -> tuple[Template, Template]:
    """The user's prompt replaces the one of `grader_mode`."""
    own, mode = section.custom_evaluation_prompt, section.grader_mode
    key = f"{KEY}.custom_evaluation_prompt"
    if isinstance(own, dict):
        if section.language not in own or not isinstance(own[section.language], str):
            raise ConfigError(f"{key}: there is no prompt for language {section.language!r}; there are {list(own)}")
        own = own[section.language]
    if own:
        for name in ("{rubrics}", "{answers}" if mode == "listwise" else "{answer}"):
            if name not in own:
                raise ConfigError(f"{key}: a {mode} prompt needs {name}")
    pointwise = own if own and mode == "pointwise" else POINTWISE
    listwise = own if own and mode == "listwise" else LISTWISE
    return whole_templates(pointwise, listwise, section, mode, key, "rubrics")


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold the lock of this file, so that only one process writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
