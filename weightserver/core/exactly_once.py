"""What a shard remembers of a writer, so that it applies none of its writes twice, and none that was abandoned."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from weightserver.core.errors import FencedError

_STRUCT = struct.Struct("<Q?")


@dataclass(frozen=True)
class WriterState:
    """A writer's newest write: its number, and whether it was applied or sealed. Every lower number is settled."""

    number: int = 0
    applied: bool = False

    @classmethod
    def unpack(cls, value: memoryview | bytes | None) -> WriterState:
        return cls() if value is None else cls(*_STRUCT.unpack(value))

    def pack(self) -> bytes:
        return _STRUCT.pack(self.number, self.applied)

    def has_applied(self, number: int) -> bool:
        """Whether the shard has applied that write; if not, it may.

        Raises:
            FencedError: it was sealed, or its writer has gone on to a later one.
        """
        if number > self.number:
            return False
        if number == self.number and self.applied:
            return True
        raise FencedError(f"write {number} of this writer is settled, and can have no effect any more")
