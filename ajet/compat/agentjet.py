"""Names of AgentJet's older versions, bound to our parts; `ajet.MOVED` serves them where old files look for them.

`AgentJetJob` is a run described in Python: a YAML file plus arguments. `create_external_llm_fn` and
`RobustDashScopeChatModel` call the helper model from judges, and from agents that are not trained. `AutoGraderJudge`
uses rubrics outside a run. New code uses a YAML, `ajet.task_judge.helper.HelperModel` and
`judge_type: rubrics_auto_grader`.
"""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import yaml

from ajet.config import Config
from ajet.config.judges import RubricsConfig
from ajet.config.keys import JOB_NAMES
from ajet.config.section import Block
from ajet.schema.chat import Message
from ajet.schema.errors import ConfigError
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import JudgedEpisode
from ajet.task_judge.helper import HelperModel
from ajet.task_judge.rubrics import Rubrics, RubricsJudge, example_of

READERS = {"hf": "huggingface_dat_repo", "huggingface": "huggingface_dat_repo", "jsonl": "jsonl_dataset_file"}
"""Short names in `set_data` of `task_reader.type`s."""


class AgentJetJob:
    """`AgentJetJob(base_yaml_config="x.yaml", model=…, num_repeat=8)`; what isn't given stays as in the file."""

    def __init__(self, base_yaml_config: str | Path | None = None, *, lora_rank: int | None = None, **given: Any):
        """`given`: the names in `JOB_NAMES`."""
        unknown = given.keys() - JOB_NAMES.keys()
        if unknown:
            raise ConfigError(f"AgentJetJob takes no {', '.join(sorted(unknown))}; it takes {', '.join(JOB_NAMES)}")
        self._tree = Block({"ajet": {}})
        if base_yaml_config is not None:
            self.load_job_from_yaml(base_yaml_config)
        for name, value in given.items():
            if value is not None:
                self._set(JOB_NAMES[name], value)
        if lora_rank:
            self._set("model.lora.enabled", True)
            self._set("model.lora.rank", lora_rank)

    @property
    def config(self) -> Block:
        """What the YAML file will hold; readable and settable as attributes."""
        return self._tree

    def set_workflow(self, workflow: type[Any] | str) -> None:
        """The workflow: a class in a file, or `module->Class`."""
        if not isinstance(workflow, str):
            try:
                file = Path(inspect.getfile(workflow)).resolve()
            except (OSError, TypeError):  # of a notebook, or a prompt
                raise ConfigError(
                    f"{workflow.__name__} is defined in no file: write it to one, so that runs can load it"
                ) from None
            workflow = f"{file}->{workflow.__qualname__}"
        self._set("rollout.user_workflow", workflow)

    def set_data(self, type: str, dataset_path: str, **options: Any) -> None:
        """The tasks: `type="hf"` (a hub's id or a folder) or `"jsonl"` (a file). `options`: further keys of it."""
        kind = READERS.get(type, type)
        self._set("task_reader.type", kind)
        if kind == "jsonl_dataset_file":
            options = {"training": {"file_path": dataset_path}, **options}
        else:
            options = {"dataset_path": dataset_path, **options}
        self._set(f"task_reader.{kind}", options)

    def load_job_from_yaml(self, path: str | Path) -> None:
        """Start again from a file."""
        self._tree = Block({"ajet": {}} | (yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}))

    def dump_job_as_yaml(self, path: str | Path) -> Path:
        """Write the YAML file of the job."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(_plain(self._tree), sort_keys=False, allow_unicode=True), encoding="utf-8")
        return file

    def tune(self, *arguments: str) -> int:
        """Run the job, as `ajet --conf` with these further arguments would. Returns its exit code."""
        with tempfile.TemporaryDirectory() as folder:
            name = self._tree["ajet"].get("experiment_name", "job")
            file = self.dump_job_as_yaml(Path(folder) / f"{name}.yaml")
            return subprocess.run(
                [sys.executable, "-m", "ajet", "--conf", str(file), *arguments], check=False
            ).returncode

    def _set(self, key: str, value: Any) -> None:
        *groups, last = key.split(".")
        place: Block = self._tree["ajet"]
        for group in groups:
            if place.get(group) is None:
                place[group] = Block()
            place = place[group]
        place[last] = value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def create_external_llm_fn(alien_llm_model: str, alien_llm_response_length: int = 512) -> Callable[..., dict[str, Any]]:
    """A blocking function from messages to the helper model's reply (`HelperModel.former`), as a message."""
    model = HelperModel.former(alien_llm_model)

    def ask(
        messages: Sequence[Message], custom_sampling_params: dict[str, Any] | None = None, request_id: str = ""
    ) -> dict[str, Any]:
        sampling = {"max_tokens": alien_llm_response_length, **(custom_sampling_params or {})}
        return {"role": "assistant", "content": model.complete_blocking(messages, **sampling)}

    return ask


CONTEXT_SIZE = 32768
"""The context length that AgentScope 2 is given."""


