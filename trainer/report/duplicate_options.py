"""What counts as a near-duplicate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DuplicateOptions:
    """What counts as a near-duplicate.

    Raises:
        ValueError: a number out of range.
    """

    threshold: float = 0.98
    neighbours: int = 8
    most_pairs: int = 10_000

    def __post_init__(self) -> None:
        if not -1 < self.threshold <= 1:
            raise ValueError(f"--threshold must lie above -1 and not above 1, got {self.threshold}")
        if not 1 <= self.neighbours < 4_096:
            raise ValueError(f"--neighbours must lie in 1..4095, got {self.neighbours}")
        if self.most_pairs < 1:
            raise ValueError(f"--most-pairs must be at least 1, got {self.most_pairs}")
