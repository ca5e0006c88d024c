"""`Candidate`: one version of the prompt templates, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ajet.schema.resources import PromptSet, PromptTemplate


@dataclass(frozen=True, slots=True)
class Candidate:
    """One version of the prompt templates."""

    id: str
    """`c0` is the start; the others are numbered as they were accepted."""
    prompts: PromptSet
    parents: tuple[str, ...] = ()
    made_by: str = "start"
    """`start`, `edit`, `rewrite`, `reflect` or `merge`."""
    feedback: str = ""
    """What led to it: the criticism of its parent, or the feedback of the episodes."""
    round: int = 0

    @property
    def version(self) -> str:
        """Of the templates' content, as episodes record it."""
        return self.prompts.version

    @property
    def texts(self) -> dict[str, str]:
        """The templates' texts by name."""
        return {name: one.template for name, one in self.prompts.templates.items()}

    def to_record(self) -> dict[str, Any]:
        """As plain data."""
        templates = {name: {"text": one.template, "engine": one.engine} for name, one in self.prompts.templates.items()}
        return {
            "id": self.id,
            "version": self.version,
            "templates": templates,
            "parents": list(self.parents),
            "made_by": self.made_by,
            "feedback": self.feedback,
            "round": self.round,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Candidate:
        """The inverse of `to_record`. Raises KeyError or TypeError for anything else."""
        templates = {name: PromptTemplate(one["text"], one["engine"]) for name, one in record["templates"].items()}
        return cls(
            id=str(record["id"]),
            prompts=PromptSet(templates),
            parents=tuple(map(str, record["parents"])),
            made_by=str(record["made_by"]),
            feedback=str(record["feedback"]),
            round=int(record["round"]),
        )
