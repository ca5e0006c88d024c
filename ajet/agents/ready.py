"""The ready agents (`ReActAgent`, `ToolAgent`, `CodingAgent`), and `make_agent`, which makes one by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from ajet.agents.agent import Agent, check_kind
from ajet.agents.model_function import Message
from ajet.agents.run import AgentNameTakenError, AgentRun, AgentSettingsError, check_above_zero
from ajet.agents.task_tests import ResultAs, bring_files, judge_by_tests, run_command, said
from ajet.agents.tools import make_tools
from ajet.agents.tools.bash import need_sandbox
from ajet.agents.tools.tool import Arguments, StatelessTool, Tool, ToolContext, ToolResult, ToolSource
from ajet.config.kinds import AGENTS, load, nearest_name, no_option
from ajet.schema.user_code import ARROW, load_symbol


class ReActAgent(Agent):
    """Thinks, calls tools, sees their results, and goes on until it answers.

    With native tool calls, a reply without one is the answer; in the text format, `Final Answer:` marks it.
    """

    system_prompt_default = "Solve the task step by step. Use the tools where they help, then give the final answer."


class ToolAgent(Agent):
    """Calls exactly one tool in each step, and ends by calling `finish` with the answer."""

    system_prompt_default = (
        "Work on the task with the tools, one tool call in each step. When you know the answer, call finish with it."
    )
    one_call_per_step = True

    def __init__(self, *, tools: Sequence[Any] = (), **settings: Any) -> None:
        super().__init__(tools=tools, **settings)
        if not any(isinstance(tool, Tool) and tool.name in ("finish", "submit") for tool in self.tools):
            self.tools += make_tools(["finish"])

    async def answered(self, run: AgentRun, answer: str, call: int) -> None:
        self.tell(run, "Call a tool. When you know the answer, call finish with it.")


TOOLS = ("bash", "file_editor", "search")
CODING = "a coding agent"


class RunTests(StatelessTool):
    """The tests, as a tool. When they pass, the episode ends."""

    limits_itself = True  # by the sandbox's `exec_seconds`

    name = "run_tests"
    description = "Run the tests. When they all pass, the task is done."
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}  # noqa: RUF012

    def __init__(self, command: str, ends_episode: bool) -> None:
        self._command = command
        self._ends_episode = ends_episode

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        result = await run_command(need_sandbox(context, CODING), self._command)
        passed = result.exit_code == 0
        return ToolResult(
            said(result), success=passed, data={"exit_code": result.exit_code},
            ends_episode=passed and self._ends_episode,
        )  # fmt: skip


class CodingAgent(Agent):
    """Works on files with `bash`, `file_editor`, `search` and `run_tests`."""

    system_prompt_default = (
        "You repair and write code. Look at the files, change what is needed, and run the tests with run_tests until "
        "they pass. Change no test."
    )

    def __init__(
        self,
        *,
        tools: Sequence[Any] = (),
        test_command: str = "",
        result_as: str = "modules",
        stop_when_tests_pass: bool = True,
        max_attempts: int = 3,
        parallel_tool_calls: bool = False,
        **settings: Any,
    ) -> None:
        """`tools`: default bash, file_editor and search; `run_tests` is added. `max_attempts`: how often the agent may
        say that it is done while the tests fail; it is told what failed."""
        super().__init__(tools=tools or TOOLS, parallel_tool_calls=parallel_tool_calls, **settings)
        check_kind("test_command", test_command, str)
        check_kind("stop_when_tests_pass", stop_when_tests_pass, bool)
        check_above_zero("max_attempts", max_attempts)
        if result_as not in get_args(ResultAs):
            raise AgentSettingsError(f"result_as: {result_as!r} is not one of {', '.join(get_args(ResultAs))}")
        self.test_command = test_command
        self.result_as = result_as
        self.stop_when_tests_pass = stop_when_tests_pass
        self.max_attempts = max_attempts
        self.base_dirs = settings.get("base_dirs", ())

    def run_tools(self, context: ToolContext) -> list[Tool | ToolSource]:
        command = self._command(context)
        return [*self.tools, RunTests(command, self.stop_when_tests_pass)] if command else self.tools

    async def begin(self, run: AgentRun, messages: Sequence[Message]) -> None:
        sandbox = need_sandbox(run.context, CODING)
        await bring_files(sandbox, _metadata(run.context), self.base_dirs)
        await super().begin(run, messages)

    async def answered(self, run: AgentRun, answer: str, call: int) -> None:
        attempts = run.state["attempts"] = run.state.get("attempts", 0) + 1
        command = self._command(run.context)
        if command and attempts < self.max_attempts:
            result = await run_command(need_sandbox(run.context, CODING), command)
            if result.exit_code != 0:
                self.tell(run, f"The tests do not pass yet:\n{said(result)}")
                return
        await super().answered(run, answer, call)

    async def finalize(self, run: AgentRun) -> None:
        """Run the tests on what the agent left: they are the reward."""
        trajectory, command = run.trajectory, self._command(run.context)
        if not command:
            return
        verdict = await judge_by_tests(
            need_sandbox(run.context, CODING),
            _metadata(run.context),
            command,
            result_as=self.result_as,
            base_dirs=self.base_dirs,
        )
        trajectory.is_success = verdict.passed
        trajectory.reward = float(verdict.passed)
        trajectory.metadata["tests"] = verdict.facts()

    def _command(self, context: ToolContext) -> str:
        return str(_metadata(context).get("test_command") or self.test_command)


def _metadata(context: ToolContext) -> Mapping[str, Any]:
    task = getattr(context.workflow_task, "task", None)
    return {} if task is None else task.metadata


AgentClass = TypeVar("AgentClass", bound=type[Agent])
_REGISTERED: dict[str, type[Agent]] = {}


def register_agent(name: str) -> Callable[[AgentClass], AgentClass]:
    """Decorate an agent's class to give it a name, for this process."""

    def register(agent_class: AgentClass) -> AgentClass:
        if name in AGENTS or _REGISTERED.get(name, agent_class) is not agent_class:
            raise AgentNameTakenError(f"there is an agent {name!r} already: choose another name")
        _REGISTERED[name] = agent_class
        return agent_class

    return register


