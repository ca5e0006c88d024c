"""What all commands share: how their arguments are read, and how they say that something went wrong.

| exit code | what |
|---|---|
| 0 | done |
| 1 | tried, and failed: a run, every episode, a check |
| 2 | something you can fix: arguments, config, data, workflow file, missing package |
| 130 | interrupted, by Ctrl-C or SIGTERM |

An error is printed to stderr. With `--json` it is also the last line on stdout, as
`{"event": "error", "error": "…", "exit_code": 2}`.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

from ajet.schema.errors import EXIT_USER_ERROR, UserError
from ajet.schema.printable import printable

JSON_FLAG = "--json"
_on_stdout = False


class ArgumentError(UserError):
    """A command line that makes no sense."""


class CommandParser(ArgumentParser):
    """Reads the arguments of a command. What is wrong with them is an error like any other."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message}\n    see: {self.prog} --help")


def show_errors_as_asked(arguments: Sequence[str]) -> None:
    """From now on, errors are printed to stdout too if the command line asks for JSON."""
    global _on_stdout
    _on_stdout = JSON_FLAG in arguments


def fail(message: str, code: int = EXIT_USER_ERROR) -> int:
    """Print an error. Returns `code`."""
    message = printable(message)
    if _on_stdout:
        print(json.dumps({"event": "error", "error": message, "exit_code": code}), flush=True)
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(f"\033[1;31merror:\033[0m {message}" if colour else f"error: {message}", file=sys.stderr)
    return code
