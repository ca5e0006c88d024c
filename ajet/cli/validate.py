"""`ajet validate CONF`: what would run, without a model: config, tasks, workflow and judge, and the size of it all.

Problems would end or spoil a run; `doubts` might. Nothing is run, and no weights are loaded, unless `--run` asks to
`rehearse` one episode of the first task.
"""

from __future__ import annotations

import ast
import inspect
import shlex
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ajet.schema.errors import EXIT_FAILED
from ajet.schema.printable import counted, one_line, printable
from ajet.system.command_line import CommandParser, fail, real

if TYPE_CHECKING:
    from ajet.backbone.plan import RunPlan
    from ajet.backbone.ray import Remark
    from ajet.config import BackboneName, Config
    from ajet.config.rollout import AgentConfig
    from ajet.engine.base import Engine
    from ajet.engine.scripted import Reply
    from ajet.environment.environment import EnvironmentSource
    from ajet.schema.episode import Episode
    from ajet.schema.task import Task
    from ajet.task_judge.base_judge import BaseJudge
    from ajet.task_runner.workflow import Workflow

SHOWN_QUERY = 70
READ_FROM_SERVICES = ("env_service", "data_generation", "tracing")
"""Readers that may ask one of `ajet.services` for the tasks."""


def run(argv: Sequence[str]) -> int:
    """Check one config and print what it would do."""
    arguments = _parser().parse_intermixed_args(argv)
    arguments.plan |= arguments.gpu is not None
    from ajet.backbone.launch import known_backbone
    from ajet.config import load_config
    from ajet.system.services import yaml_services

    flag = known_backbone(arguments.backbone)
    config = load_config(arguments.conf, arguments.overrides, backbone=flag)
    rehearsed = arguments.run or arguments.replies
    needed = rehearsed or config.ajet.task_reader.type in READ_FROM_SERVICES
    with yaml_services(config, use_running=True) if needed else nullcontext():
        return _check(config, arguments, flag)


def _check(config: Config, arguments: Namespace, flag: BackboneName | None) -> int:
    from ajet.backbone.checks import refuse_no_validation
    from ajet.backbone.launch import choose_backbone
    from ajet.backbone.plan import RunPlan, training_samples
    from ajet.backbone.report import EarlyStop
    from ajet.config.contradictions import TRAINING
    from ajet.observe.logs import Masker

    backbone, why = choose_backbone(flag, config)
    config.ajet.backbone = backbone
    loaded = load(config)
    if backbone in TRAINING:
        refuse_no_validation(config, loaded.validation)
    if backbone == "local":
        EarlyStop.from_config(config, len(loaded.validation))
    plan = RunPlan.of(config, backbone, training_samples(config, loaded.training), len(loaded.validation))
    for label, text in [("backbone", f"{backbone} ({why})"), *describe(config, plan, loaded)]:
        print(f"  {label:<10} {printable(text)}")
    wrong = _look_for_problems(config, backbone, loaded)
    if arguments.plan:
        from ajet.backbone.memory import show_plan

        wrong += show_plan(config, backbone, arguments.gpu)
    print(flush=True)
    if wrong:
        return fail("\n".join(wrong))
    if arguments.run or arguments.replies:
        if loaded.workflow is None or not loaded.training:
            wrapper = config.ajet.task_runner.wrapper_type
            return fail(f"--run: with task_runner.wrapper_type: {wrapper}, there is no episode to run here")
        if not rehearse(config, loaded.training[0], arguments.replies):
            return EXIT_FAILED
        print()
    command = ["ajet", "--conf", arguments.conf, *([f"--backbone={flag}"] if flag else []), *arguments.overrides]
    shown = Masker(config.model_dump(mode="json")).text(shlex.join(command))
    print(printable(f"{arguments.conf} is valid. To run it: {shown}"))
    return 0


