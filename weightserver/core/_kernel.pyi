"""The compiled passes; `_kernel.c` says what they compute. Arrays are contiguous; "blocks" are stored ones or None."""

from typing import Any

INTERFACE: int

Layout = tuple[int, int, int, int, int, int, int, int, int]
Initial = tuple[int, float, Any]

def look(
    layout: Layout,
    blocks: list[memoryview | None],
    numbers: Any,
    starts: Any,
    slots: Any,
    last_step: Any,
    checksum_address: int,
    /,
) -> tuple[int, bool]:
    """Fills last_step; returns the first damaged block's position or -1, and whether all blocks have small values."""

def answer(
    layout: Layout,
    blocks: list[memoryview | None],
    starts: Any,
    slots: Any,
    rows: Any,
    coefficients: Any,
    initial: Initial,
    rounding: tuple[int, int],
    weight_head: bytes,
    momentum_head: bytes | None,
    last_step_head: bytes | None,
    last_step: Any,
    /,
) -> bytes:
    """A message of the rows: each array after its head."""

def initial_rows(initial: Initial, rows: Any, dim: int, weight: Any, /) -> None: ...
