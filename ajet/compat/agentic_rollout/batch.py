"""`generate_sequences`: the agentic-rollout library's entry for verl's batches, a `DataProto` in and one out.

Given verl's client of its rollout servers (it has `generate(request_id, prompt_ids=…, sampling_params=…)`) and the
tokenizer, each row is an episode of verl's own agent loop worker with `AjetAgentLoop`, and the tensors are what verl
makes of it. Given a text-only function, the sampled tokens are unknown: the result then holds answers, rewards and
trajectories, but no tensors.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ajet.agents.model_function import Message
from ajet.schema.episode import Failure
from ajet.schema.errors import MissingDependencyError, UserError, WorkflowFault
from ajet.schema.install import install_command
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.schema.trajectory import StopReason, Trajectory, TrajectoryStatus
from ajet.task_runner.tuner import AjetTuner
from ajet.task_runner.workflow import Workflow

PROMPT_LENGTH, RESPONSE_LENGTH = 4096, 16384
"""verl's `prompt_length` and `response_length`, where `meta_info` doesn't give them."""
LOOP = "ajet_agentic_rollout"
SERVERS = "hf"
"""A name of verl's by which nothing is assumed of the servers: whose they are, the client doesn't say."""


async def generate_sequences(rollout: Any, prompts: Any) -> Any:
    """One trajectory for each row of `prompts`. A row that fails is an empty one, and says why in its metadata."""
    try:
        from verl.protocol import DataProto
    except ImportError as error:
        raise MissingDependencyError(f"generate_sequences needs verl ({error}): {install_command('verl')}") from error
    batch = _Batch(rollout, rows_of(prompts))
    if hasattr(rollout.llm_generate_func, "generate"):
        made = await batch.sampled(DataProto, dict(prompts.meta_info))
    else:
        batch.made = dict(enumerate(await rollout.run_batch(batch.rows)))
        made = DataProto(meta_info={})
    rollout.trajectories = [batch.made.get(number) or _unfinished(rollout) for number in range(len(batch.rows))]
    columns: dict[str, Any] = {
        "responses": [each.final_response for each in rollout.trajectories],
        "final_rewards": [_reward(each) for each in rollout.trajectories],
    }
    if rollout.config.include_trajectory_in_output:
        columns["trajectories"] = [each.to_dict() for each in rollout.trajectories]
    made.non_tensor_batch |= dict(prompts.non_tensor_batch)
    made.non_tensor_batch |= {name: _objects(values) for name, values in columns.items()}
    made.meta_info |= prompts.meta_info
    return made


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


@dataclass
class _Batch:
    """The rows of one call, and their trajectories."""

    rollout: Any
    rows: list[dict[str, Any]]
    made: dict[int, Trajectory] = field(default_factory=dict)
    """By row."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    """The caller's, to which what its agent and tools hold may belong."""

    async def sampled(self, batches: Any, meta: Mapping[str, Any]) -> Any:
        """The batch as verl's worker makes it of an episode for each row."""
        import numpy as np

        name = uuid.uuid4().hex
        known = [{"row": number, "batch": name} for number in range(len(self.rows))]
        asked = [row.get("messages") or [{"role": "user", "content": ""}] for row in self.rows]
        rows = np.arange(len(self.rows))  # by which a warning names an episode
        columns = {"raw_prompt": _objects(asked), "extra_info": _objects(known), "index": rows}
        batch = batches(batch=None, non_tensor_batch=columns, meta_info=dict(meta))
        RolloutWorkflow.batches[name] = self
        try:
            made = await _worker(self.rollout, meta).generate_sequences(batch)
        finally:
            del RolloutWorkflow.batches[name]
        for column in columns:
            del made.non_tensor_batch[column]
        return made


class RolloutWorkflow(Workflow):
    """An episode that is a trajectory of a rollout's agent."""

    batches: ClassVar[dict[str, _Batch]] = {}
    """Those that are being made."""

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        number, batch = (workflow_task.task.metadata[name] for name in ("row", "batch"))
        given, model = self.batches[batch], tuner.as_model_function()
        running = given.rollout.run_one(given.rows[number], workflow_task.episode_uuid, model)
        made = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(running, given.loop))
        given.made[number] = made
        if made.status is TrajectoryStatus.FAILED:
            raise WorkflowFault(made.failure.in_short if made.failure else "the agent failed")
        return WorkflowOutput(reward=_reward(made))


def _worker(rollout: Any, meta: Mapping[str, Any]) -> Any:
    """verl's worker, with our agent loop. Raises UserError without a tokenizer and its model."""
    from hydra.errors import InstantiationException
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    from ajet.backbone.ray import compose_verl_config

    if rollout.tokenizer is None:
        raise UserError(
            "generate_sequences: with verl's client as the model, AgenticRollout needs the model's tokenizer: "
            "AgenticRollout(config, client, tokenizer)"
        )
    asked = {
        "temperature": float(meta.get("temperature", 0.0 if meta.get("validate") else rollout.config.temperature)),
        "top_p": float(meta.get("top_p", 1.0)),
        "top_k": int(meta.get("top_k", -1)),
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as loops:
        json.dump([_loop(rollout)], loops)
        loops.flush()
        settings = {
            **{name: value for key, value in asked.items() for name in (key, f"val_kwargs.{key}")},
            "name": SERVERS,
            "prompt_length": int(meta.get("prompt_length") or PROMPT_LENGTH),
            "response_length": int(meta.get("response_length") or RESPONSE_LENGTH),
            "calculate_log_probs": True,
            "agent.agent_loop_config_path": loops.name,
            "agent.default_agent_loop": LOOP,
        }
        settings = {f"actor_rollout_ref.rollout.{name}": value for name, value in settings.items()}
        model = settings["actor_rollout_ref.model.path"] = rollout.tokenizer.name_or_path
        try:
            return AgentLoopWorker(compose_verl_config(settings, given=settings), rollout.llm_generate_func)
        except InstantiationException as error:
            raise UserError(
                f"generate_sequences: verl can't read the model that tokenizer.name_or_path names, {model!r}: make the "
                f"tokenizer by AutoTokenizer.from_pretrained(the model's folder)\n    {error.__cause__ or error}"
            ) from error


def _loop(rollout: Any) -> dict[str, Any]:
    """The entry of verl's `agent_loop_config_path`."""
    run = {
        "user_workflow": f"{__name__}->{RolloutWorkflow.__name__}",
        "max_env_worker": rollout.config.concurrent_requests,
        "episode_retries": 0,
        "compute_madness_checklist": [],
    }
    return {
        "name": LOOP,
        "_target_": "ajet.backbone.ray.verl.agent_loop.AjetAgentLoop",
        "reward": "ajet",
        "ajet": {"rollout": run, "task_runner": {"wrapper_type": "asyncio"}},  # the agent is an object of this process
    }


def _unfinished(rollout: Any) -> Trajectory:
    made = Trajectory(new_request_ids(1)[0], agent=rollout.agent.name)
    made.end(StopReason.AGENT_ERROR, Failure("Unfinished", "the episode ended before its agent did: see the log"))
    return made


def _reward(trajectory: Trajectory) -> float:
    reward = trajectory.reward if trajectory.reward is not None else trajectory.tool_reward
    return float(reward or 0.0)


def _objects(values: Sequence[Any]) -> Any:
    import numpy as np

    made = np.empty(len(values), dtype=object)
    made[:] = list(values)
    return made


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
