"""Checks before a run begins: the user's classes, the tasks, and the model's name and files. No weights are loaded.

`check_start` and `read_tasks` are what a run does first, before PyTorch is imported. `model_problems` is what
`ajet validate` adds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from ajet.backbone.memory import conversation_bytes
from ajet.backbone.plan import imitates_a_file
from ajet.backbone.training_settings import (
    TEACHER,
    credit_settings,
    is_address,
    loss_settings,
    try_estimator,
    try_policy_loss,
)
from ajet.config.contradictions import TRAINING
from ajet.config.effects import recipe_line
from ajet.context_tracker.template import ChatTemplate, TemplateRefusal
from ajet.engine.layers import one_layer_of_each_kind
from ajet.engine.model_source import ModelSource, json_file, known_shapes
from ajet.schema.errors import ConfigError, FeatureUnavailableError
from ajet.schema.install import TRAIN, install_command, missing_for_training
from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks
from ajet.task_reader.quality import FILES, overlap_lines

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.schema.task import Task

log = logging.getLogger(__name__)

KEY = "ajet.model.path"
ELSEWHERE = ("remote", "outside")
"""Runners with a workflow of their own: what it needs may not be installed here."""


def check_start(config: Config) -> None:
    """Import the workflow, the judge and the environment, and find the model. Raises a `UserError`."""
    from ajet.task_judge.base_judge import load_judge
    from ajet.task_runner.environments import find_environment, find_sandbox, load_workflow

    if config.ajet.task_runner.wrapper_type not in ELSEWHERE:
        load_workflow(config)
    load_judge(config)
    find_environment(config)
    find_sandbox(config)
    check_formulas(config)
    _find_model(KEY, config.ajet.model.path)


def check_teacher(config: Config) -> None:
    """Find the teacher of a run that trains, if it is loaded here. Raises a `ConfigError`."""
    teacher = config.ajet.trainer_common.algorithm.distillation.teacher
    if teacher is not None and not is_address(teacher):
        _find_model(TEACHER, teacher)


def _find_model(key: str, name: str) -> ModelSource:
    """Refuses what can't be a model's name. A hub id may still turn out to be none."""
    try:
        return ModelSource.resolve(name)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def recipe(config: Config) -> str | None:
    """What the recipe of a training run sets, in one line; None if there is none."""
    named = config.ajet.trainer_common.algorithm.recipe
    if named is None or config.ajet.backbone not in TRAINING:
        return None
    return recipe_line(config.ajet, named)


def starts_over(config: Config) -> bool:
    """Whether the config itself asks to put an earlier run in the folder aside, as `--fresh` does."""
    common = config.ajet.trainer_common
    return config.ajet.backbone in TRAINING and common.resume == "never" and not common.val_only


def formulas(config: Config) -> tuple[str, str]:
    """What the loss and the estimator are called: one of our names, or where your own is."""
    algorithm = config.ajet.trainer_common.algorithm
    return algorithm.policy_loss, algorithm.adv_estimator


def check_formulas(config: Config) -> None:
    """Try your own loss and estimator on a made-up batch, if the run trains. Raises a `UserError`."""
    if config.ajet.backbone not in TRAINING:
        return
    loss, estimator = formulas(config)
    if "->" in estimator:
        try_estimator(credit_settings(config).estimator)
    if "->" in loss:
        try_policy_loss(loss_settings(config))


def has_workflow(config: Config) -> bool:
    """Whether there is a workflow to check: one is named, or a run needs it."""
    named = config.ajet.rollout.user_workflow is not None or config.ajet.rollout.agent is not None
    return named or config.ajet.task_runner.wrapper_type not in ELSEWHERE


class RunTasks(NamedTuple):
    """The tasks of a run."""

    training: list[Task]
    """Empty if recorded conversations are trained, or if programs elsewhere begin the episodes."""
    validation: list[Task]


def read_tasks(config: Config) -> RunTasks:
    """Read them, unless nothing would use them."""
    if config.ajet.task_runner.wrapper_type == "outside":
        return RunTasks([], [])
    reader = build_reader(config)
    training = [] if imitates_a_file(config) else read_training_tasks(reader)
    tasks = RunTasks(training, read_validation_tasks(reader))
    refuse_no_validation(config, tasks.validation)
    for warning in repeated(config, *tasks):
        log.warning(warning)
    return tasks


def refuse_no_validation(config: Config, validation: Sequence[Task]) -> None:
    """Raise if the run is to validate alone, and there is nothing to validate on."""
    if config.ajet.trainer_common.val_only and not validation:
        raise ConfigError("ajet.trainer_common.val_only: this config has no validation tasks, see ajet.task_reader")


def repeated(config: Config, training: Sequence[Task], validation: Sequence[Task]) -> Iterator[str]:
    """A warning if tasks of files are both trained on and validated on, or share an id that means two things."""
    asked = {task.task_id: (task.main_query, task.init_messages) for task in training}
    taken = [
        task.task_id
        for task in validation
        if task.task_id in asked and asked[task.task_id] != (task.main_query, task.init_messages)
    ]
    if taken:
        yield (
            f"validation tasks that have the id of a training task and ask something else: {len(taken)} (first: "
            f"{taken[0]!r}); what is recorded of a task is found by its id, so give them ids of their own"
        )
    if config.ajet.task_reader.type in FILES:
        for label, text in overlap_lines(training, validation, near=False):
            yield f"{label}: {text}; validation measures memory there. `ajet tasks check` looks for more"


def model_problems(config: Config, engine: str) -> Iterator[str]:
    """What would end a run of this model, as far as its files tell."""
    path = config.ajet.model.path
    try:
        source = _find_model(KEY, path)
        if config.ajet.backbone == "local":
            check_teacher(config)
    except ConfigError as error:
        yield str(error)
        return
    yield from (answers := model_answers(config, engine).problems)
    folder = source.folder()
    if folder is None:
        return  # `unchecked` says so
    source = replace(source, path=str(folder))
    try:
        settings, generation = json_file(folder / "config.json"), json_file(folder / "generation_config.json")
        yield from _tokenizer_problems(path, source.tokenizer(), generation)
    except ConfigError as error:
        if not answers:  # else it may be the same
            yield f"{KEY}: {error}"
        return
    most = _positions(settings)
    length = config.ajet.rollout.max_model_len
    if most is not None and length > most:
        yield (
            f"ajet.rollout.max_model_len: {length:,} tokens, but {path} was made for {most:,} "
            f"(max_position_embeddings): write max_model_len: {most}, or less"
        )


class ModelAnswers(NamedTuple):
    """What the embedded engine and the local trainer say of a model, without its weights."""

    lines: tuple[tuple[str, str], ...] = ()
    """Label and text, for a report."""
    problems: tuple[str, ...] = ()


def model_answers(config: Config, engine: str) -> ModelAnswers:
    """Ask those of the two that a run of this config uses. Empty if no config.json of the model is at hand."""
    ajet = config.ajet
    trains = ajet.backbone == "local" and not ajet.trainer_common.val_only
    answers = _answers(ajet.model.path, engine == "torch", trains, ajet.rollout.routing_replay)
    lora, gigabytes = ajet.model.lora, ajet.rollout.kv_cache_gb if engine == "torch" else None
    targets = trains and lora.enabled and lora.target_modules != "all-linear"
    if answers.problems or not (targets or gigabytes is not None):
        return answers
    dtype = "bfloat16" if ajet.model.dtype == "auto" else ajet.model.dtype  # the run may have a GPU
    model = ModelSource.resolve(ajet.model.path).on_meta(dtype, "cpu")
    if model is not None and targets:
        from ajet.backbone.local.learner import unknown_targets

        if unknown := unknown_targets(model, lora):
            return answers._replace(problems=(unknown,))
    if model is not None and gigabytes is not None:
        longest = ajet.rollout.max_model_len
        if (least := conversation_bytes(model, longest)) > gigabytes * 1e9:
            problem = (
                f"ajet.rollout.kv_cache_gb: {gigabytes:g} has no room for one conversation of rollout.max_model_len "
                f"({longest:,} tokens), which takes {ceil(least / 1e7) / 100:g} GB: raise it, or lower "
                "rollout.max_model_len"
            )
            return answers._replace(problems=(problem,))
    return answers


def say_how_trained(config: Config) -> None:
    """Say it before a local run loads its weights. Raises a `ConfigError` if they can't be trained."""
    answers = model_answers(config, config.ajet.rollout.engine)
    if answers.problems:
        raise ConfigError("\n".join(answers.problems))
    for label, text in answers.lines:
        log.info("%s %s", label, text)


