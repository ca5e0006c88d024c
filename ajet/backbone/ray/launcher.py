"""`run`: one run on Ray, from the launcher's side. A child process, the driver, runs verl or Trinity; this one watches.

What differs between the two is a `BackboneAdapter`. Whatever was started is gone when `run` returns or raises.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil

from ajet.backbone import LaunchOptions
from ajet.backbone.checks import read_tasks
from ajet.backbone.failures import GapWatch
from ajet.backbone.plan import BEFORE_THE_FIRST, lacks_validation, training_steps
from ajet.backbone.ray.facts import (
    EPISODE_METRICS,
    WARNINGS,
    DriverInput,
    Machine,
    Remark,
    RunError,
    RunFacts,
    RunPayload,
    Settings,
)
from ajet.backbone.ray.start import ClusterPlace, ray_environment, ray_settings, serve_as_worker
from ajet.backbone.ray.watcher import (
    SILENCE_S,
    BackboneFailedError,
    Source,
    Tail,
    last_error,
    started_child,
    watch,
)
from ajet.backbone.report import exit_code, show_report
from ajet.observe.metrics import read_metrics
from ajet.observe.progress import Progress
from ajet.observe.progress_state import RunningTotal
from ajet.observe.run_files import was_cut_off
from ajet.schema.errors import FRESH, ConfigError, FeatureUnavailableError, UserError
from ajet.system.processes import RAY_RUN, end_all
from ajet.task_runner.remote import ANY_HOST, runner_key

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.engine.model_source import ModelSource
    from ajet.observe.experiment import ExperimentFolder

log = logging.getLogger(__name__)

SCRATCH = Path("/tmp")
SCRATCH_NAME = "ajv"
DRIVER_INPUT = "run.json"
LORA = "lora_train_meta.json"
"""What verl writes beside the weights of a model with adapters: their rank and factor."""


class BackboneAdapter(Protocol):
    """What the launcher must know of verl or Trinity."""

    name: str
    """The backbone's name, as on the command line."""
    title: str
    """The library's name, for messages."""
    driver: str

    def require(self) -> None:
        """Raise, with the command that installs it, if the library is missing."""

    def detect_machine(self) -> Machine:
        """GPUs, or the CPU where an environment variable asks for it. Raises if there are none."""

    def check(self, config: Config, machine: Machine, options: LaunchOptions) -> None:
        """Raise if this machine can't do what the configuration asks."""

    def notes(self, config: Config, machine: Machine) -> list[Remark]:
        """Our keys that are honoured only in part, or not at all."""

    def settings(self, config: Config, facts: RunFacts, machine: Machine) -> Settings:
        """The library's configuration."""

    def environment(self, scratch: Path) -> dict[str, str]:
        """Variables of the driver beside those of Ray."""

    def sources(self, config: Config, scratch: Path) -> list[Source]:
        """The library's own metrics."""

    def trains(self, config: Config) -> bool:
        """Whether the run updates weights."""

    def validates(self, config: Config) -> bool:
        """Whether the run validates, if there are tasks for it."""

    def newest_step(self, config: Config, checkpoints: Path) -> int | None:
        """The step after which a resumed run goes on; None: from the start."""

    def newest_weights(self, config: Config, checkpoints: Path) -> Path | None:
        """The newest checkpoint's weights in Hugging Face form."""


def run(adapter: BackboneAdapter, config: Config, experiment: ExperimentFolder, options: LaunchOptions) -> int:
    adapter.require()
    machine = adapter.detect_machine()
    place = ClusterPlace.from_environment(os.environ) if options.ray_cluster else None
    mark = uuid.uuid4().hex
    shared = place is not None or options.ray_address is not None
    environment = {**os.environ, **ray_environment(os.environ, shared=shared), RAY_RUN: mark}
    if place is not None and place.rank > 0:
        try:
            return serve_as_worker(place, machine, environment)
        finally:
            end_all(RAY_RUN, mark)
    for note in adapter.notes(config, machine):
        if not note.refused:
            log.warning("%s", note)
    adapter.check(config, machine, options)
    with ExitStack() as stack:
        scratch = stack.enter_context(private_folder())
        stack.callback(end_all, RAY_RUN, mark)
        prepared = prepare(adapter, config, experiment, scratch, machine)
        facts = prepared.facts
        if prepared.remains:
            ray = stack.enter_context(ray_settings(options, place, scratch, machine, environment))
            given = DriverInput(prepared.settings, facts.payload, ray, place.nodes if place else 0)
            given.write(scratch / DRIVER_INPUT)
            if config.ajet.task_runner.wrapper_type == "remote":
                log.warning("%s", how_to_connect(config))
            environment |= adapter.environment(scratch)
            _watch_driver(adapter, config, experiment, options, prepared, environment, machine)
    if (weights := adapter.newest_weights(config, facts.checkpoint_dir)) is not None:
        keep_weights(weights, experiment.hf)
    if not options.json:
        show_report(config, experiment.path, quiet=options.quiet)
    done = facts.resumed_step or 0
    after = done if done < facts.total_steps else 0  # no step was left: those before count
    return exit_code(config, experiment.path, after) if adapter.trains(config) else 0


