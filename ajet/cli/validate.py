"""`ajet validate CONF`: what would run, without a model: config, tasks, workflow and judge, and the size of it all."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.cli.main import EXIT_FAILED

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.schema.task import Task
    from ajet.task_judge.base_judge import BaseJudge
    from ajet.workflow import Workflow

SHOWN_QUERY = 70


@dataclass(frozen=True, slots=True)
class RunSize:
    """How much a run is, at most."""

    tasks_per_step: int
    episodes_per_step: int
    steps: int
    episodes: int
    epochs: float
    validations: int
    validation_episodes: int
    generated_per_episode: int
    """Tokens that one agent may generate in an episode."""

    @property
    def generated(self) -> int:
        return (self.episodes + self.validations * self.validation_episodes) * self.generated_per_episode


@dataclass(frozen=True, slots=True)
class Plan:
    """What a config would do."""

    config: Config
    backbone: str
    why: str
    workflow: type[Workflow]
    judge: BaseJudge | None
    training: list[Task]
    validation: list[Task]
    size: RunSize

    @classmethod
    def of(cls, config: Config, backbone: str, why: str) -> Plan:
        """Import the user's classes and read the tasks, as a run would."""
        workflow, judge = _load_code(config)
        training, validation = _read_tasks(config)
        size = run_size(config, len(training), len(validation), backbone)
        return cls(config, backbone, why, workflow, judge, training, validation, size)


def run(argv: Sequence[str]) -> int:
    """Check one config and print what it would do."""
    arguments = _parser().parse_intermixed_args(argv)
    from ajet.cli.launch import choose_backbone, known_backbone
    from ajet.config import load_config

    flag = known_backbone(arguments.backbone)
    config = load_config(arguments.conf, arguments.overrides, backbone=flag)
    plan = Plan.of(config, *choose_backbone(flag, config))
    for label, text in describe(plan):
        print(f"  {label:<11}{text}")
    print(flush=True)
    if arguments.run or arguments.replies:
        from ajet.cli.rehearsal import rehearse

        if not rehearse(config, plan.training[0], arguments.replies):
            return EXIT_FAILED
        print()
    command = f"ajet --conf {arguments.conf}" + (f" --backbone={flag}" if flag else "")
    print(f"{arguments.conf} is valid. To run it: {command}")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser("ajet validate", description="Check a config and say what would run, without a model.")
    parser.add_argument("conf", metavar="CONF")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--backbone", help="check for this backbone")
    parser.add_argument("--run", action="store_true", help="run the first task too, with scripted replies, no model")
    parser.add_argument("--replies", metavar="FILE", help="for --run: a YAML or JSON list of replies")
    return parser


def _load_code(config: Config) -> tuple[type[Workflow], BaseJudge | None]:
    """The user's classes, imported as a run would."""
    from ajet.task_judge.base_judge import load_judge
    from ajet.user_code import import_class
    from ajet.workflow import Workflow

    text = config.ajet.rollout.user_workflow
    assert text is not None
    workflow = import_class(text, Workflow, key="ajet.rollout.user_workflow", base_dirs=config.base_dirs)
    return workflow, load_judge(config, config.base_dirs)


def _read_tasks(config: Config) -> tuple[list[Task], list[Task]]:
    from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks

    reader = build_reader(config.ajet.task_reader, config.base_dirs)
    return read_training_tasks(reader), read_validation_tasks(reader)


def run_size(config: Config, training: int, validation: int, backbone: str) -> RunSize:
    """Steps, episodes and tokens of a run over so many tasks."""
    rollout, trainer, data = config.ajet.rollout, config.ajet.trainer_common, config.ajet.data
    per_agent = rollout.multi_turn.max_steps * rollout.max_response_length_in_one_turn
    if backbone == "debug":
        tasks = min(config.ajet.debug.debug_first_n_tasks, training)
        return RunSize(tasks, tasks, 1, tasks, tasks / max(training, 1), 0, 0, per_agent)
    steps = trainer.total_training_steps or -(-trainer.total_epochs * training // data.train_batch_size)
    episodes = data.train_batch_size * rollout.num_repeat
    validations = 0
    if validation:
        regular = steps // trainer.test_freq if trainer.test_freq > 0 else 0
        last = int(trainer.test_freq > 0 and steps % trainer.test_freq > 0)
        validations = regular + last + int(trainer.val_before_train)
    return RunSize(
        tasks_per_step=data.train_batch_size,
        episodes_per_step=episodes,
        steps=steps,
        episodes=steps * episodes,
        epochs=steps * data.train_batch_size / max(training, 1),
        validations=validations,
        validation_episodes=validation * max(trainer.val_pass_n, rollout.val_kwargs.num_repeat),
        generated_per_episode=per_agent,
    )


def describe(plan: Plan) -> list[tuple[str, str]]:
    """The lines of the report: label and text."""
    ajet, size = plan.config.ajet, plan.size
    turns, reply = ajet.rollout.multi_turn.max_steps, ajet.rollout.max_response_length_in_one_turn
    judge = "none: the workflow gives the reward"
    if plan.judge is not None:
        judge = _place(type(plan.judge), ajet.task_judge.judge_protocol)
    counts = f"{len(plan.training):,} to train on, {len(plan.validation):,} to validate on ({ajet.task_reader.type})"
    return [
        ("backbone", f"{plan.backbone} ({plan.why})"),
        ("model", f"{ajet.model.path}, engine {ajet.rollout.engine}"),
        ("workflow", _place(plan.workflow, ajet.rollout.user_workflow)),
        ("judge", judge),
        ("tasks", counts),
        ("first task", f"{plan.training[0].task_id}: {_short(plan.training[0].main_query)}"),
        *(_debug_lines(size) if plan.backbone == "debug" else _training_lines(size, ajet.rollout.num_repeat)),
        ("lengths", f"at most {ajet.rollout.max_model_len:,} tokens a conversation, {reply:,} a reply"),
        ("generated", f"at most {turns} × {reply:,} tokens an episode and agent, {size.generated:,} in all"),
    ]


def _debug_lines(size: RunSize) -> list[tuple[str, str]]:
    return [("would run", f"{_count(size.episodes, 'episode')}, one for each of the first tasks; no training")]


def _training_lines(size: RunSize, num_repeat: int) -> list[tuple[str, str]]:
    groups, episodes = _count(size.tasks_per_step, "group"), _count(size.episodes_per_step, "episode")
    lines = [
        ("a step", f"{_count(size.tasks_per_step, 'task')} × {num_repeat} = {episodes} in {groups}"),
        ("the run", f"{_count(size.steps, 'step')} ({size.epochs:.3g} epochs), {_count(size.episodes, 'episode')}"),
    ]
    if size.validations:
        lines.append(("validation", f"{size.validations:,} × {_count(size.validation_episodes, 'episode')}"))
    return lines


def _place(cls: type[object], text: str | None) -> str:
    place = (text or "").partition("->")[0]
    file = Path(place)
    if file.is_absolute() and file.is_relative_to(Path.cwd()):
        place = str(file.relative_to(Path.cwd()))
    return f"{cls.__name__} ({place})"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_QUERY else line[: SHOWN_QUERY - 1] + "…"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
