"""The classes of a step: the most recently visited rows, of any step."""

from __future__ import annotations

from weightserver.torch import VisitSchedule
from weightserver.torch.recency import ActiveRows, visited_before


def recent_rows(schedule: VisitSchedule, step: int, *, num_active: int, batch_size: int) -> ActiveRows:
    """The K rows of the latest visits up to the step's own, which are t·B … t·B+B−1."""
    start, stop = step * batch_size, (step + 1) * batch_size
    visited = visited_before(schedule.visits, stop, num_active=num_active)
    return ActiveRows.of(visited.rows, schedule.visits(start, stop))
