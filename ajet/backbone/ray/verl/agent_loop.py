"""`AjetAgentLoop`: a ready agent, or any workflow, as an agent loop inside verl's own trainer and scripts.

verl stays the host: its data set, its rewards (or ours), its advantages and updates. Each of its prompts is one episode
here, with tools, sandbox and gateway as everywhere; what goes back to verl are the tokens as they were sampled, a mask
that is 1 on them alone, and their log-probabilities. Named in verl's `agent_loop_config_path`; see docs/verl.md.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from ajet.backbone.metrics import is_success
from ajet.backbone.ray.engine import ServerEngine
from ajet.backbone.ray.rows import empty_sample, version_span
from ajet.config import Config
from ajet.config.contradictions import contradictions
from ajet.context_tracker import TrackerSettings
from ajet.context_tracker.samples import episode_samples
from ajet.gateway.chat import EpisodeSession
from ajet.schema.chat import plain_text
from ajet.schema.episode import Episode
from ajet.schema.errors import ConfigError
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_runner.attempt import WorkflowAttempt
from ajet.task_runner.runtime import Runtime

log = logging.getLogger(__name__)

PLACE = "agent_loop_config_path: ajet"


class ScoredByVerl(BaseJudge):
    """Stands in for verl's own reward, which is computed later, from the tokens."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        return 0.0, False


class AjetAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """One per prompt; what episodes need is shared by all of a process."""

    def __init__(self, *args: Any, ajet: Any = None, reward: str = "verl", **kwargs: Any) -> None:
        """`ajet`: our YAML's block, with `rollout.agent` or `rollout.user_workflow`. `reward`: who gives it, `verl`
        (its reward function) or `ajet` (the agent's tests or answer, the workflow, a judge)."""
        super().__init__(*args, **kwargs)
        if reward not in ("verl", "ajet"):
            raise ConfigError(f"{PLACE}: reward: {reward!r} is not one of verl, ajet")
        self._reward = reward
        block = OmegaConf.to_container(ajet, resolve=True) if OmegaConf.is_config(ajet) else ajet
        self._config = host_config(block, self.rollout_config, str(self.tokenizer.name_or_path), reward)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """An episode on one row of verl's data set. verl's newer worker, which says which of a prompt's sessions this
        is, takes a row for each branch; the older one takes the one with the most sampled tokens."""
        runtime = await HostRuntime.of(self._config, self.server_manager, str(self.rollout_config.name))
        task = task_of(row)
        runtime.sampling[task.task_id] = sampling_params
        try:
            episode = await asyncio.wrap_future(runtime.submit(runtime.pool.run_episode(task)))
        finally:
            del runtime.sampling[task.task_id]
        if not episode.usable:
            failure = episode.failure
            said = f"{failure.kind}: {failure.message}" if failure is not None else episode.status
            counts = ", and verl counts it as reward 0" if self._reward == "ajet" else ""
            log.warning("an episode on %s failed: none of its tokens is trained%s: %s", task.task_id, counts, said)
        settings = TrackerSettings.from_config(self._config)
        step = int(row.get("global_steps") or 0)
        success = is_success(episode, self._config.ajet.task_judge.success_threshold)
        outputs = outputs_of_episode(episode, settings, success if self._reward == "ajet" else None, step=step)
        return outputs if "session_id" in row else _best(outputs, episode.ledger.captured)


class HostRuntime(Runtime):
    """The one of this process, for a configuration; verl decides how each of its episodes is sampled."""

    _opened: dict[str, asyncio.Task[HostRuntime]] = {}  # noqa: RUF012 - of the class, on purpose

    def __init__(self, config: Config, client: Any, servers: str) -> None:
        self.sampling: dict[str, Mapping[str, Any]] = {}
        """By task."""

        super().__init__(config, make_engine=lambda of: ServerEngine.of(of, client, servers))

    @classmethod
    async def of(cls, config: Config, client: Any, servers: str) -> HostRuntime:
        """Opened by the first who asks. Raises a UserError that says what is wrong with the block."""
        key = f"{id(client)} {config.model_dump_json()}"
        if key not in cls._opened:
            cls._opened[key] = asyncio.create_task(asyncio.to_thread(cls._open, config, client, servers))
        return await asyncio.shield(cls._opened[key])

    @classmethod
    def _open(cls, config: Config, client: Any, servers: str) -> HostRuntime:
        runtime = cls(config, client, servers)
        runtime.start()
        atexit.register(runtime.stop)
        return runtime

    async def open_session(self, attempt: WorkflowAttempt) -> EpisodeSession:
        session = await super().open_session(attempt)
        asked = self.sampling.get(attempt.workflow_task.task_id, {})
        names = [name for name in ("temperature", "top_p", "top_k") if name in asked]
        session.settings = replace(session.settings, **{name: asked[name] for name in names})
        return session


