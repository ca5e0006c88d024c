"""An episode as plain JSON: for `save_trajectory_as_json_file`, exports and copying out of the viewer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ajet.observe.episode_codec import Annotation
from ajet.schema.call_tree import ROOT, CallTree
from ajet.schema.episode import Episode


def episode_json(episode: Episode, step: int, annotation: Annotation | None = None) -> dict[str, Any]:
    """Everything that is known of an episode, as JSON values. Token arrays are lists."""
    record: dict[str, Any] = {"step": step, **_builtin(episode)}
    if annotation is not None:
        record |= _builtin(annotation)
    return record


def conversation(tree: CallTree, call: int) -> list[dict[str, Any]]:
    """The messages of a call's prompt, and its reply."""
    chain: list[int] = []
    index = call
    while index != ROOT:
        chain.append(index)
        index = tree.calls[index].extends
    messages: list[dict[str, Any]] = []
    for index in reversed(chain):
        messages.extend(tree.calls[index].new_messages)
        if tree.calls[index].reply:
            messages.append(tree.calls[index].reply)
    return messages


def last_calls(tree: CallTree) -> list[int]:
    """The calls that no other call extends: one a conversation."""
    extended = {call.extends for call in tree.calls}
    return [index for index in range(len(tree.calls)) if index not in extended]


def write_trajectory(folder: Path, episode: Episode, step: int, annotation: Annotation | None) -> Path:
    """Write `step_N/<episode id>.json`, complete or not at all."""
    target = folder / f"step_{step}" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', episode.episode_id)[:150]}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(".tmp")
    scratch.write_text(json.dumps(episode_json(episode, step, annotation), ensure_ascii=True), encoding="utf-8")
    scratch.replace(target)
    return target


def _builtin(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=_encode_other)


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return str(value)
