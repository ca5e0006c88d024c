"""`Trajectory`: what an agent did on one task, from the first message to the last, and the file that holds it.

`calls` are the model calls exactly as they were made; each continues an earlier one or begins a branch. `steps` are the
same for human readers: thoughts, actions, their results, the final answer. Pure data, with a JSON form.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from ajet.schema.chat import Message, Tool
from ajet.schema.episode import Failure
from ajet.schema.errors import UserError
from ajet.schema.files import json_line

NO_CALL = -1
"""`ModelCall.extends` of a call that begins a conversation; `TrajectoryStep.call` of a step that no call wrote."""


class TrajectoryFormatError(UserError):
    """A stored trajectory that can't be read."""


class StepType(StrEnum):
    OBSERVATION = "observation"
    """A message to the agent: the task, or an error about a reply that could not be parsed."""
    THOUGHT = "thought"
    ACTION = "action"
    """A tool call, as the model asked for it."""
    ACTION_RESULT = "action_result"
    FINAL_ANSWER = "final_answer"


class TrajectoryStatus(StrEnum):
    RUNNING = "running"
    """It hasn't ended, or its process was killed before it could record the end."""
    COMPLETED = "completed"
    """The agent ended it: by an answer, or by a tool such as `finish`."""
    TRUNCATED = "truncated"
    """A limit or a refusal ended it, before there was an answer."""
    FAILED = "failed"
    """The model, the agent's own code, or the opening of its tools failed."""
    CANCELLED = "cancelled"


class StopReason(StrEnum):
    ANSWER = "answer"
    TOOL = "tool"
    """A tool that ends the episode, such as `finish`."""
    ENVIRONMENT = "environment"
    """The environment ended the episode."""
    MAX_STEPS = "max_steps"
    MAX_TOKENS = "max_tokens"
    MAX_SECONDS = "max_seconds"
    CONTEXT_FULL = "context_full"
    AGENT = "agent"
    """The agent itself, by its `should_continue`."""
    REPLY_CUT = "reply_cut"
    """The last reply reached its maximum length, so it is not an answer."""
    REFUSED = "refused"
    """The model declined to answer, or its server's filter withheld the reply."""
    MODEL_ERROR = "model_error"
    AGENT_ERROR = "agent_error"
    """The agent's own code raised, or its tools or its sandbox could not be opened."""
    CANCELLED = "cancelled"

    @property
    def status(self) -> TrajectoryStatus:
        if self in (StopReason.ANSWER, StopReason.TOOL, StopReason.ENVIRONMENT, StopReason.AGENT):
            return TrajectoryStatus.COMPLETED
        if self in (StopReason.MODEL_ERROR, StopReason.AGENT_ERROR):
            return TrajectoryStatus.FAILED
        return TrajectoryStatus.CANCELLED if self is StopReason.CANCELLED else TrajectoryStatus.TRUNCATED


@dataclass(slots=True)
class Usage:
    input_tokens: int = 0
    output_tokens: int = 0
    counted: bool = True
    """False: some of them were estimated from the length of the text, because the model reported none."""

    def add(self, other: Usage) -> None:
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.counted = self.counted and other.counted


@dataclass(slots=True)
class ModelCall:
    new_messages: list[Message]
    """What this call added to the conversation it continues (all messages, if it continues none)."""
    reply: Message
    extends: int = NO_CALL
    finish_reason: str = "stop"
    usage: Usage = field(default_factory=Usage)
    started_s: float = 0.0
    """Seconds since the trajectory began."""
    seconds: float = 0.0
    reply_id: str = ""
    """The reply's id from the model's server."""
    purpose: str = ""
    """`summary`: to make room in the context; empty: the work itself."""