def host_config(block: Any, rollout: Any, model: str, reward: str) -> Config:
    """Our configuration: the user's block, with verl's model and lengths. Raises ConfigError."""
    if not isinstance(block, Mapping) or not isinstance(block.get("rollout"), Mapping):
        raise ConfigError(
            f"{PLACE} needs our block: `ajet: {{rollout: {{agent: {{type: react, …}}}}}}`, not {block!r:.100}"
        )
    tree: dict[str, Any] = json.loads(json.dumps(block))
    prompt, response = int(rollout.prompt_length), int(rollout.response_length)
    tree["model"] = {"path": model, **tree.get("model", {})}
    tree["data"] = {**tree.get("data", {}), "max_prompt_length": prompt, "max_response_length": response}
    own = {"max_model_len": prompt + response, "max_response_length_in_one_turn": response}
    tree["rollout"] = {**own, **tree["rollout"]}
    if reward == "verl":
        if tree.get("task_judge"):
            raise ConfigError(f"{PLACE}: task_judge gives rewards only with `reward: ajet`")
        tree["task_judge"] = {"judge_protocol": f"{__name__}->{ScoredByVerl.__name__}"}
    try:
        config = Config.model_validate({"ajet": tree})
    except ValueError as error:
        raise ConfigError(f"{PLACE}: {error}") from None
    if config.ajet.rollout.agent is None and config.ajet.rollout.user_workflow is None:
        raise ConfigError(f"{PLACE}: rollout needs `agent: {{type: react, …}}` or `user_workflow: module->Class`")
    for found in contradictions(config.ajet, "verl"):
        raise ConfigError(f"{PLACE}: {' and '.join(found.keys)}: {found.what}; {found.fix}")
    return config


def task_of(row: Mapping[str, Any]) -> Task:
    """A row of verl's data set as a task: its prompt; as metadata, `extra_info`, and the ground truth as `answer`."""
    messages = [dict(message) for message in row["raw_prompt"]]
    asked = [plain_text(message.get("content")) for message in messages if message.get("role") == "user"]
    metadata = dict(row.get("extra_info") or {})
    truth = (row.get("reward_model") or {}).get("ground_truth")
    if truth is not None:
        metadata.setdefault("answer", truth)
    # verl draws several episodes of a prompt; they differ by their name, and so by their random numbers
    name = f"{row.get('uid') or row.get('index', 0)}-{uuid.uuid4().hex[:12]}"
    return Task(task_id=name, main_query=asked[-1] if asked else "", init_messages=messages, metadata=metadata)


def outputs_of_episode(
    episode: Episode, settings: TrackerSettings, success: bool | None, *, step: int = 0
) -> list[AgentLoopOutput]:
    """An episode as verl's rows, one for each branch with sampled tokens; if there is none, one that trains nothing.
    `success`: None if verl's own reward function scores it."""
    samples = episode_samples(episode, settings)[0] if episode.usable else []
    reward = (episode.reward if episode.usable else None) or 0.0
    facts: dict[str, Any] = {"turn_scores": [], "tool_rewards": [], "ajet_status": str(episode.status)}
    if success is not None:
        facts["reward_extra_info"] = {"acc": float(episode.usable and success)}
    return [
        AgentLoopOutput(
            prompt_ids=sample.prompt_ids.tolist(),
            response_ids=sample.response_ids.tolist(),
            response_mask=sample.response_mask.astype(int).tolist(),
            response_logprobs=sample.logprobs.tolist(),
            reward_score=None if success is None else float(reward),
            num_turns=2 * len(episode.tree.calls),
            metrics=AgentLoopMetrics(generate_sequences=episode.timings.get("model", 0.0)),
            extra_fields={**facts, **version_span(sample, step)},
        )
        for sample in samples or [empty_sample(episode.episode_id)]
    ]


def _best(outputs: Sequence[AgentLoopOutput], captured: int) -> AgentLoopOutput:
    """The row with the most sampled tokens, and how many of the episode's it lacks."""
    best = max(outputs, key=lambda output: sum(output.response_mask))
    best.extra_fields["ajet_left_out"] = captured - sum(best.response_mask)
    return best
