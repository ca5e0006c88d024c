"""Every error that ajet raises on purpose, and how an error and its causes are shown.

Three families, by who can act on them:

- `UserError`: something the user wrote is wrong. Its message says where, what was expected and how to fix it; the
  program exits with code 2.
- `ModelCallError`: one model call failed. Raised into the workflow, in the shape its client expects (OpenAI,
  Anthropic …); `http_status` and `code` are what an HTTP client sees.
- `EpisodeFault`: an episode could not be completed. It never leaves the runner, but becomes the episode's `Failure`.

To add one, subclass the family whose reader can act on it, and put the fix into the message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Coroutine, Iterable, Iterator
from itertools import groupby
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141
"""Exit codes of every command; 0: done."""
FRESH = "--fresh (in Python: Trainer(fresh=True))"
"""How to start over, in messages."""


class AjetError(Exception):
    """Base of all errors that ajet raises on purpose."""


# ---------------------------------------------------------------- what the user wrote


class UserError(AjetError):
    """Something the user can correct. The message names the place, what was expected and the fix."""

    exit_code: ClassVar[int] = EXIT_USER_ERROR


class ConfigError(UserError):
    """An invalid YAML file or override."""


class TaskDataError(UserError):
    """A task source that can't be read. Names the file and line."""


class ImportPathError(UserError):
    """`module->Class` or `file.py->Class` that can't be imported. Says what exists instead."""


class EpisodeFormatError(UserError):
    """A stored episode that can't be read: truncated, altered, or in a newer format."""


class MissingDependencyError(UserError):
    """An optional package is needed but not installed. Names the extra that installs it."""


class FeatureUnavailableError(UserError):
    """A key that loads, but whose feature this version does not have."""


class JudgeFailedError(UserError):
    """The judge failed in more than `task_judge.max_error_share` of a step's episodes. Shows the last failure."""


class ServiceFailedError(UserError):
    """The environment or the helper model failed in every episode of a step. Shows the last failure."""


class NoModelCallError(UserError):
    """Episodes succeeded without a recorded model call. Names the line that creates a client other than the tuner's."""


class OwnFormulaError(UserError):
    """A policy loss or advantage estimator of the user's own that raised, or returned what can't be trained."""


class RewardError(UserError):
    """A reward that is missing, of the wrong type, or does not fit the episode. Never taken for 0."""


# ---------------------------------------------------------------- one model call


class ModelCallError(AjetError):
    """A model call that produced no reply. `code` and `http_status` follow OpenAI's protocol."""

    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    error_type: ClassVar[str] = "server_error"


class InvalidRequestError(ModelCallError):
    """The request itself is wrong (roles, types, ranges)."""

    http_status = 400
    code = "invalid_request"
    error_type = "invalid_request_error"


class UnsupportedContentError(InvalidRequestError):
    """Images, audio or files: only text is supported."""

    code = "unsupported_content"


class ContextOverflowError(InvalidRequestError):
    """The prompt leaves no room in `rollout.max_model_len`."""

    code = "context_length_exceeded"


class TooManyStepsError(InvalidRequestError):
    """The episode used up `rollout.multi_turn.max_steps` model calls of one agent."""

    code = "max_steps_exceeded"


class AbnormalOutputError(InvalidRequestError):
    """The model's output failed a check of `compute_madness_checklist`; no further model calls are served."""

    code = "abnormal_output"


class SessionClosedError(ModelCallError):
    """The episode is over (finished, cancelled, or past its deadline)."""

    http_status = 409
    code = "session_closed"
    error_type = "invalid_request_error"


class EngineError(ModelCallError):
    """The engine failed, died or returned a malformed result."""

    http_status = 502
    code = "engine_error"


class EngineOverloadedError(EngineError):
    """The engine or the gateway is at its limit; the client should try again later."""

    http_status = 429
    code = "overloaded"
    error_type = "rate_limit_error"


