"""`PatientProposer`: a proposer with a deadline for each question. While none is answered, the terminal says so."""

from __future__ import annotations

import asyncio
import time

from ajet.observe.progress import Progress, duration
from ajet.prompt_tuning.errors import ProposerError
from ajet.prompt_tuning.proposal import Proposer, Reply, Request

QUIET_S = 20.0
"""Longest silence that needs no word: most models answer within it. After each word, the next comes twice as late."""


class PatientProposer:
    """Asks another proposer. Used on one event loop."""

    def __init__(self, proposer: Proposer, timeout_s: float, progress: Progress, quiet_s: float = QUIET_S) -> None:
        self._proposer, self._timeout_s, self._progress, self._quiet_s = proposer, timeout_s, progress, quiet_s
        self._waiting = 0
        self._heard = 0.0
        """When there was an answer last, or when the questions began."""
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, request: Request) -> Reply:
        self._waiting += 1
        if self._waiting == 1:
            self._progress.phase("proposals")
            self._listen()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await self._proposer(request)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise ProposerError(
                f"no answer within {self._timeout_s:g} s (ajet.prompt_tuning.proposer_timeout)"
            ) from None
        finally:
            self._waiting -= 1
            self._listen()

    def _listen(self) -> None:
        """From now on, until the next answer."""
        if self._timer is not None:
            self._timer.cancel()
        self._heard = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._tell) if self._waiting else None

    def _tell(self) -> None:
        silence = time.monotonic() - self._heard
        questions = "1 question waits" if self._waiting == 1 else f"{self._waiting} questions wait"
        self._progress.message(
            f"the proposer has not answered for {duration(silence)}: {questions}, each at most "
            f"{duration(self._timeout_s)} (prompt_tuning.proposer_timeout)"
        )
        self._timer = asyncio.get_running_loop().call_later(silence, self._tell)