def agent_names() -> list[str]:
    """All names, those that come with ajet first."""
    return [*AGENTS, *_REGISTERED]


def agent_class(name: str, base_dirs: Sequence[str | Path] = ()) -> type[Agent]:
    """The class of a name, or of `module->Class`. Raises AgentSettingsError or ImportPathError."""
    if name in AGENTS:
        ready: type[Agent] = load(AGENTS, name)
        return ready
    if name in _REGISTERED:
        return _REGISTERED[name]
    if ARROW in name:
        own: type[Agent] = load_symbol(name, base_dirs, expects=Agent)
        return own
    if name == "cli":
        raise AgentSettingsError(
            "agent 'cli' is a program: it needs a run's gateway and sandbox (rollout.agent in a YAML)"
        )
    hint = nearest_name(name, agent_names())
    raise AgentSettingsError(f"no agent {name!r}{hint}; there are: {', '.join(agent_names())}, module->Class")


def make_agent(name: str, options: Mapping[str, Any] | None = None, base_dirs: Sequence[str | Path] = ()) -> Agent:
    """An agent by name, with these options. Raises AgentSettingsError, ToolSetupError or ImportPathError."""
    made_of = agent_class(name, base_dirs)
    options = dict(options or {})
    known = option_names(made_of)
    for option in options:
        if option not in known:
            raise AgentSettingsError(no_option(f"agent {name!r}", option, known))
    if "base_dirs" in known:
        options["base_dirs"] = base_dirs
    return made_of(**options)


def option_names(of: type[Agent]) -> list[str]:
    """The arguments of an agent's constructor, those that it passes on to `Agent` included."""
    names: dict[str, None] = {}
    for level in of.__mro__:
        if "__init__" not in vars(level):
            continue
        parameters = list(inspect.signature(vars(level)["__init__"]).parameters.values())[1:]
        names.update(dict.fromkeys(entry.name for entry in parameters if entry.kind is not entry.VAR_KEYWORD))
        if not any(entry.kind is entry.VAR_KEYWORD for entry in parameters):
            break
    return list(names)
