"""Why a call could not extend the call that its messages resemble most: `explain` for one, `top_reasons` for a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ajet.context_tracker.canonical import split_reasoning, stable_json
from ajet.context_tracker.conversation import Turn
from ajet.context_tracker.record import CallRecord
from ajet.schema.call_tree import CallTree, Fork
from ajet.schema.chat import Message

EXCERPT = 60
"""Characters of a changed text shown to each side."""
LOOK_BACK = 16
"""How many of an agent's latest calls are compared with one that extends none."""


@dataclass(frozen=True, slots=True)
class ForkReason:
    """One reason, over all episodes of a run."""

    reason: str
    count: int
    tokens: int
    """Tokens that were rendered and prefilled again for it."""
    example: str


def changed_message(agent_calls: Sequence[CallRecord], turn: Turn, known: int) -> tuple[str, CallRecord, str] | None:
    """(reason, nearest call, detail) of a request that goes on from no recorded reply although it looks like one.

    `known` messages are those of earlier calls; the nearest call is the agent's latest that shares the most of them.
    """
    path = turn.path()
    if known >= len(path):
        return None  # a retry, or a request that is part of another
    nearest: CallRecord | None = None
    best: tuple[int, int] = (0, -1)
    for record in agent_calls[-LOOK_BACK:]:
        if record.reply_turn is None:
            continue
        shared = _shared_depth(record.reply_turn, path)
        if (shared, record.index) > best:
            nearest, best = record, (shared, record.index)
    says_what_was_said = any(step.message["role"] == "assistant" for step in path[best[0] :])
    if nearest is None or nearest.reply_turn is None or (not best[0] and not says_what_was_said):
        return None
    before = nearest.reply_turn.path()
    at = best[0]
    if at >= len(before) or at >= len(path):
        return None
    now, was = path[at].message, before[at].message
    if before[at].replies and now["role"] == "assistant":
        reason = "reply_changed"
    elif len(path) < len(before) and now["role"] == was["role"]:
        reason = "history_rewritten"
    else:
        reason = "message_changed"
    return reason, nearest, f"messages[{at}]{_changed_field(was, now)}"


def _shared_depth(turn: Turn, path: list[Turn]) -> int:
    current: Turn | None = turn
    while current is not None and current.depth:
        if current.depth <= len(path) and path[current.depth - 1] is current:
            return current.depth
        current = current.parent
    return 0


def _changed_field(was: Message, now: Message) -> str:
    if was["role"] != now["role"]:
        return f".role: {was['role']!r} became {now['role']!r}"
    if was["role"] == "assistant":
        before, after = split_reasoning(was)[1], split_reasoning(now)[1]
        if before.strip() == after.strip():
            calls = [stable_json([c["function"] for c in m.get("tool_calls", ())]) for m in (was, now)]
            return f".tool_calls: {_difference(*calls)}"
        return f".content: {_difference(before.strip(), after.strip())}"
    for name in ("content", "name", "tool_call_id"):
        if was.get(name, "") != now.get(name, ""):
            return f".{name}: {_difference(was.get(name, ''), now.get(name, ''))}"
    return ""


def _difference(was: str, now: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    start = max(0, at - 16)
    return f"{was[start : at + EXCERPT]!r} became {now[start : at + EXCERPT]!r} (from character {at})"


def top_reasons(trees: Iterable[CallTree], limit: int = 5) -> list[ForkReason]:
    """The most expensive fork reasons of many episodes, for the end of a run."""
    counts: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    examples: dict[str, Fork] = {}
    for tree in trees:
        for call in tree.calls:
            if (fork := call.fork) is None:
                continue
            counts[fork.reason] += 1
            tokens[fork.reason] += fork.tokens
            if fork.reason not in examples or fork.tokens > examples[fork.reason].tokens:
                examples[fork.reason] = fork
    ranked = sorted(counts, key=lambda reason: (-tokens[reason], reason))[:limit]
    return [ForkReason(name, counts[name], tokens[name], examples[name].detail) for name in ranked]


def describe_reasons(trees: Iterable[CallTree], limit: int = 5) -> list[str]:
    """`top_reasons` as lines of text."""
    return [
        f"{reason.count} × {reason.reason} ({reason.tokens} tokens rendered again), e.g. {reason.example}"
        for reason in top_reasons(trees, limit)
    ]