def _look_for_problems(config: Config, backbone: BackboneName, loaded: Loaded) -> list[str]:
    """What a run would end with. What only looks wrong is printed with the report."""
    from ajet.backbone.checks import model_problems, repeated, unchecked
    from ajet.backbone.plan import serving_engine
    from ajet.observe.metrics import missing_trackers
    from ajet.schema.install import missing_for_training

    of_backbone = _backbone_notes(backbone, config)
    trackers = missing_trackers(config).values() if backbone != "debug" else ()
    followed = (str(note) for note in of_backbone if not note.refused)
    doubted = (*doubts(loaded), *repeated(config, loaded.training, loaded.validation))
    for label, texts in (("note", (*trackers, *followed)), ("unchecked", unchecked(config)), ("warning", doubted)):
        for text in texts:
            print(f"  {label:<10} {printable(text)}")
    of_model = model_problems(config, serving_engine(config, backbone)) if missing_for_training() is None else ()
    return [*of_model, *_task_problems(loaded), *(str(note) for note in of_backbone if note.refused)]


def _parser() -> CommandParser:
    parser = CommandParser("ajet validate", description="Check a config and say what would run, without a model.")
    parser.add_argument("conf", metavar="CONF")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--backbone", help="check for this backbone")
    parser.add_argument("--plan", action="store_true", help="also say how much memory the training will take")
    gibibytes = real(0.1, 10_000, "GiB")
    parser.add_argument("--gpu", type=gibibytes, metavar="GIB", help="as --plan, for a GPU with this much memory")
    parser.add_argument("--run", action="store_true", help="also run the first task with scripted replies, no model")
    parser.add_argument("--replies", metavar="FILE", help="for --run: a YAML or JSON list of replies")
    return parser


class Loaded(NamedTuple):
    """What a config names, imported and read as a run would."""

    workflow: type[Workflow] | None
    """None: programs elsewhere have it."""
    judge: BaseJudge | None
    environment: EnvironmentSource | None
    training: list[Task]
    """Empty if programs elsewhere begin the episodes."""
    validation: list[Task]


def load(config: Config) -> Loaded:
    """Import the user's classes and read the tasks, as a run would."""
    from ajet.backbone.checks import check_formulas, has_workflow
    from ajet.observe.metrics import tracker_class
    from ajet.task_judge.base_judge import load_judge
    from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks
    from ajet.task_runner.environments import find_environment, find_sandbox, load_workflow

    for name in config.ajet.trainer_common.logger if config.ajet.backbone != "debug" else ():
        if "->" in name:
            tracker_class(name, config)
    workflow = load_workflow(config) if has_workflow(config) else None
    judge = load_judge(config)
    environment = find_environment(config)
    find_sandbox(config)
    check_formulas(config)
    if config.ajet.task_runner.wrapper_type == "outside":
        return Loaded(workflow, judge, environment, [], [])
    reader = build_reader(config)
    return Loaded(workflow, judge, environment, read_training_tasks(reader), read_validation_tasks(reader))


