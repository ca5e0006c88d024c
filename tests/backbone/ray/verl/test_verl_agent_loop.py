"""Our agents as an agent loop of verl, with verl's own worker on the CPU: only its rollout server is scripted."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.ray_runs import installed

os.environ.setdefault("AJET_PLATFORM", "cpu")  # read when verl is imported
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed("verl"), reason="needs verl: run `make test-verl`"),
]

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
REPLIES = (f"I calculate.{CALL}", "\\boxed{42}")
BLOCK = {"rollout": {"agent": {"type": "react", "tools": ["calculator"], "max_steps": 4, "system_prompt": "Go."}}}
PROMPT, RESPONSE = 1024, 256


class Server:
    """Says the replies to each episode, as verl's servers do: ids and their log-probabilities."""

    def __init__(self, tokenizer: Any, replies: tuple[str, ...] = REPLIES) -> None:
        self.tokenizer, self.replies = tokenizer, replies
        self.calls: dict[str, int] = {}
        self.asked: list[dict[str, Any]] = []
        self.said: list[tuple[list[int], list[int]]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        index = self.calls[request_id] = self.calls.get(request_id, -1) + 1
        text = self.replies[min(index, len(self.replies) - 1)]
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        self.asked.append(sampling_params)
        self.said.append((list(prompt_ids), ids))
        logprobs = [-0.25 - 0.5 * index] * len(ids)
        return SimpleNamespace(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields={})


def worker(folder: Path, block: Any = BLOCK, reward: str = "ajet") -> tuple[Any, Server]:
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    from ajet.backbone.ray.verl.config import compose_verl_config
    from ajet.engine.model_source import ModelSource

    source = ModelSource.resolve("tiny:qwen2-0.3m")
    loops = folder / "agent_loops.yaml"
    entry = {
        "name": "ajet_agent",
        "_target_": "ajet.backbone.ray.verl.agent_loop.AjetAgentLoop",
        "reward": reward,
        "ajet": block,
    }
    loops.write_text(json.dumps([entry]))
    rollout = "actor_rollout_ref.rollout"
    settings = {
        "actor_rollout_ref.model.path": str(source.path),
        f"{rollout}.agent.agent_loop_config_path": str(loops),
        f"{rollout}.agent.default_agent_loop": "ajet_agent",
        f"{rollout}.name": "vllm",
        f"{rollout}.prompt_length": PROMPT,
        f"{rollout}.response_length": RESPONSE,
        f"{rollout}.temperature": 0.7,
        f"{rollout}.calculate_log_probs": True,
    }
    server = Server(source.tokenizer())
    return AgentLoopWorker(compose_verl_config(settings, given=settings), server), server


def batch(count: int = 1, **meta: Any) -> Any:
    import numpy as np
    from verl.protocol import DataProto

    def column(value: Any) -> Any:
        made = np.empty(count, dtype=object)
        made[:] = [value] * count
        return made

    rows = {
        "raw_prompt": column([{"role": "user", "content": "What is 6*7?"}]),
        "reward_model": column({"ground_truth": "42"}),
        "extra_info": column({"tag": "product"}),
    }
    return DataProto(batch=None, non_tensor_batch=rows, meta_info=meta)


def test_verl_gets_exactly_what_was_sampled(tmp_path: Path) -> None:
    loops, server = worker(tmp_path)
    output = asyncio.run(loops.generate_sequences(batch(global_steps=1)))
    tensors = output.batch
    (first_prompt, first), (second_prompt, second) = server.said
    prompt = tensors["prompts"][0][-len(first_prompt) :].tolist()
    expected = [*second_prompt[len(first_prompt) :], *second]  # the reply, the tool's result, the answer
    response = tensors["responses"][0][: len(expected)].tolist()
    assert (prompt, response) == (first_prompt, expected)
    mask = tensors["response_mask"][0].tolist()
    between = len(expected) - len(first) - len(second)
    assert mask == [1] * len(first) + [0] * between + [1] * len(second) + [0] * (RESPONSE - len(expected))
    logprobs = tensors["rollout_log_probs"][0].tolist()
    assert logprobs[: len(first)] == [-0.25] * len(first)
    assert logprobs[len(first) + between : len(expected)] == [-0.75] * len(second)
    assert int(tensors["attention_mask"].sum()) == len(first_prompt) + len(expected)
    assert tensors["rm_scores"].sum() == 1.0 and tensors["rm_scores"][0][len(expected) - 1] == 1.0
    assert tensors["position_ids"].shape == tensors["input_ids"].shape == (1, PROMPT + RESPONSE)
    assert "Go." in server.tokenizer.decode(first_prompt)


def test_many_rows_and_verls_sampling(tmp_path: Path) -> None:
    loops, server = worker(tmp_path)
    output = asyncio.run(loops.generate_sequences(batch(4, global_steps=1)))
    assert len(output) == 4 and output.batch["rm_scores"].sum() == 4.0
    assert {asked["temperature"] for asked in server.asked} == {0.7}
    server.asked.clear()
    asyncio.run(loops.generate_sequences(batch(global_steps=1, validate=True)))
    assert {asked["temperature"] for asked in server.asked} == {0}


def test_branches_are_rows_where_verl_takes_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's worker that names a prompt's session takes a list; the other, the longest row."""
    loops, server = worker(tmp_path)

    async def as_it_is(output: Any, validate: bool, **row: Any) -> Any:
        return output

    monkeypatch.setattr(loops, "_agent_loop_postprocess", as_it_is)
    row = {"raw_prompt": [{"role": "user", "content": "6*7?"}], "reward_model": {"ground_truth": 42}}
    trajectory = {"step": 3, "sample_index": 0, "rollout_n": 0, "validate": False}
    run = loops._run_agent_loop({}, trajectory, agent_name="ajet_agent", global_steps=3, session_id=0, **row)
    (only,) = asyncio.run(run)
    assert sum(only.response_mask) == sum(len(ids) for _, ids in server.said) and only.reward_score == 1.0
    assert (only.extra_fields["min_global_steps"], only.extra_fields["reward_extra_info"]) == (0, {"acc": 1.0})


def test_verl_gives_the_reward(tmp_path: Path) -> None:
    loops, _ = worker(tmp_path, reward="verl")
    output = asyncio.run(loops.generate_sequences(batch(global_steps=1)))
    assert "rm_scores" not in output.batch and output.batch["response_mask"].sum() > 0


def test_an_episode_that_fails_trains_nothing(tmp_path: Path) -> None:
    block = {"rollout": {**BLOCK["rollout"], "user_workflow": None, "agent": {"type": "react"}}}
    loops, server = worker(tmp_path, block)
    row = batch(global_steps=1)
    row.non_tensor_batch["reward_model"][0] = {}  # nothing says what the answer is worth
    output = asyncio.run(loops.generate_sequences(row))
    assert output.batch["response_mask"].sum() == 0 and output.batch["rm_scores"].sum() == 0.0
    assert output.non_tensor_batch["ajet_status"].tolist() == ["workflow_error"] and server.said
    sampled = sum(len(ids) for _, ids in server.said)
    assert output.non_tensor_batch["ajet_left_out"].tolist() == [sampled]  # none of them is in the row


@pytest.mark.parametrize(
    ("block", "reward", "says"),
    [
        (None, "ajet", "needs our block"),
        ({"rollout": {}}, "ajet", "rollout needs `agent"),
        ({"rollout": {"agent": {"type": "coding"}}}, "ajet", "set rollout.sandbox"),
        ({"rollout": {"agent": {"typ": "react"}}}, "ajet", "typ"),
        (BLOCK, "both", "is not one of verl, ajet"),
        ({**BLOCK, "task_judge": {"judge_protocol": "a->B"}}, "verl", "only with `reward: ajet`"),
        ({"rollout": {"agent": {"type": "raect"}}}, "ajet", "did you mean 'react'"),
    ],
)
def test_what_is_wrong_with_the_block_is_said(tmp_path: Path, block: Any, reward: str, says: str) -> None:
    loops, _ = worker(tmp_path, block, reward)
    with pytest.raises(Exception) as refused:
        asyncio.run(loops.generate_sequences(batch(global_steps=1)))
    assert says in str(refused.value)
