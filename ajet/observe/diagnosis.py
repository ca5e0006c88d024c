"""What is wrong with a run: rules over its recorded metrics and episodes, each with evidence and what to change.

`RULES` lists them. A new rule is a function and an entry in that list. `EXPLAINS` says which faults bring about which
others: a tool that is dead also leaves groups without variance. What follows from another finding comes after all that
don't. `ajet diagnose` prints the findings; the viewer's overview shows the same.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias
from urllib.parse import quote

import numpy as np

from ajet.observe.episode_codec import message_text
from ajet.observe.run_evidence import Level, RunEvidence, RunFinding, as_number, as_percent, changed
from ajet.observe.training_faults import (
    entropy_collapse,
    gaming,
    kl_growth,
    length_drift,
    no_variance,
    nothing_trained,
    part_dominates,
    reward_fell,
    sampler_gap,
    staleness,
    validation_gap,
)
from ajet.schema.episode import ROOT, Episode

GRAVITY: tuple[Level, ...] = ("bad", "warn", "quiet", "good")
EXPLAINS: dict[str, tuple[str, ...]] = {
    "judge_errors": ("failures", "dropped_tokens", "no_variance", "never_solved"),
    "dead_tool": ("failures", "cut_replies", "repeated_replies", "no_variance", "never_solved"),
    "failures": ("dropped_tokens",),
    "sampler_gap": ("kl_growth", "entropy_collapse", "reward_fell", "no_variance", "never_solved"),
    "staleness": ("kl_growth", "entropy_collapse", "reward_fell", "no_variance", "never_solved"),
    "gaming": ("kl_growth", "length_drift", "repeated_replies", "no_variance", "validation_gap"),
    "part_dominates": ("kl_growth", "length_drift", "repeated_replies"),
    "kl_growth": (
        *("entropy_collapse", "length_drift", "cut_replies", "reward_fell", "repeated_replies"),
        *("no_variance", "never_solved"),
    ),
    "entropy_collapse": (
        *("length_drift", "cut_replies", "reward_fell", "repeated_replies", "no_variance", "never_solved"),
    ),
    "length_drift": ("cut_replies", "dropped_tokens"),
    "cut_replies": ("reward_fell", "dropped_tokens", "no_variance", "never_solved"),
    "reward_fell": ("no_variance", "never_solved"),
}
"""What may follow from each fault. Causes stand before their consequences."""
_BROUGHT_BY_TRAINING = {"length_drift", "kl_growth", "entropy_collapse", "reward_fell"}
"""These explain nothing that was there in the first steps."""
_MANY, _SOME, _MOST, _NEARLY_ALL = 0.1, 0.3, 0.5, 0.95
_FEWEST = 8
"""Episodes or calls that say something."""
_FAILED = re.compile(
    r'\s*(\{\s*"errors?"\s*:\s*(?!""|\{\s*\}|\[\s*\])["{[]|\{\s*"(status|status_?code|code)"\s*:\s*"?[45]\d\d\b|'
    r"(errors?|traceback|exception)\b(?!\W*0\b)|[\w.]+(Error|Exception)\b|[\w.-]+ failed: |"
    r"(HTTP|status)[ /:=\w.]{0,12}?\b[45]\d\d\b)",
    re.IGNORECASE,
)
"""How the result of a tool begins that failed: in its own words, as ready agents write it, as HTTP or JSON does."""
_OUT_OF_SERVICE = re.compile(
    r"\b(unavailable|timed? ?out|bad gateway|internal server error|forbidden|"
    r"(permission|access) denied|unauthori[sz]ed|too many requests|try again later|"
    r"(connection|quota|rate) ?-?(refused|reset|closed|limit|exceeded)|"
    r"(could not|cannot|can't|unable to|failed to) (connect|reach))",
    re.IGNORECASE,
)
_MESSAGE = 300
"""What is no longer than this may be a message about the service. An honest answer may read alike ("unavailable"): the
words count only while next to nothing is solved."""
_FEWEST_ASKED = 4
"""Different calls of a tool, after which one and the same answer is no coincidence."""
_LOOP_TOKENS, _LOOP = 16, 0.3
"""From so many tokens on, a reply with so small a share of different pairs of tokens is a loop."""
_LONG_REPLY, _REPLIES_ALIKE = 8, 3
"""Shorter replies may well be the same: moves of a game are."""
_EXCERPT, _SHOWN = 600, 100
_WARNINGS = 3


Rule: TypeAlias = Callable[[RunEvidence], list[RunFinding]]


def diagnose(run: RunEvidence) -> list[RunFinding]:
    """All findings: causes before consequences, and among either the gravest first."""
    return in_order([finding for rule in RULES for finding in rule(run)])


def in_order(findings: Sequence[RunFinding]) -> list[RunFinding]:
    """Each consequence names its cause, and comes after what follows from nothing else."""
    faults = {finding.fault for finding in findings if finding.level in ("bad", "warn")}
    explained = [replace(finding, follows_from=_cause_of(finding, faults)) for finding in findings]
    return sorted(
        explained,
        key=lambda one: (one.level not in ("bad", "warn"), bool(one.follows_from), GRAVITY.index(one.level)),
    )


def _cause_of(finding: RunFinding, faults: set[str]) -> str:
    """The first of these faults that explains the finding; '' if none does."""
    for cause, consequences in EXPLAINS.items():
        too_late = finding.from_start and cause in _BROUGHT_BY_TRAINING
        if cause in faults and finding.fault in consequences and not too_late:
            return cause
    return ""


# ---------------------------------------------------------------- episodes that fail, or are cut


def judge_errors(run: RunEvidence) -> list[RunFinding]:
    """Episodes that ended well and could not be judged."""
    failed, count = run.figures.total("status/judge_error"), run.figures.total("episode/count")
    if not count and run.store is not None:  # such a run may end before its first step
        facets = run.store.facets()
        failed, count = facets.statuses.get("judge_error", 0), facets.total
    if not failed or not count:
        return []
    share = failed / count
    return [
        RunFinding(
            "bad" if share >= _MANY else "warn", "judge_errors",
            f"The judge failed on {failed:,.0f} of {count:,.0f} episodes ({as_percent(share)}). They have no "
            "reward, and what is trained is what the judge can read.",
            {"status/judge_error": failed, "episode/count": count},
            run.episodes("status = 'judge_error'"),
            "repair the judge: the episode shows the error and its line",
            "episodes?status=judge_error",
        )
    ]  # fmt: skip


def failures(run: RunEvidence) -> list[RunFinding]:
    """How many episodes failed lately, and of what, over the whole run."""
    lately = run.figures.lately("episode/failed_share")
    share = lately.mean if lately.steps else 0.0
    facets = run.store.facets() if run.store is not None else None
    kinds = list(facets.failures.items())[:_WARNINGS] if facets else []
    played = facets.total - facets.statuses.get("cancelled", 0) if facets else 0
    if facets and not lately.steps and played:  # no step has ended
        share = sum(facets.failures.values()) / played
    level: Level = "bad" if share >= _MOST else "warn" if share >= _MANY else "quiet"
    found = []
    if share:
        where = f"in {lately.where} " if lately.steps else ""
        found.append(
            RunFinding(
                level, "failures", f"{as_percent(share)} of the episodes {where}failed, and count in no mean.",
                {"episode/failed_share": share},
                run.episodes("failure != '' AND status != 'cancelled'"),
                "repair what the episodes name; `ajet --conf … --backbone=debug` runs two of them with each traceback",
            )
        )  # fmt: skip
    for kind, count in kinds:
        text = f"{count:,} of the recorded episodes failed with {kind}."
        link = f"episodes?failure={quote(kind, safe='')}"
        found.append(
            RunFinding(level, "failures", text, {kind: count}, run.episodes("failure = :k", k=kind), link=link)
        )
    return found


def cut_replies(run: RunEvidence) -> list[RunFinding]:
    """Episodes whose reply was cut, or whose prompt left no room for one.

    Where each reply is cut on purpose (one token is a move), rewards differ all the same: that is no fault."""
    episodes = run.figures.total("episode/count")
    found = []
    kinds = (("length", "a reply cut at its maximum length"), ("overflow", "no room left in the context"))
    for name, what in kinds:
        count = run.figures.total(f"outcome/{name}")
        if not count or not episodes:
            continue
        share = count / episodes
        harm = _loss_by_cut(run, name, count)
        level: Level = "quiet" if share < _MANY or harm is None else "bad" if share >= _MOST else "warn"
        longer = {
            "length": changed(run, "rollout.max_response_length_in_one_turn", 2),
            "overflow": changed(run, "rollout.max_model_len", 2),
        }[name]
        found.append(
            RunFinding(
                level, "cut_replies", f"{count:,.0f} of {episodes:,.0f} episodes ended with {what}.{harm or ''}",
                {f"outcome/{name}": count, "episode/count": episodes},
                run.episodes("' ' || outcomes || ' ' LIKE :o", o=f"% {name} %"),
                f"{longer}, or ask for shorter replies" if level != "quiet" else "",
                "episodes?status=truncated",
                from_start=sum(name in row["outcomes"].split() for row in run.early) >= _SOME * len(run.early),
            )
        )  # fmt: skip
    return found


def _loss_by_cut(run: RunEvidence, outcome: str, count: float) -> str | None:
    """What being cut costs an episode, in words; None if it costs nothing, '' if that isn't known. `count`: how many
    were cut in the whole run."""
    if outcome == "length" and run.key("rollout.max_response_length_in_one_turn") == 1:
        return None  # a reply of one token has no room for its end
    rows = {row["episode_id"]: row for row in (*run.early, *run.late)}.values()
    cut: list[float] = []
    whole: list[float] = []
    for row in rows:
        if row["reward"] is not None:
            (cut if outcome in row["outcomes"].split() else whole).append(row["reward"])
    seen = sum(outcome in row["outcomes"].split() for row in rows)
    where = " in the first and last steps" if seen < count else ""
    if not cut:
        return ""
    if min(cut) > 0 and min(cut) >= max(whole, default=0.0):
        return None  # cut or not, it is paid
    least = min(cut)
    if cut.count(least) >= _NEARLY_ALL * len(cut) and least <= min(whole, default=least):
        return f" {'Each' if least == max(cut) else 'Nearly each'} of them earned {as_number(least)}{where}."
    if len(whole) < _FEWEST:
        return None
    lost, spread = float(np.mean(whole) - np.mean(cut)), float(np.std([*cut, *whole]))
    if lost <= _MOST * spread:
        return None
    return f" They earned {as_number(float(np.mean(cut)))}{where}, the others {as_number(float(np.mean(whole)))}."


def dropped(run: RunEvidence) -> list[RunFinding]:
    """Sampled tokens that reach no sample."""
    captured, lost = run.figures.total("ledger/captured"), run.figures.total("ledger/dropped")
    if not captured or not lost:
        return []
    share = lost / captured
    text = f"{as_percent(share)} of the sampled tokens were dropped, and trained nothing."
    evidence = {"ledger/dropped": lost, "ledger/captured": captured}
    change = "dropped/… in the charts names the reasons; data.max_response_length is the usual one"
    level: Level = "warn" if share >= _MANY else "quiet"
    return [RunFinding(level, "dropped_tokens", text, evidence, change=change, link="charts?find=dropped")]


def dead_tools(run: RunEvidence) -> list[RunFinding]:
    """Tools whose results are errors; or the same whatever they are asked, while next to nothing is solved."""
    results: dict[str, list[tuple[str, str, str]]] = {}
    for one in run.read:
        for name, arguments, result in _tool_results(one.episode):
            results.setdefault(name, []).append((one.episode.episode_id, arguments, result))
    found, unsolved = [], sum(map(run.solved, run.late)) <= _MANY * len(run.late)
    for name, given in results.items():
        if len(given) < _FEWEST:
            continue
        failed = [row for row in given if _FAILED.match(row[2]) or (unsolved and _out_of_service(row[2]))]
        answers, asked = {_without(row[1], row[2]) for row in given}, {row[1] for row in given}
        if len(failed) >= _MOST * len(given):
            said = f"{len(failed)} of {len(given)} calls of the tool {name} ended in an error: {_begins(failed[0][2])}"
        elif len(answers) == 1 and len(asked) >= _FEWEST_ASKED and unsolved:
            failed = given  # one that only takes orders says "done" each time, too
            said = f"The tool {name} answered the same to {len(asked)} different calls: {_begins(given[0][2])}"
        else:
            continue
        found.append(
            RunFinding(
                "bad", "dead_tool", said, {"calls": len(given), "failed": len(failed)},
                tuple(dict.fromkeys(row[0] for row in failed))[:3],
                "repair the tool, or describe its arguments better: the model can't learn to use what never works",
            )
        )  # fmt: skip
    return found


def _out_of_service(result: str) -> bool:
    return len(result) <= _MESSAGE and bool(_OUT_OF_SERVICE.search(result))


def _without(arguments: str, result: str) -> str:
    """A tool's result without what it repeats of its arguments."""
    try:
        said = json.loads(arguments)
    except ValueError:
        said = arguments
    values = said.values() if isinstance(said, dict) else [said]
    for text in sorted({arguments, str(said), *map(str, values)}, key=len, reverse=True):
        result = result.replace(text, "…") if len(text) > 1 else result
    return result


