"""`ajet rollout`: a ready agent on a file of tasks, with any model and without training; its trajectories in a folder.

Running the same command again goes on where it was interrupted. `ajet view FOLDER` shows the trajectories, and
`demonstrations.jsonl` in the folder holds the successful ones for `sft.demonstrations`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ajet.cli.runs import wrapped
from ajet.cli.targets import options_of
from ajet.schema.errors import UserError
from ajet.schema.printable import printable
from ajet.system.command_line import CommandParser, real, whole

if TYPE_CHECKING:
    from ajet.agents import Agent, Trajectory
    from ajet.agents.batch import Judge
    from ajet.environment.sandboxes import SandboxSettings
    from ajet.schema.task import Task


LINE_EVERY_S = 10.0


@dataclass(slots=True)
class EpisodeCounts:
    """How far a batch is."""

    total: int
    done: int = 0
    failed: int = 0
    judged: int = 0
    succeeded: int = 0
    tokens: int = 0
    cost: float = 0.0

    def add(self, trajectory: Trajectory) -> None:
        self.done += 1
        self.failed += trajectory.failure is not None
        self.judged += trajectory.is_success is not None
        self.succeeded += bool(trajectory.is_success)
        self.tokens += trajectory.usage.output_tokens
        self.cost += trajectory.cost or 0.0

    def text(self) -> str:
        parts = [f"{self.tokens:,} tokens"]
        if self.judged:
            parts.insert(0, f"{self.succeeded / self.judged:.0%} succeeded")
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        if self.cost:
            parts.append(f"cost {self.cost:.4f}")
        return ", ".join(parts)


@contextmanager
def progress(counts: EpisodeCounts, *, quiet: bool = False) -> Iterator[Callable[[Trajectory], None]]:
    """Yields what is to be told of each trajectory that ended: a bar on a terminal, else a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    terminal, shown = sys.stderr.isatty(), time.monotonic()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(file=sys.stderr), disable=quiet or not terminal) as bar:
        task = bar.add_task("", total=counts.total)

        def ended(trajectory: Trajectory) -> None:
            nonlocal shown
            counts.add(trajectory)
            bar.update(task, completed=counts.done, description=counts.text())
            due = time.monotonic() - shown >= LINE_EVERY_S or counts.done == counts.total
            if due and not quiet and not terminal:
                shown = time.monotonic()
                with suppress(OSError):  # nobody reads it any more: the trajectories are what counts
                    print(f"{counts.done:,}/{counts.total:,}: {counts.text()}", file=sys.stderr, flush=True)

        yield ended


DEMONSTRATIONS = "demonstrations.jsonl"
LONGEST_RUN_S = 86_400.0
"""How long a sandbox lives if the agent has no `max_seconds`."""
BEYOND_THE_RUN_S = 60.0


def run(argv: Sequence[str]) -> int:
    """Returns 1 if a run failed."""
    arguments = _parser().parse_intermixed_args(argv)
    agent, tasks, judge = _agent(arguments), _tasks(arguments), _judge(arguments)
    sandbox = _sandbox(arguments.sandbox, agent)
    if arguments.out.exists() and not arguments.out.is_dir():
        raise UserError(f"--out {arguments.out} is not a folder")
    return asyncio.run(_rollout(arguments, agent, tasks, judge, sandbox))


def _parser() -> CommandParser:
    parser = CommandParser("ajet rollout", description=__doc__)
    parser.add_argument("--agent", default="react", metavar="TYPE", help="react, tool, coding, or module->Class")
    parser.add_argument("--tasks", required=True, type=Path, metavar="FILE", help="JSON lines: question, …")
    parser.add_argument(
        "--model", required=True, help="base URL of an OpenAI-compatible server, or a model: folder, hub id, tiny:NAME"
    )
    parser.add_argument("--model-name", default="", help="for a URL: which of the server's models")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where the trajectories go")
    parser.add_argument("-n", type=whole(1), default=1, help="runs of each task (default: 1)")
    parser.add_argument("--concurrency", type=whole(1), default=32, help="most runs at a time (default: 32)")
    parser.add_argument("--limit", type=whole(1), help="only the first so many tasks")
    parser.add_argument(
        "--judge", metavar="module->Class", help="default: the answer is compared with the task's `answer`"
    )
    parser.add_argument(
        "--sandbox", metavar="KIND", help="for the agent's tools: bubblewrap, docker, …, or {kind: …, memory_mb: …}"
    )
    parser.add_argument("--temperature", type=real(0, 1e6), help="default: the server's, or 1")
    parser.add_argument("--max-tokens", type=whole(1), help="most tokens of one reply")
    parser.add_argument("--price-input", type=real(0, 1e6), default=0.0, help="of a million tokens, for the cost")
    parser.add_argument("--price-output", type=real(0, 1e6), default=0.0)
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the agent: tools=[calculator] max_steps=5")
    return parser


