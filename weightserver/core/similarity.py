"""Exact search: the rows that are most similar to given vectors, by cosine or inner product.

A similarity is defined by float64 operations of NumPy calls of their own, rounded to float32 once, so that it has the
same bits on every processor and wherever the row stands. Rows that are equally similar in float32 are ordered by their
numbers. Computing all similarities like that would take fifty times as long as a matrix product in float32, which
therefore chooses the candidates first: every row that, within the product's largest possible error, may belong to the
k best. Where nearly all rows are candidates, as among equal rows, a product in float64 decides between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightserver.core.arrays import Float32Array, Float64Array, Int64Array

SIMILARITIES = ("cosine", "inner_product")
_NO_ROW = np.iinfo(np.int64).max
MAX_PAIRS = 1 << 18
"""Pairs of a query and a row that are compared at a time, unless a query has more rows."""
_PAIR_VALUES = 1 << 18
"""Values of candidates that are compared in float64 at a time."""
_MANY = 8
"""If more than one in so many rows is a candidate, a float64 product is faster than comparing each on its own."""
_REGULAR = 1e-30, 1e30
"""Between these, float32 holds a row's sum of squares to its full precision."""


@dataclass(frozen=True)
class _Chunk:
    """Some rows, prepared for products with unit queries."""

    rows: Int64Array  # (n,), ascending
    weight: Float32Array  # (n, D)
    vectors: Float32Array  # (n, D): the weights divided by their norms (cosine), or by `scale`
    scale: float
    radius: float
    """Upper bound of the vectors' norms."""
    is_cosine: bool

    @classmethod
    def of(cls, rows: Int64Array, weight: Float32Array, *, is_cosine: bool) -> _Chunk:
        if is_cosine:
            return cls(rows, weight, unit_rows(weight), 1.0, 1.0, is_cosine=True)
        exponent = int(np.frexp(np.abs(weight).max())[1])
        vectors = np.ldexp(weight, -exponent)  # at most 1, so that no product overflows
        radius = math.sqrt(np.einsum("ij,ij->i", vectors, vectors).max())
        return cls(rows, weight, vectors, math.ldexp(1.0, exponent), radius, is_cosine=False)

    @cached_property
    def exact_vectors(self) -> Float64Array:
        """`vectors` as float64 [n, D]."""
        weight = (self.weight if self.is_cosine else self.vectors).astype(np.float64)
        return weight / _divisors(_norms(weight))[:, None] if self.is_cosine else weight

    def error(self, unit_roundoff: float) -> float:
        """Upper bound of a product's error with a unit query, in any order of its sums."""
        num_values: int = self.weight.shape[1]
        return (2 * num_values + 16) * unit_roundoff * self.radius