def _begins(text: str) -> str:
    return " ".join(text.split())[:_SHOWN] or "(nothing)"


def _tool_results(episode: Episode) -> list[tuple[str, str, str]]:
    """Name, arguments and result of each tool call that was answered; once, though a fork sends it again."""
    asked: dict[str, tuple[str, str]] = {}
    found, ends = {}, {ROOT: 0}
    for index, call in enumerate(episode.tree.calls):
        begins = ends[call.extends]
        ends[index] = begins + len(call.new_messages) + 1
        for place, message in enumerate((*call.new_messages, call.reply), begins):
            if message.get("role") == "tool":
                name, arguments = asked.get(str(message.get("tool_call_id")), ("", ""))
                result, key = message_text(message), (call.agent, place, message.get("tool_call_id"))
                found[*key, result] = (name or str(message.get("name") or "?"), arguments, result)
            for one in message.get("tool_calls") or []:
                function = one.get("function") or {}
                asked[str(one.get("id"))] = (str(function.get("name")), str(function.get("arguments")))
    return list(found.values())


def repeated_replies(run: RunEvidence) -> list[RunFinding]:
    """Replies that go in circles, within themselves or from one turn to the next."""
    looping = {}
    for one in run.read:
        if what := _loop(one.episode):
            looping[one.episode.episode_id] = what
    if len(run.read) < _FEWEST or len(looping) < _SOME * len(run.read):
        return []
    what = Counter(looping.values()).most_common(1)[0][0]
    return [
        RunFinding(
            "warn", "repeated_replies",
            f"{len(looping)} of the last {len(run.read)} episodes go in circles: {what}.",
            {"looping": len(looping), "read": len(run.read)},
            tuple(looping)[:3],
            "read them: the reward pays for something that repetition has as well; rollout.compute_madness_checklist "
            "ends such episodes",
        )
    ]  # fmt: skip


