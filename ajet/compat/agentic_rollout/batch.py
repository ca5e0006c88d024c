"""`generate_sequences`: the agentic-rollout library's entry for verl's batches, a `DataProto` in and one out.

Given verl's client of its rollout servers (it has `generate(request_id, prompt_ids=…, sampling_params=…)`) and the
tokenizer, every call is recorded as tokens, and the rows are the tensors that verl trains on. Given a text-only
function, the sampled tokens are unknown: the result then holds answers, rewards and trajectories, but no tensors.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ajet.agents.model_function import Message, ModelFunction
from ajet.backbone.ray import ServerEngine, ServerKind
from ajet.config import make_config
from ajet.context_tracker import ContextTracker, Renderer, TrackerSettings, linear_samples
from ajet.gateway.chat import EpisodeSession, SessionSettings, pick_parser
from ajet.schema.episode import Sample
from ajet.schema.errors import MissingDependencyError, UserError
from ajet.schema.install import install_command
from ajet.schema.trajectory import Trajectory, TrajectoryStatus
from ajet.task_runner.tuner import AjetTuner

PROMPT_LENGTH, RESPONSE_LENGTH = 4096, 16384
"""verl's `prompt_length` and `response_length`, where `meta_info` doesn't give them."""


async def generate_sequences(rollout: Any, prompts: Any) -> Any:
    """One trajectory for each row of `prompts`. A row that fails is an empty one, and says why in its metadata."""
    try:
        from verl.protocol import DataProto
    except ImportError as error:
        raise MissingDependencyError(f"generate_sequences needs verl ({error}): {install_command('verl')}") from error
    rows = rows_of(prompts)
    client = rollout.llm_generate_func
    names = new_request_ids(len(rows))
    sampled = [_Sampled(rollout, dict(prompts.meta_info), name) for name in names]
    exact = hasattr(client, "generate")
    free = asyncio.Semaphore(rollout.config.concurrent_requests)

    async def one(number: int) -> Any:
        async with free:
            model = sampled[number].model() if exact else None
            return await rollout.run_one(rows[number], names[number], model)

    made = list(await asyncio.gather(*(one(number) for number in range(len(rows)))))
    rollout.trajectories = list(made)
    rewards = [_reward(each) for each in made]
    columns: dict[str, Any] = {"responses": [each.final_response for each in made], "final_rewards": rewards}
    if rollout.config.include_trajectory_in_output:
        columns["trajectories"] = [each.to_dict() for each in made]
    tensors = None
    if exact:
        drawn = [calls.row(each) for calls, each in zip(sampled, made, strict=True)]
        columns["ajet_left_out"] = [left_out for _, left_out in drawn]
        tensors = _tensors([sample for sample, _ in drawn], rewards)
    kept = {name: values for name, values in prompts.non_tensor_batch.items() if name not in columns}
    return DataProto.from_dict(
        tensors=tensors,
        non_tensors={**kept, **{name: _objects(values) for name, values in columns.items()}},
        meta_info=dict(prompts.meta_info),
    )


def rows_of(prompts: Any) -> list[dict[str, Any]]:
    """Each row of a `DataProto` as an agent's prompt: its own element of every column, and `meta_info`. Raises
    UserError if no column holds a prompt."""
    columns: Mapping[str, Any] = prompts.non_tensor_batch
    rows = []
    for number in range(len(prompts)):
        row = {name: values[number] for name, values in columns.items()} | dict(prompts.meta_info)
        if row.get("raw_prompt") is not None:
            row["messages"] = [dict(message) for message in row["raw_prompt"]]
        if not any(row.get(name) for name in ("messages", "prompt", "content")):
            raise UserError(
                "generate_sequences: the batch has no prompts: non_tensor_batch needs `raw_prompt` (messages; verl's "
                "data.return_raw_chat), or `prompt`; it has " + (", ".join(sorted(columns)) or "nothing")
            )
        rows.append(row)
    return rows


class _Sampled:
    """One row's calls, as tokens."""

    def __init__(self, rollout: Any, meta: Mapping[str, Any], name: str) -> None:
        self._rollout, self._meta, self._name = rollout, meta, name
        self._session: EpisodeSession | None = None
        self._prompt_length = int(meta.get("prompt_length") or PROMPT_LENGTH)
        self._response_length = int(meta.get("response_length") or RESPONSE_LENGTH)

    def model(self) -> ModelFunction:
        """The model behind the client. Raises UserError without a tokenizer."""
        tokenizer = self._rollout.tokenizer
        if tokenizer is None:
            raise UserError(
                "generate_sequences: with verl's client as the model, AgenticRollout needs the model's tokenizer: "
                "AgenticRollout(config, client, tokenizer)"
            )
        longest = self._prompt_length + self._response_length
        renderer = Renderer(tokenizer)
        engine = ServerEngine(
            self._rollout.llm_generate_func,
            end_ids=renderer.end_ids,
            max_model_len=longest,
            kind=ServerKind.OTHER,
            decode=renderer.decode,
        )
        meta, config = self._meta, self._rollout.config
        settings = SessionSettings(
            temperature=float(meta.get("temperature", config.temperature)),
            top_p=float(meta.get("top_p", 1.0)),
            top_k=int(meta.get("top_k", -1)),
        )
        if meta.get("validate"):
            settings = replace(settings, temperature=float(meta.get("temperature", 0.0)))
        self._session = EpisodeSession(
            episode_id=self._name,
            tracker=ContextTracker(renderer, TrackerSettings(max_model_len=longest, checks=())),
            renderer=renderer,
            engine=engine,
            parser=pick_parser(tokenizer),
            settings=settings,
        )
        return AjetTuner(self._session, make_config({}), asyncio.get_running_loop()).as_model_function()

    def row(self, trajectory: Trajectory) -> tuple[Sample | None, int]:
        """The row with the most sampled tokens, and how many sampled tokens it lacks: other rows', and what was cut.
        A failed trajectory has no row."""
        if self._session is None:
            return None, 0
        samples, ledger = linear_samples(
            self._session.tracker.finish(_reward(trajectory)).tree,
            max_prompt_length=self._prompt_length,
            max_response_length=self._response_length,
            max_samples=64,
        )
        if trajectory.status is TrajectoryStatus.FAILED or not samples:
            return None, ledger.captured
        best = max(samples, key=lambda sample: int(sample.response_mask.sum()))
        return best, ledger.captured - int(best.response_mask.sum())


