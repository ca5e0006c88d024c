"""Whether a task can be trained: figures of played episodes, what a reward pays for by mistake, and the verdict.

Pure: `ajet audit` plays the episodes and the probes. A *probe* is a reply that nobody sampled: the right answer, or
one that must earn nothing. A *hole* is a sentence about a reward that pays for the wrong reply.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ajet.backbone.metrics import is_success, pass_at, played, usable
from ajet.observe.statistics import Share
from ajet.schema.chat import Tool
from ajet.schema.episode import ROOT, Call, CallTree, Episode, EpisodeGroup, Outcome
from ajet.trainer.credit import earned, summarise

ReadReply = Callable[[list[int], list[Tool]], tuple[list[str], int]]
"""From a reply's ids: the names of its tool calls, and how many could not be read."""
MANY_CUT = 0.1
"""Share of episodes that a limit cut short from which the limit is what to change."""
NOISE = -3.0
"""Mean log-probability per sampled token below which a model writes noise: a trained one is above -2."""
FEW_PAID = 0.05
"""Share of the cut episodes below which the cut is to blame."""
SOLVED = 0.9
"""Share of episodes above which nothing is left to learn."""
ONE_TURN = "ajet.rollout.max_response_length_in_one_turn"
CONVERSATION = "ajet.rollout.max_model_len"
TURNS = "ajet.rollout.multi_turn.max_steps"
CLIENT = "max_tokens of your workflow's requests"
GOLD, EMPTY, ECHO, FORMAT, LONGEST, SHORTEST = "gold", "empty", "echo", "format only", "longest", "shortest"
WHAT = {
    EMPTY: "an empty reply",
    ECHO: "the question said back",
    FORMAT: "the right form with another task's answer",
    LONGEST: "the longest reply to another task",
    SHORTEST: "the shortest reply to another task",
}
"""The probes that must not be rewarded."""


class LengthLimits(NamedTuple):
    """What may cut an episode short."""

    reply: int
    conversation: int
    turns: int


@dataclass(slots=True)
class AuditFigures:
    """What the played episodes say."""

    tasks: int
    """With at least one usable episode."""
    episodes: int
    usable: int
    failures: dict[str, int]
    pass_at: dict[int, Share]
    mixed: Share | None
    """Groups whose episodes earned different returns, of those with at least two usable ones."""
    reward: tuple[float, float, float]
    """Lowest, mean, highest return."""
    reply_tokens: tuple[float, int]
    """Mean and most, of a reply."""
    conversation_tokens: tuple[float, int]
    """Mean and most, of prompt and reply of a call."""
    calls: int
    cut_replies: int
    cut_by: dict[str, int]
    cut_paid: int
    """How many of these earned more than the least all the same."""
    seconds: float
    """Mean of an episode."""
    sampled_tokens: float
    """Mean of an episode."""
    logprob: float
    """Mean over sampled tokens."""
    tool_calls: int = 0
    bad_tool_calls: int = 0
    """Unreadable, or of a tool that isn't offered."""
    tool_errors: int = 0
    """Tool results that begin with `error`."""


def figures(groups: Sequence[EpisodeGroup], limits: LengthLimits, threshold: float) -> AuditFigures:
    """The figures of these groups; all about rewards over usable episodes."""
    whole = [played((*group.episodes, *group.failed)) for group in groups]
    episodes = [episode for group in whole for episode in group]
    counted = [kept for group in whole if (kept := usable(group))]
    returns = [[earned(summarise(episode)) for episode in group] for group in counted]
    solved = [[is_success(episode, threshold) for episode in group] for group in counted]
    flat = [value for group in returns for value in group]
    calls = [(episode.tree, call) for episode in episodes for call in episode.tree.calls if call.run != ROOT]
    lengths = [_length(tree, call) for tree, call in calls]
    whole_lengths = [call.prompt_tokens + length for (_, call), length in zip(calls, lengths, strict=True)]
    drawn = sum(lengths)
    failures = Counter(
        f"{episode.status}, {episode.failure.in_short}" for episode in episodes if episode.failure is not None
    )
    cut = {id(episode): key for episode in episodes if (key := _cut_by(episode, limits)) is not None}
    several = [float(len(set(group)) > 1) for group in returns if len(group) > 1]
    return AuditFigures(
        tasks=len(counted),
        episodes=len(episodes),
        usable=len(flat),
        failures=dict(failures.most_common()),
        pass_at=pass_at(solved),
        mixed=Share.of(several) if several else None,
        reward=(min(flat), _mean(flat), max(flat)) if flat else (0.0, 0.0, 0.0),
        reply_tokens=(_mean(lengths), max(lengths, default=0)),
        conversation_tokens=(_mean(whole_lengths), max(whole_lengths, default=0)),
        calls=len(calls),
        cut_replies=sum(call.finish_reason == "length" for _, call in calls),
        cut_by=dict(Counter(cut.values()).most_common()),
        cut_paid=sum(earned(summarise(one)) > min(flat) for one in usable(episodes) if id(one) in cut),
        seconds=_mean([episode.timings.get("total", 0.0) for episode in episodes]),
        sampled_tokens=_mean([episode.tree.sampled_tokens for episode in episodes]),
        logprob=sum(float(call.logprobs.sum()) for _, call in calls) / max(drawn, 1),
    )


