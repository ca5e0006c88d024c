"""From a finished tree to rows: `Rewards` and masks of calls, and `linear_samples`, the smallest set of rows.

`once`: a token is trained in the first row that holds it. `multiplicity`: in every row that holds it, as if the rows
were independent. Tokens beyond the limits are recorded in the ledger with the reason.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ajet.context_tracker.conversation import CallRecord
from ajet.context_tracker.messages import SharedTokenLoss, TrackerSettings, content_text
from ajet.schema.chat import Message
from ajet.schema.episode import ROOT, Call, CallTree, DropReason, Episode, Ledger, Sample
from ajet.schema.errors import RewardError


class Rewards:
    """The rewards that a workflow gives while its episode runs. Values must be finite numbers."""

    def __init__(self) -> None:
        self.episode: float | None = None
        self.by_agent: dict[str, float] = {}

    def give(
        self,
        value: float,
        call: str | None,
        agent: str | None,
        calls: Mapping[str, Call],
        agents: Collection[str],
        *,
        replace: bool = False,
    ) -> None:
        """`tuner.reward(value, call=…)`, `(value, agent=…)` or `(value)`."""
        if replace and call is None:
            raise RewardError("tuner.reward(replace=True) needs call=…: the call whose reward replaces the outcome")
        if call is not None and agent is not None:
            raise RewardError("tuner.reward takes call=… or agent=…, not both")
        if call is not None:
            if call not in calls:
                raise RewardError(
                    f"tuner.reward(call={call!r}): this episode has no such call; it has {_some(calls)}: give the id "
                    "of the response (LangChain: reply.response_metadata['id'])"
                )
            calls[call].reward = value
            calls[call].replaces_outcome = replace
        elif agent is not None:
            if agent not in agents:
                raise RewardError(f"tuner.reward(agent={agent!r}): no such agent; the agents are {_some(agents)}")
            self.by_agent[agent] = value
        else:
            self.episode = value

    def total(
        self,
        reward: float | Sequence[float] | None,
        records: Sequence[CallRecord],
        chat_calls: Sequence[Call],
        *,
        failed: bool,
        otherwise: float | None = None,
    ) -> float | None:
        """The episode's reward. A list is distributed over the calls, which get no other reward; its sum is the
        episode's reward. None stands for the reward that the workflow gave during the episode, else for `otherwise`.
        If it `failed`, a number is its only reward: calls and agents lose theirs.
        `chat_calls`: those of a model that reports no tokens, which has no records.
        """
        if reward is None:
            given = otherwise if self.episode is None else self.episode
            return None if failed else given
        if isinstance(reward, Sequence):
            return _distribute(reward, records, chat_calls)
        if failed:
            self.by_agent.clear()
            for call in (*(record.call for record in records), *chat_calls):
                if call.reward is not None:  # not None again: a reply that got one wasn't abandoned
                    call.reward, call.replaces_outcome = 0.0, False
        return reward


def _distribute(rewards: Sequence[float], records: Sequence[CallRecord], chat_calls: Sequence[Call]) -> float:
    answered = [record for record in records if record.reply is not None]
    calls = [*(record.call for record in answered), *chat_calls]
    continued = [
        *(
            after.call.extends == before.index or after.turn.follows(before.turn)
            for before, after in pairwise(answered)
        ),
        *(call.extends == index for index, call in enumerate(chat_calls[1:])),
    ]
    hint = "give each call its reward by tuner.reward(value, call=…), or each agent by tuner.reward(value, agent=…)"
    agents = sorted({call.agent for call in calls})
    if len(agents) > 1:
        raise RewardError(f"a list of rewards needs a single agent; this episode has {_some(agents)}: {hint}")
    for (before, after), goes_on in zip(pairwise(calls), continued, strict=True):
        if not goes_on:
            why = f" ({after.fork.reason})" if after.fork else ""
            raise RewardError(
                "a list of rewards needs an episode without branches, but "
                f"{after.name} does not continue {before.name}{why}: {hint}"
            )
    if len(rewards) != len(calls):
        raise RewardError(f"{len(rewards)} rewards for {len(calls)} model calls: {hint}")
    for call, reward in zip(calls, rewards, strict=True):
        call.reward = reward
        call.replaces_outcome = True
    return math.fsum(rewards)


def _some(names: Collection[str], limit: int = 8) -> str:
    shown = ", ".join(list(names)[:limit])
    return (shown + ", …" if len(names) > limit else shown) or "none"


def mask_calls(
    tree: CallTree,
    records: Sequence[CallRecord],
    settings: TrackerSettings,
    *,
    untrained: DropReason | None,
    output: str | None,
) -> Ledger:
    """Set the masks and drop reasons of all calls. Return the balanced ledger of everything sampled.

    `untrained`: why no call of the episode is trained.
    """
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
        if call.drop is None:
            call.drop = untrained
        if call.drop is not None:
            call.mask = np.zeros(count, np.bool_)
            leave_out(ledger, call.drop, count)
        else:
            ledger.trained += count
    ledger.balance()
    assert ledger.trained == tree.trained_tokens, (ledger, tree.trained_tokens)
    return ledger


def untrain(tree: CallTree, ledger: Ledger, reason: DropReason) -> None:
    """Mask all tokens of an episode that has ended, and record them in the ledger."""
    for call in tree.calls:
        count = len(call.mask)
        if call.drop is None and count:
            call.drop = reason
            call.mask = np.zeros(count, np.bool_)
            ledger.trained -= count
            leave_out(ledger, reason, count)
    ledger.balance()


def leave_out(ledger: Ledger, reason: str, count: int) -> None:
    """Record in the ledger that tokens are not trained."""
    place = ledger.masked if reason in ("abandoned", "failure_reward", "not_trainable") else ledger.dropped
    place[reason] = place.get(reason, 0) + count


def abandoned(records: Sequence[CallRecord], output: str | None = None) -> list[CallRecord]:
    """The calls that lost to another reply to the same prompt, with which the workflow went on."""
    groups: dict[tuple[int, str], list[CallRecord]] = defaultdict(list)
    for record in records:
        if record.reply is not None and record.call.drop is None:
            groups[(id(record.prompt), record.call.agent)].append(record)
    draws = [draw for group in groups.values() if len(group) > 1 for draw in _draws(group, records)]
    return [loser for draw in draws for loser in _losers(draw, records, output)]


def _draws(group: Sequence[CallRecord], records: Sequence[CallRecord]) -> list[list[CallRecord]]:
    """Replies to one prompt in the order of their requests, split wherever the conversation moved on in between.
    `records`: all calls, in the order in which they began."""
    turn, agent = group[0].turn, group[0].call.agent

    def moves_on(other: CallRecord) -> bool:
        return other.turn.follows(turn) or (other.call.agent == agent and turn.follows(other.turn))

    draws = [[group[0]]]
    first_ended = group[0].ended
    for before, record in pairwise(group):
        # what began before `before` was looked at with it
        since = bisect_right(records, max(first_ended, before.begun), key=_begun)
        if any(map(moves_on, records[since : bisect_left(records, record.begun, key=_begun)])):
            draws.append([])
            first_ended = record.ended
        draws[-1].append(record)
        first_ended = min(first_ended, record.ended)
    return draws


def _begun(record: CallRecord) -> int:
    return record.begun


def _losers(draw: Sequence[CallRecord], records: Sequence[CallRecord], output: str | None) -> list[CallRecord]:
    built = _without_repeats([record for record in draw if _built_upon(record)], records)
    if not built and output:
        built = [record for record in draw if _returned(record, output)]
    open_ = [record for record in draw if record.call.reward is None and record not in built]
    if built:
        return open_
    retried = [record for record in open_ if any(other.begun > record.ended for other in draw)]
    return [record for record in retried if not _quoted(record, records)]


def _without_repeats(built: Sequence[CallRecord], records: Sequence[CallRecord]) -> list[CallRecord]:
    """Leave out replies to a retry that says the same again: the workflow goes on from one of them, so one counts. It
    is the one that a later call extends, or else the last. Of equal answers that are returned, as of a vote, all count.
    """
    extended = {record.call.extends for record in records}
    in_order = sorted(built, key=lambda record: (record.index in extended, record.begun))
    last = {id(record.reply_turn): record for record in in_order}

    def repeats(record: CallRecord) -> bool:
        other = last[id(record.reply_turn)]
        apart = other.begun > record.ended or record.begun > other.ended
        return record.reply_turn is not None and record.index not in extended and apart

    return [record for record in built if not repeats(record)]


def _built_upon(record: CallRecord) -> bool:
    """Whether a later request contains this reply, even in a branch."""
    turn = record.reply_turn
    return turn is not None and turn.seen > record.requests_before


def _returned(record: CallRecord, output: str) -> bool:
    """Whether the output contains the reply's text or an argument of its tool calls, which may be the final answer."""
    calls = [call["function"]["arguments"] for call in record.said.get("tool_calls", ())]
    arguments = [value for given in calls if isinstance(given, dict) for value in given.values()]
    said = [_text(record), *(value for value in arguments if isinstance(value, str))]
    return any(text and text in output for text in said)


