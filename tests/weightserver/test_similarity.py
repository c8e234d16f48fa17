"""The k most similar rows, beside a dense computation in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.helpers.dense_search import dense_nearest
from weightserver.core import similarity
from weightserver.core.arrays import Float32Array
from weightserver.core.similarity import SIMILARITIES, NearestRows

NUM_ROWS, DIM = 600, 24
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> Float32Array:
    return RANDOM.standard_normal(shape, np.float32)


DISTRIBUTIONS: dict[str, Callable[[], Float32Array]] = {
    "normal": lambda: normal(NUM_ROWS, DIM),
    "clustered": lambda: normal(20, DIM)[RANDOM.integers(0, 20, NUM_ROWS)] + 1e-6 * normal(NUM_ROWS, DIM),
    "equal": lambda: np.broadcast_to(normal(1, DIM), (NUM_ROWS, DIM)).copy(),
    "of few values": lambda: RANDOM.integers(-1, 2, (NUM_ROWS, 3)).astype(np.float32),
    "parallel": lambda: normal(1, DIM) * RANDOM.integers(1, 9, (NUM_ROWS, 1)).astype(np.float32),
    "nearly all zero": lambda: normal(NUM_ROWS, DIM) * (RANDOM.random((NUM_ROWS, 1), np.float32) < 0.02),
    "of huge and small norms": lambda: (normal(NUM_ROWS, DIM) * 10 ** RANDOM.uniform(-44, 37, (NUM_ROWS, 1))).astype(
        np.float32
    ),
    "beyond float32 together": lambda: np.full((NUM_ROWS, DIM), 3e38, np.float32) * np.sign(normal(NUM_ROWS, 1)),
    "of one value": lambda: normal(NUM_ROWS, 1),
}


@pytest.mark.parametrize("measure", SIMILARITIES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_rows_found_are_those_of_a_dense_computation(distribution: str, measure: str) -> None:
    weight = DISTRIBUTIONS[distribution]()
    queries = np.concatenate([weight[:9], normal(9, weight.shape[1]), np.zeros((1, weight.shape[1]), np.float32)])
    rows = np.sort(RANDOM.choice(10**6, NUM_ROWS, replace=False))
    expected, exact = dense_nearest(queries, weight, NUM_ROWS, measure)
    for k in (1, 10, 150, NUM_ROWS + 5):
        nearest = NearestRows(queries, k, measure)
        for part in np.split(np.arange(NUM_ROWS), [3, 3, 50, 350]):  # one is empty
            nearest.add(rows[part], weight[part])
        found, scores = nearest.found()
        assert found.shape == scores.shape == (len(queries), min(k, NUM_ROWS))
        assert np.array_equal(found, rows[expected[:, :k]])
        assert np.array_equal(scores, exact[:, :k])


@pytest.mark.parametrize("measure", SIMILARITIES)
def test_neither_chunks_nor_other_queries_change_a_bit(measure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, queries = DISTRIBUTIONS["clustered"](), normal(50, DIM)
    whole = NearestRows(queries, 9, measure)
    whole.add(np.arange(NUM_ROWS), weight)
    monkeypatch.setattr(similarity, "MAX_PAIRS", 700)  # few queries at a time
    monkeypatch.setattr(similarity, "_PAIR_VALUES", 2 * DIM)
    parts = NearestRows(queries[30:], 9, measure)
    for row in range(0, NUM_ROWS, 37):
        parts.add(np.arange(row, min(row + 37, NUM_ROWS)), weight[row : row + 37])
    assert np.array_equal(whole.found()[0][30:], parts.found()[0])
    assert np.array_equal(whole.found()[1][30:], parts.found()[1])


def test_no_row_was_added() -> None:
    rows, scores = NearestRows(normal(3, DIM), 4, "cosine").found()
    assert rows.shape == scores.shape == (3, 0)
