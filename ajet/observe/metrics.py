"""A run's metrics, step by step: the `MetricsSink` protocol, `metrics.jsonl`, and the trackers that get them too.

A sink gets finite and non-finite floats under slash-separated names (`reward/mean`).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from ajet.config.kinds import TRACKERS, load
from ajet.observe.logs import Masker
from ajet.observe.run_files import LineFile, numbered_records, read_events
from ajet.schema.files import write_whole
from ajet.schema.user_code import import_class

logger = logging.getLogger(__name__)

_PARAMETERS_PER_REQUEST = 100
"""MLflow's limit."""


class MetricsSink(Protocol):
    """Where metrics go. A user's own class needs these two methods and `__init__(self, run: RunInfo)`."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Take metrics of a step. Several calls for one step add up."""

    def close(self) -> None:
        """Deliver what is pending."""


CLOSE_S = 30.0
"""How long trackers have at the end of a run to deliver what is pending."""
HURRIED_CLOSE_S = 5.0
"""The same if the run was interrupted."""


class FanOut:
    """Several sinks as one."""

    def __init__(self, sinks: Iterable[MetricsSink]) -> None:
        self.sinks = list(sinks)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for sink in self.sinks:
            sink.log(step, metrics)

    def close(self, *, in_a_hurry: bool = False) -> None:
        """Trackers deliver what is pending at the same time."""
        deadline = time.monotonic() + (HURRIED_CLOSE_S if in_a_hurry else CLOSE_S)
        for sink in self.sinks:
            if isinstance(sink, BackgroundSink):
                sink.end()
        for sink in self.sinks:
            if isinstance(sink, BackgroundSink):
                sink.close(max(0.0, deadline - time.monotonic()))
            else:
                sink.close()


class JsonlSink:
    """`metrics.jsonl`: one line per step, written as soon as the step ends."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        record |= as_json(metrics)
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a `metrics.jsonl`, in order. Of a step that was run again after a resume, the later values count.

    A last line that is still being written is left out, and so is one that a full disk or a kill has cut off.
    """
    steps: dict[int, dict[str, Any]] = {}
    for _, record in numbered_records(path):
        if record is not None and isinstance(record.get("step"), int):
            steps[record["step"]] = {**steps.pop(record["step"], {}), **record}
    return [steps[step] for step in sorted(steps)]


def helper_use(path: Path, step: int) -> Counter[str]:
    """What a recorded step has asked of the helper model: a validation that is made up for adds to it."""
    recorded: dict[str, Any] = next((line for line in read_metrics(path) if line["step"] == step), {})
    return Counter({name: recorded[name] for name in recorded if name.startswith("helper/")})


def rewind_metrics(path: Path, step: int) -> None:
    """The run resumes after `step`: drop the lines of later steps."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))


def aggregate_log_metrics(many: Iterable[Mapping[str, Any]], prefix: str = "user") -> dict[str, float]:
    """What workflows put in `log_metrics`, averaged over episodes.

    Nested mappings become `a/b`. The numbers under a name (list items one by one, booleans as 0 and 1) are averaged; if
    they came in lists and differ, `…/min` and `…/max` are added. Values that aren't numbers are left out.
    """
    values: dict[str, list[float]] = {}
    listed: set[str] = set()
    for metrics in many:
        _collect(metrics, prefix, values, listed)
    result: dict[str, float] = {}
    for name, numbers in values.items():
        result[name] = sum(numbers) / len(numbers)
        if name in listed and min(numbers) != max(numbers):
            result[f"{name}/min"], result[f"{name}/max"] = min(numbers), max(numbers)
    return result


def _collect(value: Any, name: str, values: dict[str, list[float]], listed: set[str]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _collect(item, f"{name}/{key}", values, listed)
    elif isinstance(value, list | tuple) or (hasattr(value, "tolist") and getattr(value, "ndim", False)):
        listed.add(name)
        for item in value:
            _collect(item, name, values, listed)
    elif isinstance(value, int | float) or hasattr(value, "__float__"):
        try:
            number = float(value)
        except (OverflowError, TypeError, ValueError):  # too large, or not a number after all
            return
        if math.isfinite(number):
            values.setdefault(name, []).append(number)


def as_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Metrics as JSON holds them: it has no NaN or infinity, so they are written as text."""

    def plain(value: float) -> float | str:
        if isinstance(value, int):
            return int(value)
        return float(value) if math.isfinite(value) else str(float(value))

    return {name: plain(value) for name, value in metrics.items()}


