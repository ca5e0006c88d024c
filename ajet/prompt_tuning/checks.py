"""`Checks`: refuses a proposal before an episode is spent on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ajet.schema.resources import PromptSet, PromptTemplate, PromptTemplateError


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
