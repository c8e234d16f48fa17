"""Types of NumPy arrays, and checks of values."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from weightserver.core.errors import ArgumentError

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
BFloat16Array = npt.NDArray[np.uint16]
"""The bits of bfloat16 numbers: NumPy has no such type."""
StoredArray = Float32Array | BFloat16Array
"""Values as a table stores and sends them, by its dtype."""


def all_finite(values: Float32Array) -> bool:
    """Whether no value is NaN or infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):  # one pass; it may overflow though all values are finite
            return True
    return bool(np.isfinite(values).all())


def checked_integer(value: Any, name: str, low: float = -math.inf, high: float = math.inf) -> int:
    """The argument `name` as a Python integer.

    Raises:
        TypeError: it is a bool, or nothing that Python would take as an index.
        ArgumentError: it is not in low..high.
    """
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = operator.index(value)
    if not low <= number <= high:
        raise ArgumentError(name, f"must lie in {low}..{high}, got {number}")
    return number


def checked_number(value: Any, name: str) -> float:
    """The argument `name` as a Python float, infinite for a huge integer. Raises TypeError for a text or a bool."""
    if isinstance(value, bool | np.bool_ | str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf
