"""Counts observations in buckets, cheaply: what a Prometheus histogram shows of one set of label values."""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_left


class Series:
    """The observations for one set of label values. Thread-safe.

    Args:
        bounds: upper bounds of the buckets, ascending; the last one is infinite.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.created = time.time()
        self.bounds = bounds
        self._lock = threading.Lock()
        self._counts = [0] * len(bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        bucket = bisect_left(self.bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += value

    def read(self) -> tuple[list[float], float]:
        """The number of observations in each bucket, and the sum of all."""
        with self._lock:
            return [float(count) for count in self._counts], self._sum

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Each upper bound with the number of observations up to it, and the sum of all, as Prometheus shows them."""
        from prometheus_client.utils import floatToGoString  # slow to import, and needed only where metrics are served

        counts, total = self.read()
        bounds = [floatToGoString(bound) for bound in self.bounds]  # type: ignore[no-untyped-call]
        return list(zip(bounds, itertools.accumulate(counts), strict=True)), total
