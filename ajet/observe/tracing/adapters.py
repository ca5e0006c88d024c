"""What can be made of spans: model calls (`llm_calls`), triplets, conversations to fine-tune on, tasks. And an
episode as spans.

Model calls are read in three ways of writing them down: OpenLLMetry's (`gen_ai.prompt.0.content`), OpenTelemetry's
(`gen_ai.input.messages`) and OpenInference's (`llm.input_messages.0.message.content`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from msgspec.structs import replace

from ajet.observe.episode_codec import prompt_messages
from ajet.observe.tracing.attributes import (
    CALL,
    WORTH,
    agent_of,
    agents_around,
    call_of,
    clock_of,
    get_reward_value,
    message_attributes,
)
from ajet.observe.tracing.recording import root_span_id_of, trace_id_of
from ajet.schema.chat import bare_call_id
from ajet.schema.episode import ROOT, Call, CallTree, Episode, EpisodeStatus
from ajet.schema.span import Span, SpanStatus
from ajet.schema.task import Task

EPISODE = "ajet.episode"


@dataclass(slots=True)
class LlmCall:
    """A model call that a span tells of."""

    span: Span
    messages: list[dict[str, Any]]
    reply: dict[str, Any]
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def response_id(self) -> str:
        return str(self.span.attributes.get("gen_ai.response.id") or self.span.attributes.get("llm.response.id") or "")

    @property
    def agent(self) -> str:
        return agent_of(self.span)


@dataclass(slots=True)
class Triplet:
    """One model call and what it was worth."""

    prompt: dict[str, Any]
    """`token_ids` and `raw_content` (the messages)."""
    response: dict[str, Any]
    """`token_ids`, `raw_content` and `logprobs`."""
    reward: float | None
    """None: no reward belongs to it."""
    metadata: dict[str, Any] = field(default_factory=dict)


def llm_calls(spans: Sequence[Span]) -> list[LlmCall]:
    """The model calls among spans, by their beginning; of several spans about one response, the first."""
    found: list[LlmCall] = []
    known: set[str] = set()
    for span in sorted(spans, key=lambda one: (one.start_time or 0.0, one.sequence_id)):
        call = _call(span)
        if call is None or (call.response_id and call.response_id in known):
            continue
        known.add(call.response_id)
        found.append(call)
    return found


def to_messages(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """A conversation (`messages`, `tools`) per model call that got a reply, as fine-tuning reads them."""
    return [
        {"messages": [*call.messages, call.reply], **({"tools": call.tools} if call.tools else {})}
        for call in llm_calls(spans)
        if call.reply
    ]


def to_triplets(spans: Sequence[Span], *, agent: str | None = None) -> list[Triplet]:
    """Prompt, response and reward of each model call. `agent`: a pattern that the name of the call's agent must match,
    or of one around it."""
    calls = llm_calls(spans)
    rewards = matched_rewards(calls, spans)
    by_id = {span.span_id: span for span in spans}
    agents = [agents_around(call.span, by_id) for call in calls]
    return [
        Triplet(
            {"token_ids": _ids(call, "prompt_token_ids"), "raw_content": call.messages},
            {
                "token_ids": _ids(call, "response_token_ids"),
                "raw_content": call.reply,
                "logprobs": _list(call.span.attributes.get("logprobs")),
            },
            reward,
            {"response_id": call.response_id, "agent_name": next(iter(names), "")},
        )
        for call, reward, names in zip(calls, rewards, agents, strict=True)
        if agent is None or any(re.search(agent, name) for name in names)
    ]


def to_tasks(spans: Sequence[Span]) -> list[Task]:
    """A task per trace: what was asked first, with the last answer as `metadata.answer`."""
    traces: dict[str, list[LlmCall]] = {}
    for call in llm_calls(spans):
        traces.setdefault(call.span.trace_id, []).append(call)
    tasks = []
    for trace, calls in traces.items():
        asked = next((m["content"] for m in calls[0].messages if m.get("role") == "user" and m.get("content")), None)
        said = next((call.reply["content"] for call in reversed(calls) if call.reply.get("content")), None)
        if isinstance(asked, str) and isinstance(said, str):
            found = {"answer": said, "trace": trace}
            tasks.append(Task(main_query=asked, task_id=f"trace-{trace[:12]}", metadata=found))
    return tasks


def matched_rewards(calls: Sequence[LlmCall], spans: Sequence[Span]) -> list[float | None]:
    """The reward of each call. A reward that names a response is its call's. In the order of time, each of the others
    goes to the latest call that had ended before it and has none yet. Clocks of other machines are set right first, by
    the responses that both tell of. If none of an episode's calls has one then, its last one has the episode's."""
    rewards: list[float | None] = [_worth(call.span) for call in calls]
    place = {bare_call_id(call.response_id): index for index, call in enumerate(calls) if call.response_id}
    for span in spans:
        named = call_of(span)
        if (
            named is not None
            and (index := place.get(named)) is not None
            and (value := get_reward_value(span)) is not None
        ):
            rewards[index] = value
    offsets = _clock_offsets(calls, spans)
    given = sorted(
        (
            (_time(span.start_time, span, offsets), span.sequence_id, value)
            for span in spans
            if call_of(span) is None and (value := get_reward_value(span)) is not None
        ),
    )
    ends = [_time(call.span.end_time, call.span, offsets) for call in calls]
    for when, _, value in given:
        free = [index for index, end in enumerate(ends) if end <= when and rewards[index] is None]
        if free:
            rewards[max(free, key=lambda index: ends[index])] = value
    for episode in (span for span in spans if "ajet.episode_id" in span.attributes):
        own = [index for index, call in enumerate(calls) if call.span.trace_id == episode.trace_id]
        if own and all(rewards[index] is None for index in own):
            rewards[own[-1]] = _worth(episode)
    return rewards


def _worth(span: Span) -> float | None:
    value = span.attributes.get(WORTH)
    return float(value) if isinstance(value, int | float) else None


def _time(seconds: float | None, span: Span, offsets: Mapping[str, float]) -> float:
    return (seconds or 0.0) + offsets.get(clock_of(span), 0.0)


def _clock_offsets(calls: Sequence[LlmCall], spans: Sequence[Span]) -> dict[str, float]:
    """How far each clock is behind that of the calls, as far as spans about the same response show it."""
    ours = {call.response_id: call.span for call in calls if call.response_id}
    found: dict[str, list[float]] = {}
    for span in spans:
        same = ours.get(str(span.attributes.get("gen_ai.response.id") or span.attributes.get("llm.response.id") or ""))
        if same is not None and clock_of(same) != clock_of(span) and span.end_time and same.end_time:
            found.setdefault(clock_of(span), []).append(same.end_time - span.end_time)
    return {clock: median(differences) for clock, differences in found.items()}


# ---------------------------------------------------------------- reading one call


def _call(span: Span) -> LlmCall | None:
    found = read_call(span.attributes)
    return None if found is None else LlmCall(span, *found)


def read_call(values: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]] | None:
    """Messages, reply and tools of the model call that attributes tell of. None: they tell of none."""
    if "gen_ai.prompt.0.role" in values or "gen_ai.completion.0.role" in values:
        asked, said = _numbered(values, "gen_ai.prompt."), _numbered(values, "gen_ai.completion.")
    elif "gen_ai.input.messages" in values or "gen_ai.output.messages" in values:
        asked, said = _messages(values.get("gen_ai.input.messages")), _messages(values.get("gen_ai.output.messages"))
    elif values.get("openinference.span.kind") == "LLM":
        asked = _numbered(values, "llm.input_messages.", "message.")
        said = _numbered(values, "llm.output_messages.", "message.")
    else:
        return None
    return asked, said[-1] if said else {}, _tools(values)


def _numbered(values: Mapping[str, Any], prefix: str, within: str = "") -> list[dict[str, Any]]:
    """`prefix.0.role`, `prefix.0.content` … as messages."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in values.items():
        number, _, key = name[len(prefix) :].partition(".")
        if not name.startswith(prefix) or not number.isdecimal() or len(number) > 6:
            continue
        key = key.removeprefix(within)
        if key in ("role", "content", "tool_call_id", "name"):
            found.setdefault(int(number), {})[key] = value
        elif key == "tool_calls" and isinstance(calls := _json(value), list):
            found.setdefault(int(number), {})["tool_calls"] = calls
        elif key.startswith("tool_calls."):
            _tool_call(found.setdefault(int(number), {}), key.removeprefix("tool_calls."), value)
    return [found[number] for number in sorted(found)]


