"""Resources: what is tuned and handed to an agent. `LLM` names an endpoint, `PromptTemplate` is a text."""

from __future__ import annotations

import hashlib
import json
import logging
import string
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ajet.schema.errors import UserError

log = logging.getLogger("ajet.schema.resources")

TemplateEngine = Literal["f-string", "jinja"]


class PromptTemplateError(UserError):
    """A template that can't be read, or values that don't fill it."""


@dataclass(frozen=True, slots=True)
class LLM:
    """A model behind an OpenAI-compatible endpoint."""

    endpoint: str
    """Its address, up to and including `/v1`."""
    model: str
    api_key: str | None = None
    sampling_parameters: Mapping[str, Any] = field(default_factory=dict)

    def get_base_url(self, *_: Any) -> str:
        return self.endpoint


@dataclass(frozen=True)
class PromptTemplate:
    """A text with placeholders: `{name}` (`{{` and `}}` are braces), or Jinja's `{{ name }}` in a sandbox.

    An f-string placeholder is a bare name: no attributes, no indices, so that a template written by a model can read
    nothing but the values it is given.
    """

    template: str
    engine: TemplateEngine = "f-string"

    @cached_property
    def placeholders(self) -> frozenset[str]:
        """The placeholders that `format` fills. Raises `PromptTemplateError` if the template can't be read."""
        if self.engine == "jinja":
            from jinja2 import TemplateSyntaxError, meta

            try:
                return frozenset(meta.find_undeclared_variables(_jinja().parse(self.template)))
            except TemplateSyntaxError as error:
                raise PromptTemplateError(f"prompt template, line {error.lineno}: {error.message}") from None
        if self.engine != "f-string":
            raise PromptTemplateError(f"prompt template: engine {self.engine!r}; there is: f-string, jinja")
        return frozenset(field.name for field in _fields(self.template))

    @cached_property
    def forms(self) -> Counter[str]:
        """Counts the places where the template does more than insert a value: `{name!r}` and `{name:>9}`; in Jinja,
        everything but text and plain names. Raises `PromptTemplateError`."""
        if self.engine != "jinja":
            return Counter(f"{{{field.name}{field.shape}}}" for field in _fields(self.template) if field.shape)
        from jinja2 import nodes

        _ = self.placeholders  # what can't be read is said there
        plain = (nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name)
        return Counter(
            _form(one) for one in _jinja().parse(self.template).find_all(nodes.Node) if type(one) not in plain
        )

    def format(self, **values: Any) -> str:
        """The text with every placeholder filled; further values are ignored. Warns about a template without
        placeholders."""
        missing = sorted(self.placeholders - values.keys())
        if missing:
            given = ", ".join(sorted(values)) or "nothing"
            raise PromptTemplateError(f"prompt template: no value for {{{missing[0]}}}; given: {given}")
        if values and not self.placeholders:
            _warn_of_no_placeholder(tuple(sorted(values)), "{{ name }}" if self.engine == "jinja" else "{name}")
        if self.engine == "jinja":
            from jinja2 import TemplateError

            try:
                return str(_jinja().from_string(self.template).render(values))
            except TemplateError as error:
                raise PromptTemplateError(f"prompt template: {error}") from None
            except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
                raise PromptTemplateError(f"prompt template: {type(error).__name__}: {error}") from None
        try:
            return self.template.format_map({name: values[name] for name in self.placeholders})
        except (ValueError, TypeError) as error:
            raise PromptTemplateError(f"prompt template: {error}") from None


@cache
def _warn_of_no_placeholder(names: tuple[str, ...], form: str) -> None:
    log.warning(
        "a prompt template has no placeholder, so the workflow's values for it (%s) don't reach the model: write %s "
        "in the template where one belongs",
        *(", ".join(names), form),
    )


@dataclass(frozen=True)
class PromptSet:
    """The prompt templates of an episode, by name."""

    templates: dict[str, PromptTemplate]

    @cached_property
    def version(self) -> str:
        """Eight hexadecimal digits of the content: equal for equal templates, in any run."""
        content = {name: [one.template, one.engine] for name, one in self.templates.items()}
        text = json.dumps(content, sort_keys=True, ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def get(self, name: str | None = None) -> PromptTemplate:
        """The template of this name; without a name, the only one there is. Raises `PromptTemplateError`."""
        return self.templates[self.name(name)]

    def name(self, name: str | None = None) -> str:
        """The name that `get` uses."""
        wanted = next(iter(self.templates)) if name is None and len(self.templates) == 1 else name
        if wanted not in self.templates:
            asked = f"no template {name!r}" if name is not None else "tuner.prompt() needs a name"
            raise PromptTemplateError(
                f"{asked}; ajet.prompt_tuning.templates has: {', '.join(self.templates) or 'none'}\n"
                '    write, for example: prompt_tuning: {templates: {solver: "Solve: {question}"}}'
            )
        return wanted


def read_prompts(given: Mapping[str, Any]) -> PromptSet:
    """The templates as the configuration holds them: texts, or sections with `text` or `file` and `engine`.

    Raises `PromptTemplateError`, which names the template, if one can't be read.
    """
    return PromptSet({name: _read_template(f"ajet.prompt_tuning.templates.{name}", one) for name, one in given.items()})


def _read_template(key: str, given: Any) -> PromptTemplate:
    try:
        if isinstance(given, str):
            template = PromptTemplate(given)
        elif given.text is not None:
            template = PromptTemplate(given.text, given.engine)
        else:
            template = PromptTemplate(Path(given.file).read_text(encoding="utf-8"), given.engine)
        _ = template.placeholders
    except PromptTemplateError as error:
        raise PromptTemplateError(f"{key}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PromptTemplateError(f"{key}: {given.file} can't be read: {error}") from None
    return template


class _Field(NamedTuple):
    """A placeholder of an f-string."""

    name: str
    shape: str
    """What follows the name: `!r`, `:>9`."""


def _fields(template: str) -> Iterator[_Field]:
    try:
        for _, name, spec, conversion in string.Formatter().parse(template):
            if name is None:
                continue
            if not name.isidentifier():
                raise PromptTemplateError(
                    f"prompt template: {{{name}}} isn't a plain name; write {{{{ and }}}} for braces in the text"
                )
            if conversion not in (None, "r", "s", "a"):
                raise PromptTemplateError(f"prompt template: {{{name}!{conversion}}}: there are !r, !s and !a")
            yield _Field(name, (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else ""))
            if spec:
                yield from _fields(spec)
    except ValueError as error:
        raise PromptTemplateError(f"prompt template: {error}; write {{{{ and }}}} for braces in the text") from None


def _form(node: Any) -> str:
    """A part of a Jinja template, as its author knows it."""
    kind = type(node).__name__.lower()
    if kind == "getattr":
        return f".{node.attr}"
    return f"|{node.name}" if kind == "filter" else kind


def _jinja() -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
