"""Candidates and the proposals that they come from.

A `Candidate` is one version of the prompt templates. A `Request` is what a proposer is asked; all prompts that ask a
language model to improve templates are here. `refusal` checks a proposal before an episode is spent on it. The errors
can end a search early.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from ajet.prompt_tuning.trial import Trial
from ajet.schema.chat import Message, plain_text
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
        return {name: one.template for name, one in self.prompts.templates.items()}

    def to_record(self) -> dict[str, Any]:
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


LONGEST_TEMPLATE = 20_000
"""Characters of a proposed template; twice as many as the start's has, if that is more."""


def refusal(start: PromptSet, texts: Mapping[str, str], parent: PromptSet, known: Iterable[str]) -> str:
    """What is wrong with these new texts, in words that their author can act on; empty if nothing is.

    `texts`: by name, those that change. `known`: versions that exist already.
    """
    for name, text in texts.items():
        wrong = _wrong(start.templates[name], text)
        if wrong:
            return f"template {name!r}: {wrong}"
    version = changed(parent, texts).version
    if version == parent.version:
        return "it is the same as the template that it should improve"
    if version in set(known):
        return "it is the same as an earlier proposal"
    return ""


def _wrong(start: PromptTemplate, text: str) -> str:
    if not text.strip():
        return "it is empty"
    most = max(LONGEST_TEMPLATE, 2 * len(start.template))
    if len(text) > most:
        return f"it has {len(text):,} characters; at most {most:,} are allowed"
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
        return f"nothing fills {_shown(added[0], start.engine)}; the placeholders are: {there}. {literal}".rstrip(". ")
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


# ---------------------------------------------------------------- what a proposer is asked


THINKING = re.compile(r"\A\s*<think>.*?</think>|\A(?:(?!<template).)*?</think>", re.DOTALL)
"""The reasoning before an answer; `<think>` is missing where a chat template writes it. A template may have these tags,
too."""
BLOCK = re.compile(r"<template(?:\s+name=[\"']?([^\"'>\s]+)[\"']?)?\s*>\n?(.*?)\n?</template>", re.DOTALL)
FENCE = re.compile(r"```[\w-]*\n(.*?)\n?```", re.DOTALL)


class Kind(StrEnum):
    """The kind of a request to a proposer."""

    CRITIQUE = "critique"
    """A text that says what is wrong with the templates, given the episodes."""
    EDIT = "edit"
    """New templates that answer a critique."""
    REWRITE = "rewrite"
    """New templates, without looking at any episode."""
    REFLECT = "reflect"
    """New templates, from the episodes and their feedback at once."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An algorithm's request to the proposer."""

    kind: Kind
    parent: Candidate
    names: tuple[str, ...]
    """The templates that may change."""
    trials: tuple[Trial, ...] = ()
    feedback: str = ""
    """With `edit`: the critique to address."""
    source: tuple[Trial, ...] = ()
    """With `edit`: the trials that the critique was written from."""
    draw: int = 0
    """Distinguishes equal questions."""


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a proposer. A language model is asked `messages`; a function of your own may look at the rest."""

    kind: Kind
    messages: list[Message]
    candidate: Candidate
    """The candidate whose templates are to be improved."""
    names: tuple[str, ...]
    """The templates that may change."""
    trials: tuple[Trial, ...] = ()
    feedback: str = ""
    draw: int = 0
    """A number that differs between equal questions of a run and between seeds, and is the same when the run is
    repeated."""


class Reply(NamedTuple):
    """What a proposer said, and the tokens that it took."""

    text: str
    prompt_tokens: int = 0
    sampled_tokens: int = 0


class Proposer(Protocol):
    """Answers requests. Raises `ProposerError` if it fails, `BudgetExhausted` if the budget is used up."""

    async def __call__(self, request: Request) -> Reply: ...


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal that passed the checks, before it has a number."""

    ask: Ask
    texts: dict[str, str] = field(default_factory=dict)
    """The changed templates, by name."""


def read_templates(reply: str, names: Sequence[str]) -> dict[str, str]:
    """The templates in a reply, by name. Raises ValueError, which says what is missing, if there is none.

    Each stands between `<template name="…">` and `</template>`. If only one template is asked for, the name may be
    missing, and a reply without tags is the template: its last fenced block, or else all of it.
    """
    text = THINKING.sub("", reply)
    if text.lstrip().startswith("<think>"):
        raise ValueError("it was cut off within its reasoning: reason less before the templates")
    found = {(name or names[0]): body for name, body in BLOCK.findall(text) if name or len(names) == 1}
    unknown = sorted(found.keys() - set(names))
    if unknown:
        raise ValueError(f"there is no template {unknown[0]!r} to change; there is: {', '.join(names)}")
    if found:
        return found
    if len(names) > 1 or "<template" in text:
        raise ValueError('put each new template between <template name="NAME"> and </template>')
    fences = FENCE.findall(text)
    return {names[0]: fences[-1] if fences else text.strip()}