def count_tool_calls(found: AuditFigures, groups: Sequence[EpisodeGroup], read: ReadReply) -> None:
    """Add them to the figures. Replies are read again, because an episode keeps only what could be read in them."""
    for tree in (episode.tree for group in groups for episode in (*group.episodes, *group.failed)):
        for call in tree.calls:
            results = [str(m.get("content") or "") for m in call.new_messages if m.get("role") == "tool"]
            found.tool_errors += sum(text.lstrip().lower().startswith("error") for text in results)
            if call.run == ROOT or call.tools == ROOT:
                continue
            tools = tree.toolsets[call.tools]
            called, unreadable = read(tree.runs[call.run].ids.tolist(), tools)
            offered = {tool.get("function", tool).get("name") for tool in tools}
            found.tool_calls += len(called) + unreadable
            found.bad_tool_calls += unreadable + sum(name not in offered for name in called)


def lines(found: AuditFigures, limits: LengthLimits, planned: int) -> Iterator[tuple[str, str]]:
    """The figures, as labels and texts."""
    yield "episodes", f"{found.episodes} of {planned} played, {found.usable} with a reward, {found.tasks} tasks"
    for reason, count in list(found.failures.items())[:5]:
        yield "  failed", f"{count} × {reason}"
    for k, share in found.pass_at.items():
        yield f"pass@{k}", f"{share}" + f"   95 % interval (Wilson) over {found.tasks} tasks" * (k == 1)
    if found.mixed is not None:
        yield "mixed groups", f"{found.mixed}   only these teach"
    low, mean, high = found.reward
    yield "return", f"{mean:.3f}, from {low:g} to {high:g}"
    yield "reply tokens", f"{found.reply_tokens[0]:.0f}, at most {found.reply_tokens[1]} (limit {limits.reply:,})"
    mean, most = found.conversation_tokens
    yield "prompt and reply", f"{mean:.0f}, at most {most} (limit {limits.conversation:,})"
    yield "cut replies", f"{found.cut_replies} of {found.calls}"
    for key, count in found.cut_by.items():
        yield "  cut short", f"{count} episodes, by {key}"
    if found.tool_calls:
        bad = f"{found.bad_tool_calls} unreadable or of unknown tools; {found.tool_errors} results begin with `error`"
        yield "tool calls", f"{found.tool_calls}, {bad}"
    yield "an episode", f"{found.seconds:.2f} s, {found.sampled_tokens:.0f} sampled tokens"


def _cut_by(episode: Episode, limits: LengthLimits) -> str | None:
    """The key that cut the episode short."""
    if Outcome.MAX_STEPS in episode.outcomes:
        return TURNS
    if Outcome.OVERFLOW in episode.outcomes:
        return CONVERSATION
    cut = [call for call in episode.tree.calls if call.run != ROOT and call.finish_reason == "length"]
    if not cut:
        return None
    length = max(_length(episode.tree, call) for call in cut)
    if length >= limits.reply:
        return ONE_TURN
    full = any(call.prompt_tokens + _length(episode.tree, call) >= limits.conversation - 1 for call in cut)
    return CONVERSATION if full else CLIENT


def _length(tree: CallTree, call: Call) -> int:
    return len(tree.runs[call.run].ids)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A scripted reply to one task, and what it earned."""

    kind: str
    task_id: str
    reply: str
    reward: float | None
    success: bool
    failure: str = ""
    """Why it has no reward."""
    judge_failed: bool = False
    cut: bool = False
    """It didn't fit into the limits, so it says nothing about the reward."""


