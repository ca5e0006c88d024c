"""`ajet`: finds the subcommand and imports nothing else, so `ajet --help` is quick. `interruption` is Ctrl-C's way
out.

A subcommand is a module `ajet/cli/<name>.py` with `run(argv) -> int`, and a line in `COMMANDS`; small ones share a
module with another, and their line names the function. Without a subcommand, `ajet --conf …` runs a job
(`ajet/backbone/launch.py`). Exit codes: 0 done, 1 failed, 2 something the user can correct, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from ajet.schema import __version__
from ajet.schema.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED, EXIT_USER_ERROR, AjetError, UserError

if TYPE_CHECKING:
    import asyncio
    from multiprocessing.process import BaseProcess

Run = Callable[[Sequence[str]], int]
"""A command: takes its arguments, returns the exit code."""
POOL_THREADS = ("asyncio_", "ThreadPoolExecutor-")
"""How the names of executors' threads begin."""
EXIT_S = 3.0
"""How long the interpreter may take to exit once everything of ours is closed."""


class Command(NamedTuple):
    """A line of `ajet --help`."""

    usage: str
    summary: str
    function: str = ""
    """`module.function` in `ajet/cli/`, if it isn't the `run` of the module with the command's name."""


COMMANDS = {
    "init": Command("NAME|--skill", "create a new project that runs as it is, or a skill for coding agents"),
    "tune": Command("CONF", "tune prompt templates, then train the weights with the best of them"),
    "validate": Command("CONF", "check a config and show what would run"),
    "audit": Command("CONF", "say whether a task can be trained, and what a run will take"),
    "migrate": Command("FILE", "write another system's configuration as ours, key by key"),
    "doctor": Command("", "check this machine and its packages, and suggest fixes"),
    "schema": Command("", "print the JSON schema of configs, for editors", "config.schema"),
    "config": Command("show|schema|docs", "the resolved config, the JSON schema, the documentation"),
    "runs": Command("[FOLDER]", "list runs, how far they are and how well they do"),
    "compare": Command("RUN [RUN …]", "show where runs differ: results, config, and task by task"),
    "diagnose": Command("RUN", "say what is wrong with a run, with evidence and the key to change"),
    "view": Command("[EXPERIMENT]", "show runs and episodes in the browser", "runs.view"),
    "report": Command("EXPERIMENT", "write one HTML file about a run", "runs.report"),
    "eval": Command("CONF", "play models on tasks without training, and compare them"),
    "rollout": Command("…", "run a ready agent on a file of tasks, with any model, without training"),
    "bench": Command("MATRIX.yaml", "run a matrix of training runs, and hold each to its band"),
    "export": Command("…", "export a run's weights, episodes or prompt templates"),
    "chat": Command("CONF|EXPERIMENT", "talk to a model or checkpoint"),
    "serve": Command("CONF|EXPERIMENT", "serve it as an OpenAI-compatible endpoint"),
    "tools": Command("[TOOL ...]", "list the tools that agents can be given", "rollout.tools"),
    "env": Command("serve TARGET", "serve environments over HTTP, each in a process of its own", "serve.environments"),
    "store": Command("--path FILE", "serve a rollout store: a queue, attempts, spans, resources"),
    "tasks": Command("generate|check CONF", "have tasks written or collected; find tasks trained on and validated on"),
    "rubrics": Command("make CONF", "have a model write the rubrics of a judge from graded examples", "tasks.rubrics"),
    "judge": Command("CONF --scores FILE", "say how well a judge agrees with scores that you trust"),
    "runner": Command("--connect URL", "run episodes of a training run elsewhere, with this machine's workflow"),
    "agentops": Command("[--out FILE]", "receive the spans of programs instrumented with AgentOps", "serve.agentops"),
    "vllm": Command("serve MODEL", "start a vLLM server with the settings ajet needs", "serve.vllm"),
    "completion": Command("bash|zsh|fish", "print a script with which the shell completes commands"),
}
"""Subcommands by name."""

RUN_HELP = """\
run a job:
  ajet --conf FILE.yaml [--backbone NAME] [KEY=VALUE ...]

  --conf FILE            the YAML file
  --backbone NAME        local (train here, the default), debug (run a few
                         tasks, train nothing), verl, trinity, prompt (tune
                         prompt templates, train nothing)
  KEY=VALUE              override a key: rollout.num_repeat=8, verl.trainer.x=1

  --exp-dir FOLDER       where experiments go (default: saved_experiments)
  --fresh                start over instead of resuming; the earlier run is kept
                         under another name
  --debug TAGS           stop at breakpoints bp("TAG") with these tags
                         (TAG1,TAG2 or all)
  --quiet | --json       show only errors | one JSON object per line

  --with-logview         start the viewer with the run
  --with-ray             start a private Ray on this machine (verl, trinity)
  --with-ray-cluster     join or start a Ray cluster as MASTER_ADDR and related
                         variables say
  --ray-address ADDR     use a Ray that is already running
  --skip-check-avail-gpu don't check whether the GPUs are free
  --with-NAME            run $NAME_SCRIPT in $NAME_PATH as a service, and stop
                         it with the run
  --prefix TEXT          prefix for the names of started services
  --kill                 end all your runs and services on this machine (with
                         --prefix: only those services)
  --autokill             do the same before the run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Returns the exit code."""
    if argv is not None:
        return _guarded(list(argv))
    _mend_streams()
    code = _guarded(sys.argv[1:])
    if _MayBeFull.lost:
        print(f"warning: what was printed is incomplete: {_MayBeFull.lost}", file=sys.stderr)
        if code == 0 and sys.argv[1] in COMMANDS and sys.argv[1] != "tune":  # of a run, it is the least
            code = EXIT_FAILED
    return _ensure_exit(code)


