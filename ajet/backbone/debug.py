"""`--backbone=debug`: one episode for each of the first tasks, in this process, without Ray or GPU. Trains nothing.

Shows each episode turn by turn and ends with a table. A breakpoint in an IDE, or `bp("TAG")` with `--debug TAG`, stops
in the workflow; meanwhile nothing times out and episodes run one at a time.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ajet.backbone import LaunchOptions
from ajet.backbone.failures import ModelCallWatch, warn_of
from ajet.backbone.metrics import episode_metrics, is_success, played
from ajet.context_tracker import describe_reasons
from ajet.observe.episode_codec import conversation
from ajet.observe.progress import still_open
from ajet.observe.progress_state import FailureTally
from ajet.observe.recorder import EpisodeRecorder
from ajet.schema.chat import Message, plain_text
from ajet.schema.episode import ROOT, Call, Episode
from ajet.schema.errors import EXIT_FAILED, EXIT_INTERRUPTED, condensed
from ajet.schema.printable import counted, printable
from ajet.schema.task import Task
from ajet.task_reader import build_reader, read_training_tasks
from ajet.task_runner.breakpoints import one_prompt
from ajet.task_runner.runtime import STOP_S, Runtime, wait_for

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.observe.experiment import ExperimentFolder

log = logging.getLogger(__name__)

TEXT_CHARS = 600
"""How much of a message is shown: enough to see what happened. `episodes.sqlite` has all of it."""
TRACEBACK_LINES = 12


class View:
    """Collects the episodes; subclasses show them. Only `episode` is called on the service loop."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []
        self._lock = threading.Lock()
        self._stdout = sys.stdout

    @property
    def out(self) -> IO[str]:
        """Standard output, even while a workflow has put another stream in its place."""
        return still_open(self._stdout)

    def started(self, tasks: int, parallel: int) -> None:
        """The workflow is imported and episodes begin."""

    def episode(self, episode: Episode, query: str) -> None:
        with self._lock:
            self.episodes.append(episode)
            self.show(episode, query)

    def show(self, episode: Episode, query: str) -> None:
        """Show one episode."""

    def close(self, folder: Path) -> None:
        """All episodes have ended, or the run was interrupted."""


class QuietView(View):
    """Failures only, on standard error."""

    def show(self, episode: Episode, query: str) -> None:
        if episode.failure is not None:
            line = f"{episode.task_id}: {episode.status}: {episode.failure.in_short}"
            print(printable(line), file=sys.stderr)


class JsonView(View):
    """One JSON object per episode, on standard output."""

    def show(self, episode: Episode, query: str) -> None:
        calls = [
            {"agent": call.agent, "turn": call.turn + 1, "new_messages": call.new_messages, "reply": call.reply}
            for call in episode.tree.calls
        ]
        shown = {"event": "episode", "query": query, **facts(episode), "calls": calls}
        print(json.dumps(shown), file=self.out)

    def close(self, folder: Path) -> None:
        shown = {"event": "ended", "episodes": len(self.episodes), "folder": str(folder)}
        print(json.dumps(shown), file=self.out, flush=True)


class EpisodeView(View):
    """For people."""

    def __init__(self, success_threshold: float) -> None:
        super().__init__()
        from rich.console import Console

        class Output(Console):
            def on_broken_pipe(self) -> None:
                """End the run: its reader is gone. (Rich would end only this thread.)"""
                raise BrokenPipeError

        self._console = Output(highlight=False, soft_wrap=True)
        self._threshold = success_threshold
        self._total = 0

    def started(self, tasks: int, parallel: int) -> None:
        self._total = tasks
        pace = "one at a time" if parallel == 1 else f"at most {parallel} at a time"
        self._line(f"{counted(tasks, 'task')}, one episode each, {pace}", "dim")

    def show(self, episode: Episode, query: str) -> None:
        self._console.file = self.out
        number = f"{len(self.episodes)}/{self._total}"
        self._line(f"\n── episode {number} · task {episode.task_id} " + "─" * 30, "bold")
        if query:
            self._line(f"   {shortened(query, 200)}", "dim")
        told: list[Message] = []
        for index, call in enumerate(episode.tree.calls):
            self._call(call, told)
            told = conversation(episode.tree, index)
        style = "green" if is_success(episode, self._threshold) else "yellow" if episode.usable else "red"
        self._line(f"   {in_short(episode)}", style)
        if episode.failure is not None:
            self._line(f"   {episode.failure.kind}: {shortened(episode.failure.message, TEXT_CHARS)}", "red")
            if episode.failure.place:
                self._line(f"   at {episode.failure.place}", "red")
            for line in condensed(episode.failure.traceback).rstrip().splitlines()[-TRACEBACK_LINES:]:
                self._line(f"   │ {line}", "dim")

    def _call(self, call: Call, told: list[Message]) -> None:
        """`told`: the conversation shown last. A branch that begins like it is shown from where they differ."""
        same = 0
        if call.extends == ROOT:
            same = next(
                (i for i, pair in enumerate(zip(told, call.new_messages, strict=False)) if not _alike(*pair)), len(told)
            )
            if call.fork is not None:
                self._line(f"   branch: {call.fork.reason} {shortened(call.fork.detail, 200)}".rstrip(), "magenta")
        for message in call.new_messages[same:]:
            self._message(message, "cyan" if message.get("role") == "tool" else "dim")
        cut = f", {call.finish_reason}" if call.finish_reason != "stop" else ""
        tokens = f"{len(call.logprobs)} tokens{cut}"
        self._line(f"   {call.agent} · turn {call.turn + 1} ({tokens}{', not trained' * (not call.trainable)})", "bold")
        self._message(call.reply, "")

    def _message(self, message: Message, style: str) -> None:
        if text := plain_text(message.get("reasoning_content")):
            self._line(f"     (thinks) {shortened(text)}", "dim")
        text = plain_text(message.get("content"))
        speaker = "" if message.get("role") == "assistant" else f"{message.get('role')}: "
        if text or not message.get("tool_calls"):
            self._line(f"     {speaker}{shortened(text)}", style)
        for name, arguments in tool_calls(message):
            self._line(f"     → {name}({shortened(arguments, 200)})", "cyan")

    def close(self, folder: Path) -> None:
        self._console.file = self.out
        if self.episodes:
            self._console.print()
            self._console.print(self._table())
            for line in describe_reasons(episode.tree for episode in self.episodes):
                self._line(f"branches: {line}", "dim")
        failed = sum(not episode.usable for episode in self.episodes)
        interrupted = f", {self._total - len(self.episodes)} not run" * (len(self.episodes) < self._total)
        self._line(
            f"{counted(len(self.episodes), 'episode')}, {failed} without a reward{interrupted}. Recorded in {folder}"
        )

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("task", overflow="fold")
        table.add_column("status")
        # short names: with an id made from a task's content and `workflow_error`, a line has 80 columns
        for name in ("reward", "success", "turns", "tools", "tokens", "time s"):
            table.add_column(name, justify="right")
        for episode in self.episodes:
            row = facts(episode)
            success = is_success(episode, self._threshold) if episode.usable else None
            cells = [
                str(row["task"]),
                str(row["status"]),
                "–" if episode.reward is None else f"{episode.reward:g}",
                {True: "yes", False: "no", None: "–"}[success],
                *(str(row[name]) for name in COUNTED),
                f"{row['seconds']:.1f}",
            ]
            style = "" if episode.usable else "red"
            table.add_row(*(Text(printable(cell), style=style) for cell in cells))
        return table

    def _line(self, text: str, style: str = "") -> None:
        """Print text as it is: a model's output is neither markup nor terminal control codes."""
        self._console.print(printable(text), style=style or None, markup=False)