def _watch_driver(
    adapter: BackboneAdapter,
    config: Config,
    experiment: ExperimentFolder,
    options: LaunchOptions,
    prepared: PreparedRun,
    environment: dict[str, str],
    machine: Machine,
) -> None:
    """Start the driver and watch it to its end. Raises if it fails."""
    facts, scratch = prepared.facts, prepared.facts.scratch
    if experiment.resumed and not config.ajet.trainer_common.val_only:
        experiment.rewind(BEFORE_THE_FIRST if facts.resumed_step is None else facts.resumed_step)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress.create(options.progress_mode()))
        progress.state.spent = RunningTotal.of(read_metrics(experiment.path / "metrics.jsonl"))
        progress.start(experiment.name, adapter.name, facts.total_steps, facts.resumed_step or 0, options.viewer)
        progress.phase("train", detail=f"{adapter.name} on Ray; its log is {prepared.log}")
        child = stack.enter_context(
            started_child(
                [adapter.driver, str(scratch / DRIVER_INPUT)],
                environment=environment,
                log=prepared.log,
                payload=facts.payload,
                mask=experiment.masker.text,
            )
        )
        experiment.events.write(f"{adapter.name}_started", pid=child.process.pid)
        episodes = Source(Tail(scratch / EPISODE_METRICS), dict, ends_step=False)
        silence_s = max(SILENCE_S, 2 * config.ajet.rollout.episode_timeout)
        gap = GapWatch(machine.dtype(config.ajet.model.dtype))
        sources = [episodes, *adapter.sources(config, scratch)]
        warnings = Tail(scratch / WARNINGS)
        code = watch(adapter.title, child, sources, warnings, experiment, progress, gap, silence_s=silence_s)
    if code != 0:
        raise why_it_failed(adapter.title, code, RunError.read(scratch), prepared.log, experiment.masker.text)


def why_it_failed(
    title: str, code: int, reported: RunError | None, log_file: Path, mask: Callable[[str], str]
) -> BackboneFailedError | UserError:
    """What to raise of a driver that failed: what a process reported, or else what the log or the exit code says."""
    if reported is not None and reported.users:
        return UserError(mask(reported.text))
    ended = f"{title} ended with exit code {code}"
    reason = last_error(log_file) if reported is None else mask(reported.text)
    if code < 0:
        ended = f"{title} was ended by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL and reported is None:  # which writes nothing
            reason = "from outside, or by the kernel because memory ran out"
    return BackboneFailedError(f"{ended}: {reason}\n    its log: {log_file}")


def how_to_connect(config: Config) -> str:
    """What the process that serves runners would say, if anybody saw it: it is on this machine, or the head node."""
    remote = config.ajet.task_runner.remote
    scheme = "https" if remote.tls_cert else "http"
    host = socket.gethostname() if remote.host in ANY_HOST else remote.host
    return f"runners connect with: ajet runner --connect {scheme}://{host}:{remote.port} --workflow FILE.py->CLASS"


@dataclass(frozen=True, slots=True)
class PreparedRun:
    settings: Settings
    facts: RunFacts
    log: Path
    remains: bool
    """Whether a step or a validation is left to run."""