def _agent(arguments: Namespace) -> Agent:
    from ajet.agents import make_agent

    options = options_of(arguments.settings, "setting")
    sampling = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    if isinstance(options.setdefault("sampling", {}), dict):
        options["sampling"] |= {name: value for name, value in sampling.items() if value is not None}
    if "->" not in arguments.agent:
        options.setdefault("name", arguments.agent)
    try:
        return make_agent(arguments.agent, options, [Path.cwd()])
    except TypeError as error:  # a value of the wrong type, which the class itself refuses
        raise UserError(f"agent {arguments.agent}: {error}") from None


def _sandbox(text: str | None, agent: Agent) -> SandboxSettings | None:
    """What each run's sandbox is. None: there is none."""
    from pydantic import ValidationError

    from ajet.config import make_config
    from ajet.config.problems import dotted, from_validation
    from ajet.config.yaml_source import parse_value
    from ajet.task_runner.environments import find_sandbox

    if text is None:
        return None
    asked = parse_value(text, "--sandbox")
    try:
        config = make_config({"rollout.sandbox": asked})
        settings = find_sandbox(config)
    except ValidationError as error:
        wrong = from_validation(error, {"ajet": {"rollout": {"sandbox": asked}}})[0]
        key = dotted(wrong.path[3:])
        fix = f"\n    {wrong.fix}" if wrong.fix else ""
        raise UserError(f"--sandbox {text}: {key + ': ' if key else ''}{wrong.what}{fix}") from None
    except UserError as error:
        raise UserError(f"--sandbox {text}: {error}") from None
    if settings is None:
        return None
    if settings.network == "gateway":
        raise UserError(f"--sandbox {text}: there is no gateway without a run; choose network: none or host")
    if config.ajet.rollout.sandbox is not None and config.ajet.rollout.sandbox.lifetime_seconds is None:
        longest = agent.limits.max_seconds or LONGEST_RUN_S
        settings = replace(settings, lifetime_seconds=longest + BEYOND_THE_RUN_S)
    return settings


def _tasks(arguments: Namespace) -> list[Task]:
    from ajet.config import make_config
    from ajet.task_reader import build_reader, read_training_tasks

    if not arguments.tasks.is_file():
        raise UserError(f"--tasks {arguments.tasks}: no such file")
    key = "task_reader.jsonl_dataset_file.training.file_path"
    tasks = read_training_tasks(build_reader(make_config({key: str(arguments.tasks)})))
    return tasks[: arguments.limit]


def _judge(arguments: Namespace) -> Judge:
    """Gives a trajectory its reward."""
    from ajet.config import make_config
    from ajet.schema.task import WorkflowTask
    from ajet.task_judge.base_judge import load_judge, validate_reward
    from ajet.task_runner.agent_workflow import output_of, reward_of

    config = make_config({"task_judge.judge_protocol": arguments.judge})
    own = load_judge(config)
    threshold = config.ajet.task_judge.success_threshold

    async def decide(task: Task, trajectory: Trajectory) -> None:
        if own is None:
            found = reward_of(trajectory, task)
            if found is not None:
                trajectory.reward, trajectory.is_success = found
        else:
            workflow_task = WorkflowTask(task=task, task_id=task.task_id, task_thread_index=trajectory.repeat)
            value = await asyncio.to_thread(own.compute_reward, workflow_task, output_of(trajectory))
            verdict = validate_reward(await value if inspect.isawaitable(value) else value, type(own).__name__)
            trajectory.reward, trajectory.is_success = verdict.reward, verdict.is_success
        if trajectory.is_success is None and trajectory.reward is not None:
            trajectory.is_success = trajectory.reward >= threshold

    return decide


async def _rollout(
    arguments: Namespace, agent: Agent, tasks: list[Task], judge: Judge, sandbox: SandboxSettings | None
) -> int:
    from ajet.agents.batch import Batch, Prices, demonstrations, run_batch
    from ajet.task_runner.thread_control import ProcessState

    arguments.out.mkdir(parents=True, exist_ok=True)
    counts = EpisodeCounts(total=len(tasks) * arguments.n)
    async with _model(arguments) as model:
        with progress(counts, quiet=arguments.quiet) as ended:
            batch = Batch(
                agent,
                tasks,
                model.function,
                arguments.out,
                repeats=arguments.n,
                concurrency=arguments.concurrency,
                judge=judge,
                judge_name=arguments.judge or "",
                prices=Prices(arguments.price_input, arguments.price_output),
                model_name=model.name,
                on_end=ended,
                sandbox=sandbox,
            )
            state = ProcessState()
            state.note_streams()
            try:
                trajectories = await run_batch(batch)
            except asyncio.CancelledError:
                print(f"interrupted; the same command goes on from {arguments.out}", file=sys.stderr)
                raise
            finally:
                state.restore_streams()
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in demonstrations(trajectories)]
    (arguments.out / DEMONSTRATIONS).write_text("".join(lines), encoding="utf-8", errors="replace")
    _report(arguments, trajectories, len(lines))
    return 1 if counts.failed else 0