@dataclass(slots=True)
class Probed:
    """What is known about the reward."""

    probes: list[Probe] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Why, by kind."""

    def of(self, kind: str) -> list[Probe]:
        return [probe for probe in self.probes if probe.kind == kind]


def rewarded(probes: Iterable[Probe], lowest: float, highest: float) -> list[Probe]:
    """Pick those that are a success, or earn more than half of what there is to earn."""
    bar = (lowest + highest) / 2 if highest > lowest else math.inf
    return [probe for probe in probes if probe.success or (probe.reward is not None and probe.reward > bar)]


def find_hole(probed: Probed, seen: tuple[float, float], threshold: float, *, relative: bool = False) -> str | None:
    """One sentence about the first thing the reward gets wrong; None: nothing was found.

    `seen`: the lowest and highest return of the played episodes. `relative`: rewards compare the replies of a group, so
    that only their order means anything. A hole shows in at least half of the tasks that were tried.
    """
    gold = [probe for probe in probed.of(GOLD) if not probe.cut]
    given = [probe.reward for probe in probed.probes if probe.reward is not None]
    paid = [probe.reward for probe in gold if probe.reward is not None]
    lowest, highest = min([*given, seen[0]]), max(paid) if paid else max(seen[1], threshold)
    for kind, what in WHAT.items():
        tried = probed.of(kind)
        if failed := [probe for probe in tried if probe.judge_failed]:
            return f"the judge fails on {what} ({quoted(failed[0].reply)}): {failed[0].failure}"
        wrong = [] if relative else rewarded(tried, lowest, highest)
        if tried and 2 * len(wrong) >= len(tried):
            best = max((probe.reward or 0.0) for probe in wrong)
            right = f", the right answer {max(paid):g}" if paid else ""
            often = f"in {len(wrong)} of {len(tried)} tasks"
            return f"{what} is rewarded {often}: {quoted(wrong[0].reply)} earns {best:g}{right}"
    if failed := [probe for probe in gold if probe.judge_failed]:
        return f"the judge fails on the right answer ({quoted(failed[0].reply)}): {failed[0].failure}"
    above = [probe for probe in gold if _above_others(probe, probed.probes)]
    if gold and 2 * len(above) <= len(gold):
        worst = next(probe for probe in gold if probe not in above)
        earns = worst.failure or f"earns {worst.reward:g}"
        return f"the right answer earns no more than a wrong one: {quoted(worst.reply)} {earns}"
    if given and not relative and lowest > 0 and {*given, *seen} == {lowest}:
        return f"every reply earns {lowest:g}, whatever it says"
    return None


def _above_others(gold: Probe, probes: Sequence[Probe]) -> bool:
    others = [p.reward for p in probes if p.task_id == gold.task_id and p.kind != GOLD and p.reward is not None]
    return gold.reward is not None and all(gold.reward > other for other in others)


def quoted(reply: str, width: int = 100) -> str:
    """The reply in one line: its beginning, its end and its length if it is long."""
    text = repr(reply)
    return text if len(text) <= width else f"{text[: width // 2]}…{text[-width // 4 :]} ({len(reply):,} characters)"


class AuditVerdict(NamedTuple):
    what: str
    """`train`, `imitate first`, `change limits` or `change the reward`."""
    why: str
    key: str = ""
    """With `change limits`: which …"""
    value: int | None = None
    """… and what to try."""


def verdict(found: AuditFigures, hole: str | None, limits: LengthLimits, tasks_per_step: int) -> AuditVerdict:
    """A wrong reward spoils everything else, and noise explains replies that a limit cuts. A limit that cuts replies
    which earn something all the same does no harm."""
    if hole is not None:
        return AuditVerdict("change the reward", hole)
    teaching = tasks_per_step * (found.mixed.value if found.mixed is not None else 0.0)
    noise, cut = found.logprob < NOISE, sum(found.cut_by.values())
    if cut > MANY_CUT * found.episodes and found.cut_paid < FEW_PAID * cut and not noise:
        key = max(found.cut_by, key=lambda name: found.cut_by[name])
        now = {ONE_TURN: limits.reply, CONVERSATION: limits.conversation, TURNS: limits.turns}
        why = f"{found.cut_by[key]} of {found.episodes} episodes were cut short by {key}"
        if key in now:
            return AuditVerdict("change limits", f"{why}: {now[key]}", key, 2 * now[key])
        return AuditVerdict("change limits", why, key)
    if teaching >= 1:
        return AuditVerdict("train", f"of the {tasks_per_step} groups of a step, about {teaching:.1f} teach")
    if found.pass_at and found.pass_at[1].value > SOLVED:
        why = f"nothing is left to learn: {found.pass_at[1].value:.0%} of the episodes succeed. Take harder tasks"
        return AuditVerdict("change the reward", why + ", or let the reward tell good answers from better ones")
    low, mean, high = found.reward
    why = f"every episode earned {mean:g}" if low == high else "the episodes of a task earn the same"
    if noise:
        why += f", and the model writes noise (mean log-probability of a token: {found.logprob:.1f})"
    return AuditVerdict("imitate first", f"{why}: of the {tasks_per_step} groups of a step, fewer than one would teach")
