"""`Rubrics`: what a grader looks at, as a YAML file that people can read and edit; and the graded examples."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ajet.schema.errors import TaskDataError, UserError

HEAD = """\
# What answers are graded by. Edit, add and remove rubrics: this file is written only if it isn't there.
# `ajet rubrics make CONF --again` writes it anew; the earlier one is kept beside it.
"""


class RubricsError(UserError):
    """A rubrics file or a graded example that makes no sense. Names the file and the place."""


@dataclass(slots=True)
class Rubrics:
    """The rubrics of one grader."""

    texts: list[str]
    name: str = "rubrics"
    mode: str = "pointwise"
    model: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    """How they were made, and how well they agree with the examples."""

    def as_text(self) -> str:
        """A numbered list, for a prompt."""
        return "\n".join(f"{number}. {text}" for number, text in enumerate(self.texts, start=1))

    def save(self, path: Path) -> None:
        """Write the file, completely or not at all."""
        import yaml

        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"name": self.name, "mode": self.mode, "model": self.model, "about": self.about, "rubrics": self.texts}
        scratch = path.with_suffix(".tmp")
        scratch.write_text(HEAD + yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=110), "utf-8")
        scratch.replace(path)

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
        if (
            not isinstance(texts, list)
            or not texts
            or not all(isinstance(text, str) and text.strip() for text in texts)
        ):
            raise RubricsError(f"{path}: expected `rubrics:` with a list of texts, one rubric each")
        about = record.get("about")
        return cls(
            texts=[text.strip() for text in texts],
            name=str(record.get("name") or "rubrics"),
            mode=str(record.get("mode") or "pointwise"),
            model=str(record.get("model") or ""),
            about=about if isinstance(about, dict) else {},
        )


@dataclass(frozen=True, slots=True)
class Example:
    """A query with answers and what people thought of them."""

    query: str
    answers: tuple[str, ...]
    labels: tuple[float, ...]
    """Pointwise: the one score. Listwise: the rank of each answer, 1 the best; equal ranks are ties."""


def read_examples(
    path: Path, mode: str, *, query_field: str, answer_field: str, low: float, high: float
) -> list[Example]:
    """The graded examples of a JSON Lines file."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
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
        examples.append(example_of(record, mode, place, query_field, answer_field, low, high))
    if not examples:
        raise RubricsError(f"{path}: no examples; each line is one graded answer, as docs/judges.md shows")
    return examples


def example_of(
    record: dict[str, Any], mode: str, place: str, query_field: str, answer_field: str, low: float, high: float
) -> Example:
    """One example from its record. Raises RubricsError naming `place`."""
    metadata = record.get("metadata")
    fields = {**record, **(metadata if isinstance(metadata, dict) else {})}
    query = next((fields[name] for name in (query_field, "main_query", "question", "query") if fields.get(name)), None)
    if not isinstance(query, str):
        raise RubricsError(f"{place}: no field {query_field!r} with the problem's text")
    if mode == "pointwise":
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