@dataclass(slots=True)
class TrajectoryStep:
    step_type: StepType
    content: str = ""
    call: int = NO_CALL
    """Index in `calls` of the model call that wrote it or asked for it."""
    tool_name: str | None = None
    tool_args: Any = None
    """The parsed arguments; the raw text if it isn't a JSON object."""
    tool_result: Any = None
    """The structured result, if the tool returns one."""
    tool_call_id: str = ""
    success: bool | None = None
    reward_score: float | None = None
    seconds: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """The message role of this step in the prompt."""
        told = (StepType.OBSERVATION, StepType.ACTION_RESULT)
        return "user" if self.step_type in told else "assistant"


@dataclass
class Trajectory:
    request_id: str
    task_id: str = ""
    repeat: int = 0
    agent: str = ""
    model: str = ""
    tools: list[Tool] = field(default_factory=list)
    """The tools offered to the model."""
    steps: list[TrajectoryStep] = field(default_factory=list)
    calls: list[ModelCall] = field(default_factory=list)
    pending: list[Message] = field(default_factory=list)
    """Messages after the last call, which the model has not seen: the result of `finish`, for example."""
    status: TrajectoryStatus = TrajectoryStatus.RUNNING
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    reward: float | None = None
    is_success: bool | None = None
    started: float = field(default_factory=time.time)
    """Unix time."""
    seconds: float = 0.0
    cost: float | None = None
    """In the currency of the prices it was computed with; None: no prices were given."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def is_completed(self) -> bool:
        return self.status is TrajectoryStatus.COMPLETED

    @property
    def final_answer(self) -> str | None:
        """None if something ended the run before there was one."""
        answers = [step.content for step in self.steps if step.step_type is StepType.FINAL_ANSWER]
        return answers[-1] if answers else None

    @property
    def final_response(self) -> str:
        """The final answer, or else the model's last text."""
        if self.final_answer is not None:
            return self.final_answer
        written = [step.content for step in self.steps if step.role == "assistant" and step.content]
        return written[-1] if written else ""

    @property
    def usage(self) -> Usage:
        total = Usage()
        for call in self.calls:
            total.add(call.usage)
        return total

    @property
    def messages(self) -> list[Message]:
        """The conversation at its end."""
        return [*self.conversation(len(self.calls) - 1), *self.pending]

    @property
    def tool_calls(self) -> list[TrajectoryStep]:
        return [step for step in self.steps if step.step_type is StepType.ACTION]

    @property
    def tool_reward(self) -> float:
        """The sum of the rewards that tools returned."""
        return sum(step.reward_score for step in self.steps if step.reward_score is not None)

    def conversation(self, call: int) -> list[Message]:
        """The messages of a call's prompt, then its reply."""
        chain: list[ModelCall] = []
        while call != NO_CALL:
            chain.append(self.calls[call])
            call = self.calls[call].extends
        return [message for link in reversed(chain) for message in (*link.new_messages, link.reply)]

    def end(self, reason: StopReason, failure: Failure | None = None) -> None:
        """Record how it ended. Only the first reason counts, except that a failure overrides an earlier end that wasn't
        one."""
        if self.stop_reason is None or (failure is not None and self.failure is None):
            self.stop_reason, self.status, self.failure = reason, reason.status, failure
            self.seconds = max(0.0, time.time() - self.started)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain: dict[str, Any] = _plain(self)
        return plain

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Trajectory:
        """Read what `to_dict` made. Raises TrajectoryFormatError."""
        try:
            made = msgspec.convert(values, cls)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: text where none belongs
            raise TrajectoryFormatError(f"not a trajectory: {error}") from None
        for index, call in enumerate(made.calls):
            if not NO_CALL <= call.extends < index:
                raise TrajectoryFormatError(f"call {index} extends call {call.extends}, which is none before it")
        return made


def as_plain(value: Any) -> Any:
    """What a tool returned may be anything: values without a JSON form are kept as text."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return repr(value)


SUFFIX = ".jsonl"
LONGEST_NAME = 200
"""Bytes of a file's name, before its digest and suffix. File systems take 255."""
_GROWING = ("calls", "steps")
_MARK = b'{"trajectory": '
"""The beginning of the first line, by which such a file is recognised."""