def _report(arguments: Namespace, trajectories: Sequence[Trajectory], demonstrations: int) -> None:
    from collections import Counter

    from ajet.backbone.metrics import pass_at

    judged: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        if trajectory.is_success is not None:
            judged.setdefault(trajectory.task_id, []).append(trajectory.is_success)
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    rows = [("runs", f"{len(trajectories):,}")]
    reasons = Counter(str(trajectory.stop_reason) for trajectory in trajectories)
    rows.append(("ended by", ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())))
    if rewards:
        rows.append(("mean reward", f"{sum(rewards) / len(rewards):.4f} over {len(rewards):,}"))
    rows += [(f"pass@{k}", f"{chance.value:.4f}") for k, chance in pass_at([*judged.values()]).items()]
    tokens = [trajectory.usage for trajectory in trajectories]
    about = "" if all(usage.counted for usage in tokens) else "about "
    total_in, total_out = sum(usage.input_tokens for usage in tokens), sum(usage.output_tokens for usage in tokens)
    rows.append(("tokens", f"{about}{total_in:,} in, {total_out:,} out"))
    if arguments.price_input or arguments.price_output:
        rows.append(("cost", f"{about}{sum(trajectory.cost or 0.0 for trajectory in trajectories):.4f}"))
    if demonstrations:
        rows.append(("successful", f"{demonstrations:,} conversations in {arguments.out / DEMONSTRATIONS}"))
    for name, value in rows:
        print(f"{name:<12} {value}")
    failed = [trajectory for trajectory in trajectories if trajectory.failure is not None]
    for trajectory in failed[:3]:
        assert trajectory.failure is not None
        told = f"failed: {trajectory.request_id}: {trajectory.failure.kind}: {trajectory.failure.message}"
        print(printable(told[:300]))
    if failed:
        print(f"{len(failed):,} failed; the same command runs them again")
    print(f"to look at them: ajet view {arguments.out}")


class _Model(NamedTuple):
    name: str
    function: Callable[[], Any]
    """A model function for one run."""


@asynccontextmanager
async def _model(arguments: Namespace) -> AsyncIterator[_Model]:
    """The model at a URL, or one that is loaded here."""
    from ajet.agents import as_model_function

    target: str = arguments.model
    if target.startswith(("http://", "https://")):
        name = arguments.model_name or await _only_model(target)
        function = as_model_function(target, name)
        yield _Model(name, lambda: function)
        return
    from ajet.cli.targets import target_config
    from ajet.task_runner.model import load_model
    from ajet.task_runner.tuner import AjetTuner

    config, loop = target_config(target), asyncio.get_running_loop()
    model = load_model(config)

    def function_of_one_run() -> Any:
        session = model.open_conversation(config.ajet.rollout.max_model_len)
        return AjetTuner(session, config, loop).as_model_function()

    try:
        await model.engine.ready()
        yield _Model(target, function_of_one_run)
    finally:
        await model.engine.aclose()


async def _only_model(address: str) -> str:
    """The server's model, if it has one only."""
    import os

    from openai import AsyncOpenAI, OpenAIError

    try:
        client = AsyncOpenAI(base_url=address, api_key=os.environ.get("OPENAI_API_KEY") or "none", max_retries=1)
        names = [model.id for model in (await client.models.list()).data]
    except (OpenAIError, AttributeError) as error:  # the latter: it answers with a web page
        raise UserError(
            f"--model {address}: {type(error).__name__}: {error}\n    is the server up? {address}"
        ) from None
    if len(names) != 1:
        shown = ", ".join(names[:8]) or "none"
        raise UserError(f"--model {address}: name one of the server's models with --model-name: {shown}")
    return names[0]


# ---------------------------------------------------------------- the tools that there are


def tools(argv: Sequence[str]) -> int:
    """`ajet tools`: the tools that agents can be given, with descriptions and schemas."""
    parser = CommandParser("ajet tools", description="The tools that agents can be given.")
    parser.add_argument(
        "tools",
        nargs="*",
        help="entries of a YAML's list of tools: names, module->object, file.py->object, '{mcp: {command: …}}' "
        "(default: all that come with ajet)",
    )
    parser.add_argument("--json", action="store_true", help="print the schemas as the model gets them")
    arguments = parser.parse_args(argv)

    from ajet.agents.tools import get_global_tool_registry, make_tools, schemas_of
    from ajet.config.yaml_source import parse_value

    specs = [parse_value(text, "TOOL") if text.lstrip().startswith("{") else text for text in arguments.tools]
    schemas = asyncio.run(schemas_of(make_tools(specs or get_global_tool_registry().listed())))
    if arguments.json:
        print(printable(json.dumps(schemas, indent=2, ensure_ascii=False)))
    else:
        print(printable("\n\n".join(_shown(schema["function"]) for schema in schemas)))
    return 0


def _shown(function: dict[str, Any]) -> str:
    from ajet.agents.tools import type_of

    lines = [function["name"], *wrapped(function["description"], 2)]
    properties: dict[str, Any] = function["parameters"].get("properties", {})
    required = function["parameters"].get("required", [])
    for name, schema in properties.items():
        optional = "" if name in required else ", optional"
        lines += wrapped(f"{name} ({type_of(schema)}{optional}): {schema.get('description', '')}".rstrip(": "), 4)
    return "\n".join(lines)
