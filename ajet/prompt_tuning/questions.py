"""All words in which a language model is asked to improve templates."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ajet.prompt_tuning.proposal import Ask, Kind
from ajet.prompt_tuning.trial import Trial
from ajet.schema.chat import Message
from ajet.schema.resources import PromptTemplate

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
"""Characters shown of one message: enough for a turn, and a long document doesn't fill the proposer's context."""
TRIAL_LENGTH = 8_000
"""Characters shown of one trial."""


def messages_for(ask: Ask) -> list[Message]:
    """The question, as a chat."""
    asked = {
        Kind.CRITIQUE: _critique,
        Kind.EDIT: _edit,
        Kind.REWRITE: _rewrite,
        Kind.REFLECT: _reflect,
    }[ask.kind](ask)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]


def again(messages: list[Message], reply: str, wrong: str) -> list[Message]:
    """The question asked once more, after a reply that can't be used."""
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
    """A trial as a proposer reads it."""
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