@cache
def _answers(path: str, serves: bool, trains: bool, follows: bool) -> ModelAnswers:
    if not (serves or trains):
        return ModelAnswers()
    try:
        source = ModelSource.resolve(path)
        model = source.on_meta("bfloat16", "cpu")
    except ConfigError as error:
        return ModelAnswers(problems=(f"{KEY}: {error}",))
    if model is None:
        return ModelAnswers()
    lines, problems = [], []
    with one_layer_of_each_kind(model):
        for label, ask in ((("served", _served),) if serves else ()) + ((("trained", _trained),) if trains else ()):
            try:
                lines.append((label, ask(model)))
            except FeatureUnavailableError as error:
                problems.append(f"{KEY}: {error}")
            except RuntimeError as error:  # an operation that needs values: the run asks again when it has them
                log.info("%s is not checked without its weights: %s", path, str(error).partition("\n")[0])
        if follows:
            from ajet.engine.routing import routers_of

            try:
                routers_of(model)
            except FeatureUnavailableError as error:
                problems.append(str(error))
    try:
        source.check_weights(model)
    except ConfigError as error:
        problems.append(f"{KEY}: {error}")
    return ModelAnswers(tuple(lines), tuple(problems))


def _served(model: Any) -> str:
    from ajet.engine.torch import ServedShape

    keeps = "states beside keys and values" if ServedShape.of(model).mixers else "keys and values"
    return f"by the embedded engine, which keeps {keeps}"


