"""The applied sequence numbers of a writer: the highest contiguous one and a bitmap of the next 1,024."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from weightserver.core.errors import InvalidRequestError

WINDOW = 1_024
_STRUCT = struct.Struct(f"<Q{WINDOW // 8}s")


@dataclass
class WriterState:
    """One writer's applied sequence numbers: all up to `highest`, and highest + 1 + i for each bit i of `beyond`."""

    highest: int = 0
    beyond: int = 0

    @classmethod
    def unpack(cls, value: memoryview | bytes | None) -> WriterState:
        if value is None:
            return cls()
        highest, beyond = _STRUCT.unpack(value)
        return cls(highest, int.from_bytes(beyond, "little"))

    def pack(self) -> bytes:
        return _STRUCT.pack(self.highest, self.beyond.to_bytes(WINDOW // 8, "little"))

    def admit(self, sequence: int, settled_before: int) -> bool:
        """Records `sequence`; returns False if it was applied before, or given up by the writer.

        Raises:
            InvalidRequestError: too many earlier numbers are missing to record this one.
        """
        self._settle(settled_before)
        bit = sequence - self.highest - 1
        if bit < 0 or self.beyond >> bit & 1:
            return False
        if bit >= WINDOW:
            raise InvalidRequestError(
                f"sequence number {sequence} is more than {WINDOW} beyond {self.highest}, "
                "up to which all writes have arrived: finish or give up the earlier ones first"
            )
        self.beyond |= 1 << bit
        self._settle(self.highest + 1)
        return True

    def _settle(self, settled_before: int) -> None:
        if settled_before - 1 > self.highest:
            self.beyond >>= settled_before - 1 - self.highest
            self.highest = settled_before - 1
        while self.beyond & 1:
            self.beyond >>= 1
            self.highest += 1
