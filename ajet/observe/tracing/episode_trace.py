"""`episode_spans`: an episode as one trace: the episode itself, its model calls, and what its code told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ajet.observe.tracing.recording import root_span_id_of, trace_id_of
from ajet.schema.call_tree import ROOT, Call, CallTree
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.span import Span, SpanStatus

EPISODE = "ajet.episode"
CALL = "openai.chat.completion"
"""Adapters of agent-lightning look for this name."""


def episode_spans(episode: Episode, *, tokens: bool = False, attributes: dict[str, Any] | None = None) -> list[Span]:
    """All spans of an episode, the whole first, then by their beginning. `tokens`: with the ids and log-probabilities.

    `attributes` are added to the whole's.
    """
    trace_id, root_id = trace_id_of(episode.episode_id), root_span_id_of(episode.episode_id)
    first_attempt = episode.episode_id.partition(".")[0]
    ids: dict[str, Any] = {"rollout_id": first_attempt, "attempt_id": episode.episode_id, "trace_id": trace_id}
    calls = [
        Span(
            **ids,
            span_id=call_span_id(episode.episode_id, index),
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
    told = [
        replace(span, trace_id=trace_id, parent_id=span.parent_id if span.parent_id in own else root_id)
        for span in episode.spans
    ]
    parts = sorted([*calls, *told], key=lambda span: span.start_time or 0.0)
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


def call_span_id(episode_id: str, call: int) -> str:
    """The span of one model call."""
    return root_span_id_of(f"{episode_id}/{call}")


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
    if episode.reward is not None:  # under a name of its own: the reward of the whole matches no call
        values["ajet.reward"] = episode.reward
    return values | {f"ajet.reward.{name}": value for name, value in episode.reward_parts.items()}


def _of_call(tree: CallTree, index: int, call: Call, tokens: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "agent.name": call.agent,
        "gen_ai.operation.name": "chat",
        "gen_ai.response.id": call.name,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": len(call.logprobs),
        "gen_ai.response.finish_reasons": [call.finish_reason],
    }
    for number, message in enumerate(_conversation(tree, index)):
        values |= _message(f"gen_ai.prompt.{number}", message)
    if call.reply:
        values |= _message("gen_ai.completion.0", call.reply)
    if call.tools != ROOT:
        values["gen_ai.request.tools"] = json.dumps(tree.toolsets[call.tools], ensure_ascii=False)
    if call.reward is not None:
        values["ajet.reward"] = call.reward
    if tokens and call.run != ROOT:
        values["prompt_token_ids"] = tree.prompt_ids(index).tolist()
        values["response_token_ids"] = tree.runs[call.run].ids.tolist()
        values["logprobs"] = call.logprobs.tolist()
    return values


def _conversation(tree: CallTree, index: int) -> list[dict[str, Any]]:
    """The messages of a call's prompt."""
    chain = [index]
    while (before := tree.calls[chain[-1]].extends) != ROOT:
        chain.append(before)
    messages: list[dict[str, Any]] = []
    for place in reversed(chain):
        messages.extend(tree.calls[place].new_messages)
        if place != index and tree.calls[place].reply:
            messages.append(tree.calls[place].reply)
    return messages


def _message(prefix: str, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    values = {f"{prefix}.role": message.get("role", "assistant")}
    values[f"{prefix}.content"] = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    if message.get("tool_calls"):
        values[f"{prefix}.tool_calls"] = json.dumps(message["tool_calls"], ensure_ascii=False)
    if message.get("tool_call_id"):
        values[f"{prefix}.tool_call_id"] = message["tool_call_id"]
    return values
