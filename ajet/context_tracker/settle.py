"""`settle`: at the end of an episode, which tokens are trained, and the ledger of all that were sampled.

A reply is *abandoned* when another reply to the same prompt of the same agent took its place: that one was built upon
(a later request holds it, or the workflow returned its text) and this one was not; or none was, and the other was
asked for after this one had come (a retry). Replies that were drawn side by side with nothing built upon any of them,
single replies, last replies and calls with a reward of their own are never abandoned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ajet.context_tracker.record import CallRecord
from ajet.context_tracker.settings import TrackerSettings
from ajet.schema.call_tree import CallTree
from ajet.schema.episode import Ledger


def settle(
    tree: CallTree, records: Sequence[CallRecord], settings: TrackerSettings, *, failed: bool, output: str | None
) -> Ledger:
    """Set the masks and drop reasons of all calls; return the balanced ledger."""
    if settings.abandoned_calls == "mask":
        for record in abandoned(records, output):
            record.call.drop = "abandoned"
    ledger = Ledger()
    for record in records:
        call = record.call
        if record.reply is None:
            continue
        count = len(record.reply.ids)
        ledger.captured += count
        if failed and call.drop is None:
            call.drop = "failed_episode"
        if call.drop is not None:
            call.mask = np.zeros(count, np.bool_)
            places = ledger.masked if call.drop in ("abandoned", "not_trainable") else ledger.dropped
            places[call.drop] = places.get(call.drop, 0) + count
        else:
            ledger.trained += count
    ledger.balance()
    assert ledger.trained == tree.trained_tokens, (ledger, tree.trained_tokens)
    return ledger


def abandoned(records: Sequence[CallRecord], output: str | None = None) -> list[CallRecord]:
    """The calls whose place another reply took."""
    groups: dict[tuple[int, str], list[CallRecord]] = defaultdict(list)
    for record in records:
        if record.reply is not None and record.call.drop is None:
            groups[(id(record.turn), record.call.agent)].append(record)
    chosen = []
    for group in groups.values():
        if len(group) < 2:
            continue
        built = [record for record in group if _built_upon(record)]
        if not built and output:
            built = [record for record in group if _returned(record, output)]
        for record in group:
            if record.call.reward is not None or record in built:
                continue
            if built or any(other.begun > record.ended for other in group):
                chosen.append(record)
    return chosen


def _built_upon(record: CallRecord) -> bool:
    """Whether a request that came later holds this reply, even in a branch."""
    turn = record.reply_turn
    return turn is not None and turn.seen > record.requests_before


def _returned(record: CallRecord, output: str) -> bool:
    said = str(record.call.reply.get("content") or "").strip()
    return bool(said) and said in output