def _tool_call(message: dict[str, Any], key: str, value: Any) -> None:
    """`0.tool_call.function.name`, `0.name` and their like."""
    number, _, what = key.partition(".")
    if not number.isdecimal() or len(number) > 3:
        return
    calls: list[dict[str, Any]] = message.setdefault("tool_calls", [])
    while len(calls) <= int(number):
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    last = what.rpartition(".")[2]
    if last in ("name", "arguments"):
        calls[int(number)]["function"][last] = value
    elif last == "id":
        calls[int(number)]["id"] = value


def _messages(value: Any) -> list[dict[str, Any]]:
    """OpenTelemetry's messages, with `parts`, as OpenAI's."""
    messages = []
    for given in _list(_json(value)):
        if not isinstance(given, dict):
            continue
        texts = [
            part.get("content", part.get("text", "")) for part in _list(given.get("parts")) if isinstance(part, dict)
        ]
        content = given.get("content")
        if texts:
            content = "".join(text for text in texts if isinstance(text, str))
        messages.append({"role": given.get("role", "user"), "content": content})
    return messages


def _tools(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = _json(values.get("gen_ai.request.tools") or values.get("gen_ai.tool.definitions"))
    if given:
        return [tool for tool in _list(given) if isinstance(tool, dict)]
    functions = _functions(values)
    return [{"type": "function", "function": one} for one in functions]


def _functions(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`gen_ai.request.functions.0.name` …"""
    found: dict[int, dict[str, Any]] = {}
    for name, value in values.items():
        match = re.fullmatch(r"(?:gen_ai|llm)\.request\.functions\.(\d{1,4})\.(name|description|parameters)", name)
        if match:
            found.setdefault(int(match[1]), {})[match[2]] = _json(value) if match[2] == "parameters" else value
    return [found[number] for number in sorted(found)]


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _ids(call: LlmCall, name: str) -> list[int]:
    value = call.span.attributes.get(name)
    if isinstance(value, str):
        value = _json(value)
    return [one for one in _list(value) if isinstance(one, int)]


# ---------------------------------------------------------------- spans of an episode


def episode_spans(episode: Episode, *, tokens: bool = False, attributes: dict[str, Any] | None = None) -> list[Span]:
    """Return all spans of an episode: its root span, then the others by start time.

    `tokens` adds token ids and log-probabilities. `attributes` are added to the root span.
    """
    trace_id, root_id = trace_id_of(episode.episode_id), root_span_id_of(episode.episode_id)
    first_attempt = episode.episode_id.partition(".")[0]
    ids: dict[str, Any] = {"rollout_id": first_attempt, "attempt_id": episode.episode_id, "trace_id": trace_id}
    calls = [
        Span(
            **ids,
            span_id=root_span_id_of(f"{episode.episode_id}/{index}"),
            parent_id=root_id,
            name=CALL,
            status=SpanStatus(status_code="ERROR" if call.run == ROOT else "OK"),
            attributes=_of_call(episode.tree, index, call, tokens),
            start_time=episode.began + call.started_s,
            end_time=episode.began + call.started_s + call.seconds,
        )
        for index, call in enumerate(episode.tree.calls)
    ]
    own = {span.span_id for span in episode.spans}
    emitted = [
        replace(span, trace_id=trace_id, parent_id=span.parent_id if span.parent_id in own else root_id)
        for span in episode.spans
    ]
    parts = sorted([*calls, *emitted], key=lambda span: span.start_time or 0.0)
    whole = Span(
        **ids,
        span_id=root_id,
        name=EPISODE,
        status=_status(episode),
        attributes={**_of_episode(episode), **(attributes or {})},
        start_time=episode.began,
        end_time=max([episode.began + episode.timings.get("total", 0.0), *_ends(parts)]),
    )
    return [whole, *parts]


def _ends(spans: Sequence[Span]) -> list[float]:
    return [span.end_time for span in spans if span.end_time is not None]


def _status(episode: Episode) -> SpanStatus:
    if episode.failure is not None:
        return SpanStatus(status_code="ERROR", description=episode.failure.in_short[:1000])
    return SpanStatus(status_code="OK" if episode.status is EpisodeStatus.COMPLETED else "UNSET")


def _of_episode(episode: Episode) -> dict[str, Any]:
    values: dict[str, Any] = {
        "ajet.episode_id": episode.episode_id,
        "ajet.task_id": episode.task_id,
        "ajet.group_id": episode.group_id,
        "ajet.status": str(episode.status),
        "ajet.attempts": episode.attempts,
        "ajet.tokens.captured": episode.ledger.captured,
        "ajet.tokens.trained": episode.ledger.trained,
    }
    if episode.tag:
        values["ajet.tag"] = episode.tag
    if episode.is_success is not None:
        values["ajet.is_success"] = episode.is_success
    if episode.reward is not None:
        values[WORTH] = episode.reward
    return values | {f"{WORTH}.{name}": value for name, value in episode.reward_parts.items()}


def _of_call(tree: CallTree, index: int, call: Call, tokens: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "agent.name": call.agent,
        "gen_ai.operation.name": "chat",
        "gen_ai.response.id": call.name,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": len(call.logprobs),
        "gen_ai.response.finish_reasons": [call.finish_reason],
    }
    for number, message in enumerate(prompt_messages(tree, index)):
        values |= message_attributes(f"gen_ai.prompt.{number}", message)
    if call.reply:
        values |= message_attributes("gen_ai.completion.0", call.reply)
    if call.tools != ROOT:
        values["gen_ai.request.tools"] = json.dumps(tree.toolsets[call.tools], ensure_ascii=False)
    if call.reward is not None:
        values[WORTH] = call.reward
    if tokens and call.run != ROOT:
        values["prompt_token_ids"] = tree.prompt_ids(index).tolist()
        values["response_token_ids"] = tree.runs[call.run].ids.tolist()
        values["logprobs"] = call.logprobs.tolist()
    return values
