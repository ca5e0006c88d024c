"""One episode in the form its page needs: conversation and call tree as one JSON document, tokens as another.

Also its timeline (model calls, tools, environment steps and spans, each by what it did), and the page of one task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ajet.observe.episode_store import EpisodeStore, RecordedEpisode
from ajet.observe.run_evidence import value_at
from ajet.observe.tracing import is_reward_span
from ajet.observe.viewer.library import Experiment
from ajet.schema.episode import ROOT, Call, CallTree, Episode
from ajet.schema.printable import one_line
from ajet.schema.span import Span

_MOST_ENTRIES = 2000
_LONGEST_VALUE = 2000
"""Characters of one attribute of a span."""
_LONGEST_DETAIL = 120
_OWN = "agentlightning."
"""The names and attributes of the spans that `ajet.observe.tracing` makes begin so: one name for each kind of span."""
_SAID = ("message.body", "reward.0.value", "object.literal", "object.json")
"""Which of their attributes says what such a span is about."""


def timeline(episode: Episode) -> dict[str, Any]:
    """`entries` in the order of their beginning, and how many were `left_out`.

    An entry has `kind` (call, tools, environment, span), `label`, `detail` (what was done or said, shortened), `start`
    (None: unknown), `seconds`, `error`, `depth` (of a span within another) and, by kind, `call` (index) or `facts`.
    """
    found = [*_calls(episode), *_tools(episode), *_environment(episode), *_spans(episode)]
    found.sort(key=lambda entry: (entry["start"] is None, entry["start"] or 0.0))
    record = episode.environment
    left_out = episode.spans_left_out + (record.left_out if record is not None else 0)
    return {"entries": found[:_MOST_ENTRIES], "left_out": left_out + max(0, len(found) - _MOST_ENTRIES)}


def _entry(kind: str, label: str, start: float | None, seconds: float, **more: Any) -> dict[str, Any]:
    entry = {"kind": kind, "label": label, "detail": "", "start": start, "seconds": max(0.0, seconds)}
    return entry | {"error": "", "depth": 0} | more


def _calls(episode: Episode) -> list[dict[str, Any]]:
    return [
        _entry("call", call.agent, call.started_s, call.seconds, call=index, error=_aborted(call))
        for index, call in enumerate(episode.tree.calls)
    ]


def _aborted(call: Call) -> str:
    return "" if call.reply else (call.drop or "no reply").replace("_", " ")


def _tools(episode: Episode) -> list[dict[str, Any]]:
    """The time between a reply that asks for tools and the call that brings their results."""
    calls = episode.tree.calls
    entries = []
    for after in calls:
        if after.extends < 0 or not any(message.get("role") == "tool" for message in after.new_messages):
            continue
        asked = calls[after.extends]
        names = [_tool_name(one) for one in asked.reply.get("tool_calls") or []]
        start = asked.started_s + asked.seconds
        label = ", ".join(names) or "tools"
        entries.append(_entry("tools", label, start, after.started_s - start, call=after.extends))
    return entries


def _tool_name(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _environment(episode: Episode) -> list[dict[str, Any]]:
    record = episode.environment
    if record is None:
        return []
    offset = record.began - episode.began if record.began and episode.began else 0.0
    return [
        _entry(
            "environment", event.what, offset + event.started_s, event.seconds, error=event.error,
            detail=_detail(event.action),
            facts={
                "environment": record.name, "action": event.action, "observation": event.observation,
                "reward": event.reward, "done": event.done or None, "error": event.error,
            },
        )
        for event in record.events
    ]  # fmt: skip


def _spans(episode: Episode) -> list[dict[str, Any]]:
    starts = [span.start_time for span in episode.spans if span.start_time is not None]
    began = episode.began or min(starts, default=0.0)
    depths = _depths(episode.spans)
    return [_span(span, began, depths[span.span_id]) for span in episode.spans]


def _span(span: Span, began: float, depth: int) -> dict[str, Any]:
    start = None if span.start_time is None else span.start_time - began
    end = span.end_time if span.end_time is not None else span.start_time
    seconds = 0.0 if span.start_time is None or end is None else end - span.start_time
    failed = span.status.status_code == "ERROR"
    facts = {
        "status": None if span.status.status_code == "UNSET" else span.status.status_code,
        **{name: _shortened(value) for name, value in span.attributes.items()},
        "events": span.events or None,
    }
    error = (span.status.description or "error") if failed else ""
    label, detail = _called(span)
    return _entry("span", label, start, seconds, detail=detail, depth=depth, error=error, facts=facts)


def _called(span: Span) -> tuple[str, str]:
    """A span's label, and what it says. A span of our own emitters is labelled by its kind."""
    kind = span.name.removeprefix(_OWN)
    if kind == span.name:
        return span.name, ""
    if kind == "operation":
        return str(span.attributes.get(f"{_OWN}operation.name") or kind), ""
    if is_reward_span(span):
        kind = "reward"
    said = (span.attributes.get(_OWN + name) for name in _SAID)
    return kind, _detail(next((value for value in said if value is not None), ""))


