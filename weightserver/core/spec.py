"""The spec of a table: constant while the table exists, except for num_rows, which may grow."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from weightserver.core.arrays import checked_integer, checked_number
from weightserver.core.errors import ArgumentError

MAX_ROWS = 2**48
_MAX_BLOCK_BYTES = 32 << 20
"""A message holds the rows of at least one block, and must stay within gRPC's limit."""
_INTEGERS = {"num_rows": (1, MAX_ROWS), "dim": (1, 65_536), "rows_per_block": (1, 2_048), "seed": (0, 2**64 - 1)}
"""The smallest and largest values."""
_NUMBERS = {"momentum": (1.0, "1"), "weight_decay": (math.inf, "∞"), "init_std": (1e15, "1e15")}
"""Numbers of a table that are in [0, limit): the limit, and how it is written. That of init_std keeps norms finite."""
_CORRECTIONS: dict[bool | str, bool | str] = {True: True, False: False, "exact": True, "paper": "paper", "none": False}
_VALUE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A classifier's table of rows: its size, the initial weights, and the dynamics that move them.

    Raises:
        ArgumentError: a value out of range.
        ValueError: another invalid value.
        TypeError: a value of the wrong type.
    """

    num_rows: int
    """N, one row per training image; `extend_table` adds rows."""
    dim: int
    """D, the length of a weight vector."""
    momentum: float = 0.9
    """m of SGD, in [0, 1)."""
    weight_decay: float = 1e-4
    """λ of SGD, ≥ 0."""
    init_std: float = 0.01
    """Standard deviation of the initial weights, N(0, init_std²)."""
    seed: int = 0
    """Seed of the initial weights, in [0, 2⁶⁴)."""
    rows_per_block: int = 63
    """Rows stored together as one value; 63 rows of D = 128 just fit 16 pages of 4 KiB."""
    correction: bool | Literal["exact", "paper", "none"] = True
    """Whether untouched rows follow momentum and weight decay. True, "exact": with the learning rate of each step.
    "paper": the paper's closed form, with one learning rate for all steps of a gap. False, "none": they do not move
    (the paper's ablation). The attribute holds True, "paper" or False."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The numbers in which the shards store and send weights, momentum buffers and gradients; arithmetic is float32.
    "bfloat16" halves disk, wire and memory, and rounds to 8 bits whenever a row is stored."""

    def __post_init__(self) -> None:
        for name, (low, high) in _INTEGERS.items():
            self._set(name, checked_integer(getattr(self, name), name, low, high))
        for name, (limit, shown) in _NUMBERS.items():
            number = checked_number(getattr(self, name), name)
            if not 0 <= number < limit:
                raise ArgumentError(name, f"must lie in [0, {shown}), got {number!r}")
            self._set(name, number)
        if not isinstance(self.correction, bool | str) or self.correction not in _CORRECTIONS:
            raise TypeError(
                f"correction must be a bool, got {self.correction!r}: True (exact), 'paper' or False (none)"
            )
        self._set("correction", _CORRECTIONS[self.correction])
        if not isinstance(self.dtype, str) or self.dtype not in _VALUE_BYTES:
            raise ValueError(f"dtype must be 'float32' or 'bfloat16', got {self.dtype!r}")
        block_bytes = self.rows_per_block * (8 + 2 * self.value_bytes * self.dim)
        if block_bytes > _MAX_BLOCK_BYTES:
            raise ArgumentError(
                "rows_per_block",
                f"is {self.rows_per_block}, but a block of so many rows of {self.dim} numbers takes "
                f"{block_bytes} bytes, more than {_MAX_BLOCK_BYTES}: choose fewer",
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_rows // self.rows_per_block)

    @property
    def value_bytes(self) -> int:
        """Bytes of a stored value."""
        return _VALUE_BYTES[self.dtype]

    def is_another_size_of(self, other: TableSpec) -> bool:
        """Whether the two differ in num_rows and in nothing else."""
        return self != other and replace(self, num_rows=other.num_rows) == other
