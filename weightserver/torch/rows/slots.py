"""A map from rows to slots, with the choice of the rows that leave. NumPy only."""

from __future__ import annotations

import numpy as np

from weightserver.core.arrays import Int64Array

_EMPTY = -1


class NoRoomError(ValueError):
    """More rows are needed at a time than there are slots."""


class SlotMap:
    """Rows in `capacity` slots; the row whose last announced step is the oldest leaves first.

    The rows of one call are distinct. A row keeps its slot until it leaves.
    """

    def __init__(self, capacity: int) -> None:
        self.row = np.full(capacity, _EMPTY, np.int64)  # (capacity,), the row in each slot
        self.last_announced = np.full(capacity, _EMPTY, np.int64)  # (capacity,), the latest step that needs the row
        self._rows = np.zeros(0, np.int64)  # (held,), ascending
        self._slots = np.zeros(0, np.int64)  # (held,), the slot of each of those rows
        self._free = np.arange(capacity)[::-1]

    def __len__(self) -> int:
        return len(self._rows)

    def extend(self, added: int) -> None:
        """Adds free slots."""
        empty, capacity = np.full(added, _EMPTY, np.int64), len(self.row)
        self.row, self.last_announced = np.append(self.row, empty), np.append(self.last_announced, empty)
        self._free = np.append(np.arange(capacity, capacity + added)[::-1], self._free)

    def held(self) -> Int64Array:
        """The slots of all rows, in the order of the rows."""
        return self._slots

    def find(self, rows: Int64Array) -> Int64Array:
        """The slot of each row, -1 if it is not held."""
        if not len(self._rows):
            return np.full(len(rows), _EMPTY, np.int64)
        position = np.searchsorted(self._rows, rows)
        found = self._rows.take(position, mode="clip") == rows
        return np.where(found, self._slots.take(position, mode="clip"), _EMPTY)

    def leaving(self, num_entering: int, *, step: int) -> Int64Array:
        """The slots to empty so that `num_entering` rows fit, which no step from `step` on needs. Raises NoRoomError if
        too few rows may leave."""
        num_leaving = num_entering - len(self._free)
        if num_leaving <= 0:
            return np.zeros(0, np.int64)
        idle = self._slots[self.last_announced[self._slots] < step]
        if len(idle) < num_leaving:
            raise NoRoomError(
                f"{len(self.row)} resident rows are too few: step {step} needs {num_leaving - len(idle)} more; "
                "raise --capacity (a head's `capacity`) or lower --prefetch-steps"
            )
        oldest = np.argpartition(self.last_announced[idle], num_leaving - 1)[:num_leaving]
        return idle[oldest]

    def remove(self, slots: Int64Array) -> None:
        """Forgets the rows in `slots`."""
        gone = np.searchsorted(self._rows, np.sort(self.row[slots]))
        self._rows, self._slots = np.delete(self._rows, gone), np.delete(self._slots, gone)
        self.row[slots] = _EMPTY
        self._free = np.append(self._free, slots)

    def add(self, rows: Int64Array) -> Int64Array:
        """Gives each of `rows` (ascending, none held) a free slot."""
        rest = len(self._free) - len(rows)
        slots, self._free = self._free[rest:], self._free[:rest]
        self.row[slots] = rows
        where = np.searchsorted(self._rows, rows)
        self._rows, self._slots = np.insert(self._rows, where, rows), np.insert(self._slots, where, slots)
        return slots