def make_sinks(config: Any, folder: Path, masker: Masker, *, with_trackers: bool = True) -> FanOut:
    """`metrics.jsonl`, and the trackers of `trainer_common.logger`.

    `console` and `file` in that list stand for what is always on: the progress display and `metrics.jsonl`.
    """
    ajet = config.ajet
    names = [name for name in dict.fromkeys(ajet.trainer_common.logger) if name not in ("console", "file")]
    if with_trackers and (missing := missing_trackers(config)):
        for said in missing.values():
            logger.warning(said)
        names = [name for name in names if name not in missing]
    trackers = [make_tracker(name, config, folder, masker) for name in names if with_trackers]
    return FanOut([JsonlSink(folder / "metrics.jsonl"), *trackers])


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a tracker gets to know about the run. Contains no secrets."""

    project: str
    name: str
    folder: Path
    config: dict[str, Any]
    """The resolved config, secrets masked."""


class TensorBoardSink:
    """TensorBoard, as event files in the experiment folder's `tensorboard/`."""

    package, install = "tensorboard", "tensorboard"

    def __init__(self, run: RunInfo) -> None:
        # a run that resumes does some steps again: TensorBoard would draw both
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(str(run.folder / "tensorboard"), purge_step=_first_step_again(run.folder))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _first_step_again(folder: Path) -> int | None:
    """The first step that this run does again, if it resumed."""
    step = None
    for event in read_events(folder / "events.jsonl"):
        if event["event"] in ("started", "resumed"):
            step = None
        elif event["event"] == "rewound":
            step = event["step"] + 1
    return step


class WandbSink:
    """Weights & Biases. Gets metrics and the masked config, no console output, no code and no command line, which may
    hold a key. Offline without a login."""

    package, install = "wandb", "wandb"

    def __init__(self, run: RunInfo) -> None:
        wandb = import_module("wandb")
        mode = os.environ.get("WANDB_MODE")
        if mode is None and not wandb.api.api_key:  # it would prompt on the terminal
            mode = "offline"
            logger.warning(
                "not logged in to Weights & Biases: writing to %s; `wandb sync` uploads it later", run.folder
            )
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            config=run.config,
            mode=mode,
            settings=wandb.Settings(
                console="off", save_code=False, disable_git=True, x_disable_stats=True, x_disable_meta=True
            ),
        )
        # its own counter drops what comes late: on verl and Trinity, episodes of a step may end before the last update
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


