"""What a run has taken so far, and will take in all: on the terminal, in the viewer and in `ajet runs` alike.

They follow from the metrics of its steps, those that an earlier part of a resumed run wrote included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

STEP, VALIDATION, TOTAL_STEPS, GPUS = "time/step", "time/validate", "perf/total_steps", "perf/gpus"
SAMPLED = ("episode/sampled_tokens_total", "val/episode/sampled_tokens_total")
HELPER = ("helper/calls", "helper/tokens", "helper/cost")
USED = (STEP, VALIDATION, TOTAL_STEPS, GPUS, *SAMPLED, *HELPER)
"""The metrics that it takes."""
_OF_STEPS = ("steps", "total_steps", "warm_up")


@dataclass(slots=True)
class RunningTotal:
    """Add each line of `metrics.jsonl` as it is written."""

    seconds: float = 0.0
    """In steps and validations."""
    gpu_hours: float = 0.0
    """Accelerators × time."""
    sampled_tokens: float = 0.0
    """Those of validations included."""
    helper_calls: float = 0.0
    helper_tokens: float = 0.0
    helper_cost: float = 0.0
    """By `ajet.helper.price_per_million`."""
    steps: int = 0
    total_steps: float = 0.0
    """0: not known."""
    warm_up: float = 0.0
    """Seconds up to the end of the first step, a validation before it included: they tell little about the others."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        """A step's line, or that of a validation before the first step."""
        step, validation = _of(metrics, STEP), _of(metrics, VALIDATION)
        self.total_steps = _of(metrics, TOTAL_STEPS) or self.total_steps
        self.seconds += step + validation
        self.gpu_hours += (step + validation) * _of(metrics, GPUS) / 3600
        self.sampled_tokens += sum(_of(metrics, name) for name in SAMPLED)
        self.helper_calls += _of(metrics, HELPER[0])
        self.helper_tokens += _of(metrics, HELPER[1])
        self.helper_cost += _of(metrics, HELPER[2])
        if step:
            self.warm_up = self.warm_up or self.seconds
            self.steps += 1

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> RunningTotal:
        """All lines so far."""
        total = cls()
        for line in lines:
            total.add(line)
        return total

    @classmethod
    def of_columns(cls, columns: Mapping[str, Any]) -> RunningTotal:
        """Of `steps` and `series`, as the viewer reads them."""
        series = columns["series"]
        return cls.of({name: series[name][at] for name in series} for at in range(len(columns["steps"])))

    @property
    def expected_seconds(self) -> float | None:
        """In all, at the pace of the steps after the first. None: too early to tell, or no end is known."""
        if not self.total_steps or self.steps < 2:
            return None
        pace = (self.seconds - self.warm_up) / (self.steps - 1)
        return self.seconds + max(0.0, self.total_steps - self.steps) * pace

    def figures(self) -> dict[str, float]:
        """By name; what was not used is left out."""
        kept = {name: value for name, value in asdict(self).items() if value and name not in _OF_STEPS}
        expected = self.expected_seconds
        return kept if expected is None else {**kept, "expected_seconds": expected}


def _of(metrics: Mapping[str, Any], name: str) -> float:
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
