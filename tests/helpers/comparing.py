"""Whether rows are the same, to the last bit."""

from __future__ import annotations

import numpy as np

from weightserver import RowState


def same(one: RowState, other: RowState) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in vars(one))
