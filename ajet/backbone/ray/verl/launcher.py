"""`run`: one run on verl, from this process's side. verl itself runs in a child process that this one watches.

The child's metrics become ours as they are written; its death, or its silence, becomes our error with the last thing it
said; and whatever it started is gone when `run` returns, however that comes about.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.backbone.exit_code import exit_code
from ajet.backbone.ray.child import (
    SILENCE_S,
    Child,
    Source,
    keep_weights,
    open_progress,
    private_folder,
    started_child,
    watch,
)
from ajet.backbone.ray.failure import BackboneFailedError, last_error
from ajet.backbone.ray.machine import Machine
from ajet.backbone.ray.metrics_tail import MetricsTail
from ajet.backbone.ray.payload import KEY, RunPayload
from ajet.backbone.ray.preflight import check_user_classes
from ajet.backbone.ray.processes import MARK, end_all
from ajet.backbone.ray.ray_start import ClusterPlace, ray_environment, ray_settings, serve_as_worker
from ajet.backbone.ray.settings import training_steps
from ajet.backbone.ray.verl.config_map import RunFacts, check_honoured, pass_through, verl_settings
from ajet.backbone.ray.verl.gpu_check import check_gpus
from ajet.backbone.ray.verl.verl_metrics import translate
from ajet.backbone.report import show_report
from ajet.schema.errors import ConfigError, MissingDependencyError, UserError

if TYPE_CHECKING:
    from ajet.backbone.options import LaunchOptions
    from ajet.config import Config
    from ajet.observe.experiment import ExperimentFolder

log = logging.getLogger(__name__)

METRICS_PATH = "VERL_FILE_LOGGER_PATH"
"""Where verl's file logger writes, whose lines we read."""


class NoGpuError(UserError):
    """A run on GPUs was asked for where there is none."""


def run(config: Config, experiment: ExperimentFolder, options: LaunchOptions | None = None) -> int:
    """Train, and return the exit code."""
    require_verl()
    machine = detect_machine()
    place = _cluster_place(options)
    mark = uuid.uuid4().hex
    shared = place is not None or (options is not None and options.ray_address is not None)
    environment = {**os.environ, **ray_environment(os.environ, shared=shared), MARK: mark}
    if place is not None and place.rank > 0:
        try:
            return serve_as_worker(place, machine, environment)
        finally:
            end_all(mark)
    for note in check_honoured(config, machine):
        if not note.refused:
            log.warning("%s", note)
    _check_divisible(config, machine)
    if not machine.cpu:
        check_gpus(
            config.ajet.trainer_common.n_gpus_per_node,
            skip_memory=options is not None and options.skip_check_avail_gpu,
        )
    with ExitStack() as stack:
        scratch = stack.enter_context(private_folder())
        stack.callback(end_all, mark)
        plan = prepare(config, experiment, scratch, machine)
        ray = stack.enter_context(ray_settings(options, place, scratch, machine, environment))
        plan.settings |= {f"ray_kwargs.ray_init.{key}": value for key, value in ray.items()}
        # a Ray that was there before our driver does not hand on the driver's environment
        plan.settings[f"ray_kwargs.ray_init.runtime_env.env_vars.{METRICS_PATH}"] = str(plan.verl_metrics)
        plan.nodes = place.nodes if place else 0
        if plan.resumed_step is not None:
            experiment.rewind(plan.resumed_step)
        progress = stack.enter_context(open_progress(options))
        progress.start(experiment.name, "verl", plan.total_steps, plan.resumed_step or 0)
        child = stack.enter_context(_child(plan, experiment, environment))
        sources = [
            Source(MetricsTail(plan.episode_metrics, translate), ends_step=False),
            Source(MetricsTail(plan.verl_metrics, translate), ends_step=True),
        ]
        silence_s = max(SILENCE_S, 2 * config.ajet.rollout.episode_timeout)
        code = watch(child, sources, experiment, progress, silence_s=silence_s)
    if code != 0:
        raise BackboneFailedError(f"verl ended with exit code {code}: {last_error(plan.log)}\n    its log: {plan.log}")
    if (step := _checkpointed_step(plan.checkpoints)) is not None:
        keep_weights(plan.checkpoints / f"global_step_{step}" / "actor" / "huggingface", experiment.hf)
    if options is None or not options.json:
        show_report(experiment.path, quiet=options is not None and options.quiet)
    return exit_code(experiment.path, plan.resumed_step or 0)


def _cluster_place(options: LaunchOptions | None) -> ClusterPlace | None:
    if options is None or str(options.ray) != "cluster":
        return None
    return ClusterPlace.from_environment(os.environ)


def require_verl() -> None:
    """Raise, with the command that installs it, if verl is absent."""
    if find_spec("verl") is None or find_spec("ray") is None:
        raise MissingDependencyError(
            "the verl backbone needs verl, which is not installed\n"
            "    pip install 'agentjet[verl]' -c constraints/verl.txt   (in an environment of its own)"
        )


