"""`--backbone=debug`: one episode for each of the first tasks, in this process, without Ray or GPU. Trains nothing.

Shows each episode turn by turn and ends with a table. A breakpoint in an IDE, or `bp("TAG")` with `--debug TAG`, stops
in the workflow; meanwhile nothing times out and episodes run one at a time.
"""

from __future__ import annotations

import logging
from concurrent.futures import wait
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ajet.backbone import LaunchOptions
from ajet.backbone.debug_view import EpisodeView, JsonView, QuietView, View
from ajet.backbone.episode_metrics import episode_metrics, played
from ajet.backbone.failures import warn_of
from ajet.backbone.model_calls import ModelCallWatch
from ajet.observe.failure_tally import FailureTally
from ajet.observe.recorder import EpisodeRecorder, RecorderSettings
from ajet.runtime.runtime import STOP_S, Runtime
from ajet.runtime.service_loop import wait_for
from ajet.schema.episode import Episode
from ajet.schema.task import Task
from ajet.task_reader import build_reader, read_training_tasks
from ajet.task_runner.breakpoints import one_prompt

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.observe.experiment import ExperimentFolder

log = logging.getLogger(__name__)

EXIT_ALL_FAILED = 1
EXIT_INTERRUPTED = 130
DEBUGGER_QUIT = "BdbQuit"


def run(config: Config, experiment: ExperimentFolder, options: LaunchOptions) -> int:
    """0: at least one episode has a reward; 1: none has; 130: interrupted, or the user quit the debugger. Raises
    `NoModelCallError` if none asked the tuned model."""
    config = debug_config(config)
    tasks = _first_tasks(config)
    view = _view(config, options)
    recorder = EpisodeRecorder(experiment.episodes, RecorderSettings.from_config(config), masker=experiment.masker)
    try:
        code = _DebugRun(config, tasks, view, recorder).run()
    finally:
        recorder.close()
    threshold = config.ajet.task_judge.success_threshold
    metrics = episode_metrics(view.episodes, success_threshold=threshold)
    experiment.metrics.log(0, metrics)
    view.close(experiment.path)
    ModelCallWatch(config).look_at("this run", played(view.episodes))
    warn_of(0, metrics)
    return code


def debug_config(config: Config) -> Config:
    """The config with the seed and the engine size that `ajet.debug` asks for."""
    debug, rollout = config.ajet.debug, config.ajet.rollout
    changes: dict[str, int | str] = {}
    named = rollout.engine_by_former_name
    if named in ("vllm", "sglang") and rollout.vllm.python is None and find_spec(named) is None:
        log.warning(
            "rollout.name: %s is not installed here, so the embedded engine answers in this debug run; rollout.engine: "
            "%s insists on it",
            *(named, named),
        )
        changes["engine"] = "torch"
    if debug.debug_vllm_seed is not None:
        changes["seed"] = debug.debug_vllm_seed
    if debug.debug_tensor_parallel_size is not None:
        changes["tensor_model_parallel_size"] = debug.debug_tensor_parallel_size
    ajet = config.ajet.model_copy(update={"rollout": rollout.model_copy(update=changes)})
    return config.model_copy(update={"ajet": ajet})


class _DebugRun:
    """Runs the episodes of one debug run."""

    def __init__(self, config: Config, tasks: list[Task], view: View, recorder: EpisodeRecorder) -> None:
        self._tasks = tasks
        self._view = view
        self._recorder = recorder
        self._task_of = {task.task_id: task for task in tasks}
        self._tally = FailureTally()
        self._quit = False
        self._runtime = Runtime(
            config, parallel=min(config.ajet.debug.debug_max_parallel, len(tasks)), on_episode=self._ended
        )

    def run(self) -> int:
        try:
            with one_prompt(), self._runtime as runtime:
                self._view.started(len(self._tasks), runtime.pool.parallel)
                self._run_episodes(runtime)
                self._recorder.use_tokenizer(runtime.model().tokenizer)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        if self._quit:
            return EXIT_INTERRUPTED
        return 0 if any(episode.usable for episode in self._view.episodes) else EXIT_ALL_FAILED

    def _run_episodes(self, runtime: Runtime) -> None:
        """Ctrl-C ends the episodes as `cancelled`; they are shown and recorded like any other."""
        running = runtime.submit(runtime.pool.run_episodes(self._tasks))
        try:
            wait_for(running)
        except KeyboardInterrupt:
            runtime.loop.call_soon_threadsafe(runtime.pool.stop_all)
            wait([running], STOP_S)
            raise

    def _ended(self, episode: Episode) -> None:
        task = self._task_of.get(episode.task_id)
        self._recorder.record(episode, 0, task=task)
        self._view.episode(episode, task.main_query if task is not None else "")
        self._tally.tell(episode, only_to_file=True)
        if episode.failure is not None and episode.failure.kind == DEBUGGER_QUIT:
            self._quit = True
            self._runtime.pool.stop_all()


def _first_tasks(config: Config) -> list[Task]:
    reader = build_reader(config)
    return read_training_tasks(reader)[: config.ajet.debug.debug_first_n_tasks]


def _view(config: Config, options: LaunchOptions) -> View:
    if options.json:
        return JsonView()
    threshold = config.ajet.task_judge.success_threshold
    return QuietView() if options.quiet else EpisodeView(threshold)