class RobustDashScopeChatModel:
    """A chat model for AgentScope at the helper's endpoint (`HelperModel.former`). Its client retries.

    It is often made when a file is imported, so it looks for the endpoint on its first call, and it keeps one client
    per event loop.
    """

    def __init__(
        self, model_name: str = "qwen3-max", stream: bool = False, api_key: str | None = None, **_options: Any
    ) -> None:
        """Further arguments, such as `enable_thinking`, are DashScope's own and are not passed on."""
        self.model_name = self.model = model_name
        self.stream = stream
        self.context_size = CONTEXT_SIZE
        self._api_key = api_key
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    async def __call__(self, messages: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        """AgentScope's own call: messages in, a response out. Who passes dictionaries, as AgentScope 1 does, gets a
        response whose blocks are dictionaries, from AgentScope 2 as well."""
        from ajet.task_runner.tuner import Connection, agentscope_model

        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            connection = Connection(*HelperModel.former(self.model_name, self._api_key).endpoint())
            self._clients[loop] = agentscope_model(connection, context_size=self.context_size, stream=self.stream)
        plain = any(isinstance(message, dict) for message in messages)
        if not plain or version("agentscope").startswith("1."):
            return await self._clients[loop](messages, *arguments, **options)
        reply = await self._clients[loop]([_as_message(each) for each in messages], *arguments, **options)
        return _all_with_plain_blocks(reply) if self.stream else _with_plain_blocks(reply)


def _as_message(message: Any) -> Any:
    """A message of AgentScope 2 from a dictionary with text."""
    from agentscope.message import Msg, TextBlock

    if not isinstance(message, dict):
        return message
    role: Any = message.get("role")
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [part.get("text") for part in content or ()]
    if role not in ("system", "user", "assistant") or not all(isinstance(text, str) for text in texts):
        raise TypeError(
            f"RobustDashScopeChatModel takes dictionaries with text of role system, user or assistant, not "
            f"{message!r:.200}; pass anything else as agentscope.message.Msg"
        )
    return Msg(name=message.get("name", role), content=[TextBlock(text=text) for text in texts], role=role)


def _with_plain_blocks(reply: Any) -> Any:
    reply.content = [block.model_dump() for block in reply.content]
    return reply


async def _all_with_plain_blocks(replies: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for reply in replies:
        yield _with_plain_blocks(reply)


@dataclass(frozen=True, slots=True)
class GraderScore:
    """The grade of one answer."""

    score: float
    reason: str


@dataclass(frozen=True, slots=True)
class Rank:
    """The ranks of several answers, in the order of the answers: 1 is the best."""

    rank: list[int]
    reason: str


class AutoGraderJudge(RubricsJudge):
    """Takes a whole config, or any object whose attributes resemble one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config if isinstance(config, Config) else _as_config(config))

    async def generate_rubrics_from_samples(self, tasks: Sequence[Task] = ()) -> Rubrics:
        """Rubrics from graded tasks (by default, the examples of the config), also written to the file."""
        if not tasks:
            self.rubrics = await asyncio.to_thread(self.load_or_write, again=True)
            return self.rubrics
        examples = [
            example_of(
                {"main_query": task.main_query, **task.metadata},
                f"task {task.task_id or number}",
                self.section,
            )
            for number, task in enumerate(tasks)
        ]
        self.rubrics = await asyncio.to_thread(self.write, examples)
        self.rubrics.save(self.path)
        return self.rubrics

    async def load_rubrics_from_cache(self) -> Rubrics:
        """The rubrics of the file."""
        self.rubrics = Rubrics.load(self.path)
        return self.rubrics

    async def _async_compute_reward(
        self, task: Task, output: WorkflowOutput | list[WorkflowOutput]
    ) -> GraderScore | Rank:
        outputs = output if isinstance(output, list) else [output]
        judged = [JudgedEpisode(WorkflowTask(task=task), each) for each in outputs]
        said = await self.compute_group_rewards(judged)
        reason = "\n".join(dict.fromkeys(text for each in said for text in each.notes.get("reasons", [])))
        if not isinstance(output, list):
            return GraderScore(said[0].reward, reason)
        better = [sum(other.reward > each.reward for other in said) for each in said]
        return Rank([count + 1 for count in better], reason)


def _as_config(given: Any) -> Config:
    """Build a config from nested attribute objects. Only this judge's block and the experiment's folder are read."""
    try:
        block = given.ajet.task_judge.rubrics_auto_grader
    except AttributeError as error:
        raise ConfigError(f"AutoGraderJudge: the config has no ajet.task_judge.rubrics_auto_grader: {error}") from None
    values = {name: _values_of(getattr(block, name)) for name in RubricsConfig.model_fields if hasattr(block, name)}
    config = Config.model_validate({"ajet": {"task_judge": {"rubrics_auto_grader": values}}})
    if folder := getattr(given.ajet, "experiment_dir", None):
        config.remember_folder(Path(folder))
    return config


def _values_of(value: Any) -> Any:
    return {key: _values_of(inner) for key, inner in vars(value).items()} if hasattr(value, "__dict__") else value