def _detail(value: Any) -> str:
    return one_line(str(value), _LONGEST_DETAIL)


def _depths(spans: list[Span]) -> dict[str, int]:
    """How many spans each is nested in. A cycle of parents, which only a broken program makes, counts as none."""
    parents = {span.span_id: span.parent_id for span in spans}
    depths: dict[str, int] = {}
    for name in parents:
        chain = [name]
        while (above := parents.get(chain[-1])) in parents and above not in chain:
            chain.append(str(above))
        depths[name] = len(chain) - 1
    return depths


def _shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST_VALUE:
        return f"{value[:_LONGEST_VALUE]}… ({len(value):,} characters)"
    return value


def episode_view(recorded: RecordedEpisode, store: EpisodeStore) -> dict[str, Any]:
    """Everything except the tokens."""
    episode = recorded.episode
    before, after = store.neighbours(episode.episode_id)
    return {
        "episode": _about(episode),
        "step": recorded.step,
        "validation": recorded.validation,
        "recorded": recorded.recorded,
        "query": recorded.query,
        "before": before,
        "after": after,
        "calls": [_call(recorded, index) for index in range(len(episode.tree.calls))],
        "toolsets": episode.tree.toolsets,
        "has_tokens": bool(episode.tree.runs),
        "timeline": timeline(episode),
    }


def tokens_view(recorded: RecordedEpisode, store: EpisodeStore) -> dict[str, Any]:
    """All token runs, what is known about each token, and the text of each id."""
    tree = recorded.episode.tree
    trainer = recorded.annotation.trainer_logprobs
    ids = np.unique(np.concatenate([run.ids for run in tree.runs])).tolist() if tree.runs else []
    return {
        "runs": [
            {"ids": run.ids.tolist(), "parent": run.parent, "start": run.start, "call": run.call} for run in tree.runs
        ],
        "calls": [
            {
                "logprobs": _short(call.logprobs),
                "trainer": _short(trainer[index]) if trainer is not None and index < len(trainer) else [],
                "mask": call.mask.astype(int).tolist(),
                "versions": call.versions,
            }
            for index, call in enumerate(tree.calls)
        ],
        "pieces": {str(index): _piece(data) for index, data in store.token_bytes(ids).items()},
    }


_OF_EPISODE = (
    "task_id", "group_id", "repeat", "tag", "status", "outcomes", "reward", "agent_rewards", "reward_parts",
    "reward_weights", "failure", "attempts", "timings", "prompt_version", "prompts_used", "ledger",
)  # fmt: skip
_OF_CALL = (
    "name", "agent", "target", "turn", "extends", "fork", "finish_reason", "sampling", "trainable", "drop", "reward",
    "new_messages", "reply", "tools", "started_s", "seconds", "prompt_run", "prompt_tokens", "run", "versions",
)  # fmt: skip
"""What is shown as it is recorded."""


