"""`ajet`: picks the subcommand and imports nothing else, so that `ajet --help` answers at once.

A subcommand is a module `ajet/cli/<name>.py` with `run(argv) -> int` and a line in `COMMANDS`. Without one, `ajet
--conf …` runs a job (`ajet/cli/launch.py`). Exit codes: 0 done, 1 failed, 2 something the user can correct,
130 interrupted.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from ajet import __version__

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
POOL_THREADS = ("asyncio_", "ThreadPoolExecutor-")
"""Names of executors' threads."""
PATIENCE_S = 3.0
"""How long the interpreter may take to end, once everything of ours is closed."""


class Command(NamedTuple):
    """A line of `ajet --help`."""

    module: str
    usage: str
    summary: str

    @property
    def exists(self) -> bool:
        return find_spec(self.module) is not None


COMMANDS = {
    "init": Command("ajet.cli.init", "NAME", "make a new project that runs as it is"),
    "validate": Command("ajet.cli.validate", "CONF", "check a config and say what would run"),
    "doctor": Command("ajet.cli.doctor", "", "check this machine and its packages, with fixes"),
    "config": Command("ajet.cli.config", "show|schema|docs", "the resolved config, the JSON schema, the documentation"),
    "view": Command("ajet.cli.view", "[EXPERIMENT]", "look at runs and episodes in the browser"),
    "report": Command("ajet.cli.report", "EXPERIMENT", "one HTML file about a run"),
    "eval": Command("ajet.cli.eval", "CONF", "validate a model or checkpoint, train nothing"),
    "export": Command("ajet.cli.export", "…", "weights or episodes of a run for other programs"),
    "chat": Command("ajet.cli.chat", "CONF|EXPERIMENT", "talk to a model or checkpoint"),
    "serve": Command("ajet.cli.serve", "CONF|EXPERIMENT", "offer it as an OpenAI-compatible endpoint"),
    "vllm": Command("ajet.cli.vllm", "serve MODEL", "start a vLLM server as ajet needs it"),
}
"""Subcommands. One whose module is not there yet is not shown, and using it says so."""

RUN_HELP = """\
run a job:
  ajet --conf FILE.yaml [--backbone NAME] [KEY=VALUE ...]

  --conf FILE            the YAML file
  --backbone NAME        local (train here, the default), debug (run a few tasks, train nothing), verl, trinity
  KEY=VALUE              override a key: rollout.num_repeat=8, verl.trainer.x=1, frozen_lake.size=4

  --exp-dir FOLDER       where experiments go (default: saved_experiments)
  --fresh                start anew instead of resuming; what is there is kept under another name
  --debug TAGS           stop at breakpoints bp("TAG") with these tags (TAG1,TAG2 or all)
  --quiet | --json       show errors only | one JSON object a line

  --with-logview         open the viewer beside the run
  --with-ray             start a private Ray on this machine (verl, trinity)
  --with-ray-cluster     join or start a Ray cluster by MASTER_ADDR and friends
  --ray-address ADDR     use a running Ray
  --skip-check-avail-gpu do not look whether the GPUs are free
  --with-NAME            start the service in $NAME_PATH by $NAME_SCRIPT, and stop it with the run
  --prefix TEXT          put before the names of services started
  --kill                 end all that ajet started here and is still running (with --prefix: only that)
  --autokill             do so before the run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the result is the exit code."""
    code = _guarded(list(sys.argv[1:] if argv is None else argv))
    return _leave(code) if argv is None else code


def _guarded(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away (`ajet config docs | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _leave(code: int) -> int:
    """Make sure that the program ends. Python waits at its exit for threads of executors (`asyncio.to_thread`), and a
    call that user code left blocked in one would keep it for ever."""
    if any(thread.name.startswith(POOL_THREADS) for thread in threading.enumerate()):
        threading.Thread(target=_end_anyway, args=(code,), daemon=True).start()
    return code


def _end_anyway(code: int) -> None:
    time.sleep(PATIENCE_S)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also where their reader has gone
        os._exit(code)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else EXIT_USER_ERROR
    if arguments[0] in ("-V", "--version", "version"):
        print(f"ajet {__version__}")
        return 0
    first = arguments[0]
    if first in COMMANDS:
        command = COMMANDS[first]
        if not command.exists:
            return fail(f"`ajet {first}` is not part of this version")
        return _run(command.module, arguments[1:])
    if not first.startswith("-") and "=" not in first:
        near = get_close_matches(first, COMMANDS, n=1)
        if first.endswith((".yaml", ".yml")):
            hint = f"to run it: ajet --conf {first}"
        elif near:
            hint = f"did you mean `ajet {near[0]}`?"
        else:
            hint = f"commands: {', '.join(name for name, command in COMMANDS.items() if command.exists)}"
        return fail(f"no command {first!r}\n    {hint}")
    return _run("ajet.cli.launch", arguments)


def _run(module: str, arguments: list[str]) -> int:
    """Call a command; what the user can correct becomes one message and exit code 2."""
    from ajet.schema.errors import UserError

    try:
        code: int = import_module(module).run(arguments)
    except UserError as error:
        return fail(str(error), error.exit_code)
    return code


def fail(message: str, code: int = EXIT_USER_ERROR) -> int:
    """Say what is wrong, on stderr."""
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(f"\033[1;31merror:\033[0m {message}" if colour else f"error: {message}", file=sys.stderr)
    return code


def _help() -> str:
    shown = [(f"{name} {command.usage}", command.summary) for name, command in COMMANDS.items() if command.exists]
    width = max((len(usage) for usage, _ in shown), default=9) + 2
    lines = [f"  ajet {usage:<{width}}{summary}" for usage, summary in shown]
    return (
        "ajet: tune the language model behind an agent. Bring a workflow, tasks and a reward.\n\n"
        + RUN_HELP
        + "\nmore commands (each with --help):\n"
        + "\n".join(lines)
        + f"\n  ajet {'--version':<{width}}print the version"
    )
