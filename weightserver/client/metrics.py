"""Prometheus metrics of all clients of this process, as their calls happen.

The first `WeightClient` registers them in Prometheus' default registry, which `prometheus_client.start_http_server`
serves; a program with a registry of its own registers `WeightClient.metrics()` there.
"""

from __future__ import annotations

import threading

from prometheus_client import REGISTRY

from weightserver.common.metrics import Counters, Gauges, Histograms, Registry

_NAME = "weightserver_client"
_CALL = ("shard", "method")

registry = Registry()
attempts = Counters(f"{_NAME}_attempts", "Attempts of calls, counted when they begin.", _CALL, registry).labels
retries = Counters(f"{_NAME}_retries", "Attempts that repeat a call which failed.", _CALL, registry).labels
errors = Counters(f"{_NAME}_errors", "Attempts that failed.", (*_CALL, "status", "outcome"), registry).labels
wrong_answers = Counters(
    f"{_NAME}_wrong_answers",
    "Attempts that another one answered, by what was expected, shard/shards, and what it is: shard/shards, "
    "no table, or another table, state of it, token, version or program.",
    ("shard", "expected", "answered"),
    registry,
).labels
late = Counters(
    f"{_NAME}_late_calls",
    "Calls that take longer than 0.1 s, or a second with over 32,768 rows, counted before they end.",
    _CALL,
    registry,
).labels
failed = Counters(
    f"{_NAME}_failed_calls",
    "Calls that failed after all retries, for no mistake of their caller's, or whose shard said nothing for 60 s, "
    "counted while they wait.",
    _CALL,
    registry,
).labels
waiting = Gauges(f"{_NAME}_waiting_calls", "Calls whose answer is waited for.", _CALL, registry).labels
oldest = Gauges(
    f"{_NAME}_oldest_call_seconds", "For how long the oldest of these calls has waited.", _CALL, registry
).labels
call_seconds = Histograms(
    f"{_NAME}_call_seconds",
    "Time of the calls of one shard that have ended, retries included: ok, refused for a mistake of the caller's, "
    "failed, or cancelled by the caller.",
    (*_CALL, "size_class", "outcome"),
    registry,
).labels
fetch_seconds = Histograms(
    f"{_NAME}_fetch_seconds", "Time of fetches from all shards together.", ("size_class",), registry
).labels
slowest_shard_seconds = Histograms(
    f"{_NAME}_slowest_shard_seconds",
    "Time that the slowest shard of each of these fetches worked on it, as it says itself.",
    ("size_class",),
    registry,
).labels
_lock = threading.Lock()
_registered = False


def register_once() -> None:
    """Shows the metrics in the default registry."""
    global _registered
    with _lock:
        if not _registered:
            REGISTRY.register(registry)
            _registered = True
