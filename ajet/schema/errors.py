"""Every error that ajet raises on purpose.

Three families, by who can act on them:

- `UserError`: something the user wrote is wrong. Its message says where, what was expected and how to fix it; the
  program exits with code 2.
- `ModelCallError`: one model call failed. Raised into the workflow, in the shape its client expects (OpenAI,
  Anthropic …); `http_status` and `code` are what an HTTP client sees.
- `EpisodeFault`: an episode could not be completed. It never leaves the runner, but becomes the episode's `Failure`.

To add one, subclass the family whose reader can act on it, and put the fix into the message.
"""

from __future__ import annotations

from typing import ClassVar


class AjetError(Exception):
    """Base of all errors that ajet raises on purpose."""


# ---------------------------------------------------------------- what the user wrote


class UserError(AjetError):
    """Something the user can correct. The message names the place, what was expected and the fix."""

    exit_code: ClassVar[int] = 2


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


class NoModelCallError(UserError):
    """Episodes ended well without a recorded model call. Names the line that makes another client than the tuner's."""


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
    """An environment raised, hung, or gave an answer that makes no sense. An action of the model may have caused it."""


class EnvironmentUnavailableError(EnvironmentFault):
    """An environment can't be reached, is gone, or can't say what an episode is worth, through no action of the model:
    the episode may be run again."""


class LostThreadsError(AjetError):
    """Too many workflow threads are stuck for good; `task_runner.wrapper_type: multi-processing` survives that."""
