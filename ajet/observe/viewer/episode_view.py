"""One episode in the form its page needs: conversation and call tree as one JSON document, tokens as another."""

from __future__ import annotations

from typing import Any

import numpy as np

from ajet.observe.episode_store import EpisodeStore, RecordedEpisode
from ajet.observe.viewer.timeline import timeline
from ajet.schema.call_tree import ROOT, Call, CallTree
from ajet.schema.episode import Episode


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


def _about(episode: Episode) -> dict[str, Any]:
    return {
        "id": episode.episode_id,
        "task_id": episode.task_id,
        "group_id": episode.group_id,
        "repeat": episode.repeat,
        "tag": episode.tag,
        "status": episode.status,
        "outcomes": episode.outcomes,
        "reward": episode.reward,
        "success": episode.is_success,
        "agent_rewards": episode.agent_rewards,
        "reward_parts": episode.reward_parts,
        "reward_weights": episode.reward_weights,
        "failure": episode.failure,
        "attempts": episode.attempts,
        "metadata": episode.metadata,
        "log_metrics": episode.log_metrics,
        "timings": episode.timings,
        "prompt_version": episode.prompt_version,
        "prompts_used": episode.prompts_used,
        "ledger": episode.ledger,
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
        "index": index,
        "name": call.name,
        "agent": call.agent,
        "target": call.target,
        "turn": call.turn,
        "extends": call.extends,
        "fork": call.fork,
        "alternative_to": _same_prompt(tree, index),
        "finish_reason": call.finish_reason,
        "sampling": call.sampling,
        "trainable": call.trainable,
        "drop": call.drop,
        "reward": call.reward,
        "new_messages": call.new_messages,
        "reply": call.reply,
        "tools": call.tools,
        "started_s": call.started_s,
        "seconds": call.seconds,
        "prompt_run": call.prompt_run,
        "prompt_tokens": call.prompt_tokens,
        "run": call.run,
        "tokens": len(tree.runs[call.run].ids) if call.run != ROOT else 0,
        "trained": int(call.mask.sum()),
        "mean_logprob": _mean_logprob(call),
        "advantage": mine.advantage if mine is not None and mine.entries else None,
        "weight": mine.weight if mine is not None and mine.entries else None,
        "entries": mine.entries if mine is not None else [],
        "versions": call.versions,
    }


def _same_prompt(tree: CallTree, index: int) -> int:
    """The first call with exactly this prompt, if this reply is an alternative to that call's; otherwise ROOT."""
    call = tree.calls[index]
    for other, earlier in enumerate(tree.calls[:index]):
        if (earlier.prompt_run, earlier.prompt_tokens) == (call.prompt_run, call.prompt_tokens):
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
