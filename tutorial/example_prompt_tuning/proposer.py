"""A proposer that needs no language model: rules that read the feedback of the episodes, and a list of sentences.

It stands in for the helper model where there is none, and proves that the search works, not that a model writes well.
Asked to criticise, it repeats the complaint that it read most often. Asked for an edit, it adds a sentence that shares
a word with the criticism; of the forty sentences several do, and most of those change nothing. Asked to rewrite without
having seen an episode, it adds sentences at random, from the same list.
"""

from __future__ import annotations

import random
import re
from collections import Counter

from sentences import ALL

from ajet.prompt_tuning import Kind, Request

COMMON = frozenset(
    ("a", "an", "and", "are", "at", "be", "but", "by", "for", "from", "in", "is", "it", "no", "not", "of", "on", "that",
     "the", "this", "to", "was", "with", "you", "your")
)  # fmt: skip
ENDINGS = re.compile(r"(?:est|er|ly|s)$")
REQUEST = "{request}"


def propose(request: Request) -> str:
    """Answer one question of the search."""
    draw = random.Random(f"{request.candidate.version} {request.kind} {request.draw} {request.feedback}")
    if request.kind is Kind.CRITIQUE:
        return _complaint(request, draw)
    text = request.candidate.texts[request.names[0]]
    if request.kind is Kind.REWRITE:
        return _with(text, draw.sample(ALL, draw.randint(1, 3)))
    criticism = request.feedback if request.kind is Kind.EDIT else _complaint(request, draw)
    fitting = [one for one in ALL if one not in text and words(one) & words(criticism)]
    return _with(text, [draw.choice(fitting or ALL)])


def _complaint(request: Request, draw: random.Random) -> str:
    """One of the two complaints that were made most often."""
    said = re.findall(r"[^.]+\.", " ".join(trial.feedback for trial in request.trials))
    kinds = Counter(re.sub(r"\d+", "#", sentence.strip()) for sentence in said)
    if not kinds:
        return "Nothing went wrong in these episodes."
    return draw.choice([text for text, _ in kinds.most_common(2)])


def words(text: str) -> frozenset[str]:
    """Its words without their endings, and without those that every text has."""
    found = re.findall(r"[a-z]+", text.lower())
    return frozenset(ENDINGS.sub("", word) for word in found if word not in COMMON)


def _with(text: str, sentences: list[str]) -> str:
    """The template with these sentences before the request. A sentence that is there already isn't repeated."""
    before, _, after = text.partition(REQUEST)
    new = " ".join(one for one in sentences if one not in text)
    return f"<template>{before.rstrip()} {new}\n{REQUEST}{after}</template>"
