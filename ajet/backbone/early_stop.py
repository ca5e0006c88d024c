"""`EarlyStop`: whether a run ends before its last step, by what its validations measured.

Its state is plain data for a checkpoint. Whether to stop is decided from state and configuration, so a stopped run goes
on if its limits are raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from ajet.config import Config

PLACE = "ajet.trainer_common.early_stop"


@dataclass(slots=True)
class _Measured:
    """What a checkpoint keeps."""

    best: float | None = None
    best_step: int = 0
    latest: float | None = None
    since: int = 0
    """Validations since the best one."""


class EarlyStop:
    """Follows one metric of the validations; higher is better."""

    def __init__(self, metric: str, *, patience: int | None, min_delta: float, target: float | None) -> None:
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.target = target
        self._measured = _Measured()

    @classmethod
    def from_config(cls, config: Config, validation_tasks: int) -> EarlyStop:
        """Raises if it needs validations and there is nothing to validate on."""
        given = config.ajet.trainer_common.early_stop
        asked = next((name for name in ("target", "patience") if given[name] is not None), None)
        if asked is not None and not validation_tasks:
            raise ConfigError(
                f"{PLACE}.{asked} looks at validations, and there are no validation tasks: give ajet.task_reader "
                "validation tasks, or leave early_stop out"
            )
        return cls(given.metric, patience=given.patience, min_delta=given.min_delta, target=given.target)

    @property
    def active(self) -> bool:
        return self.patience is not None or self.target is not None

    def look_at(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a validation. One without a score, because all of its episodes failed, says nothing."""
        if not self.active or "val/success" not in metrics:
            return
        value = metrics.get(self.metric)
        if value is None:
            near = get_close_matches(self.metric, metrics, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(metrics))}"
            raise ConfigError(f"{PLACE}.metric: a validation has no metric {self.metric!r}; {hint}")
        mine = self._measured
        mine.latest = value
        if mine.best is None or value > mine.best + self.min_delta:
            mine.best, mine.best_step, mine.since = value, step, 0
        else:
            mine.since += 1

    @property
    def reason(self) -> str | None:
        """Why the run should end now, and which key says so; None: it should go on."""
        mine = self._measured
        if mine.latest is None or mine.best is None:
            return None
        if self.target is not None and mine.latest >= self.target:
            return f"{self.metric} is {mine.latest:.4g} ({PLACE}.target: {self.target:g})"
        if self.patience is not None and mine.since >= self.patience:
            return (
                f"{self.metric} has not risen above {mine.best:.4g}, its value after step {mine.best_step}, in "
                f"{mine.since} validations ({PLACE}.patience: {self.patience})"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"metric": self.metric, **asdict(self._measured)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue. If another metric was followed until now, its values mean nothing here."""
        if state["metric"] == self.metric:
            self._measured = _Measured(**{name: state[name] for name in _Measured.__slots__})