def describe(config: Config, plan: RunPlan, loaded: Loaded) -> Iterator[tuple[str, str]]:
    """The lines of the report: label and text."""
    from ajet.backbone.checks import model_answers, recipe
    from ajet.config.effects import notes
    from ajet.schema.install import missing_for_training

    ajet = config.ajet
    turns, reply = ajet.rollout.multi_turn.max_steps, ajet.rollout.max_response_length_in_one_turn
    environment = loaded.environment
    counts = f"{len(loaded.training):,} to train on, {len(loaded.validation):,} to validate on"
    yield "model", f"{ajet.model.path}, engine {plan.engine}"
    if missing_for_training() is None:
        yield from model_answers(config, plan.engine).lines
    if loaded.workflow is None:
        yield "workflow", f"elsewhere (task_runner.wrapper_type: {ajet.task_runner.wrapper_type})"
    elif ajet.rollout.agent is None:
        yield "workflow", _place(loaded.workflow, ajet.rollout.user_workflow)
    else:
        yield "agent", _agent(ajet.rollout.agent)
    if loaded.judge is None:
        yield "judge", f"none: the {'workflow' if ajet.rollout.agent is None else 'agent'} gives the reward"
    else:
        kind = ajet.task_judge.judge_type
        own = ajet.task_judge.judge_protocol if kind == "customized_protocol" else f"judge_type: {kind}"
        yield "judge", _place(type(loaded.judge), own)
    if environment is not None:
        yield "environment", environment.name
    if (sandbox := config.ajet.rollout.sandbox) is not None:
        yield "sandbox", sandbox.kind
    if loaded.training:
        first = loaded.training[0]
        yield "tasks", f"{counts} ({ajet.task_reader.type})"
        yield "first task", f"{first.task_id}: {one_line(first.main_query, SHOWN_QUERY)}"
    else:
        yield "tasks", "none: programs elsewhere begin the episodes"
    if plan.backbone == "prompt":
        from ajet.backbone.prompt import search_lines

        yield from search_lines(config, loaded.training, loaded.validation)
    yield from _size(plan, ajet.rollout.num_repeat, f" ({plan.epochs:.3g} epochs)" if loaded.training else "")
    yield "lengths", f"at most {ajet.rollout.max_model_len:,} tokens per conversation, {reply:,} per reply"
    total = f", {plan.generated:,} in total" if plan.backbone != "prompt" else ""
    yield "generated", f"at most {turns} × {reply:,} tokens per episode and agent{total}"
    if (sets := recipe(config)) is not None:
        yield "recipe", sets
    for package in plan.needs:
        yield "needs", _need(package.name)
    for note in notes(config):
        yield "note", note


def _size(plan: RunPlan, num_repeat: int, epochs: str) -> Iterator[tuple[str, str]]:
    if plan.backbone == "debug":
        yield "would run", f"{counted(plan.episodes, 'episode')}, one for each of the first tasks; no training"
    elif plan.trains and not plan.episodes:
        yield "each step", f"{plan.tasks_per_step:,} recorded conversations are imitated; no episodes"
        yield "the run", f"{counted(plan.steps, 'step')}{epochs}"
    elif plan.trains:
        tasks, groups = counted(plan.tasks_per_step, "task"), counted(plan.tasks_per_step, "group")
        yield "each step", f"{tasks} × {num_repeat} = {counted(plan.episodes_per_step, 'episode')} in {groups}"
        yield "the run", f"{counted(plan.steps, 'step')}{epochs}, {counted(plan.episodes, 'episode')}"
    if plan.validations:
        yield "validation", f"{plan.validations:,} × {counted(plan.validation_episodes, 'episode')}"


def _agent(agent: AgentConfig) -> str:
    if agent.type == "cli":
        command = agent.command if agent.command is not None else f"{agent.program} (a program)"
        return f"cli: {command if isinstance(command, str) else ' '.join(command)}"
    tools = [next(iter(tool)) if isinstance(tool, dict) else tool for tool in agent.tools]
    return f"{agent.type}, tools: {', '.join(tools) or 'none'}, at most {agent.max_steps} steps"


def _need(package: str) -> str:
    from ajet.backbone.plan import installed, requirement, version_range

    wanted, found = requirement(package), installed(package)
    text = f"{package} {version_range(wanted)}".rstrip()
    if found is None:
        return f"{text}, which isn't installed here (see `ajet doctor`)"
    return text if wanted.specifier.contains(found, prereleases=True) else f"{text}, but {found} is installed"


def _place(cls: type[object], text: str | None) -> str:
    place = (text or "").partition("->")[0]
    file = Path(place)
    if file.is_absolute() and file.is_relative_to(Path.cwd()):
        place = str(file.relative_to(Path.cwd()))
    return f"{cls.__name__} ({place})"


def doubts(loaded: Loaded) -> Iterator[str]:
    """What looks wrong, though only a run can tell."""
    if loaded.judge is None or loaded.workflow is None:
        return
    wanted = set(loaded.judge.reads_output) or _keys_read(type(loaded.judge))
    given = _keys_written(loaded.workflow)
    if wanted and given and not wanted & given:
        judge, workflow = type(loaded.judge).__name__, loaded.workflow.__name__
        yield (
            f"{judge} reads {_named(wanted)} of the workflow's metadata, and {workflow} gives {_named(given)}: "
            "every episode would fail in the judge"
        )


