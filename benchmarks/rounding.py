"""Shows why rows in bfloat16 are rounded stochastically: how far they move, by how and how often they are rounded.

python -m benchmarks.rounding [--steps 20000] [--output benchmarks/results]

Only rows, no images: 64 rows of 128 values take `steps` updates of SGD in float32, with training's learning rates, and
are rounded after every update (as `--rows remote` stores them) or after every 256th (as `--rows resident` does, when
they leave the window). The peer is the same in float64 without rounding. A row's progress is the part of the exact
movement that it makes: the projection of its movement on the exact one, 1 if it follows and 0 if it stalls.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measure import write_results
from weightserver import TableSpec
from weightserver.core.arrays import Float32Array, Float64Array, Int64Array
from weightserver.core.correction import Schedule, apply_push
from weightserver.core.initial import initial_rows
from weightserver.core.precision import MOMENTUM_BUFFER, WEIGHT, BFloat16

NUM_ROWS, DIM, VISIT = 64, 128, 256
Gradient = Callable[[int], Float32Array]
Round = Callable[[Float32Array, Int64Array, int, int], Float32Array]


@dataclass(frozen=True)
class Movement:
    """How the rows of one case moved, compared with the exact ones."""

    progress: float
    """Part of the exact movement that they make, over all rows."""
    error: float
    """Median over the rows of ‖difference‖ / ‖row‖."""


def nearest(values: Float32Array, rows: Int64Array, step: int, array: int) -> Float32Array:
    """The nearest bfloat16, of two equally near ones the even one."""
    bits = values.view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def stochastic(values: Float32Array, rows: Int64Array, step: int, array: int) -> Float32Array:
    """Rounds as the shards do."""
    precision = BFloat16(seed=0)
    return precision.widened(precision.rounded(values, rows, step, array))


def unrounded(values: Float32Array, rows: Int64Array, step: int, array: int) -> Float32Array:
    return values


def gradients(weight: Float32Array) -> dict[str, Gradient]:
    """Gradients of each step by name, float32 [n, D]; small as those of negatives, of which a row is mostly one."""
    size = np.abs(weight).mean()
    direction = np.random.default_rng(1).standard_normal(weight.shape).astype(np.float32) * size

    def noisy(step: int) -> Float32Array:
        noise = np.random.default_rng(step).standard_normal(weight.shape).astype(np.float32)
        return np.float32(1e-3) * (direction + 10 * size * noise)

    return {
        "weight decay alone": lambda step: np.zeros_like(weight),
        "a small constant pull": lambda step: np.float32(1e-3) * direction,
        "the same pull in ten times as much noise": noisy,
    }


def exact(weight: Float32Array, gradient: Gradient, schedule: Schedule) -> Float64Array:
    """The weights after all updates, in float64."""
    w, u = weight.astype(np.float64), np.zeros(weight.shape)
    for step, rate in enumerate(schedule.learning_rates.astype(np.float64)):
        u = schedule.momentum * u + gradient(step) + schedule.weight_decay * w
        w = w - rate * u
    return w


def rounded(weight: Float32Array, gradient: Gradient, schedule: Schedule, how: Round, every: int) -> Float32Array:
    """The weights after all updates, rounded after every `every`-th and the last."""
    rows = np.arange(len(weight))
    w, u, last_step = weight.copy(), np.zeros_like(weight), np.zeros(len(weight), np.int64)
    for step in range(schedule.horizon):
        apply_push(schedule, True, step, last_step, w, u, gradient(step), rows=np.arange(len(w)))
        if (step + 1) % every == 0 or step + 1 == schedule.horizon:
            w, u = how(w, rows, step + 1, WEIGHT), how(u, rows, step + 1, MOMENTUM_BUFFER)
    return w


def movements(num_steps: int) -> dict[str, dict[str, Movement]]:
    """What rounding leaves of the movement, by gradients and by how the rows are stored."""
    spec = TableSpec(num_rows=NUM_ROWS, dim=DIM, dtype="bfloat16")
    weight = initial_rows(spec, np.arange(NUM_ROWS))
    rates = 0.06 * (0.5 + 0.5 * np.cos(np.pi * np.arange(num_steps) / num_steps))
    schedule = Schedule.of_table(spec, rates)
    cases: dict[str, tuple[Round, int]] = {
        "float32": (unrounded, 1),
        "nearest, every update": (nearest, 1),
        f"nearest, every {VISIT} updates": (nearest, VISIT),
        "stochastic, every update": (stochastic, 1),
        f"stochastic, every {VISIT} updates": (stochastic, VISIT),
    }
    results: dict[str, dict[str, Movement]] = {}
    for name, gradient in gradients(weight).items():
        right = exact(weight, gradient, schedule)
        results[name] = {}
        for case, (how, every) in cases.items():
            found = rounded(weight, gradient, schedule, how, every)
            moved, wanted = found - weight.astype(np.float64), right - weight
            error = np.linalg.norm(found - right, axis=1) / np.linalg.norm(right, axis=1)
            progress = float((moved * wanted).sum() / (wanted * wanted).sum())
            results[name][case] = Movement(progress, float(np.median(error)))
    return results


def as_table(results: dict[str, dict[str, Movement]]) -> str:
    lines = ["| gradients | stored | progress | error of a row |", "|---|---|---|---|"]
    for name, cases in results.items():
        lines += [f"| {name} | {case} | {one.progress:.3f} | {one.error:.2g} |" for case, one in cases.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    results = movements(arguments.steps)
    command = f"python -m benchmarks.rounding --steps {arguments.steps}"
    write_results(arguments.output, "rounding", command, results, as_table(results))


if __name__ == "__main__":
    main()