class _MayBeFull(FileIO):
    """Loses what a full disk has no room for."""

    lost = ""
    """Why something was lost of standard output."""

    def write(self, text: Any, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if self.fileno() == 1:
                _MayBeFull.lost = str(error.strerror)
            return len(text)


def _mend_streams() -> None:
    """Streams that were closed (`>&-`) lead nowhere, what the terminal's encoding lacks is escaped, and what a full
    disk doesn't take is lost: nothing that is printed ends a run."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor: this one
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = _mended(1, sys.stdout), _mended(2, sys.stderr)


def _mended(descriptor: int, stream: TextIO) -> TextIO:
    return TextIOWrapper(
        BufferedWriter(_MayBeFull(descriptor, "w", closefd=False)),
        stream.encoding,
        "backslashreplace",
        line_buffering=bool(stream.line_buffering),
        write_through=isinstance(stream, TextIOWrapper) and stream.write_through,
    )


def _guarded(arguments: list[str]) -> int:
    try:
        try:
            code = _dispatch(arguments)
        except SystemExit:  # of `--help`
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away (`ajet config docs | head`)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:  # what is left in its buffer goes nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return EXIT_PIPE_CLOSED


def _ensure_exit(code: int) -> int:
    """Make sure that the program ends. On exit Python waits for the threads of executors (`asyncio.to_thread`) and for
    the processes of `multiprocessing`, and user code may have left something that never ends in one."""
    if _what_holds_us():
        threading.Thread(target=_exit_anyway, args=(code,), daemon=True).start()
    return code


def _what_holds_us() -> list[str]:
    """Names of what Python waits for on exit: executors' threads, daemons or not, and threads and processes of user
    code."""
    others = [one for one in threading.enumerate() if one is not threading.main_thread()]
    threads = [one.name for one in others if not one.daemon or one.name.startswith(POOL_THREADS)]
    return threads + [child.name for child in _children()]


def _children() -> list[BaseProcess]:
    """Processes that user code started by `multiprocessing`: at exit Python ends the daemons and joins the others."""
    module = sys.modules.get("multiprocessing.process")
    return [child for child in module.active_children() if not child.daemon] if module else []


def _exit_anyway(code: int) -> None:
    time.sleep(EXIT_S)
    try:
        print(f"warning: ended without waiting for: {', '.join(_what_holds_us())}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # even if nobody reads them any more
        for child in _children():
            child.kill()
        os._exit(code)


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_help())
        return EXIT_USER_ERROR
    if arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"ajet {__version__}")
        return 0
    first = arguments[0]
    if first in COMMANDS:
        return _run(lambda: function_of(first), arguments[1:])
    if not first.startswith("-") and "=" not in first:
        from difflib import get_close_matches

        near = get_close_matches(first, COMMANDS, n=1)
        if first.endswith((".yaml", ".yml")):
            hint = f"to run it: ajet --conf {first}"
        elif near:
            hint = f"did you mean `ajet {near[0]}`?"
        else:
            hint = f"commands: {', '.join(COMMANDS)}"
        from ajet.system.command_line import fail

        return fail(f"unknown command {first!r}\n    {hint}")
    return _run(lambda: import_module("ajet.backbone.launch").run, arguments)


def function_of(command: str) -> Run:
    """Import what runs a subcommand."""
    module, _, function = (COMMANDS[command].function or f"{command}.run").partition(".")
    run: Run = getattr(import_module(f"ajet.cli.{module}"), function)
    return run


def _run(find: Callable[[], Run], arguments: list[str]) -> int:
    """Find what runs a command, and run it. An error that ajet raises on purpose becomes one message, with exit code 2
    if the user can correct it."""
    from ajet.schema.install import missing_packages_named
    from ajet.system.command_line import fail, open_more_files, place_advice, show_errors_as_asked

    show_errors_as_asked(arguments)
    open_more_files()
    try:
        os.getcwd()
    except FileNotFoundError:
        return fail("the folder that this terminal is in was deleted\n    cd to another one")
    try:
        with missing_packages_named("this"):
            code = find()(arguments)
    except UserError as error:
        return fail(str(error), error.exit_code)
    except AjetError as error:  # of a model's or helper's server, for example
        return fail(str(error), EXIT_FAILED)
    except (OSError, RuntimeError) as error:
        if (advice := place_advice(error)) is None:
            raise
        return fail(advice)
    return code


def _help() -> str:
    """The commands, as wide as the terminal, and at least 80 columns."""
    from shutil import get_terminal_size
    from textwrap import fill

    columns = max(80, get_terminal_size().columns)
    shown = [(f"{name} {command.usage}", command.summary) for name, command in COMMANDS.items()]
    width = max(len(usage) for usage, _ in shown) + 2
    lines = [
        fill(f"  ajet {usage:<{width}}{summary}", columns, subsequent_indent=" " * (width + 7))
        for usage, summary in shown
    ]
    return (
        "ajet: tune the language model behind an agent.\nYou bring a workflow, tasks and a reward.\n\n"
        + RUN_HELP
        + "\nmore commands (each with --help):\n"
        + "\n".join(lines)
        + f"\n  ajet {'--version':<{width}}print the version"
    )


def interruption() -> asyncio.Event:
    """Set by Ctrl-C or SIGTERM, which from now on do nothing else."""
    import asyncio  # takes longer to load than the rest of the command line
    import signal

    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    return interrupted