def _trained(model: Any) -> str:
    from ajet.trainer.footprint import trained_as

    try:
        why = trained_as(model).why_rows
    except FeatureUnavailableError as error:
        raise FeatureUnavailableError(f"{error}. Choose another model, or --backbone=verl") from error
    return "as trees: what calls share is computed once" if why is None else f"as rows: {why}"


def unchecked(config: Config) -> Iterator[str]:
    """What `model_problems` couldn't look at."""
    if (missing := missing_for_training()) is not None:
        yield f"the model and its chat template, which needs {missing}: {install_command(TRAIN)}"
        return
    path, teacher = config.ajet.model.path, config.ajet.trainer_common.algorithm.distillation.teacher
    if not _at_hand(path):
        whether = "exists" if path in known_shapes() else "exists, can be served and trained,"
        yield (
            f"the model: no files of {path} are in this machine's cache of the hub, so whether it {whether} and has a "
            "chat template will show when it is loaded"
        )
    loaded = teacher if config.ajet.backbone == "local" else None
    if loaded is not None and not is_address(loaded) and not _at_hand(loaded):
        yield (
            f"the teacher: no files of {teacher} are in this machine's cache of the hub, so whether it exists and has "
            "the model's vocabulary will show when it is loaded"
        )


def _at_hand(name: str) -> bool:
    """Whether a model's files are on this machine. A name that is refused is a problem, which is said as one."""
    try:
        return ModelSource.resolve(name).folder() is not None
    except ConfigError:
        return True


def _tokenizer_problems(path: str, tokenizer: Any, generation: dict[str, Any]) -> Iterator[str]:
    if not tokenizer.chat_template:
        yield (
            f"{KEY}: the tokenizer of {path} has no chat template, so messages can't become a prompt: choose "
            "a model tuned for chat, or put its template as chat_template.jinja into the folder"
        )
    else:
        try:
            ChatTemplate(tokenizer)
        except (ConfigError, TemplateRefusal) as error:
            yield f"{KEY}: the chat template of {path} can't be used: {error}"
    if tokenizer.eos_token_id is None and not generation.get("eos_token_id"):
        yield (
            f"{KEY}: nothing says which token ends a reply of {path}, so every reply would run to its "
            "maximum length: set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json"
        )


def _positions(settings: dict[str, Any]) -> int | None:
    """The most positions that a model's config names. None if none, or if its positions are stretched."""
    text = settings.get("text_config") or settings
    stretched = text.get("rope_scaling") or {}
    if stretched.get("factor") and stretched.get("rope_type", stretched.get("type")) != "default":
        return None
    most = text.get("max_position_embeddings")
    return most if isinstance(most, int) else None
