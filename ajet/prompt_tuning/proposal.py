"""Proposals: what a proposer is asked (`Request`), and what its reply must hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from ajet.prompt_tuning.candidate import Candidate
from ajet.prompt_tuning.trial import Trial
from ajet.schema.chat import Message

THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
BLOCK = re.compile(r"<template(?:\s+name=[\"']?([^\"'>\s]+)[\"']?)?\s*>\n?(.*?)\n?</template>", re.DOTALL)
FENCE = re.compile(r"```[\w-]*\n(.*?)\n?```", re.DOTALL)


class Kind(StrEnum):
    """What a proposer is asked for."""

    CRITIQUE = "critique"
    """What is wrong with the templates, seen from the episodes: a text."""
    EDIT = "edit"
    """New templates that answer a critique."""
    REWRITE = "rewrite"
    """New templates, without looking at any episode."""
    REFLECT = "reflect"
    """New templates, from the episodes and their feedback at once."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What an algorithm wants of the proposer."""

    kind: Kind
    parent: Candidate
    names: tuple[str, ...]
    """The templates that may change."""
    trials: tuple[Trial, ...] = ()
    """What to read."""
    feedback: str = ""
    """With `edit`: the critique that is to be answered."""
    source: tuple[Trial, ...] = ()
    """With `edit`: what the critique was written from."""
    draw: int = 0
    """Tells equal questions apart."""


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a proposer. A language model is asked `messages`; a function of your own may look at the rest."""

    kind: Kind
    messages: list[Message]
    candidate: Candidate
    """Whose templates are to be improved."""
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
    """Answers requests. Raises `ProposerError` if it can't, `BudgetExhausted` if it must not."""

    async def __call__(self, request: Request) -> Reply: ...


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal that passed the checks, before it has a number."""

    ask: Ask
    texts: dict[str, str] = field(default_factory=dict)
    """By name, those that change."""


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
