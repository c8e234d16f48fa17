"""Digests of everything that rows, orders and schedules are computed by: the same on every machine.

As a script this file prints them as JSON, also where there is nothing but Python, NumPy and this project's imports.
"""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
import xxhash

from trainer.schedule import forward_seed, learning_rates, visit_uniforms
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.correction import Schedule, apply_push, correct
from weightserver.core.initial import initial_rows
from weightserver.core.precision import GRADIENT, MOMENTUM_BUFFER, WEIGHT, BFloat16
from weightserver.core.spec import TableSpec
from weightserver.torch.windows import RangesOrder, RowOrder, VisitSchedule

PRESETS = {"long": (50_000, 0.03, 1_250), "demo": (3_000, 0.1, 100), "no warm-up": (777, 1.7, 0)}
"""num_steps, base and warmup_steps of a schedule."""
SPECS = {"paper": (0.9, 1e-4), "decaying": (0.9, 3e-3), "no momentum": (0.0, 1e-3), "fast": (0.99, 0.05)}
"""momentum and weight_decay."""


def digests() -> dict[str, str]:
    """XXH3 of what each part computes, by its name."""
    return {name: xxhash.xxh3_64_hexdigest(b"".join(array.tobytes() for array in arrays)) for name, arrays in _parts()}


def _parts() -> list[tuple[str, list[npt.NDArray[np.generic]]]]:
    rows = np.concatenate([np.arange(300), 2**39 + np.arange(300)])
    weight = initial_rows(TableSpec(num_rows=2**40, dim=33, seed=5, init_std=0.37), rows)
    order, ranges = RowOrder(123_457, 3), RangesOrder([1_000, 77, 4_096], 9)
    visits = VisitSchedule(num_rows=5_000, window_size=700, window_stride=33, seed=2)
    rates = {
        name: learning_rates(num_steps=steps, base=base, warmup_steps=warmup)
        for name, (steps, base, warmup) in PRESETS.items()
    }
    parts: list[tuple[str, list[npt.NDArray[np.generic]]]] = [
        ("initial rows", [weight]),
        ("orders", [order.images(rows[:300]), order.rows(rows[:300]), ranges.images(np.arange(5_173))]),
        ("visits", [visits.visits(-900, 3_000)]),
        ("uniforms of visits", [visit_uniforms(7, np.arange(2_000) * 10**9, 13)]),
        ("rows in bfloat16", _rounded(weight, rows)),
        ("forward seeds", [np.array([forward_seed(3, step, rank) for step in range(9) for rank in range(3)], "<u8")]),
        ("learning rates", list(rates.values())),
    ]
    for name, (momentum, weight_decay) in SPECS.items():
        given = rates["long"].copy()
        given[20_000 : 20_000 + len(rates["demo"])] = rates["demo"]
        schedule = Schedule(momentum=momentum, weight_decay=weight_decay, learning_rates=given)
        starts = np.unique(np.geomspace(1, 49_999, 400).astype(np.int64))
        transfers = [schedule.transfer(starts[starts <= stop], stop) for stop in (17, 4_096, 33_333, 50_000)]
        parts.append((f"transfers, {name}", list(transfers)))
        parts.append((f"rows, {name}", _moved(schedule, weight)))
    return parts


def _moved(schedule: Schedule, weight: npt.NDArray[np.float32]) -> list[npt.NDArray[np.generic]]:
    """Rows after gradients of several updates, on time and late, and corrected at last."""
    weight, momentum_buffer = weight.copy(), np.zeros_like(weight)
    last_step = np.zeros(len(weight), np.int64)
    gradient = np.flip(weight, axis=0).copy()
    for step in (100, 101, 5_000, 4_000, 40_000, 40_000):
        apply_push(schedule, True, step, last_step, weight, momentum_buffer, gradient, rows=np.arange(len(weight)))
    last_step[::3] = 41_000  # as if a third had been written later
    correct(weight, momentum_buffer, schedule.coefficients(last_step, 45_000))
    return [weight, momentum_buffer]


def _rounded(weight: Float32Array, rows: Int64Array) -> list[npt.NDArray[np.generic]]:
    """Values rounded to bfloat16, also very large and subnormal ones."""
    precision = BFloat16(5)
    spread = np.ldexp(weight, np.where(rows % 2, 108, -130)[:, None] + np.arange(-16, 17))
    return [
        initial_rows(TableSpec(num_rows=2**40, dim=33, seed=5, dtype="bfloat16"), rows),
        *(precision.rounded(spread, rows, rows % 1_000, array) for array in (WEIGHT, MOMENTUM_BUFFER, GRADIENT)),
    ]


if __name__ == "__main__":
    print(json.dumps(digests(), indent=2))
