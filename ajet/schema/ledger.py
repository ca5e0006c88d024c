"""Where every captured token went: captured = trained + masked + dropped, each drop with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field


class LedgerImbalance(AssertionError):
    """Tokens were lost or counted twice: a fault of ours, never the user's."""


@dataclass(slots=True)
class Ledger:
    """Counts of sampled tokens of one episode, or summed over many."""

    captured: int = 0
    trained: int = 0
    masked: dict[str, int] = field(default_factory=dict)
    """By reason: `not_trainable`, `abandoned`, …: kept in the tree, carry no loss."""
    dropped: dict[str, int] = field(default_factory=dict)
    """By reason: `response_too_long`, `too_many_samples`, …: not in any training sample."""

    def balance(self) -> None:
        """Raise unless every captured token is accounted for."""
        accounted = self.trained + sum(self.masked.values()) + sum(self.dropped.values())
        if accounted != self.captured:
            raise LedgerImbalance(f"captured {self.captured} tokens but accounted for {accounted}: {self}")

    def add(self, other: Ledger) -> None:
        """Add another ledger's counts to this one."""
        self.captured += other.captured
        self.trained += other.trained
        for mine, theirs in ((self.masked, other.masked), (self.dropped, other.dropped)):
            for reason, count in theirs.items():
                mine[reason] = mine.get(reason, 0) + count
