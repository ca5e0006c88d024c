"""`OpenJudge` (`judge_type: openjudge`): a grader of the package py-openjudge, in an interpreter of its own.

The grader runs in one process per run; it is built before the first episode and asked about each episode as it ends.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.schema.errors import ConfigError, JudgeFault
from ajet.system.interpreter_host import START_S, InterpreterHost
from ajet.task_judge.base_judge import GroupJudge, JudgedEpisode, Judgement
from ajet.task_judge.helper import HelperModel
from ajet.task_judge.llm_judge import Scale, Template, environment_later, episode_values

if TYPE_CHECKING:
    from ajet.config import Config

KEY = "ajet.task_judge.openjudge"
PROGRAM = Path(__file__).with_name("openjudge_host.py")
ALIVE_S = 10.0
"""How long a process may take to answer a ping."""
USUAL = {"query": "{query}", "response": "{answer}", "reference_response": "{reference}"}
"""The graders' usual parameter names, and what fills them."""


class OpenJudgeHost(InterpreterHost):
    package = "openjudge"
    fault = JudgeFault
    gone = JudgeFault

    def __init__(self, python: str | None) -> None:
        super().__init__(PROGRAM, [], python or sys.executable, f"{KEY}.python")

    def ready(self) -> None:
        """Wait until it has imported the package. Raises ConfigError."""
        try:
            self.started()
        except (JudgeFault, TimeoutError) as error:
            self.close()
            why = error if str(error) else f"it took longer than {START_S:g} s"
            raise ConfigError(
                f"{KEY}: {self.interpreter} can't load py-openjudge: {why}\n"
                "    its pins clash with ajet's: give it an environment of its own (python -m venv F; "
                f"F/bin/pip install py-openjudge) and set {KEY}.python: F/bin/python"
            ) from None


class OpenJudge(GroupJudge):
    """`ajet.task_judge.openjudge`."""

    per_episode = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._section = section = config.ajet.task_judge.openjudge
        if not section.grader:
            raise ConfigError(f"{KEY}.grader: name a grader of py-openjudge, such as StringMatchGrader")
        if section.python is not None and shutil.which(section.python) is None:
            raise ConfigError(f"{KEY}.python: there is no program {section.python}: name a Python interpreter")
        self._scale = Scale(section.min_score, section.max_score, section.normalise)
        self._templates = {name: Template(text, f"{KEY}.inputs.{name}") for name, text in section.inputs.items()}
        self._building = threading.Lock()
        self._built: tuple[OpenJudgeHost, str, dict[str, Template]] | None = None
        self._asks_model = "model" in section.options

    async def compute_reward(self, workflow_task: Any, workflow_output: Any) -> Any:
        asks = any("environment" in template.names for template in self._templates.values())
        return await environment_later(workflow_task, asked=asks)

    def prepare(self) -> None:
        self._grader()

    async def compute_group_rewards(self, episodes: Sequence[JudgedEpisode]) -> list[Judgement]:
        return [await self._judge(episode) for episode in episodes]

    async def _judge(self, episode: JudgedEpisode) -> Judgement:
        section = self._section
        host, name, templates = await asyncio.to_thread(self._grader)
        names = set().union(*(template.names for template in templates.values()))
        values = episode_values(
            episode, names, answer_field=section.answer_field, reference_field=section.reference_field
        )
        if not self._asks_model and not values.get("reference", "-").strip():  # every reply contains no text
            raise JudgeFault(
                f"task {episode.workflow_task.task.task_id!r} has an empty reference answer, which {section.grader} "
                f"may find in any reply: set its metadata {section.reference_field!r}, or write into {KEY}.inputs what "
                "the reply is to be compared with"
            )
        inputs = {parameter: template.fill(values) for parameter, template in templates.items()}
        number, answer = host.ask("grade", name=name, inputs=inputs, seconds=section.timeout)
        scored = asyncio.wrap_future(answer)
        late = JudgeFault(f"{section.grader} gave no score within {section.timeout:g} s ({KEY}.timeout)")
        try:
            while not (await asyncio.wait([scored], timeout=section.timeout))[0]:  # it may still wait for its turn
                if await _end_if_stuck(host):
                    raise late
            said = scored.result()
        finally:
            if scored.cancel():
                host.cancel(number)
            else:
                scored.exception()  # read: it has one if the process was ended
        if said is None:
            raise late
        return self._judgement(said)

    def _judgement(self, said: dict[str, Any]) -> Judgement:
        score, scale = said["score"], self._scale
        real = isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
        if not real or not scale.low <= score <= scale.high:
            raise JudgeFault(
                f"{self._section.grader} gave the score {score!r}, which is not from {scale.low:g} to {scale.high:g}: "
                f"set {KEY}.min_score and max_score to the grader's scale"
            )
        reward = scale.reward(float(score))
        return Judgement(reward, reward >= self._section.success_threshold, notes=dict(said))

    def _grader(self) -> tuple[OpenJudgeHost, str, dict[str, Template]]:
        """The process, the grader's name in it, and the templates of its inputs. Restarts a process that has ended."""
        with self._building:
            if self._built is None or not self._built[0].alive:
                self._built = self._build(OpenJudgeHost.shared(self._section.python))
            return self._built

    def _build(self, host: OpenJudgeHost) -> tuple[OpenJudgeHost, str, dict[str, Template]]:
        section = self._section
        name = json.dumps([section.grader, section.options, section.model], sort_keys=True, default=str)
        asked: dict[str, Any] = {"name": name, "grader": section.grader, "options": section.options}
        asked["at_once"] = section.max_concurrent
        built = self._answer(host, **asked, model=None)
        if built.get("needs_model"):
            self._asks_model = True
            endpoint = HelperModel.chosen(self.config, section.model, f"{KEY}.model").endpoint()
            model = {"model": endpoint.model, "base_url": endpoint.base_url, "api_key": endpoint.api_key}
            built = self._answer(host, **asked, model=model)
        return host, name, self._inputs(built)

    def _answer(self, host: OpenJudgeHost, **asked: Any) -> dict[str, Any]:
        try:
            built: dict[str, Any] = host.ask("build", **asked)[1].result(START_S)
        except (JudgeFault, TimeoutError) as error:
            raise ConfigError(f"{KEY}.grader: {self._section.grader} can't be built: {error}") from None
        return built

    def _inputs(self, built: dict[str, Any]) -> dict[str, Template]:
        parameters, own = built["parameters"], self._templates
        usual = {
            name: Template(text, f"{KEY}.inputs")
            for name, text in USUAL.items()
            if name in parameters and name not in own
        }
        if missing := [name for name in built["needed"] if name not in own and name not in usual]:
            raise ConfigError(
                f"{KEY}.inputs: {self._section.grader} needs {missing[0]!r}; it takes {', '.join(parameters)}\n"
                f"    write `inputs: {{{missing[0]}: '{{answer}}'}}`, or whatever it should be"
            )
        return {**usual, **own}


async def _end_if_stuck(host: OpenJudgeHost) -> bool:
    """End a process that doesn't answer a ping: a grader that blocks it would delay all others. The next question
    starts a new one. Returns whether it was ended."""
    try:
        await asyncio.wait_for(asyncio.wrap_future(host.ask("ping")[1]), ALIVE_S)
    except (TimeoutError, JudgeFault):
        await asyncio.to_thread(host.close)
        return True
    return False
