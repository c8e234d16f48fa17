"""The rows most similar to queries by a dense computation: the oracle of searches."""

from __future__ import annotations

import math

import numpy as np

from weightserver.core.arrays import Float32Array, Int64Array


def dense_nearest(queries: Float32Array, weight: Float32Array, k: int, metric: str) -> tuple[Int64Array, Float32Array]:
    """Positions of the k rows of `weight` most similar to each query, and their similarities, [q, min(k, n)] each.

    Correctly rounded sums of products in float64, rounded to float32; equals in the order of their positions.
    """
    similarity = np.empty((len(queries), len(weight)), np.float32)
    exact_queries, exact_weight = queries.astype(np.float64), weight.astype(np.float64)
    norms = np.array([math.sqrt(math.fsum(row * row)) for row in exact_weight])
    with np.errstate(over="ignore", under="ignore"):
        for number, query in enumerate(exact_queries):
            products = np.array([math.fsum(row) for row in exact_weight * query])
            if metric == "cosine":
                lengths = norms * math.sqrt(math.fsum(query * query))
                products = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
            similarity[number] = products
    similarity += np.float32(0)  # no −0
    order = np.argsort(-similarity, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(similarity, order, axis=1)
