"""Recorded conversations as episodes to imitate: assistant messages are replayed through a `ContextTracker`.

In: messages in OpenAI's format (a JSONL file, or code), or a run's `episodes.sqlite`. Out: episodes whose trees hold
exactly the tokens the model would have had to sample. Replayed ones have reward 1.0, and logprobs of 0: nobody sampled
them. `demonstration_batches` makes a stream of them for `policy_loss: sft`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.backbone.local.reply_target import numbered_calls, reply_ids
from ajet.context_tracker import ContextTracker, Renderer, TrackerSettings
from ajet.context_tracker.messages import plain_messages
from ajet.named_files import find_named, looked_in
from ajet.observe.episode_store import EpisodeStore
from ajet.schema.chat import DEFAULT_AGENT, DEFAULT_TARGET, Message, Tool
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.errors import ConfigError, InvalidRequestError, TaskDataError
from ajet.schema.generation import Completion, Sampling
from ajet.schema.task import Task
from ajet.session.tool_call_parsers import pick_parser
from ajet.task_reader.stream import TaskStream

if TYPE_CHECKING:
    from ajet.config import Config

_NO_LIMIT = 1 << 30


def read_demonstrations(path: Path, renderer: Renderer) -> list[Episode]:
    """One conversation per line: `{"messages": […], "tools": […], "chat_template_kwargs": {…}}`, the last two if there
    are any. Messages with `"train": false` are context only."""
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
            kwargs = record.get("chat_template_kwargs") or {}
            if not isinstance(kwargs, dict):
                raise ValueError('expected {"chat_template_kwargs": {"name": value}}')
            episodes.append(
                replay(
                    renderer,
                    record["messages"],
                    record.get("tools") or [],
                    template_kwargs=kwargs,
                    name=f"line-{number}",
                )
            )
        except (ValueError, KeyError, TypeError, InvalidRequestError) as error:
            raise TaskDataError(f"{path}:{number}: {error}") from error
    if not episodes:
        raise TaskDataError(f"{path} holds no conversation: expected one JSON object with `messages` per line")
    return episodes


def replay(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    name: str = "",
) -> Episode:
    """The episode in which a model wrote these assistant messages."""
    limits = TrackerSettings(max_model_len=_NO_LIMIT, max_steps=_NO_LIMIT, checks=(), detect_forks=False)
    tracker, parser = ContextTracker(renderer, limits), pick_parser(renderer.tokenizer)
    spoken = plain_messages(messages)
    if parser.markup.numbered_ids:
        spoken = numbered_calls(spoken)
    replies = [i for i, one in enumerate(messages) if one["role"] == "assistant" and one.get("train", True)]
    if not replies:
        raise ValueError("the conversation holds no assistant message to train")
    for index in replies:
        before, reply = spoken[:index], spoken[index]
        ids = reply_ids(renderer, parser, before, reply, tools, template_kwargs)
        prepared = tracker.begin(
            DEFAULT_AGENT, DEFAULT_TARGET, before, tools, Sampling(), template_kwargs=template_kwargs
        )
        tracker.commit(prepared.call_id, Completion(ids, [0.0] * len(ids), "stop"), reply)
    calls = tracker.finish(1.0)
    return Episode(name, name, EpisodeStatus.COMPLETED, calls.tree, calls.ledger, group_id=name, reward=calls.reward)


def demonstration_batches(config: Config, renderer: Renderer) -> TaskStream:
    """Batches of `sft.demonstrations`; each task holds its episode in `metadata["episode"]`."""
    sft = config.ajet.trainer_common.algorithm.sft
    assert sft.demonstrations is not None
    path = _find(sft.demonstrations, config)
    recorded = path.suffix == ".sqlite"
    episodes = list(_recorded(path, sft.min_reward)) if recorded else read_demonstrations(path, renderer)
    if not episodes:
        raise TaskDataError(f"{path} holds no trained episode with a reward of at least {sft.min_reward:g}")
    tasks = [
        Task(task_id=f"{index}-{episode.episode_id}", metadata={"episode": episode})
        for index, episode in enumerate(episodes)
    ]
    reader = config.ajet.task_reader
    return TaskStream(tasks, seed=reader.seed, batch_size=config.ajet.data.train_batch_size, shuffle=reader.shuffle)


def count_demonstrations(config: Config) -> int:
    """How many conversations or episodes there are to imitate, without a tokenizer."""
    sft = config.ajet.trainer_common.algorithm.sft
    assert sft.demonstrations is not None
    path = _find(sft.demonstrations, config)
    if path.suffix == ".sqlite":
        return sum(1 for _ in _recorded(path, sft.min_reward))
    return sum(1 for line in path.read_text(encoding="utf-8").split("\n") if line.strip())


def _recorded(path: Path, least: float) -> Iterator[Episode]:
    """A run's training episodes with a reward of at least `least`."""
    store = EpisodeStore(path)
    try:
        for record in store.all():
            episode = record.episode
            if episode.reward is not None and episode.reward >= least and episode.tree.trained_tokens:
                yield episode
    finally:
        store.close()


def _find(name: str, config: Config) -> Path:
    if (found := find_named(name, config.base_dirs, Path.is_file)) is not None:
        return found
    raise ConfigError(
        f"ajet.trainer_common.algorithm.sft.demonstrations: no such file: {name}\n"
        f"    looked in {looked_in(name, config.base_dirs)}"
    )