def _quoted(record: CallRecord, records: Sequence[CallRecord]) -> bool:
    """Whether a later request quotes the reply's text in a message. A text that its prompt also contains proves
    nothing."""
    text = _text(record)
    asked = [turn.message for turn in record.turn.path()]
    later = [message for other in records if other.begun > record.ended for message in other.call.new_messages]
    return bool(text) and _holds(later, text) and not _holds(asked, text)


def _holds(messages: Sequence[Message], text: str) -> bool:
    return any(text in content_text(message.get("content"), "message") for message in messages)


def _text(record: CallRecord) -> str:
    return str(record.call.reply.get("content") or "").strip()


def linear_samples(
    tree: CallTree,
    *,
    shared_token_loss: SharedTokenLoss = "once",
    max_prompt_length: int,
    max_response_length: int,
    max_samples: int,
    episode_id: str = "",
) -> tuple[list[Sample], Ledger]:
    """The rows, and the ledger of every sampled token of the tree.

    If there are more than `max_samples` rows, those with the most trained tokens are kept. A row's prompt ends at its
    first trained token or at `max_prompt_length`, whichever comes first; the response is cut at `max_response_length`.
    """
    leaves = _leaves(tree)
    paths = [tree.path(leaf) for leaf in leaves]
    kept = _choose(tree, paths, max_samples)
    trained: set[int] = set()
    samples: list[Sample] = []
    lost: dict[int, str] = {}
    kept_tokens: dict[int, int] = {}
    for path in kept:
        calls = [tree.runs[run].call for run in path]
        wanted = {call for call in calls if call != ROOT and tree.calls[call].mask.any()}
        if shared_token_loss == "once":
            wanted -= trained
        trained |= wanted
        sample, counts = _row(tree, path, wanted, max_prompt_length, max_response_length, episode_id)
        if sample is not None:
            samples.append(sample)
        for call, count in counts.items():
            kept_tokens[call] = max(count, kept_tokens.get(call, 0))
            if count < int(tree.calls[call].mask.sum()):
                lost[call] = "response_too_long" if sample is not None else "prompt_too_long"
    return samples, _account(tree, kept_tokens, lost)