class TrajectoryFile:
    """Writes one trajectory to its file as it grows."""

    def __init__(self, path: Path, trajectory: Trajectory) -> None:
        """Begin the file anew. Raises OSError if it can't be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._trajectory = trajectory
        self._calls = self._steps = 0
        """How many of them are written."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._append({"trajectory": _without_growing(trajectory)})

    def update(self) -> None:
        """Append the calls and steps that were added since the last update."""
        calls, steps = self._trajectory.calls, self._trajectory.steps
        lines = [{"call": _plain(call)} for call in calls[self._calls :]]
        lines += [{"step": _plain(step)} for step in steps[self._steps :]]
        self._append(*lines)
        self._calls, self._steps = len(calls), len(steps)

    def close(self) -> None:
        """Write how it ended."""
        try:
            self.update()
            self._append({"end": _without_growing(self._trajectory)})
        finally:
            os.close(self._file)

    def _append(self, *records: dict[str, Any]) -> None:
        text = "".join(map(json_line, records))
        data = memoryview(text.encode("utf-8", "replace"))
        whole = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:  # the disk may have room again later, and what is written then follows whole lines
            os.ftruncate(self._file, whole)
            error.filename = str(self.path)
            raise


def write_trajectory(path: Path, trajectory: Trajectory) -> None:
    TrajectoryFile(path, trajectory).close()


def write_end(path: Path, trajectory: Trajectory) -> None:
    """Add to a trajectory's file what became known after its end: its reward, for example."""
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(json_line({"end": _without_growing(trajectory)}))


def read_trajectory(path: Path) -> Trajectory:
    """Read a trajectory's file, also one that is still growing. Raises TrajectoryFormatError with file and line."""
    values: dict[str, Any] = {}
    growing: dict[str, list[Any]] = {"calls": [], "steps": []}
    lines = _lines(path)
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            ((kind, content),) = record.items()
            if kind in ("trajectory", "end"):
                values.update(content)
            else:
                growing[f"{kind}s"].append(content)
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            if number == len(lines) and not line.endswith("\n"):  # torn: the process was killed while it wrote
                break
            raise TrajectoryFormatError(f"{path}:{number}: not a line of a trajectory") from None
    try:
        return Trajectory.from_dict({**values, **growing})
    except TrajectoryFormatError as error:
        raise TrajectoryFormatError(f"{path}: {error}") from None


def is_trajectory_file(path: Path) -> bool:
    """Whether a file begins like a trajectory's."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MARK)) == _MARK
    except OSError:
        return False


def trajectory_files(folder: Path) -> Iterator[Path]:
    """The trajectory files directly in a folder, sorted by name."""
    if folder.is_dir():
        yield from (path for path in sorted(folder.glob(f"*{SUFFIX}")) if is_trajectory_file(path))


def file_name(request_id: str) -> str:
    """A file name for a trajectory: its id, or as much of it as file systems take, and its digest."""
    plain = re.sub(r"[^\w.-]+", "_", request_id).strip(".").encode()[:LONGEST_NAME].decode(errors="ignore")
    if plain == request_id:
        return plain + SUFFIX
    return f"{plain}-{hashlib.sha256(request_id.encode(errors='surrogatepass')).hexdigest()[:8]}{SUFFIX}"


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TrajectoryFormatError(f"{path}: {error.strerror or error}") from None
    return re.findall(r"[^\n]*\n|[^\n]+$", text)


def _without_growing(trajectory: Trajectory) -> dict[str, Any]:
    """All fields of a trajectory but its calls and steps, which have lines of their own."""
    return {key: value for key, value in trajectory.to_dict().items() if key not in _GROWING}


def _plain(item: Trajectory | ModelCall | TrajectoryStep) -> Any:
    return msgspec.to_builtins(item, str_keys=True, enc_hook=as_plain)
