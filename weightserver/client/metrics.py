"""Prometheus metrics of all clients of this process, as their calls happen.

The first `WeightClient` registers them in Prometheus' default registry, which `prometheus_client.start_http_server`
serves; a program with a registry of its own registers `WeightClient.metrics()` there.
"""

from __future__ import annotations

import threading
from functools import cache, partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_NAME = "weightserver_client"
_CALL = ("shard", "method")
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_ROW_CLASSES = (128, 2048, 32_768)

registry = CollectorRegistry()
_counter = partial(Counter, registry=registry)
_histogram = partial(Histogram, registry=registry, buckets=_SECONDS)
# labels() takes longer than observe() and inc().
attempts = cache(_counter(f"{_NAME}_attempts", "Attempts of calls, counted when they begin.", _CALL).labels)
retries = cache(_counter(f"{_NAME}_retries", "Attempts that repeat a call which failed.", _CALL).labels)
errors = cache(_counter(f"{_NAME}_errors", "Attempts that failed, by gRPC status.", (*_CALL, "status")).labels)
wrong_answers = cache(
    _counter(
        f"{_NAME}_wrong_answers",
        "Attempts that another one answered, by what was expected, shard/shards, and what it is: shard/shards, "
        "another table, no table, or another program.",
        ("shard", "expected", "answered"),
    ).labels
)
late = cache(_counter(f"{_NAME}_late_calls", "Calls that take over 100 ms, counted before they end.", _CALL).labels)
waiting = cache(Gauge(f"{_NAME}_waiting_calls", "Calls whose answer is waited for.", _CALL, registry=registry).labels)
oldest = cache(
    Gauge(
        f"{_NAME}_oldest_call_seconds", "For how long the oldest of these calls has waited.", _CALL, registry=registry
    ).labels
)
call_seconds = cache(
    _histogram(
        f"{_NAME}_call_seconds",
        "Time of calls of one shard that have ended, retries included, by their largest number of rows.",
        (*_CALL, "rows"),
    ).labels
)
fetch_seconds = cache(
    _histogram(f"{_NAME}_fetch_seconds", "Time of fetches from all shards together.", ("rows",)).labels
)
slowest_shard_seconds = cache(
    _histogram(
        f"{_NAME}_slowest_shard_seconds",
        "Time that the slowest shard of each of these fetches worked on it, as it says itself.",
        ("rows",),
    ).labels
)
_lock = threading.Lock()
_registered = False


def register_once() -> None:
    """Shows the metrics in the default registry."""
    global _registered
    with _lock:
        if not _registered:
            REGISTRY.register(registry)
            _registered = True


def row_class(num_rows: int) -> str:
    """The size class of a call: the largest number of rows of its class; "more" beyond them; "" without rows."""
    if not num_rows:
        return ""
    return next((str(most) for most in _ROW_CLASSES if num_rows <= most), "more")
