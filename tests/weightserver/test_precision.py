"""bfloat16: which numbers a value may become, that its expectation stays, and that nothing but its place decides."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from benchmarks.rounding import movements
from tests.helpers.rounding_model import ROUNDING_ERROR
from weightserver.core.arrays import BFloat16Array, Float32Array
from weightserver.core.precision import (
    GRADIENT,
    MOMENTUM_BUFFER,
    WEIGHT,
    BFloat16,
)

most = float(np.finfo(np.float32).max)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([most, -most])


def rounded(values: npt.ArrayLike, *, seed: int = 0, row: int = 0, step: int = 0, array: int = WEIGHT) -> BFloat16Array:
    """Values float32 [n, D] of rows `row` …, as they are stored."""
    given = np.asarray(values, np.float32)
    stored = BFloat16(seed).rounded(given, np.arange(row, row + len(given)), step, array)
    assert stored.dtype == np.uint16
    return stored


def widened(stored: BFloat16Array) -> Float32Array:
    return BFloat16(0).widened(stored)


def test_every_finite_bfloat16_stays_as_it_is() -> None:
    """So raw state can be read and written back; also zeros of both signs and subnormal numbers."""
    every = np.arange(1 << 16, dtype=np.uint16)
    every = every[(every & 0x7F80) != 0x7F80].reshape(-1, 16)
    for seed, step, array in ((0, 0, WEIGHT), (2**64 - 1, 2**40, MOMENTUM_BUFFER), (7, 3, GRADIENT)):
        assert np.array_equal(rounded(widened(every), seed=seed, step=step, array=array), every)


@settings(max_examples=200)
@given(arrays.arrays(np.float32, (2, 5), elements=finite), st.integers(0, 2**64 - 1), st.integers(0, 2**62))
def test_a_value_becomes_one_of_its_two_neighbours(values: Float32Array, seed: int, step: int) -> None:
    """That are finite: the largest float32 becomes the largest bfloat16."""
    below = values.view(np.uint32) >> 16  # towards zero
    found = rounded(values, seed=seed, step=step)
    exact = (values.view(np.uint32) & 0xFFFF) == 0
    assert ((found == below) | (~exact & (found == below + 1)) & np.isfinite(widened(found))).all()
    error = np.abs(widened(found).astype(np.float64) - values)
    assert (error <= np.maximum(ROUNDING_ERROR * np.abs(values.astype(np.float64)), 2.0**-133)).all()


@pytest.mark.parametrize("value", [1.0, -0.01, 1e-39, -(2.0**-133), 3e38])
@pytest.mark.parametrize("part", [0.01, 0.3, 0.5, 0.97])
def test_the_expectation_is_the_value(value: float, part: float) -> None:
    """`part` of the way between two neighbours, also of subnormal numbers."""
    low = np.float32(value).view(np.uint32) & 0xFFFF0000
    between = np.full((400, 100), low + np.uint32(part * 65536), np.uint32).view(np.float32)
    for array in (WEIGHT, MOMENTUM_BUFFER, GRADIENT):
        up = rounded(between, step=9, array=array) != low >> 16
        assert abs(up.mean() - part) < 5 * (part * (1 - part) / up.size) ** 0.5


def test_rounding_is_a_function_of_seed_row_step_array_and_column() -> None:
    precision, values = BFloat16(5), np.random.default_rng(0).standard_normal((700, 130)).astype(np.float32)
    rows, steps = np.arange(700) * 10**9, np.arange(700) % 17
    together = precision.rounded(values, rows, steps, MOMENTUM_BUFFER)  # in several chunks
    chosen = np.random.default_rng(1).permutation(700)
    assert np.array_equal(
        precision.rounded(values[chosen], rows[chosen], steps[chosen], MOMENTUM_BUFFER), together[chosen]
    )
    for row in (0, 1, 699):
        alone = precision.rounded(values[[row]], rows[[row]], int(steps[row]), MOMENTUM_BUFFER)
        assert np.array_equal(alone[0], together[row])
    assert precision.rounded(values[:0], rows[:0], steps[:0], WEIGHT).shape == (0, 130)


def test_other_seeds_rows_steps_arrays_and_columns_round_independently() -> None:
    halves = np.full((300, 128), 1 + 2.0**-8, np.float32)  # half way
    base = rounded(halves).astype(np.float64) - 0x3F80
    assert abs(base.mean() - 0.5) < 5 * 0.5 / base.size**0.5
    others = {
        "seed": rounded(halves, seed=1),
        "row": rounded(halves, row=1),
        "far row": rounded(halves, row=2**40),
        "step": rounded(halves, step=1),
        "far step": rounded(halves, step=2**40),
        "array": rounded(halves, array=MOMENTUM_BUFFER),
        "gradient": rounded(halves, array=GRADIENT),
        "column": np.roll(rounded(halves), 1, axis=1),
        "word": np.roll(rounded(halves), 4, axis=1),
    }
    for name, other in others.items():
        correlation = np.corrcoef(base.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 5 / base.size**0.5, name


def test_nan_and_infinite_values_are_seen() -> None:
    precision = BFloat16(0)
    for bits in (0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFFF):
        stored = np.array([[0, 0x8000, bits]], np.uint16)
        assert not precision.all_finite(stored)
    edge = np.array([0x7F7F, 0xFF7F, 1, 0x8001], np.uint16)
    assert precision.all_finite(edge)
    assert precision.all_finite(edge[:0])


def test_rows_rounded_to_the_nearest_would_stand_still() -> None:
    """Why rounding is stochastic: weight decay and the small gradients of negatives are lost otherwise."""
    for cases in movements(400).values():
        assert cases["nearest, every update"].progress < 0.5
        assert abs(cases["stochastic, every update"].progress - 1) < 0.05
    assert cases["float32"].error < 1e-5