def _about(episode: Episode) -> dict[str, Any]:
    return {
        **{name: getattr(episode, name) for name in _OF_EPISODE},
        "id": episode.episode_id,
        "success": episode.is_success,
        "metadata": exact(episode.metadata),
        "log_metrics": exact(episode.log_metrics),
        "tokens": episode.tree.tokens,
        "sampled": episode.tree.sampled_tokens,
        "trained": episode.tree.trained_tokens,
    }


def _call(recorded: RecordedEpisode, index: int) -> dict[str, Any]:
    tree = recorded.episode.tree
    call = tree.calls[index]
    credit = recorded.annotation.credit
    mine = credit[index] if credit is not None and index < len(credit) else None
    return {
        **{name: getattr(call, name) for name in _OF_CALL},
        "index": index,
        "alternative_to": _same_prompt(tree, index),
        "tokens": len(tree.runs[call.run].ids) if call.run != ROOT else 0,
        "trained": int(call.mask.sum()),
        "mean_logprob": _mean_logprob(call),
        "advantage": mine.advantage if mine is not None and mine.entries else None,
        "weight": mine.weight if mine is not None and mine.entries else None,
        "entries": mine.entries if mine is not None else [],
    }


def _same_prompt(tree: CallTree, index: int) -> int:
    """The agent's first call with exactly this prompt, if this reply is an alternative to it; otherwise ROOT."""
    call = tree.calls[index]
    if call.prompt_run == ROOT:  # only messages are known: as many tokens aren't the same ones
        return ROOT
    for other, earlier in enumerate(tree.calls[:index]):
        same_prompt = (earlier.prompt_run, earlier.prompt_tokens) == (call.prompt_run, call.prompt_tokens)
        if same_prompt and earlier.agent == call.agent:
            return other
    return ROOT


def _mean_logprob(call: Call) -> float | None:
    return round(float(call.logprobs.mean()), 4) if len(call.logprobs) else None


def _short(logprobs: Any) -> list[float]:
    """Rounded to four decimals, which is all a reader can use."""
    return [float(value) for value in np.round(np.asarray(logprobs, np.float64), 4)]


def _piece(data: bytes) -> str | list[int]:
    """Text, or the bytes of a token that is only part of a character."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


_ANSWER_NAMES = (
    "answer", "final_answer", "gold_answer", "gold", "ground_truth", "reference", "reference_answer", "solution",
    "target", "expected", "label",
)  # fmt: skip
"""Where data sets keep the right answer, the most usual first."""


def task_view(experiment: Experiment, store: EpisodeStore, task_id: str) -> dict[str, Any]:
    """What the reader gave of a task; `recorded`: whether that is known."""
    task = store.task(task_id)
    if task is None:
        return {"task_id": task_id, "recorded": False}
    found = gold_answer(task.metadata, answer_names(experiment.config()))
    return {
        "task_id": task_id,
        "recorded": True,
        "query": task.main_query,
        "init_messages": task.init_messages,
        "env_type": task.env_type,
        "metadata": exact(task.metadata),
        "answer": exact(found),
    }


def exact(value: Any) -> Any:
    """The value, with whole numbers that a browser would round as text."""
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [exact(item) for item in value]
    return str(value) if isinstance(value, int) and abs(value) >= 2**53 else value


def gold_answer(metadata: dict[str, Any], names: Sequence[str]) -> Any:
    """The right answer, from the first of these fields that the task has; None if it has none of them."""
    return next((metadata[name] for name in names if metadata.get(name) is not None), None)


def answer_names(config: dict[str, Any]) -> tuple[str, ...]:
    """The fields to look into: what the run's judge compares with (`reference_field`), then the usual ones."""
    judge = value_at(config, "ajet", "task_judge")
    sections = judge.values() if isinstance(judge, dict) else ()
    named = [value_at(section, "reference_field") for section in sections]
    return (*(name for name in named if isinstance(name, str)), *_ANSWER_NAMES)
