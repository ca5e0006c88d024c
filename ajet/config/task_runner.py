"""`ajet.task_runner`: where a workflow's code runs."""

from __future__ import annotations

from typing import Literal

from ajet.config.section import Section
from ajet.config.types import AboveZero, Count, Positive


class TaskRunnerConfig(Section):
    """`ajet.task_runner`: where a workflow's code runs."""

    wrapper_type: Literal["asyncio-with-gc", "asyncio", "multi-processing"] = "asyncio-with-gc"
    """`asyncio-with-gc` and `asyncio`: in a thread of its own with an event loop. `multi-processing`: in a process of
    its own, so that it may crash, call `os._exit` or hang."""
    wrapper_multiprocessing_timeout: AboveZero = 3600.0
    """Seconds after which a workflow's process is ended; `rollout.episode_timeout` applies as well."""
    llm_infer_submit_method: str | None = None
    """Accepted for existing files. Model calls are always asynchronous here."""
    max_lost_threads: Count = 8
    """Workflow threads that may hang for good before the run ends with a hint at `multi-processing`."""
    processes: Positive | Literal["auto"] = "auto"
    """With `multi-processing`: processes at the same time at most; `auto`: `rollout.max_env_worker`."""
