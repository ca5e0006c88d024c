"""Requests about spans, carried out: add, number, query."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec.structs import force_setattr

from ajet.schema.task import finite_reward
from ajet.store import requests as ask
from ajet.store.records import Attempt, Page, Span
from ajet.store.request_context import Context
from ajet.store.rows import Stored
from ajet.store.stored_rollouts import find_attempt, heard, refer, stored, write, write_heard

REWARD_NAME = re.compile(r"(^|\.)reward(\.\d+\.value)?$")
"""Attributes of a span that hold a reward."""


def add_spans(context: Context, request: ask.AddSpans) -> int:
    together: dict[tuple[str, str], list[Span]] = {}
    for span in request.spans:
        _check_rewards(span)
        together.setdefault((span.rollout_id, span.attempt_id), []).append(span)
    known = refer(context, together)
    batches = []
    for reference, spans in together.items():
        one, attempt = known[reference]
        if new := _new_spans(context, one, attempt, spans):
            batches.append((one, attempt.sequence_id, new))
        if attempt is one.attempt:
            heard(context, one, span=True)
    context.tables.add_spans(batches)
    write_heard(context, known)
    return sum(len(new) for _, _, new in batches)


def _new_spans(context: Context, one: Stored, attempt: Attempt, spans: Iterable[Span]) -> list[Span]:
    """Those that the store doesn't know, numbered: the request's spans are this store's own copies."""
    seen = context.tables.span_ids(one.number, attempt.sequence_id) if one.spans else set()
    last, new = one.spans, []
    for span in spans:
        if span.span_id in seen:
            continue
        seen.add(span.span_id)
        if not span.sequence_id:
            force_setattr(span, "sequence_id", last + 1)
        if span.sequence_id > last:
            last = span.sequence_id
        new.append(span)
    one.spans = last
    return new


def _check_rewards(span: Span) -> None:
    for name, value in span.attributes.items():
        if "reward" in name and type(value) is not float and REWARD_NAME.search(name):  # floats are finite: `wire`
            finite_reward(value, f"span {span.span_id}: the attribute {name!r}")


def next_sequence_ids(context: Context, request: ask.NextSequenceIds) -> list[int]:
    one = stored(context, request.rollout_id, change=True)
    context.must_own(one.owner, request.rollout_id)
    first = one.spans + 1
    one.spans += request.count
    write(context, [one])
    return list(range(first, first + request.count))


def query_spans(context: Context, request: ask.QuerySpans) -> Page[Span]:
    one = stored(context, request.rollout_id)
    context.must_own(one.owner, request.rollout_id)
    sequence = None
    if request.attempt_id == "latest":
        sequence = one.attempts
    elif request.attempt_id is not None:
        sequence = find_attempt(context, one, request.attempt_id).attempt.sequence_id
    found = [
        span
        for span in context.tables.spans(one.number, sequence)
        if (request.name is None or span.name == request.name)
        and request.name_contains in span.name
        and (request.trace_id is None or span.trace_id == request.trace_id)
        and (request.parent_id is None or span.parent_id == request.parent_id)
    ]
    return Page(items=found[request.offset : request.offset + request.limit], total=len(found))
