"""The dimensionless numbers of a run, by which runs of different sizes are compared. Derived in docs/results.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from trainer.config import TrainConfig
from trainer.run.run_images import RunImages
from weightserver.core.arrays import Float64Array

MEANINGS = {
    "first_turn": "turn of a row at its first visit, η/((1−m)·τ·B·D·σ²)",
    "total_turn": "turn of a row over all its visits, rad",
    "learning_per_pass": "learning rate times the steps of a pass, η·N/B·0.1/(1−m)",
    "decay": "weight decay over the whole run, λ·Ση·0.1/(1−m)",
    "visits_per_row": "visits to each row",
    "negatives_of_rows": "classes of a step, K/N",
    "negatives_of_batch": "classes for each image of a batch, K/B",
    "window_of_images": "window, W/N",
    "window_of_batch": "window in batches, W/B",
    "stride_of_window": "stride, S/W",
    "warmup_of_steps": "share of the warm-up",
}
"""Name of a number to what it is, in the paper's symbols."""
_PAPERS_MOMENTUM = 0.9
_LEAST_SQUARE = float(np.finfo(np.float32).tiny) ** 2
"""The square of the shortest length that a row is taken to have; a strong decay would shrink it to 0 between visits."""


@dataclass(frozen=True, kw_only=True)
class Proportions:
    """What two runs must share to be alike, whatever their sizes. η and m are those of the rows."""

    first_turn: float | None
    """Tangent of the angle by which the gradient of its own image turns a row at its first visit, at the most: with the
    largest η of the first N visits. It is that of a run in epoch order: a window may visit a row again before momentum
    has run out. None for a plain softmax, under which it depends on more than these settings."""
    total_turn: float | None
    """Sum of the angles of all visits, in radians, at the most, as if they were evenly apart. Each visit makes the row
    longer, and weight decay makes it shorter between them: of runs with correction, since without it rows decay only
    while they are active."""
    learning_per_pass: float
    decay: float
    """This and `learning_per_pass` are those of a run with the paper's momentum, in which rows move as far: its η is
    0.1/(1 − m) times this run's."""
    visits_per_row: float
    negatives_of_rows: float
    negatives_of_batch: float
    window_of_images: float
    window_of_batch: float
    stride_of_window: float
    warmup_of_steps: float

    def lines(self) -> Iterator[str]:
        """Each number with what it is."""
        return (f"{MEANINGS[name]}: {value:.3g}" for name, value in asdict(self).items() if value is not None)


def proportions(config: TrainConfig, num_images: int, num_rows: int | None = None) -> Proportions:
    """The numbers of a run of these settings on `num_images` images, N, from its beginning.

    Args:
        num_rows: classes that the images share; without it each image is its own.

    Raises:
        ValueError: a run of more steps than are possible.
    """
    optimization, rows = config.optimization, num_rows or num_images
    factor = config.rows.row_learning_rate
    rates = factor * RunImages(num_images, num_images).learning_rates(optimization).astype(np.float64)
    batch, steps = optimization.batch_size, len(rates)
    by_momentum = (1 - _PAPERS_MOMENTUM) / (1 - _momentum(config))
    turns = None if config.loss.softmax == "plain" else _turns(config, rates, rows)
    return Proportions(
        first_turn=None if turns is None else _first_turn(config, rates, rows),
        total_turn=None if turns is None else float(turns.sum()),
        learning_per_pass=by_momentum * factor * optimization.learning_rate * rows / batch,
        decay=by_momentum * optimization.weight_decay * float(rates.sum()),
        visits_per_row=steps * batch / rows,
        negatives_of_rows=config.rows.num_negatives / rows,
        negatives_of_batch=config.rows.num_negatives / batch,
        window_of_images=config.sampling.window_size / num_images,
        window_of_batch=config.sampling.window_size / batch,
        stride_of_window=config.sampling.window_stride / config.sampling.window_size,
        warmup_of_steps=optimization.warmup_steps(num_images, steps) / steps,
    )


def _momentum(config: TrainConfig) -> float:
    """m of the rows' SGD."""
    return config.optimization.momentum if config.rows.row_momentum is None else config.rows.row_momentum


def _push(config: TrainConfig) -> float:
    """How far a visit moves a row of length 1 for each unit of η, at the most: 1 / ((1 − m) τ B)."""
    return 1 / ((1 - _momentum(config)) * config.loss.temperature * config.optimization.batch_size)


def _first_turn(config: TrainConfig, rates: Float64Array, num_rows: int) -> float:
    of_a_pass = rates[: max(1, num_rows // config.optimization.batch_size)]
    return float(_push(config) * of_a_pass.max() / _first_square(config))


def _first_square(config: TrainConfig) -> float:
    """r² of a row at its first visit."""
    return max(config.model.dim * config.rows.init_std**2, _LEAST_SQUARE)


def _turns(config: TrainConfig, rates: Float64Array, num_rows: int) -> Float64Array:
    """The turns of a row's visits, which are evenly apart.

    A visit moves a row of length r by a/r across its direction: it turns by arctan(a/r²), and r² grows by (a/r)².
    Between visits r shrinks by λη/(1 − m) in each step.
    """
    steps_apart = num_rows / config.optimization.batch_size
    firsts = np.unique(np.round(np.arange(0, len(rates), max(1, steps_apart))).astype(np.int64))
    firsts = firsts[firsts < len(rates)]
    visits = np.diff(firsts, append=len(rates)) / steps_apart  # several at a time, if rows are fewer than images
    sums = np.add.reduceat(rates, firsts)
    pushes = _push(config) * sums / np.diff(firsts, append=len(rates)) * visits
    shrinks = np.exp(-2 * config.optimization.weight_decay / (1 - _momentum(config)) * sums)
    square, turns = _first_square(config), np.zeros(len(firsts))
    for visit, (push, shrink) in enumerate(zip(pushes.tolist(), shrinks.tolist(), strict=True)):
        turns[visit] = np.arctan2(push, square)
        square = max((square + push**2 / square) * shrink, _LEAST_SQUARE)
    return turns
