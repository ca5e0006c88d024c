"""`RubricsJudge` (`judge_type: rubrics_auto_grader`): a helper model grades by rubrics that it wrote from examples.

`Rubrics` are grading criteria in a YAML file that people can read and edit. `RubricsWriter` writes them from graded
examples, once, before the first episode; the file is used from then on.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.schema.errors import ConfigError, TaskDataError, UserError
from ajet.schema.files import write_whole
from ajet.task_judge.helper import Asker, HelperModel
from ajet.task_judge.helper_answers import NearDuplicates, read_json
from ajet.task_judge.llm_judge import ABOUT, Grade, Grader, ModelJudge, Scale, Template, whole_templates

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.config.judges import RubricsConfig

log = logging.getLogger("ajet.rubrics")

HEAD = """\
# What answers are graded by. Edit, add and remove rubrics: this file is written only if it isn't there.
# `ajet rubrics make CONF --again` writes it anew; the earlier one is kept beside it.
"""


class RubricsError(UserError):
    """An invalid rubrics file or graded example. Names the file and the place."""


@dataclass(slots=True)
class Rubrics:
    texts: list[str]
    name: str = "rubrics"
    mode: str = "pointwise"
    model: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    """How they were written, and how well grading by them agrees with the examples."""

    def as_text(self) -> str:
        return "\n".join(f"{number}. {text}" for number, text in enumerate(self.texts, start=1))

    def save(self, path: Path) -> None:
        import yaml

        record = {"name": self.name, "mode": self.mode, "model": self.model, "about": self.about, "rubrics": self.texts}
        write_whole(path, HEAD + yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=110))

    @classmethod
    def load(cls, path: Path) -> Rubrics:
        """Read a file that `save` or a person wrote."""
        import yaml

        try:
            record = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RubricsError(f"{path}: can't be read: {error}") from None
        except yaml.YAMLError as error:
            raise RubricsError(f"{path}: not YAML: {error}") from None
        if isinstance(record, list):
            record = {"rubrics": record}
        texts = record.get("rubrics") if isinstance(record, dict) else None
        if not isinstance(texts, list) or not texts:
            raise RubricsError(f"{path}: expected `rubrics:` with a list of texts, one rubric each")
        for number, text in enumerate(texts, start=1):
            if not isinstance(text, str) or not text.strip():
                raise RubricsError(
                    f"{path}: rubric {number} is {text!r:.80}, not a text\n    put it in quotes: a colon in it, or a "
                    "word such as yes, means something else to YAML"
                )
        about = record.get("about")
        return cls(
            texts=[text.strip() for text in texts],
            about=about if isinstance(about, dict) else {},
        )


@dataclass(frozen=True, slots=True)
class Example:
    """A query with answers that people graded."""

    query: str
    answers: tuple[str, ...]
    labels: tuple[float, ...]
    """Pointwise: the one score. Listwise: the rank of each answer, 1 the best; equal ranks are ties."""


def read_examples(path: Path, section: RubricsConfig) -> list[Example]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RubricsError(f"{path}: can't be read: {error}") from None
    examples = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TaskDataError(f"{place}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise TaskDataError(f"{place}: expected an object with fields")
        examples.append(example_of(record, place, section))
    if not examples:
        raise RubricsError(f"{path}: no examples; each line is one graded answer, as docs/judges.md shows")
    return examples


def example_of(record: dict[str, Any], place: str, section: RubricsConfig) -> Example:
    """One example from its record. Raises RubricsError naming `place`."""
    query_field, answer_field = section.query_field, section.answer_field
    low, high = section.min_score, section.max_score
    metadata = record.get("metadata")
    fields = {**record, **(metadata if isinstance(metadata, dict) else {})}
    query = next((fields[name] for name in (query_field, "main_query", "question", "query") if fields.get(name)), None)
    if not isinstance(query, str):
        raise RubricsError(f"{place}: no field {query_field!r} with the problem's text")
    if section.grader_mode == "pointwise":
        answer = next((fields[name] for name in (answer_field, "answer") if fields.get(name) is not None), None)
        score: Any = fields.get("score")
        if answer is None or not _is_number(score) or not low <= score <= high:
            raise RubricsError(
                f"{place}: a pointwise example needs `answer` (or {answer_field!r}) and `score`, a number from {low:g} "
                f"to {high:g} (min_score and max_score); score is {score!r}"
            )
        return Example(query, (str(answer),), (float(score),))
    candidates: Any = fields.get("candidates")
    if not (isinstance(candidates, list) and len(candidates) > 1) or not all(
        isinstance(each, dict) and each.get("answer") is not None and _is_number(each.get("rank"))
        for each in candidates
    ):
        raise RubricsError(
            f"{place}: a listwise example needs `candidates`, a list of at least two objects with `answer` and `rank`"
        )
    return Example(
        query, tuple(str(each["answer"]) for each in candidates), tuple(float(each["rank"]) for each in candidates)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


SIMILAR = 0.7
"""Overlap from which two rubrics count as one."""
AGREES = 0.1 + 1e-9
"""Share of the scale by which a score may differ from its label. In floats, 0.8 - 0.7 is more than 0.1."""
PATIENCE = 5
"""`smart_sampling`: writing stops after so many examples in a row that add nothing new."""

LANGUAGES = {"en": "English", "zh": "Chinese", "de": "German", "fr": "French", "es": "Spanish", "ja": "Japanese"}

PROPOSE = """\
You write rubrics: criteria by which answers to queries of one kind are graded. Below is an example with its grade.

