"""Recorded conversations as episodes to imitate: each assistant message is replayed through a `ContextTracker`.

In: lists of messages in OpenAI's form (a JSONL file, or code). Out: `Episode`s with reward 1.0 whose trees hold exactly
the tokens that the model would have had to sample. Their logprobs are 0: nobody sampled them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ajet.context_tracker import ContextTracker, Renderer, TrackerSettings
from ajet.schema.chat import DEFAULT_AGENT, DEFAULT_TARGET, Message, Tool
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.errors import TaskDataError
from ajet.schema.generation import Completion, Sampling

_NO_LIMIT = 1 << 30


def read_demonstrations(path: Path, renderer: Renderer) -> list[Episode]:
    """One conversation a line: `{"messages": […], "tools": […]}`. Messages with `"train": false` are context only."""
    episodes = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise TaskDataError(f"{path}: {error.strerror or error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
                raise ValueError('expected {"messages": […]}')
            episodes.append(replay(renderer, record["messages"], record.get("tools") or [], name=f"line-{number}"))
        except (ValueError, KeyError, TypeError) as error:
            raise TaskDataError(f"{path}:{number}: {error}") from error
    if not episodes:
        raise TaskDataError(f"{path} holds no conversation: one JSON object with `messages` a line is expected")
    return episodes


def replay(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Tool] = (), *, name: str = "") -> Episode:
    """The episode in which a model wrote these assistant messages."""
    limits = TrackerSettings(max_model_len=_NO_LIMIT, max_steps=_NO_LIMIT, checks=(), detect_forks=False)
    tracker = ContextTracker(renderer, limits)
    spoken = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    trained = 0
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        ids = reply_ids(renderer, spoken[:index], spoken[index], tools)
        prepared = tracker.begin(
            DEFAULT_AGENT, DEFAULT_TARGET, spoken[:index], tools, Sampling(), trainable=message.get("train", True)
        )
        tracker.commit(prepared.call_id, Completion(ids, [0.0] * len(ids), "stop"), spoken[index])
        trained += 1
    if not trained:
        raise ValueError("the conversation holds no assistant message")
    calls = tracker.finish(1.0)
    return Episode(name, name, EpisodeStatus.COMPLETED, calls.tree, calls.ledger, group_id=name, reward=calls.reward)


def reply_ids(renderer: Renderer, history: Sequence[Message], reply: Message, tools: Sequence[Tool]) -> list[int]:
    """What a model samples to write this reply, its end token included."""
    prompt = renderer.render(history, tools)
    whole = renderer.render([*history, reply], tools, add_generation_prompt=False)
    if whole[: len(prompt)] != prompt:
        raise ValueError("the chat template writes something else before this reply than it prompts the model with")
    ids: list[Any] = whole[len(prompt) :]
    for length, token in enumerate(ids, start=1):
        if token in renderer.end_ids:
            return ids[:length]
    raise ValueError("the chat template ends this reply without an end token")
