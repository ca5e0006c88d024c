"""What happened in an episode, by time: model calls, what came of their tool calls, environment steps and spans.

Times are seconds since the first call could be made. Clocks of other machines may differ: what they tell is placed as
they tell it.
"""

from __future__ import annotations

from typing import Any

from ajet.schema.call_tree import Call
from ajet.schema.episode import Episode
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
    (None: not told), `seconds`, `error`, `depth` (of a span within another) and, by kind, `call` (index) or `facts`.
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
    told = [span.start_time for span in episode.spans if span.start_time is not None]
    began = episode.began or min(told, default=0.0)
    depths = _depths(episode.spans)
    return [_span(span, began, depths[span.span_id]) for span in episode.spans]


def _span(span: Span, began: float, depth: int) -> dict[str, Any]:
    start = None if span.start_time is None else span.start_time - began
    end = span.end_time if span.end_time is not None else span.start_time
    seconds = 0.0 if span.start_time is None or end is None else end - span.start_time
    failed = span.status.status_code == "ERROR"
    facts = {
        "status": None if span.status.status_code == "UNSET" else span.status.status_code,
        **{name: _short(value) for name, value in span.attributes.items()},
        "events": span.events or None,
    }
    error = (span.status.description or "error") if failed else ""
    label, detail = _called(span)
    return _entry("span", label, start, seconds, detail=detail, depth=depth, error=error, facts=facts)


def _called(span: Span) -> tuple[str, str]:
    """A span's name, and what it says. Those of our own emitters are called by what they tell of."""
    kind = span.name.removeprefix(_OWN)
    if kind == span.name:
        return span.name, ""
    if kind == "operation":
        return str(span.attributes.get(f"{_OWN}operation.name") or kind), ""
    said = (span.attributes.get(_OWN + name) for name in _SAID)
    return kind, _detail(next((value for value in said if value is not None), ""))


def _detail(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST_DETAIL else f"{text[:_LONGEST_DETAIL]}…"


def _depths(spans: list[Span]) -> dict[str, int]:
    """How many spans each is within. A ring of parents, which only a broken program makes, counts as none."""
    parents = {span.span_id: span.parent_id for span in spans}
    depths: dict[str, int] = {}
    for name in parents:
        chain = [name]
        while (above := parents.get(chain[-1])) in parents and above not in chain:
            chain.append(str(above))
        depths[name] = len(chain) - 1
    return depths


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST_VALUE:
        return f"{value[:_LONGEST_VALUE]}… ({len(value):,} characters)"
    return value