class NearestRows:
    """The `k` rows most similar to each query, among those that were added. Add rows in ascending order.

    Args:
        queries: float32 [q, D], finite.
        similarity: one of `SIMILARITIES`. The cosine with a vector of zeros is 0.
    """

    def __init__(self, queries: Float32Array, k: int, similarity: str) -> None:
        self.num_rows = 0
        """Number of rows added."""
        self._k = k
        self._is_cosine = similarity == "cosine"
        self._queries = queries
        exact = queries.astype(np.float64)
        self._norms = _norms(exact)
        self._exact_units = exact / _divisors(self._norms)[:, None]
        self._units = self._exact_units.astype(np.float32)
        self._rows = np.full((len(queries), k), _NO_ROW)
        self._similarity = np.full((len(queries), k), -np.inf, np.float32)

    def add(self, rows: Int64Array, weight: Float32Array) -> None:
        """Adds rows (int64 [n], ascending, beyond all earlier ones) with their weights (float32 [n, D], finite)."""
        if not len(rows):
            return
        with np.errstate(over="ignore", under="ignore"):
            chunk = _Chunk.of(rows, weight, is_cosine=self._is_cosine)
            queries_at_a_time = max(1, MAX_PAIRS // len(rows))
            for start in range(0, len(self._queries), queries_at_a_time):
                queries = np.arange(start, min(start + queries_at_a_time, len(self._queries)))
                self._insert(*self._candidates(queries, chunk))
        self.num_rows += len(rows)

    def found(self) -> tuple[Int64Array, Float32Array]:
        """The rows most similar to each query, most similar first, and their similarities: int64 and float32 [q, n],
        where n is k, or the number of rows added if that is less."""
        count = min(self._k, self.num_rows)
        return self._rows[:, :count], self._similarity[:, :count]

    def _candidates(self, queries: Int64Array, chunk: _Chunk) -> tuple[Int64Array, Int64Array, Float32Array]:
        """Rows of a chunk that may be among the k most similar: queries, row numbers and similarities, [m] each."""
        scale = np.full(len(queries), chunk.scale) if self._is_cosine else chunk.scale * _divisors(self._norms[queries])
        product: Float32Array = self._units[queries] @ chunk.vectors.T
        error = chunk.error(2.0**-24)
        # A row is needed if its similarity is greater than `least`. Among equals, the earlier rows come first.
        least = np.full(len(queries), -np.inf, np.float32)
        if self.num_rows >= self._k:
            least = self._similarity[queries, -1]
        chosen = product >= _rounded_down(least / scale - error)[:, None]
        if np.count_nonzero(chosen) > 4 * self._k * len(queries) and len(chunk.rows) > self._k:
            worst = np.partition(product, -self._k, axis=1)[:, -self._k]  # of the k best of this chunk
            reached = ((worst.astype(np.float64) - error) * scale).astype(np.float32)
            least = np.maximum(least, np.nextafter(reached, np.float32(-np.inf)))
            chosen &= product >= _rounded_down(least / scale - error)[:, None]
        if np.count_nonzero(chosen) * _MANY > chosen.size:
            return self._decided(queries, chunk, scale, least, chosen)
        of_query, of_row = np.nonzero(chosen)
        return queries[of_query], chunk.rows[of_row], self._compared(queries[of_query], chunk.weight, of_row)

    def _decided(
        self,
        queries: Int64Array,
        chunk: _Chunk,
        scale: Float64Array,
        least: Float32Array,
        chosen: npt.NDArray[np.bool_],
    ) -> tuple[Int64Array, Int64Array, Float32Array]:
        """The candidates among the `chosen`, bool [q, n], by a float64 product: it nearly always decides the float32
        similarity."""
        product = (self._exact_units[queries] @ chunk.exact_vectors.T) * scale[:, None]
        error = (chunk.error(2.0**-52) * scale * (self._norms[queries] > 0))[:, None]
        highest = (product + error).astype(np.float32)
        chosen = chosen & ((highest > least[:, None]) | np.isneginf(least)[:, None])
        of_query, of_row = np.nonzero(chosen)
        similarity = (product - error).astype(np.float32)[of_query, of_row]
        open_pairs = np.flatnonzero(similarity != highest[of_query, of_row])
        similarity[open_pairs] = self._compared(queries[of_query[open_pairs]], chunk.weight, of_row[open_pairs])
        return queries[of_query], chunk.rows[of_row], similarity + np.float32(0)

    def _compared(self, queries: Int64Array, weight: Float32Array, rows: Int64Array) -> Float32Array:
        """The similarity of each pair of a query (int64 [m]) and a row of `weight` (int64 [m]), float32 [m]."""
        similarity = np.empty(len(queries), np.float32)
        pairs_at_a_time = max(1, _PAIR_VALUES // weight.shape[1])
        for start in range(0, len(queries), pairs_at_a_time):
            part = slice(start, start + pairs_at_a_time)
            query, row = self._queries[queries[part]].astype(np.float64), weight[rows[part]].astype(np.float64)
            exact = _sums(query * row)
            if self._is_cosine:
                exact /= _divisors(self._norms[queries[part]] * _norms(row))
            similarity[part] = exact
        return similarity + np.float32(0)  # no −0

    def _insert(self, queries: Int64Array, rows: Int64Array, similarity: Float32Array) -> None:
        """Takes the candidates ([m] each) that are more similar than the rows found so far."""
        changed, place = np.unique(queries, return_inverse=True)
        if not len(changed):
            return
        every_query = np.concatenate([np.repeat(np.arange(len(changed)), self._k), place])
        every_row = np.concatenate([self._rows[changed].reshape(-1), rows])
        every_similarity = np.concatenate([self._similarity[changed].reshape(-1), similarity])
        order = np.lexsort((every_row, -every_similarity, every_query))
        first = np.searchsorted(every_query[order], np.arange(len(changed)))
        kept = order[first[:, None] + np.arange(self._k)]
        self._rows[changed], self._similarity[changed] = every_row[kept], every_similarity[kept]


def most_similar(rows: Int64Array, similarity: Float32Array, k: int) -> tuple[Int64Array, Float32Array]:
    """The k most similar of each query's rows, most similar first: rows and similarity are int64 and float32 [q, n]."""
    order = np.lexsort((rows, -similarity), axis=-1)[:, :k]
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(similarity, order, axis=1)


def unit_rows(weight: Float32Array) -> Float32Array:
    """Rows float32 [n, D] divided by their norms, which float32 may not hold; rows of zeros stay."""
    with np.errstate(over="ignore", under="ignore"):
        squares = np.einsum("ij,ij->i", weight, weight)
    odd = np.flatnonzero(~((squares > _REGULAR[0]) & (squares < _REGULAR[1])))
    if len(odd):
        weight = weight.copy()
        exponents = np.frexp(np.abs(weight[odd]).max(axis=1))[1]
        weight[odd] = np.ldexp(weight[odd], -exponents[:, None])
        squares[odd] = np.einsum("ij,ij->i", weight[odd], weight[odd])
    squares[squares == 0] = 1
    units: Float32Array = weight * (1 / np.sqrt(squares))[:, None]
    return units


def _norms(rows: Float64Array) -> Float64Array:
    """The norm of each row, float64 [n]."""
    norms: Float64Array = np.sqrt(_sums(rows * rows))
    return norms


def _divisors(norms: Float64Array) -> Float64Array:
    """The norms, and 1 for zeros."""
    return np.where(norms > 0, norms, 1.0)


def _sums(values: Float64Array) -> Float64Array:
    """The sum of each row of `values` (float64 [n, D], overwritten), by halves: the same bits on every processor."""
    while (width := values.shape[1]) > 1:
        half = width // 2
        values[:, :half] += values[:, width - half :]
        values = values[:, : width - half]
    return values[:, 0]


def _rounded_down(values: Float64Array) -> Float32Array:
    """float32 numbers that are not above the values."""
    rounded: Float32Array = np.nextafter(values.astype(np.float32), np.float32(-np.inf))
    return rounded