def prepare(
    adapter: BackboneAdapter, config: Config, experiment: ExperimentFolder, scratch: Path, machine: Machine
) -> PreparedRun:
    """Read the tasks, find the model, and map the configuration."""
    from ajet.engine.model_source import ModelSource

    common = config.ajet.trainer_common
    tasks, validation = read_tasks(config)
    experiment.keep_checkpoints_in(common.checkpoint_base_dir)
    checkpoints = experiment.checkpoints.resolve()
    steps = training_steps(config, len(tasks))
    resumed = adapter.newest_step(config, checkpoints) if common.resume != "never" else None
    recorded = read_metrics(experiment.path / "metrics.jsonl") if experiment.resumed else []
    if resumed is None and not common.val_only and any("time/checkpoint" in step for step in recorded):
        raise ConfigError(
            f"{experiment.checkpoints} holds no whole checkpoint any more: the run would begin anew and drop its "
            f"records. Bring the checkpoints back, or use {FRESH}: the records are kept aside"
        )
    lacks = False
    if resumed is not None and validation and adapter.validates(config):
        lacks = lacks_validation(config, recorded, resumed, max(steps, resumed))
    ended = resumed is not None and resumed >= steps and not common.val_only
    if ended and not (lacks or was_cut_off(experiment.path)):
        raise ConfigError(
            f"{experiment.path} is complete: its newest checkpoint is of step {resumed} of {steps}. To go on, raise "
            f"ajet.trainer_common.total_training_steps; to start anew: {FRESH}"
        )
    source = ModelSource.resolve(config.ajet.model.path)
    refuse_changing_rope(adapter.title, source, config.ajet.rollout.max_model_len)
    payload = RunPayload(
        config=config.model_dump(mode="json"),
        base_dir=os.getcwd(),
        yaml_path=str(config.yaml_path.resolve()) if config.yaml_path else "",
        model_path=source.path,
        experiment_dir=str(experiment.path.resolve()),
        reports=str(scratch),
        total_steps=steps,
        resumed_step=resumed,
        lacks_validation=lacks,
        runner_key=runner_key() if config.ajet.task_runner.wrapper_type == "remote" else "",
    ).encode()
    facts = RunFacts(
        source.path,
        checkpoints,
        steps,
        payload=payload,
        scratch=scratch,
        validates=bool(validation),
        resumed_step=resumed,
        lacks_validation=lacks,
    )
    log_file = experiment.path.resolve() / f"{adapter.name}.log"
    return PreparedRun(adapter.settings(config, facts, machine), facts, log_file, remains=lacks or not ended)


def refuse_changing_rope(title: str, source: ModelSource, longest: int) -> None:
    """Refuse rows that would be computed otherwise than they were sampled.

    With such a model, verl and Trinity compute a batch as its longest row asks, and vLLM every call as its
    `max_model_len` does.
    """
    from ajet.engine.attention_rules import changing_rope

    rope = changing_rope(source.config())
    if rope is not None and longest > rope.until:
        raise FeatureUnavailableError(
            f"ajet.rollout.max_model_len is {longest}, and in rows of more than {rope.until} tokens this model's "
            f"rotary embedding ({rope.kind}) changes, which {title} would not compute as it was sampled: set the key "
            f"to {rope.until} or less, or use --backbone=local, which trains each call by itself"
        )


@contextmanager
def private_folder() -> Iterator[Path]:
    """A temporary folder. Its path is short: Ray puts sockets into it, whose paths are limited."""
    remove_abandoned(SCRATCH)
    folder = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_NAME}{os.getpid()}_", dir=SCRATCH))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(place: Path) -> None:
    """Remove the private folders of launchers that were killed: their names hold the process id."""
    for folder in place.glob(f"{SCRATCH_NAME}*_*"):
        pid = folder.name.removeprefix(SCRATCH_NAME).partition("_")[0]
        with suppress(FileNotFoundError):  # another launcher has removed it
            if pid.isdigit() and not psutil.pid_exists(int(pid)) and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def keep_weights(source: Path, target: Path) -> None:
    """Copy weights in Hugging Face form to where every backbone leaves the newest."""
    if not source.is_dir():
        return
    scratch = target.with_name(target.name + ".part")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch)
    if (adapters := source.with_name(LORA)).exists():
        given = json.loads(adapters.read_text())
        merge_adapters(scratch, given["lora_alpha"] / given["r"])
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)


def merge_adapters(folder: Path, scale: float) -> None:
    """Add the adapters to the weights beside them. verl writes both as they lie in peft's model: under its names,
    transformers finds none of them, and takes random weights instead."""
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import load_file

    given = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    merged, left = {}, []
    for name, tensor in given.items():
        layer = name.removesuffix(".base_layer.weight")
        if layer != name and (down := given.get(f"{layer}.lora_A.default.weight")) is not None:
            up = given[f"{layer}.lora_B.default.weight"]
            tensor = (tensor.float() + scale * (up.float() @ down.float())).to(tensor.dtype)
        elif layer != name:  # an embedding's
            left.append(layer.removeprefix("base_model.model."))
        if ".lora_" not in name:
            merged[name.removeprefix("base_model.model.").replace(".base_layer.", ".")] = tensor
    if left:
        log.warning("hf/ lacks what the adapters of %s learnt: only the checkpoint has it", ", ".join(left))
    save_torch_state_dict(merged, folder)
