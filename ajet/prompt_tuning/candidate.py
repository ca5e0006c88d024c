"""`Candidate`: one version of the prompt templates, and where it came from.

`Checks` refuses a proposal before an episode is spent on it. The errors are what can end a search before its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ajet.schema.errors import AjetError, UserError
from ajet.schema.resources import PromptSet, PromptTemplate, PromptTemplateError


class ProposerError(AjetError):
    """The proposer could not be asked, or failed. Not raised for a proposal that is merely refused."""


class SearchFailedError(AjetError):
    """The search can't go on: no episode of a batch could be scored, or every question to the proposer failed."""


class UnusedTemplateError(UserError):
    """No episode asked for a template that is to be tuned: its text could not matter."""


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
        """The version of the templates' content, as episodes record it."""
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


@dataclass(frozen=True, slots=True)
class Checks:
    """What every proposal must keep of the start."""

    start: PromptSet
    max_length: int = 20_000
    """Characters of one template."""

    def refusal(self, texts: Mapping[str, str], parent: PromptSet, known: Iterable[str]) -> str:
        """What is wrong with these new texts, in words that their author can act on; empty if nothing is.

        `texts`: by name, those that change. `known`: versions that exist already.
        """
        for name, text in texts.items():
            if name not in self.start.templates:
                return f"there is no template {name!r}; there is: {', '.join(self.start.templates)}"
            wrong = self._wrong(name, text)
            if wrong:
                return f"template {name!r}: {wrong}"
        version = changed(parent, texts).version
        if version == parent.version:
            return "it is the same as the template that it should improve"
        if version in set(known):
            return "it is the same as an earlier proposal"
        return ""

    def _wrong(self, name: str, text: str) -> str:
        if not text.strip():
            return "it is empty"
        if len(text) > self.max_length:
            return f"it has {len(text):,} characters; at most {self.max_length:,} are allowed"
        start = self.start.templates[name]
        try:
            template = PromptTemplate(text, start.engine)
            placeholders, more = template.placeholders, template.forms - start.forms
        except PromptTemplateError as error:
            return str(error)
        lost, added = sorted(start.placeholders - placeholders), sorted(placeholders - start.placeholders)
        if lost:
            return f"it lacks the placeholder {_shown(lost[0], start.engine)}, which must stay exactly as it is"
        if added:
            literal = "write {{ and }} for braces that belong to the text" if start.engine == "f-string" else ""
            there = ", ".join(_shown(one, start.engine) for one in sorted(start.placeholders)) or "none"
            return f"nothing fills {_shown(added[0], start.engine)}; the placeholders are: {there}. {literal}".rstrip(
                ". "
            )
        if more:  # a model's arithmetic, loops and widths can take all of the machine
            return f"it has {min(more)!r}, which the start hasn't, or has less often: only the words may change"
        return ""


def changed(parent: PromptSet, texts: Mapping[str, str]) -> PromptSet:
    """The parent's templates with these texts."""
    templates = dict(parent.templates)
    for name, text in texts.items():
        if name in templates:
            templates[name] = PromptTemplate(text, templates[name].engine)
    return PromptSet(templates)


def _shown(name: str, engine: str) -> str:
    return f"{{{{ {name} }}}}" if engine == "jinja" else f"{{{name}}}"