def _reward(trajectory: Trajectory) -> float:
    reward = trajectory.reward if trajectory.reward is not None else trajectory.tool_reward
    return float(reward or 0.0)


def _objects(values: Sequence[Any]) -> Any:
    import numpy as np

    made = np.empty(len(values), dtype=object)
    made[:] = list(values)
    return made


def _tensors(samples: Sequence[Sample | None], rewards: Sequence[float]) -> dict[str, Any]:
    """Pad like verl: prompts on the left, responses on the right."""
    import torch

    width = max([len(sample.prompt_ids) for sample in samples if sample is not None], default=1)
    length = max([len(sample.response_ids) for sample in samples if sample is not None], default=1)
    count = len(samples)
    whole = torch.zeros(count, width + length, dtype=torch.long)
    attention, mask = torch.zeros_like(whole), torch.zeros(count, length, dtype=torch.long)
    logprobs, scores = torch.zeros(count, length), torch.zeros(count, length)
    for row, sample in enumerate(samples):
        if sample is None:  # a row that trains nothing still needs one token
            attention[row, width - 1 : width + 1] = 1
            continue
        begins, ends = width - len(sample.prompt_ids), width + len(sample.response_ids)
        whole[row, begins:width] = torch.tensor(sample.prompt_ids.tolist())
        whole[row, width:ends] = torch.tensor(sample.response_ids.tolist())
        attention[row, begins:ends] = 1
        mask[row, : ends - width] = torch.tensor(sample.response_mask.astype(int).tolist())
        logprobs[row, : ends - width] = torch.tensor(sample.logprobs.tolist())
        scores[row, ends - width - 1] = rewards[row]
    return {
        "prompts": whole[:, :width],
        "responses": whole[:, width:],
        "input_ids": whole,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0) * attention,
        "response_mask": mask,
        "rollout_log_probs": logprobs,
        "rm_scores": scores,
    }


CLIENT_S = 120.0
"""How long a reply may take."""


class ReplyText(str):
    """A reply's text that also records how it ended: one that was cut or withheld is not an answer."""

    finish_reason: str = "stop"


class LLMAPIClient:
    """A client of an OpenAI-compatible server. `generate` is an LLM function; failures raise."""

    def __init__(
        self,
        api_key: str,
        base_url: str,
        model: str,
        debug: bool = False,
        max_retries: int = 3,
        proxy_url: str | None = None,
    ) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        through = DefaultAsyncHttpxClient(proxy=proxy_url, timeout=CLIENT_S) if proxy_url else None
        self.model = model
        self._client = AsyncOpenAI(
            api_key=api_key, base_url=base_url, max_retries=max_retries, timeout=CLIENT_S, http_client=through
        )

    async def generate(
        self, messages: Sequence[Message], max_tokens: int = 16000, temperature: float = 0.7, **more: Any
    ) -> str:
        """The reply's text."""
        asked: Any = list(messages)
        reply = await self._client.chat.completions.create(
            model=self.model, messages=asked, max_tokens=max_tokens, temperature=temperature, **more
        )
        choice = reply.choices[0]
        text = ReplyText(choice.message.content or choice.message.refusal or "")
        text.finish_reason = "refusal" if choice.message.refusal else choice.finish_reason
        return text

    async def close(self) -> None:
        await self._client.close()


def create_llm_client(api_key: str, base_url: str, model: str, **more: Any) -> LLMAPIClient:
    """`LLMAPIClient(…)`."""
    return LLMAPIClient(api_key, base_url, model, **more)


def new_request_ids(count: int) -> list[str]:
    """Request ids that are unique among all batches."""
    batch = uuid.uuid4().hex[:16]
    return [f"agentic_rollout_{batch}_{number}" for number in range(count)]