def detect_machine() -> Machine:
    """GPUs, or the CPU where VERL_PLATFORM=cpu asks for it."""
    asked = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if asked == "cpu":
        return Machine("cpu", flash_attention=False)
    import torch

    if not torch.cuda.is_available():
        raise NoGpuError(
            "the verl backbone found no GPU on this machine\n"
            "    to run it small on the CPU, set the environment variable VERL_PLATFORM=cpu"
        )
    return Machine("cuda", flash_attention=find_spec("flash_attn") is not None)


@dataclass(slots=True)
class Plan:
    """A run that is ready to start."""

    settings: dict[str, Any]
    given: dict[str, Any]
    """What the user wrote for verl itself: its keys must exist."""
    scratch: Path
    log: Path
    checkpoints: Path
    total_steps: int
    resumed_step: int | None
    verl_metrics: Path
    episode_metrics: Path
    nodes: int = 0
    """Machines to wait for; 0: none."""


def prepare(config: Config, experiment: ExperimentFolder, scratch: Path, machine: Machine) -> Plan:
    """Read the tasks, find the model, and map the configuration."""
    from ajet.engine.model_source import ModelSource
    from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks

    check_user_classes(config)
    reader = build_reader(config.ajet.task_reader, config.base_dirs)
    tasks, validates = read_training_tasks(reader), bool(read_validation_tasks(reader))
    if config.ajet.trainer_common.val_only and not validates:
        raise ConfigError("ajet.trainer_common.val_only: this config has no validation tasks, see ajet.task_reader")
    base = config.ajet.trainer_common.checkpoint_base_dir
    checkpoints = (Path(base).expanduser() / experiment.name if base else experiment.checkpoints).resolve()
    steps = training_steps(config, len(tasks))
    source = ModelSource.resolve(config.ajet.model.path)
    resumed = _checkpointed_step(checkpoints) if config.ajet.trainer_common.resume != "never" else None
    if resumed is not None and resumed >= steps and not config.ajet.trainer_common.val_only:
        raise ConfigError(
            f"{experiment.path} is complete: its newest checkpoint is of step {resumed} of {steps}. To go on, raise "
            "ajet.trainer_common.total_training_steps; to start anew, use --fresh"
        )
    facts = RunFacts(
        source.path, checkpoints, len(tasks), resume=config.ajet.trainer_common.resume, validates=validates
    )
    settings = verl_settings(config, facts, machine)
    payload = RunPayload(
        config=config.model_dump(mode="json"),
        base_dir=os.getcwd(),
        yaml_path=str(config.yaml_path.resolve()) if config.yaml_path else "",
        model_path=source.path,
        experiment_dir=str(experiment.path.resolve()),
        metrics_file=str(scratch / "episodes.jsonl"),
        total_steps=steps,
        resumed_step=resumed,
    )
    settings[f"data.{KEY}"] = payload.encode()
    return Plan(
        settings=settings,
        given=pass_through(config),
        scratch=scratch,
        log=experiment.path.resolve() / "verl.log",
        checkpoints=checkpoints,
        total_steps=steps,
        resumed_step=resumed,
        verl_metrics=scratch / "verl.jsonl",
        episode_metrics=scratch / "episodes.jsonl",
    )


def _checkpointed_step(checkpoints: Path) -> int | None:
    newest = checkpoints / "latest_checkpointed_iteration.txt"
    return int(newest.read_text()) if newest.exists() else None


def _check_divisible(config: Config, machine: Machine) -> None:
    common = config.ajet.trainer_common
    gpus = 1 if machine.cpu else common.nnodes * common.n_gpus_per_node
    sequence_parallel = common.ulysses_sequence_parallel_size
    engine = 1 if machine.cpu else config.ajet.rollout.tensor_model_parallel_size
    for key, size in (
        ("ajet.trainer_common.ulysses_sequence_parallel_size", sequence_parallel),
        ("ajet.rollout.tensor_model_parallel_size", engine),
    ):
        if gpus % size:
            raise UserError(f"{key}: {size} does not divide the {gpus} GPUs of the run (nnodes x n_gpus_per_node)")


@contextmanager
def _child(plan: Plan, experiment: ExperimentFolder, environment: dict[str, str]) -> Iterator[Child]:
    order = plan.scratch / "run.json"
    order.touch(mode=0o600)
    order.write_text(json.dumps({"settings": plan.settings, "given": plan.given, "nodes": plan.nodes}))
    with started_child(
        "verl",
        ["ajet.backbone.ray.verl.driver", str(order)],
        environment=environment | {METRICS_PATH: str(plan.verl_metrics), "HYDRA_FULL_ERROR": "1"},
        log=plan.log,
        payload=plan.settings[f"data.{KEY}"],
        mask=experiment.masker.text,
    ) as child:
        experiment.events.write("verl_started", pid=child.process.pid)
        yield child