def _backbone_notes(backbone: BackboneName, config: Config) -> list[Remark]:
    """Keys that verl or Trinity honours only in part, or refuses. The GPUs may be on another machine."""
    from ajet.config.kinds import BACKBONES, load_module

    module = load_module(BACKBONES, backbone)
    return module.planned_notes(config) if hasattr(module, "planned_notes") else []


def _task_problems(loaded: Loaded) -> Iterator[str]:
    if loaded.judge is None or not loaded.training:
        return
    first = loaded.training[0]
    absent = [key for key in loaded.judge.reads_task if key not in first.metadata]
    if absent:
        present = _named(set(first.metadata)) if first.metadata else "nothing"
        yield (
            f"{type(loaded.judge).__name__} reads {_named(set(absent))} of a task's metadata, and task "
            f"{first.task_id!r} has {present}"
        )


def _keys_written(workflow: type[object]) -> set[str]:
    """The keys of every `metadata={…}` in a workflow's source. Empty if they can't be determined."""
    keys: set[str] = set()
    for node in ast.walk(_syntax(workflow)):
        if isinstance(node, ast.keyword) and node.arg == "metadata":
            if not isinstance(node.value, ast.Dict):
                return set()
            for key in node.value.keys:
                if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                    return set()  # computed, or `**more`
                keys.add(key.value)
    return keys


def _keys_read(judge: type[object]) -> set[str]:
    """The keys of `workflow_output.metadata[…]` and `.get(…)` in a judge's source."""
    keys: set[str] = set()
    for node in ast.walk(_syntax(judge)):
        if isinstance(node, ast.Subscript):
            owner, key = node.value, node.slice
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and node.args:
            owner, key = node.func.value, node.args[0]  # type: ignore[attr-defined] # it has an `attr`
        else:
            continue
        of_output = isinstance(owner, ast.Attribute) and owner.attr == "metadata" and "output" in ast.unparse(owner)
        if of_output and isinstance(key, ast.Constant) and isinstance(key.value, str):
            keys.add(key.value)
    return keys


def _syntax(cls: type[object]) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # created at run time
        return ast.Module([], [])


def _named(keys: set[str]) -> str:
    return ", ".join(map(repr, sorted(keys)))


NO_CALL = (
    "the episode made no model call, so there would be nothing to train: call the model through the tuner "
    "(tuner.as_raw_openai_sdk_client(), tuner.as_oai_baseurl_apikey() …), not through a client of your own"
)
DEFAULT_REPLIES: list[Reply] = ["This is a scripted reply."]


def rehearse(config: Config, task: Task, replies_file: str | None = None) -> bool:
    """Run the task once with scripted replies, and show the episode. Returns whether it got a reward.

    It finds what an import can't: a workflow that raises, tools that don't work, a judge that returns no number.
    """
    from ajet.backbone.debug import EpisodeView
    from ajet.engine.model_source import ModelSource
    from ajet.engine.scripted import ScriptedEngine, read_replies
    from ajet.task_runner.runtime import Runtime

    file = replies_file or config.ajet.rollout.scripted_replies
    replies = read_replies(file) if file else DEFAULT_REPLIES

    def scripted(_config: Config) -> Engine:
        source = config.ajet.model.path
        tokens = config.ajet.rollout.max_model_len
        return ScriptedEngine(replies, lambda: ModelSource.resolve(source).tokenizer(), max_model_len=tokens)

    view = EpisodeView(config.ajet.task_judge.success_threshold)
    ended: list[Episode] = []
    with Runtime(config, make_engine=scripted, parallel=1, on_episode=ended.append) as runtime:
        runtime.run(runtime.pool.run_episodes([task]))
    view.started(1, 1)
    view.episode(ended[-1], task.main_query)
    if ended[-1].usable and not ended[-1].tree.calls:
        fail(NO_CALL)
        return False
    return ended[-1].usable
