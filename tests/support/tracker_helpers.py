"""A model that says what it is told, and helpers that drive a tracker as a session does."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ajet.context_tracker import ContextTracker, FinishedCalls, PreparedCall, Renderer, TrackerSettings, linear_samples
from ajet.context_tracker.messages import ReasoningHistory
from ajet.schema.chat import Completion, Sampling
from ajet.schema.episode import ROOT, CallTree, Episode, EpisodeStatus
from support.tracker_families import tokenizer

WIDE = TrackerSettings(
    max_model_len=10**6,
    max_prompt_length=10**6,
    max_response_length=10**6,
    max_steps=10**6,
    max_sample_per_task=10**6,
)

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["query"],
        },
    },
}


@cache
def renderer(family: str, reasoning_history: ReasoningHistory = "template") -> Renderer:
    return Renderer(tokenizer(family), reasoning_history=reasoning_history)


def system(text: str = "Be nice.") -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def called(call_id: str, query: str, content: str | None = "", **arguments: Any) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps({"query": query, **arguments})}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def end_id(rend: Renderer, calls_tools: bool = False) -> int:
    """The token that ends a reply in this family; some families use another one after tool calls."""
    tokens = sorted(rend.probe.end_tokens, reverse=True)
    return int(rend.tokenizer.convert_tokens_to_ids(tokens[-1 if calls_tools else 0]))


def episode_of(calls: FinishedCalls) -> Episode:
    """A completed episode with these calls."""
    return Episode(
        "episode",
        "task",
        EpisodeStatus.COMPLETED,
        calls.tree,
        calls.ledger,
        reward=calls.reward,
        agent_rewards=calls.agent_rewards,
        outcomes=calls.outcomes,
    )


@dataclass
class Drive:
    """An episode under test."""

    family: str = "qwen2_5"
    settings: TrackerSettings = WIDE
    reasoning_history: ReasoningHistory = "template"
    seed: int = 0
    drift: float = 0.0
    seen: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    """Prompt and sampled ids of each call, as the engine saw them."""

    def __post_init__(self) -> None:
        self.renderer = renderer(self.family, self.reasoning_history)
        self.tokenizer = self.renderer.tokenizer
        self.tracker = ContextTracker(self.renderer, self.settings)
        self.rng = random.Random(self.seed)

    def begin(
        self,
        messages: list[dict[str, Any]],
        *,
        agent: str = "agent",
        tools: list[dict[str, Any]] | None = None,
        trainable: bool = True,
        kwargs: dict[str, Any] | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        choice: int = 0,
    ) -> PreparedCall:
        fresh = json.loads(json.dumps(messages))
        return self.tracker.begin(
            agent, "target", fresh, tools or [], sampling, trainable=trainable, template_kwargs=kwargs, choice=choice
        )

    def commit(
        self,
        call: PreparedCall,
        reply: dict[str, Any],
        text: str | None = None,
        *,
        finish: str = "stop",
        end: bool = True,
        stopped_by: str | int | None = None,
        logprobs: list[float] | None = None,
    ) -> dict[str, Any]:
        """Have the model sample `text` (default: the reply's content) and an end token."""
        ids = self.sample(reply["content"] or "" if text is None else text)
        if end and finish == "stop":
            ids.append(end_id(self.renderer, bool(reply.get("tool_calls"))))
            stopped_by = ids[-1]
        values = logprobs or [-self.rng.random() for _ in ids]
        completion = Completion(ids, values, finish, stopped_by)  # type: ignore[arg-type]
        self.seen[call.call_id] = (list(call.prompt_ids), list(ids))
        self.tracker.commit(call.call_id, completion, reply)
        return reply

    def sample(self, text: str) -> list[int]:
        """Token ids that say this: the tokenizer's own, or others that decode to the same text."""
        encode = self.renderer.encoder.continuation
        ids = encode(text)
        if len(text) < 2 or self.rng.random() >= self.drift:
            return list(ids)
        cuts = sorted(self.rng.sample(range(1, len(text)), min(3, len(text) - 1)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        drifted = [token for part in parts for token in encode(part)]
        return drifted if self.tokenizer.decode(drifted) == self.tokenizer.decode(ids) else list(ids)

    def ask(self, messages: list[dict[str, Any]], reply: dict[str, Any], **options: Any) -> PreparedCall:
        """Begin and commit; append the reply to `messages`."""
        commits = {k: options.pop(k) for k in ("text", "finish", "end", "stopped_by") if k in options}
        call = self.begin(messages, **options)
        self.commit(call, reply, **commits)
        messages.append(reply)
        return call


def assert_faithful(drive: Drive, tree: CallTree, expected_samples: int | None = None) -> None:
    """Every call is in a sample exactly as the engine saw it, trained once, in as few samples as possible."""
    samples, ledger = linear_samples(tree, max_prompt_length=10**6, max_response_length=10**6, max_samples=10**6)
    rows = [(sample.prompt_ids.tolist() + sample.response_ids.tolist(), sample) for sample in samples]
    trained_total = 0
    for index, call in enumerate(tree.calls):
        prompt, sampled = drive.seen[call.name]
        assert tree.prompt_ids(index).tolist() == prompt
        assert call.run != ROOT and tree.runs[call.run].ids.tolist() == sampled
        trained = sum(int((sample.response_mask & (sample.call_of_token == index)).sum()) for _, sample in rows)
        if call.drop is None:
            whole = prompt + sampled
            assert any(ids[: len(whole)] == whole for ids, _ in rows)
            assert trained == len(sampled)
        else:
            assert trained == 0
        trained_total += trained
    assert ledger.trained == trained_total
    assert len(samples) == trained_leaves(tree)
    if expected_samples is not None:
        assert len(samples) == expected_samples


def trained_leaves(tree: CallTree) -> int:
    """Trained runs that no trained run follows."""
    trained = [call.run for call in tree.calls if call.run != ROOT and call.mask.any()]
    followed = {run for leaf in trained for run in tree.path(leaf)[:-1]}
    return sum(run not in followed for run in trained)
