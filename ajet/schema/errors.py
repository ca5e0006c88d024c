"""Every failure that ajet names itself.

Three families, by who can act on them:

- `UserError`: something the user wrote is wrong. Carries where, what was expected and the fix; ends the program with
  exit code 2.
- `ModelCallError`: one model call failed. Raised into the workflow, in the shape its client expects (OpenAI,
  Anthropic …); `http_status` and `code` say how it looks over HTTP.
- `EpisodeFault`: an episode could not be brought to an end. Never leaves the runner: it becomes the episode's
  `Failure`.

To add one, subclass the family whose reader can act on it, and give the message the fix.
"""

from __future__ import annotations

from typing import ClassVar


class AjetError(Exception):
    """Base of all errors that ajet raises on purpose."""


# ---------------------------------------------------------------- what the user wrote


class UserError(AjetError):
    """Something the user can correct: the message names the place, what was expected and the fix."""

    exit_code: ClassVar[int] = 2


class ConfigError(UserError):
    """A YAML file or an override that can't be accepted."""


class TaskDataError(UserError):
    """A task source that can't be read: names file and line."""


class ImportPathError(UserError):
    """`module->Class` or `file.py->Class` that leads nowhere: says what exists instead."""


class EpisodeFormatError(UserError):
    """A stored episode that can't be read: cut short, altered, or of a newer format."""


class MissingDependencyError(UserError):
    """An optional package is needed and absent: names the extra that brings it."""


class FeatureUnavailableError(UserError):
    """A key that loads but whose feature this version does not have."""


class RewardError(UserError):
    """A reward that is missing, of the wrong type, or not allowed for this episode's shape. Never read as 0."""


# ---------------------------------------------------------------- one model call


class ModelCallError(AjetError):
    """A model call that gave no reply. `code` and `http_status` are those of OpenAI's protocol."""

    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    error_type: ClassVar[str] = "server_error"


class InvalidRequestError(ModelCallError):
    """The request itself is wrong (roles, types, ranges)."""

    http_status = 400
    code = "invalid_request"
    error_type = "invalid_request_error"


class UnsupportedContentError(InvalidRequestError):
    """Images, audio or files: text only for now."""

    code = "unsupported_content"


class ContextOverflowError(InvalidRequestError):
    """The prompt leaves no room in `rollout.max_model_len`."""

    code = "context_length_exceeded"


class TooManyStepsError(InvalidRequestError):
    """The episode used up `rollout.multi_turn.max_steps` model calls of one agent."""

    code = "max_steps_exceeded"


class AbnormalOutputError(InvalidRequestError):
    """The model's output failed a check of `compute_madness_checklist`; the episode takes no further model calls."""

    code = "abnormal_output"


class SessionClosedError(ModelCallError):
    """The episode is over (finished, cancelled, or past its deadline)."""

    http_status = 409
    code = "session_closed"
    error_type = "invalid_request_error"


class EngineError(ModelCallError):
    """The engine failed, died or gave a malformed result."""

    http_status = 502
    code = "engine_error"


class EngineOverloadedError(EngineError):
    """The engine or the gateway takes no more requests now: try again later."""

    http_status = 429
    code = "overloaded"
    error_type = "rate_limit_error"


class GenerationTimeoutError(EngineError):
    """A generation did not end within its deadline."""

    http_status = 504
    code = "timeout"


# ---------------------------------------------------------------- one episode


class EpisodeFault(AjetError):
    """An episode that could not be completed, through no doing of the model."""


class WorkflowFault(EpisodeFault):
    """The user's workflow raised, returned something else than a WorkflowOutput, or its process died."""


class JudgeFault(EpisodeFault):
    """The judge raised, or returned no finite number."""


class EpisodeTimeout(EpisodeFault):
    """`rollout.episode_timeout` ran out."""


class EpisodeCancelled(EpisodeFault):
    """The pool stopped the episode (early group stop, Ctrl-C)."""


class LostThreadsError(AjetError):
    """Too many workflow threads hang for good; `task_runner.wrapper_type: multi-processing` survives that."""