class GenerationTimeoutError(EngineError):
    """A generation did not finish before its deadline."""

    http_status = 504
    code = "timeout"


# ---------------------------------------------------------------- one episode


class EpisodeFault(AjetError):
    """An episode that could not be completed, for reasons other than the model's behaviour."""


class WorkflowFault(EpisodeFault):
    """The user's workflow raised, did not return a WorkflowOutput, or its process died."""


class JudgeFault(EpisodeFault):
    """The judge raised, or did not return a finite number."""


class EnvironmentFault(EpisodeFault):
    """An environment raised, hung, or returned an invalid answer. An action of the model may have caused it."""


class EnvironmentUnavailableError(EnvironmentFault):
    """An environment can't be reached, is gone, or can't say what an episode is worth, through no action of the model:
    the episode may be run again."""


class LostThreadsError(AjetError):
    """Too many workflow threads are stuck for good; `task_runner.wrapper_type: multi-processing` survives that."""


_FRAME = re.compile(r'^[\s|+-]*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)$')
_MARGIN = re.compile(r"^\s*\|")
"""The margin at the start of each line of an exception group's text."""
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3[.\d]*/|^<")
PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_LEFT_OUT = "  … lines in libraries"


def user_line(traceback: str) -> str:
    """The innermost line of the user's code: `agent.py:17 in execute`. Empty if there is none."""
    for text in reversed(traceback.splitlines()):
        frame = _FRAME.match(text)
        if frame is not None and _is_the_users(frame["file"]):
            return f"{_shown(frame['file'])}:{frame['line']} in {frame['function']}"
    return ""


def at_user_line(traceback: str) -> str:
    """`, at agent.py:17 in execute`, to end a sentence with. Empty if there is no line of the user's code."""
    line = user_line(traceback)
    return f", at {line}" if line else ""


def condensed(traceback: str) -> str:
    """The traceback without library frames, which are counted instead. Unchanged if no frame is in the user's code."""
    if not user_line(traceback):
        return traceback
    kept: list[str] = []
    skipping = False
    for text in traceback.rstrip().splitlines():
        if (frame := _FRAME.match(text)) is not None:
            skipping = not _is_the_users(frame["file"])
            kept.append(_LEFT_OUT if skipping else text)
        elif not (skipping and _belongs_to_a_frame(text)):
            skipping = False
            kept.append(text)
    lines: list[str] = []
    for text, repeated in groupby(kept):
        if text == _LEFT_OUT:
            lines.append(f"{text}: {len(list(repeated))}")
        else:
            lines += repeated
    return "\n".join(lines)


def _is_the_users(file: str) -> bool:
    return not _LIBRARY.search(file) and not file.startswith(PACKAGE)


def _belongs_to_a_frame(text: str) -> bool:
    """Source lines and the marks below them are indented further than a frame's own line."""
    return _MARGIN.sub("", text).startswith("    ")


def _shown(file: str) -> str:
    """The path, relative to the working directory if it is below that."""
    from pathlib import Path  # `ajet --help` needs none

    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (FileNotFoundError, ValueError):  # a workflow deleted the working folder, or the file is elsewhere
        return file


def address_of(error: BaseException) -> str:
    """The address that a client could not reach or that returned an error, as many clients' messages don't name it.
    Empty if there is none. User name, password and query are removed, as they may be secret."""
    from urllib.parse import urlsplit

    for link in error_chain(error):
        try:
            url = str(link.request.url)  # type: ignore[attr-defined] # of httpx, and of clients built on it or on requests
        except (AttributeError, RuntimeError):  # httpx raises the latter if it has no request
            continue
        parts = urlsplit(url)
        if parts.hostname:
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return ""


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, and the members of exception groups."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions


async def concurrently(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all, and return the results in order. The first error cancels the rest, and is raised without an exception
    group."""
    import asyncio  # `ajet --help` needs none

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as several:
        first = several.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]