def _loop(episode: Episode) -> str:
    """How an episode goes in circles; '' if it doesn't."""
    tree, said = episode.tree, Counter[bytes]()
    for call in tree.calls:
        if call.run == ROOT:
            continue
        ids = tree.runs[call.run].ids
        if len(ids) >= _LONG_REPLY and call.extends != ROOT:
            said[ids.tobytes()] += 1
        if len(ids) >= _LOOP_TOKENS and len(set(pairwise(ids.tolist()))) < _LOOP * (len(ids) - 1):
            return "the same few words again and again within a reply"
    if max(said.values(), default=0) >= _REPLIES_ALIKE:
        return f"the same reply {_REPLIES_ALIKE} times or more in one conversation"
    return ""


def logged(run: RunEvidence) -> list[RunFinding]:
    """The newest warnings and errors of the log, in its own words. A warning alone is no fault."""
    levels: dict[str, Level] = {"warning": "quiet", "error": "warn", "critical": "warn"}
    found: dict[str, RunFinding] = {}
    for line in reversed(run.log):
        level = levels.get(str(line.get("level", "")).lower())
        if level is not None:
            text = str(line.get("message", ""))
            found.setdefault(text, RunFinding(level, "logged", text[:_EXCERPT], link="about"))
    return list(found.values())[:_WARNINGS]


RULES: tuple[Rule, ...] = (
    judge_errors, failures, sampler_gap, cut_replies, dead_tools, nothing_trained, staleness, gaming, part_dominates,
    kl_growth, repeated_replies, length_drift, entropy_collapse, reward_fell, no_variance, validation_gap, dropped,
    logged,
)  # fmt: skip
"""What a bug or a key has caused for certain comes before what may have several causes."""
