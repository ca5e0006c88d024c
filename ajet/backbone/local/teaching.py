"""`policy_loss: sft` from a file: conversations (JSONL) or recorded episodes (`.sqlite`) as a stream of batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.backbone.local.demonstrations import read_demonstrations
from ajet.context_tracker import Renderer
from ajet.observe.episode_store import EpisodeStore
from ajet.schema.episode import Episode
from ajet.schema.errors import ConfigError, TaskDataError
from ajet.schema.task import Task
from ajet.task_reader.stream import TaskStream

if TYPE_CHECKING:
    from ajet.config import Config


def demonstration_batches(config: Config, renderer: Renderer) -> TaskStream:
    """Batches of what is to be imitated; each task holds its episode as `metadata["episode"]`."""
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


def _recorded(path: Path, least: float) -> Iterator[Episode]:
    """The training episodes of a run that earned enough."""
    store = EpisodeStore(path)
    try:
        for record in store.all():
            episode = record.episode
            if episode.reward is not None and episode.reward >= least and episode.tree.trained_tokens:
                yield episode
    finally:
        store.close()


def _find(name: str, config: Config) -> Path:
    for base in (Path(), *map(Path, config.base_dirs)):
        if (base / name).is_file():
            return base / name
    raise ConfigError(f"ajet.trainer_common.algorithm.sft.demonstrations: {name} does not exist")
