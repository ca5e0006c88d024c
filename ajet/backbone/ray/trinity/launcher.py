"""`run`: one run on Trinity, from this process's side. Trinity itself is conducted by a child that this one watches.

The child's metrics become ours as they are written; its death, or its silence, becomes our error with the last thing it
said; and whatever it started is gone when `run` returns, however that comes about.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.backbone.exit_code import exit_code
from ajet.backbone.ray.child import (
    SILENCE_S,
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
from ajet.backbone.ray.payload import RunPayload
from ajet.backbone.ray.preflight import check_user_classes
from ajet.backbone.ray.processes import MARK, end_all
from ajet.backbone.ray.ray_start import ClusterPlace, ray_environment, ray_settings, serve_as_worker
from ajet.backbone.ray.settings import training_steps
from ajet.backbone.ray.trinity.config_map import CPU_GPUS, RunFacts, check_honoured, run_mode, trinity_settings
from ajet.backbone.ray.trinity.metric_names import translate, unchanged
from ajet.backbone.ray.trinity.plugin import CPU
from ajet.backbone.report import show_report
from ajet.schema.errors import ConfigError, MissingDependencyError, UserError

if TYPE_CHECKING:
    from ajet.backbone.options import LaunchOptions
    from ajet.config import Config
    from ajet.observe.experiment import ExperimentFolder

log = logging.getLogger(__name__)

PLATFORM = "AJET_PLATFORM"
"""Environment variable: `cpu` for a run without a GPU."""
ERROR = "error.txt"
"""Where the child says what went wrong."""
FOLDER = "run"
"""Trinity's name of the run, below the project's in its checkpoint folder."""


def run(config: Config, experiment: ExperimentFolder, options: LaunchOptions | None = None) -> int:
    """Explore and train, and return the exit code."""
    require_trinity()
    machine = detect_machine()
    enter_machine(machine)
    place = None
    if options is not None and str(options.ray) == "cluster":
        place = ClusterPlace.from_environment(os.environ)
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
    with ExitStack() as stack:
        scratch = stack.enter_context(private_folder())
        stack.callback(end_all, mark)
        plan = prepare(config, experiment, scratch, machine)
        ray = stack.enter_context(ray_settings(options, place, scratch, machine, environment))
        if plan.resumed_step is not None:
            experiment.rewind(plan.resumed_step)
        progress = stack.enter_context(open_progress(options))
        progress.start(experiment.name, "trinity", plan.total_steps, plan.resumed_step or 0)
        order = plan.write(scratch / "run.json", ray, nodes=place.nodes if place else 0)
        child = stack.enter_context(
            started_child(
                "Trinity",
                ["ajet.backbone.ray.trinity.driver", str(order)],
                environment=environment,
                log=plan.log,
                payload=plan.payload,
                mask=experiment.masker.text,
            )
        )
        experiment.events.write("trinity_started", pid=child.process.pid)
        explores = run_mode(config) == "explore"
        sources = [
            Source(MetricsTail(scratch / "episodes.jsonl", unchanged), ends_step=False),
            Source(MetricsTail(scratch / "explorer.jsonl", translate), ends_step=explores),
            Source(MetricsTail(scratch / "trainer.jsonl", translate), ends_step=not explores),
        ]
        silence_s = max(SILENCE_S, 2 * config.ajet.rollout.episode_timeout)
        code = watch(child, sources, experiment, progress, silence_s=silence_s)
        said = scratch / ERROR
        reason = said.read_text(encoding="utf-8") if said.exists() else ""
    if code != 0:
        reason = experiment.masker.text(reason) or last_error(plan.log)
        raise BackboneFailedError(f"Trinity ended with exit code {code}: {reason}\n    its log: {plan.log}")
    if (weights := newest_weights(plan.job_dir)) is not None:
        keep_weights(weights, experiment.hf)
    if options is None or not options.json:
        show_report(experiment.path, quiet=options is not None and options.quiet)
    return 0 if explores else exit_code(experiment.path, plan.resumed_step or 0)


def require_trinity() -> None:
    """Raise, with the command that installs it, if Trinity is absent."""
    if find_spec("trinity") is None or find_spec("ray") is None:
        raise MissingDependencyError(
            "the trinity backbone needs Trinity-RFT, which is not installed\n"
            "    pip install 'agentjet[trinity]' -c constraints/trinity.txt   (in an environment of its own)"
        )


def detect_machine() -> Machine:
    """GPUs, or the CPU where AJET_PLATFORM=cpu asks for it."""
    if os.environ.get(PLATFORM, "").strip().lower() == "cpu":
        return Machine("cpu", flash_attention=False, logical_gpus=CPU_GPUS)
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "the trinity backbone found no GPU on this machine\n"
            f"    to run it small on the CPU, set the environment variable {PLATFORM}=cpu"
        )
    if find_spec("vllm") is None:
        raise MissingDependencyError(
            "the trinity backbone needs vLLM on a machine with GPUs\n"
            "    uv pip install 'trinity-rft[vllm]==0.6.0' --override constraints/trinity-vllm-overrides.txt"
        )
    return Machine("cuda", flash_attention=find_spec("flash_attn") is not None)


def enter_machine(machine: Machine) -> None:
    """Tell this process and its children what they run on."""
    from ajet.backbone.ray.trinity import plugin

    if machine.cpu:
        os.environ[CPU] = "1"
    plugin.install()


@dataclass(slots=True)
class Plan:
    """A run that is ready to start."""

    settings: dict[str, Any]
    payload: str
    log: Path
    job_dir: Path
    total_steps: int
    resumed_step: int | None

    def write(self, path: Path, ray: dict[str, Any], *, nodes: int) -> Path:
        """The order for the child, readable by this user alone."""
        path.touch(mode=0o600)
        order = {
            "settings": self.settings,
            "payload": self.payload,
            "ray": ray,
            "nodes": nodes,
            "resumed_step": self.resumed_step,
            "error_file": str(path.with_name(ERROR)),
        }
        path.write_text(json.dumps(order))
        return path


def prepare(config: Config, experiment: ExperimentFolder, scratch: Path, machine: Machine) -> Plan:
    """Read the tasks, find the model, and map the configuration."""
    from ajet.engine.model_source import ModelSource
    from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks

    check_user_classes(config)
    common = config.ajet.trainer_common
    reader = build_reader(config.ajet.task_reader, config.base_dirs)
    tasks, validates = read_training_tasks(reader), bool(read_validation_tasks(reader))
    base = common.checkpoint_base_dir
    checkpoints = (Path(base).expanduser() / experiment.name if base else experiment.checkpoints).resolve()
    job_dir = checkpoints / config.ajet.project_name / FOLDER
    steps = training_steps(config, len(tasks))
    mode = run_mode(config)
    resumed = newest_step(job_dir, explores=mode == "explore") if common.resume != "never" else None
    if resumed is not None and resumed >= steps:
        raise ConfigError(
            f"{experiment.path} is complete: its newest checkpoint is of step {resumed} of {steps}. To go on, raise "
            "ajet.trainer_common.total_training_steps; to start anew, use --fresh"
        )
    source = ModelSource.resolve(config.ajet.model.path)
    payload = RunPayload(
        config=config.model_dump(mode="json"),
        base_dir=os.getcwd(),
        yaml_path=str(config.yaml_path.resolve()) if config.yaml_path else "",
        model_path=source.path,
        experiment_dir=str(experiment.path.resolve()),
        metrics_file=str(scratch / "episodes.jsonl"),
        total_steps=steps,
        resumed_step=resumed,
    ).encode()
    facts = RunFacts(source.path, checkpoints, steps, payload=payload, metrics_dir=scratch, validates=validates)
    return Plan(
        settings=trinity_settings(config, facts, machine),
        payload=payload,
        log=experiment.path.resolve() / "trinity.log",
        job_dir=job_dir,
        total_steps=steps,
        resumed_step=resumed,
    )


def newest_step(job_dir: Path, *, explores: bool) -> int | None:
    """The step of the newest whole checkpoint (when only exploring: the last step that was explored)."""
    if explores:
        state = job_dir / "explorer_meta.json"
        return int(json.loads(state.read_text())["latest_iteration"]) if state.exists() else None
    trinity = job_dir / "latest_checkpointed_iteration.txt"
    steps = [int(trinity.read_text())] if trinity.exists() else []
    steps += [int(path.name.removeprefix("step_")) for path in job_dir.glob("step_*") if (path / "hf").is_dir()]
    return max(steps, default=None)


def newest_weights(job_dir: Path) -> Path | None:
    """The newest checkpoint's weights in Hugging Face form."""
    step = newest_step(job_dir, explores=False)
    if step is None:
        return None
    ours, trinitys = job_dir / f"step_{step}" / "hf", job_dir / f"global_step_{step}" / "actor" / "huggingface"
    return ours if ours.is_dir() else trinitys