def _alike(*two: Message) -> bool:
    return len({(one.get("role"), plain_text(one.get("content")).strip()) for one in two}) == 1


def in_short(episode: Episode) -> str:
    """`completed · reward 1 · 2 turns, 1 tool call, 34 tokens · 1.2 s`"""
    row = facts(episode)
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:g}"
    counts = ", ".join(counted(int(row[name]), name[:-1].replace("_", " ")) for name in COUNTED)
    outcomes = f" ({', '.join(episode.outcomes)})" if episode.outcomes else ""
    tries = f" · {episode.attempts} attempts" if episode.attempts > 1 else ""
    return f"{episode.status}{outcomes} · {reward} · {counts} · {row['seconds']:.1f} s{tries}"


COUNTED = ("turns", "tool_calls", "tokens")


def facts(episode: Episode) -> dict[str, Any]:
    """An episode as a row of a table."""
    calls = [call for call in episode.tree.calls if call.run != ROOT]
    return {
        "task": episode.task_id,
        "episode": episode.episode_id,
        "status": str(episode.status),
        "reward": episode.reward,
        "is_success": episode.is_success,
        "turns": len(calls),
        "tool_calls": sum(len(call.reply.get("tool_calls") or ()) for call in calls),
        "tokens": episode.tree.sampled_tokens,
        "seconds": round(episode.timings.get("total", 0.0), 3),
        "failure": None if episode.failure is None else f"{episode.failure.kind}: {episode.failure.message}",
    }


def tool_calls(message: Message) -> Iterator[tuple[str, str]]:
    """The name and arguments of each tool call."""
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        yield str(function.get("name")), arguments if isinstance(arguments, str) else json.dumps(arguments)


def shortened(text: str, limit: int = TEXT_CHARS) -> str:
    """The text, cut at `limit` and indented."""
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text) - limit} more characters)"
    return text.replace("\n", "\n       ")


DEBUGGER_QUIT = "BdbQuit"


def run(config: Config, experiment: ExperimentFolder, options: LaunchOptions) -> int:
    """0: at least one episode has a reward; 1: none has; 130: interrupted, or the user quit the debugger. Raises
    `NoModelCallError` if none asked the tuned model."""
    config = debug_config(config)
    tasks = read_training_tasks(build_reader(config))[: config.ajet.debug.debug_first_n_tasks]
    view = _view(config, options)
    with closing(EpisodeRecorder(experiment.episodes, config.ajet, masker=experiment.masker)) as recorder:
        code = _DebugRun(config, tasks, view, recorder).run()
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
    named = rollout.engine if config.old_keys.renamed.get("rollout.name") else None  # written for another machine
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
            self._quit = True
        if self._quit:
            return EXIT_INTERRUPTED
        return 0 if any(episode.usable for episode in self._view.episodes) else EXIT_FAILED

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
        self._tally.add_and_log(episode, only_to_file=True)
        if episode.failure is not None and episode.failure.kind == DEBUGGER_QUIT:
            self._quit = True
            self._runtime.pool.stop_all()


def _view(config: Config, options: LaunchOptions) -> View:
    if options.json:
        return JsonView()
    return QuietView() if options.quiet else EpisodeView(config.ajet.task_judge.success_threshold)