class SwanLabSink:
    """SwanLab. Gets what Weights & Biases gets. Without a login it writes to the experiment folder: `swanlab watch`
    shows it where `swanlab[dashboard]` is installed, else `swanlab sync` uploads it."""

    package, install = "swanlab", "swanlab"

    def __init__(self, run: RunInfo) -> None:
        self._swanlab = import_module("swanlab")
        known = "SWANLAB_API_KEY" in os.environ or (Path.home() / ".swanlab").exists()
        without = "local" if importlib.util.find_spec("swanboard") else "offline"
        probes = ("hardware", "runtime", "requirements", "git", "swanlab", "monitor")
        self._swanlab.init(
            project=run.project,
            name=run.name,
            config=run.config,
            log_dir=str(run.folder / "swanlab"),
            mode=os.environ.get("SWANLAB_MODE") or ("online" if known else without),
            settings=self._swanlab.Settings(terminal={"proxy_type": "none"}, probe=dict.fromkeys(probes, False)),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._swanlab.log(metrics, step=step)

    def close(self) -> None:
        self._swanlab.finish()


class MlflowSink:
    """MLflow, at `MLFLOW_TRACKING_URI`, otherwise as files in the experiment folder's `mlruns/`."""

    package, install = "mlflow", "mlflow-skinny"

    def __init__(self, run: RunInfo) -> None:
        # without a server: plain files, which newer versions accept only on request (a database needs more packages)
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        server = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").resolve().as_uri()
        self._client: Any = import_module("mlflow.tracking").MlflowClient(server)
        entities = import_module("mlflow.entities")
        self._metric = entities.Metric
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        self._run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        parameters = [entities.Param(_mlflow_name(key), str(value)[:500]) for key, value in flatten(run.config)]
        for start in range(0, len(parameters), _PARAMETERS_PER_REQUEST):
            self._client.log_batch(self._run_id, params=parameters[start : start + _PARAMETERS_PER_REQUEST])

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        entries = [self._metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=entries)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _mlflow_name(name: str) -> str:
    """As MLflow allows it: it would refuse the whole request for one name. Its plain files make each `/` a folder, and
    `val/success` has a value besides `val/success/pass@4`: only the first `/` stays."""
    parts = re.sub(r"[^\w .:/-]", "_", name.replace("@", "_at_")).split("/")
    group, *rest = [part for part in parts if part.strip(".")] or ["_"]
    return "/".join([group, ".".join(rest)] if rest else [group])


def make_tracker(name: str, config: Any, folder: Path, masker: Masker) -> MetricsSink:
    """The tracker of that name, or the user's class (`path.py->MySink`), fed by its own thread."""
    run = RunInfo(
        project=config.ajet.project_name,
        name=folder.name,
        folder=folder,
        config=masker.value(config.model_dump(mode="json")),
    )
    factory = tracker_class(name, config)
    return BackgroundSink(name, lambda: factory(run), masker)


def tracker_class(name: str, config: Any) -> Callable[[RunInfo], MetricsSink]:
    """What makes the tracker of that name. Raises a `UserError` if it is the user's class and can't be imported."""
    if "->" not in name:
        found: Any = load(TRACKERS, name)
    else:
        found = import_class(name, object, key="ajet.trainer_common.logger", base_dirs=config.base_dirs)
    return cast(Callable[[RunInfo], MetricsSink], found)


def missing_trackers(config: Any) -> dict[str, str]:
    """Trackers in `trainer_common.logger` whose package isn't installed, each with a sentence that says so. A run goes
    on without them: its folder holds all metrics."""
    return {
        name: f"ajet.trainer_common.logger: {name!r} is left out, because its package isn't installed (`pip install "
        f"{sink.install}`). All metrics are in the run's folder; trainer_common.logger=console avoids this warning"
        for name in config.ajet.trainer_common.logger
        if name in TRACKERS and importlib.util.find_spec((sink := load(TRACKERS, name)).package) is None
    }


class BackgroundSink:
    """Feeds a sink from its own thread. `log` never waits and never raises."""

    def __init__(
        self,
        name: str,
        build: Callable[[], MetricsSink],
        masker: Masker | None = None,
        *,
        capacity: int = 10_000,
        retry_seconds: float = 30.0,
    ) -> None:
        self._name = name
        self._build = build
        self._masker = masker or Masker()
        self._capacity = capacity
        self._retry_seconds = retry_seconds
        self._waiting: deque[tuple[int, dict[str, float]]] = deque()
        self._change = threading.Condition()
        self._closing = False
        self._lost = 0
        self._complained = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        entry = (step, {self._masker.text(name): float(value) for name, value in metrics.items()})
        with self._change:
            if len(self._waiting) >= self._capacity:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(entry)
            self._change.notify()

    def end(self) -> None:
        """Nothing more will come: deliver what is pending, and close."""
        with self._change:
            self._closing = True
            self._change.notify()

    def close(self, within_s: float = CLOSE_S) -> None:
        self.end()
        self._thread.join(within_s)
        missing = self._lost + len(self._waiting)
        if missing:
            logger.warning("tracker %s missed %d steps; metrics.jsonl has them", self._name, missing)
        elif self._thread.is_alive():
            said = "tracker %s took too long at the run's end and may lack the last steps; metrics.jsonl has them"
            logger.warning(said, self._name)

    def _run(self) -> None:
        sink: MetricsSink | None = None
        while True:
            with self._change:
                while not self._waiting and not self._closing:
                    self._change.wait()
                if not self._waiting:
                    break
                step, metrics = self._waiting[0]
            try:
                if sink is None:
                    sink = self._build()
                sink.log(step, metrics)
            except Exception as error:  # noqa: BLE001  a tracker may fail in any way, and must not disturb the run
                self._complain(error)
                with self._change:
                    if self._closing:
                        break
                    self._change.wait_for(lambda: self._closing, self._retry_seconds)
                continue
            self._complained = False
            with self._change:
                if self._waiting and self._waiting[0][0] == step and self._waiting[0][1] is metrics:
                    self._waiting.popleft()
        if sink is not None:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001  as above
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            text = self._masker.text(f"{type(error).__name__}: {error}")
            logger.warning("tracker %s failed and will be retried; training continues: %s", self._name, text)
            self._complained = True


def flatten(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as pairs of a dotted key and its value."""
    for key, value in block.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, name)
        else:
            yield name, value