SYSTEM = "You improve the prompt templates of an AI agent. You are precise and never invent facts about its tasks."
CRITIQUE_ANGLES = (
    "Name the rule or the step that the templates fail to state, and that would have changed these results.",
    "Compare the good results with the poor ones: what must the templates say so that all of them become good?",
    "Find the sentence in the templates that misled the agent, or that it could misread, and say what it should be.",
)
"""Several readings of the same episodes find different faults."""
EDIT_ANGLES = (
    "Change as little as the criticism asks for.",
    "Rewrite freely, and more clearly, wherever the criticism gives a reason to.",
)
MESSAGE_LENGTH = 2_000
"""The maximum number of characters shown of one message: enough for a turn, without letting a long document fill the
proposer's context."""
TRIAL_LENGTH = 8_000
"""The maximum number of characters shown of one trial."""


def messages_for(ask: Ask) -> list[Message]:
    asked = {
        Kind.CRITIQUE: _critique,
        Kind.EDIT: _edit,
        Kind.REWRITE: _rewrite,
        Kind.REFLECT: _reflect,
    }[ask.kind](ask)
    text = "\n\n".join(["These templates instruct an agent:", _templates(ask), *asked])
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def again(messages: list[Message], reply: str, wrong: str) -> list[Message]:
    """The chat messages that ask again after an unusable reply."""
    complaint = f"This can't be used: {wrong}. Answer again, in the form that was asked for."
    return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": complaint}]


def _critique(ask: Ask) -> list[str]:
    return [
        *_trials(ask),
        "Criticise the templates, in at most 150 words. " + CRITIQUE_ANGLES[ask.draw % len(CRITIQUE_ANGLES)],
        "Don't solve the tasks, and don't write the new templates yet: somebody else will, from your criticism alone.",
    ]


def _edit(ask: Ask) -> list[str]:
    return [
        "A reviewer who saw the agent use them criticises:",
        f"<criticism>\n{ask.feedback}\n</criticism>",
        "Write templates that answer the criticism. " + EDIT_ANGLES[ask.draw % len(EDIT_ANGLES)],
        _form(ask),
    ]


def _rewrite(ask: Ask) -> list[str]:
    return [
        f"Write a different version that may work better. This is attempt number {ask.draw + 1}: try an approach of "
        "its own.",
        _form(ask),
    ]


def _reflect(ask: Ask) -> list[str]:
    return [
        *_trials(ask),
        "Find out what the tasks demand that the templates don't say: facts, rules, formats, and a way of working that "
        "did well. Then write templates that say so.",
        _form(ask),
    ]


def _form(ask: Ask) -> str:
    rules = ["Keep every placeholder exactly as it is: without it the agent doesn't get its task."]
    templates = [ask.parent.prompts.templates[name] for name in ask.names]
    for engine, literal in (("f-string", "{{ and }}"), ("jinja", "{% raw %} … {% endraw %}")):
        if any(template.engine == engine for template in templates):
            rules.append(f"Braces that belong to the text are written {literal}.")
    names = " and ".join(f'<template name="{name}">…</template>' for name in ask.names)
    rules.append(f"Answer with {names}, each with the complete new text.")
    return " ".join(rules)


def _templates(ask: Ask) -> str:
    shown = []
    for name, template in ask.parent.prompts.templates.items():
        fixed = "" if name in ask.names else ' fixed="yes"'
        shown.append(f'<template name="{name}"{fixed}>\n{template.template}\n</template>\n{_placeholders(template)}')
    if len(ask.names) < len(ask.parent.prompts.templates):
        shown.append("Those marked as fixed stay as they are.")
    return "\n".join(shown)


def _placeholders(template: PromptTemplate) -> str:
    names = ", ".join(sorted(template.placeholders))
    return f"(placeholders: {names})" if names else "(no placeholders)"


def _trials(ask: Ask) -> list[str]:
    described = (describe(trial, number) for number, trial in enumerate(ask.trials, 1))
    return ["This is what happened when it used them:", "\n".join(described)]


def describe(trial: Trial, number: int = 1) -> str:
    reward = "none" if trial.reward is None else f"{trial.reward:g}"
    lines = [f'<episode number="{number}" reward="{reward}">']
    if trial.query:
        lines.append(f"task: {_cut(trial.query, MESSAGE_LENGTH)}")
    lines += [line for conversation in trial.conversations for line in map(_message, conversation)]
    if trial.failure:
        lines.append(f"it failed: {trial.failure}")
    if trial.feedback:
        lines.append(f"feedback: {trial.feedback}")
    return _cut("\n".join(lines), TRIAL_LENGTH) + "\n</episode>"


def _message(message: Message) -> str:
    content = plain_text(message.get("content"))
    parts = [content] if content else []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = function.get("arguments", "")
        parts.append(
            f"calls {function.get('name')}({arguments if isinstance(arguments, str) else json.dumps(arguments)})"
        )
    return f"{message.get('role')}: {_cut(' '.join(parts), MESSAGE_LENGTH)}"


def _cut(text: str, length: int) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= length:
        return text
    half = (length - 5) // 2
    return f"{text[:half]} […] {text[-half:]}"