<query>
{query}
</query>

{graded}

Write {count} rubric(s) that explain this grade and would grade other answers to similar queries the same way. Each is \
one sentence that says what to look for and how much it matters. Don't mention this example, its numbers or names.
Write in {language}. Answer with a JSON object and nothing after it: {{"rubrics": ["…"]}}
"""
REVISE = """

These rubrics were tried, and led to another grade than the one above:
{rubrics}
The grade by them: {grade}
The grader's reason: {reason}

Write better ones."""
SUM_UP = """\
These are criteria by which answers are graded, written from single examples:
{rubrics}

Sum them up as exactly {count} themes that together say all of it. For each theme write one paragraph: what to look \
for, and tips for telling good from bad. Leave nothing out that decides grades, and say nothing twice.
Write in {language}. Answer with a JSON object and nothing after it: {{"rubrics": ["…"]}}
"""


class RubricsWriter:
    """Writes the rubrics of one grader. `grader_by` makes a grader from rubrics."""

    def __init__(self, asker: Asker, grader_by: Callable[[Rubrics], Grader], section: RubricsConfig) -> None:
        self._asker, self._grader_by, self._section, self._mode = asker, grader_by, section, section.grader_mode
        self._scale = Scale(section.min_score, section.max_score)
        self._language = LANGUAGES.get(section.language, section.language)

    async def write(self, examples: Sequence[Example], tried_on: Sequence[Example] = ()) -> Rubrics:
        """Write rubrics and measure how well they agree with the labels."""
        proposed = await self._propose_all(examples)
        texts = self._select(proposed)
        if self._section.enable_categorization:
            texts = await self._sum_up(texts)
        rubrics = Rubrics(texts[: self._section.max_total_rubrics], mode=self._mode, model=self._asker.helper.model)
        rubrics.about = {
            "examples": len(examples),
            "proposed": len(proposed),
            **await self.agreement(rubrics, tried_on or examples),
            "tried_on": "other examples" if tried_on else "the examples they were written from",
        }
        return rubrics

    async def agreement(self, rubrics: Rubrics, examples: Sequence[Example]) -> dict[str, Any]:
        """How well grading by these rubrics agrees with the labels."""
        grader = self._grader_by(rubrics)
        graded = await asyncio.gather(*(self._grade(grader, example) for example in examples))
        if self._mode == "listwise":
            pairs = [
                right for example, grades in zip(examples, graded, strict=True) for right in _pairs(example, grades)
            ]
            return {"pairs_in_right_order": round(sum(pairs) / len(pairs), 4) if pairs else None}
        scale = self._scale
        errors = [
            abs(grades[0].score - example.labels[0]) / (scale.high - scale.low)
            for example, grades in zip(examples, graded, strict=True)
        ]
        near = sum(error <= AGREES for error in errors)
        return {
            "mean_error": round(sum(errors) / len(errors), 4),
            "agree_within_a_tenth": round(near / len(errors), 4),
        }

    async def _propose_all(self, examples: Sequence[Example]) -> list[str]:
        work = [example for _ in range(self._section.generate_number) for example in examples]
        if self._section.sampling_mode == "all_samples":
            proposing = [self._propose(example, number) for number, example in enumerate(work)]
            return [text for texts in await self._asker.all(proposing, "writing rubrics") for text in texts]
        found, known, idle = [], NearDuplicates(SIMILAR), 0
        for number, example in enumerate(work):
            new = [text for text in await self._propose(example, number) if known.add(text) is None]
            found += new
            idle = 0 if new else idle + 1
            if idle >= PATIENCE or len(found) >= self._section.max_total_rubrics:
                break
        return found

    async def _propose(self, example: Example, number: int) -> list[str]:
        """Rubrics from one example, revised until grading by them agrees with its label."""
        count = self._section.query_specific_generate_number
        question = PROPOSE.format(
            query=example.query, graded=self._shown(example), count=count, language=self._language
        )
        texts = await self._texts(question, number, count)
        for _ in range(self._section.max_epochs - 1):
            grades = await self._grade(self._grader_by(Rubrics(texts)), example)
            if self._agrees(example, grades):
                break
            again = REVISE.format(
                rubrics=Rubrics(texts).as_text(),
                grade=", ".join(f"{grade.score:g}" for grade in grades),
                reason=next((reason for grade in grades for reason in grade.reasons if reason), "none given"),
            )
            texts = await self._texts(question + again, number, count)
        return texts

    async def _texts(self, question: str, draw: int, count: int) -> list[str]:
        schema = {
            "type": "object",
            "properties": {
                "rubrics": {
                    "type": "array",
                    "items": {"type": "string", "minLength": 3},
                    "minItems": 1,
                    "maxItems": count,
                }
            },
            "required": ["rubrics"],
        }
        said = await self._asker.ask(
            [{"role": "user", "content": question}],
            lambda text: read_json(text, schema)["rubrics"],
            draw=draw,
            temperature=0.0,
            max_tokens=self._section.max_tokens,
        )
        return [" ".join(text.split()) for text in said]

    async def _grade(self, grader: Grader, example: Example) -> list[Grade]:
        values = [{"query": example.query, "answer": answer} for answer in example.answers]
        return await grader.rank(values) if self._mode == "listwise" else [await grader.score(values[0])]

    def _agrees(self, example: Example, grades: Sequence[Grade]) -> bool:
        if self._mode == "listwise":
            return all(_pairs(example, grades))
        return abs(grades[0].score - example.labels[0]) <= AGREES * (self._scale.high - self._scale.low)

    def _shown(self, example: Example) -> str:
        if self._mode == "pointwise":
            return (
                f"<answer>\n{example.answers[0]}\n</answer>\n\nGrade: {example.labels[0]:g}, on a scale from "
                f"{self._scale.low:g} (worst) to {self._scale.high:g} (best)"
            )
        shown = [
            f'<answer rank="{rank:g}">\n{answer}\n</answer>'
            for answer, rank in zip(example.answers, example.labels, strict=True)
        ]
        return "\n".join(shown) + "\n\nRank 1 is the best answer."

    def _select(self, texts: list[str]) -> list[str]:
        known = NearDuplicates(SIMILAR if self._section.aggregation_mode == "merge_similar" else 1.0)
        kept = [text for text in texts if known.add(text) is None]
        if not kept:
            raise RubricsError("no rubric was written: the examples led to none")
        return kept

    async def _sum_up(self, texts: list[str]) -> list[str]:
        count = min(self._section.categories_number, len(texts))
        question = SUM_UP.format(rubrics=Rubrics(texts).as_text(), count=count, language=self._language)
        return await self._texts(question, 0, count)


def _pairs(example: Example, grades: Sequence[Grade]) -> list[bool]:
    """Whether the grades have each pair of answers of different rank in the right order."""
    together = list(zip(example.labels, grades, strict=True))
    return [
        (one.score > other.score) == (rank < other_rank) and one.score != other.score
        for (rank, one), (other_rank, other) in combinations(together, 2)
        if rank != other_rank
    ]


KEY = "ajet.task_judge.rubrics_auto_grader"
RUBRICS = "\n<rubrics>\n{rubrics}\n</rubrics>\n"
POINTWISE = ABOUT + RUBRICS + "\n<answer>\n{answer}\n</answer>\n\nGrade the answer by the rubrics.\n"
LISTWISE = ABOUT + RUBRICS + "\n{answers}\n\nRank the answers by the rubrics.\n"


class RubricsJudge(ModelJudge):
    """`ajet.task_judge.rubrics_auto_grader`."""

    section: RubricsConfig

    def __init__(self, config: Config) -> None:
        section = config.ajet.task_judge.rubrics_auto_grader
        helper = HelperModel.chosen(config, section.model_name, f"{KEY}.model_name")
        limits = {"max_concurrent": section.max_concurrent, "retries": section.max_retries}
        asker = Asker.of_run(config, helper, **limits, cache=section.cache)
        super().__init__(config, section, asker, _templates(section), section.grader_mode)
        self.rubrics: Rubrics | None = None
        own = section.rubrics_file
        self.path = Path(own).expanduser() if own else config.cache_path / "rubrics.yaml"

    def prepare(self) -> None:
        """Read the rubrics, or have them written."""
        self.rubrics = self.load_or_write()

    async def grader(self) -> Grader:
        if self.rubrics is None:
            await asyncio.to_thread(self.prepare)
        assert self.rubrics is not None
        return self.grader_by(self.rubrics)

    def grader_by(self, rubrics: Rubrics) -> Grader:
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
        section, asker = self.section, self._grader.asker
        used = examples[: section.num_reference_samples or None]
        rubrics = asyncio.run(RubricsWriter(asker, self.grader_by, section).write(used, tried_on))
        about = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in rubrics.about.items())
        log.info("rubrics: %d written (%s); %s", len(rubrics.texts), about, asker.spent)
        return replace(rubrics, name=section.grader_name or "rubrics")

    def examples(self, split: str) -> list[Example]:
        """The graded examples in the configured file of this split; none if there is no such file."""
        path = self.section.jsonl_dataset_file[split].file_path
        return [] if path is None else read_examples(Path(path), self.section)


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