def episode_samples(episode: Episode, settings: TrackerSettings) -> tuple[list[Sample], Ledger]:
    """`linear_samples` of an episode under the run's settings."""
    return linear_samples(
        episode.tree,
        shared_token_loss=settings.shared_token_loss,
        max_prompt_length=settings.max_prompt_length,
        max_response_length=settings.max_response_length,
        max_samples=settings.max_sample_per_task,
        episode_id=episode.episode_id,
    )


def _leaves(tree: CallTree) -> list[int]:
    """Trained runs that no other trained run follows. Each needs a row, so this is the smallest number of rows."""
    followed = [False] * len(tree.runs)
    leaves = []
    for index in range(len(tree.runs) - 1, -1, -1):
        run = tree.runs[index]
        trained = run.call != ROOT and bool(tree.calls[run.call].mask.any())
        if trained and not followed[index]:
            leaves.append(index)
        if run.parent != ROOT and (trained or followed[index]):
            followed[run.parent] = True
    return sorted(leaves, key=lambda leaf: tree.runs[leaf].call)


def _choose(tree: CallTree, paths: Sequence[list[int]], limit: int) -> list[list[int]]:
    if len(paths) <= limit:
        return list(paths)

    def trained(path: list[int]) -> int:
        return sum(int(tree.calls[tree.runs[run].call].mask.sum()) for run in path if tree.runs[run].call != ROOT)

    ranked = sorted(range(len(paths)), key=lambda index: (-trained(paths[index]), index))
    return [paths[index] for index in sorted(ranked[:limit])]


def _row(
    tree: CallTree, path: list[int], wanted: set[int], max_prompt: int, max_response: int, episode_id: str
) -> tuple[Sample | None, dict[int, int]]:
    """A row, and its number of trained tokens per call; no row if none fits the limits."""
    runs = [tree.runs[index] for index in path]
    ids = np.concatenate([run.ids for run in runs])
    mask = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    calls = np.full(len(ids), ROOT, np.int32)
    versions = np.full(len(ids), ROOT, np.int32)
    for run in runs:
        if run.call == ROOT:
            continue
        call, place = tree.calls[run.call], slice(run.start, run.start + len(run.ids))
        calls[place] = run.call
        logprobs[place] = call.logprobs
        for (first, version), (end, _) in zip(call.versions, [*call.versions[1:], (len(run.ids), 0)], strict=True):
            versions[run.start + first : run.start + end] = version
        if run.call in wanted:
            mask[place] = call.mask
    places = np.flatnonzero(mask)
    counts = dict.fromkeys(wanted, 0)
    if not len(places):
        return None, counts
    split = min(int(places[0]), max_prompt)
    places = places[places < split + max_response]
    if not len(places):
        return None, counts
    end = int(places[-1]) + 1
    for call, count in zip(*np.unique(calls[places], return_counts=True), strict=True):
        counts[int(call)] = int(count)
    sample = Sample(
        episode_id=episode_id,
        agent=tree.calls[runs[-1].call].agent,
        prompt_ids=ids[:split],
        response_ids=ids[split:end],
        response_mask=mask[split:end],
        logprobs=logprobs[split:end],
        call_of_token=calls[split:end],
        versions=versions[split:end],
        leaf=runs[-1].call,
    )
    return sample, counts


def _account(tree: CallTree, kept: dict[int, int], lost: dict[int, str]) -> Ledger:
    ledger = Ledger()
    for index, call in enumerate(tree.calls):
        if call.run == ROOT:
            continue
        count, trained = len(tree.runs[call.run].ids), int(call.mask.sum())
        ledger.captured += count
        if trained < count:
            leave_out(ledger, call.drop or "not_trainable", count - trained)
        ledger.trained += kept.get(index, 0)
        if missing := trained - kept.get(index, 0):
            leave_out(ledger, lost.get(index, "too_many_samples"), missing)
    ledger.balance()
    return ledger
