"""Proposals: what a proposer is asked (`Request`), and what its reply must hold.

This module holds all prompts that ask a language model to improve templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from ajet.prompt_tuning.candidate import Candidate
from ajet.prompt_tuning.trial import Trial
from ajet.schema.chat import Message
from ajet.schema.resources import PromptTemplate

THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
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
    """The trials to read."""
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
    """The request as chat messages."""
    asked = {
        Kind.CRITIQUE: _critique,
        Kind.EDIT: _edit,
        Kind.REWRITE: _rewrite,
        Kind.REFLECT: _reflect,
    }[ask.kind](ask)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]


def again(messages: list[Message], reply: str, wrong: str) -> list[Message]:
    """The chat messages that ask again after an unusable reply."""
    complaint = f"This can't be used: {wrong}. Answer again, in the form that was asked for."
    return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": complaint}]


def _critique(ask: Ask) -> str:
    return _paragraphs(
        "These templates instruct an agent:",
        _templates(ask),
        "This is what happened when it used them:",
        _trials(ask.trials),
        "Criticise the templates, in at most 150 words. " + CRITIQUE_ANGLES[ask.draw % len(CRITIQUE_ANGLES)],
        "Don't solve the tasks, and don't write the new templates yet: somebody else will, from your criticism alone.",
    )


def _edit(ask: Ask) -> str:
    return _paragraphs(
        "These templates instruct an agent:",
        _templates(ask),
        "A reviewer who saw the agent use them criticises:",
        f"<criticism>\n{ask.feedback}\n</criticism>",
        "Write templates that answer the criticism. " + EDIT_ANGLES[ask.draw % len(EDIT_ANGLES)],
        _form(ask),
    )


def _rewrite(ask: Ask) -> str:
    return _paragraphs(
        "These templates instruct an agent:",
        _templates(ask),
        f"Write a different version that may work better. This is attempt number {ask.draw + 1}: try an approach of "
        "its own.",
        _form(ask),
    )


def _reflect(ask: Ask) -> str:
    return _paragraphs(
        "These templates instruct an agent:",
        _templates(ask),
        "This is what happened when it used them:",
        _trials(ask.trials),
        "Find out what the tasks demand that the templates don't say: facts, rules, formats, and a way of working that "
        "did well. Then write templates that say so.",
        _form(ask),
    )


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


def _trials(trials: Iterable[Trial]) -> str:
    return "\n".join(describe(trial, number) for number, trial in enumerate(trials, 1))


def describe(trial: Trial, number: int = 1) -> str:
    """Format a trial for a proposer."""
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
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    parts = [str(content)] if content else []
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


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(parts)
