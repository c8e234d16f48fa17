"""Prometheus metrics of all clients of this process, as their calls happen.

The first `WeightClient` registers them in Prometheus' default registry, which `prometheus_client.start_http_server`
serves; a program with a registry of its own registers `WeightClient.metrics()` there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from weightserver.client.calls import STATISTICS
from weightserver.common.series import Series

_CALL = ("shard", "method")
_NAME = "weightserver_client"
_lock = threading.Lock()
_registered = False


def register_once() -> None:
    """Shows the metrics in the default registry."""
    global _registered
    with _lock:
        if not _registered:
            REGISTRY.register(ClientCollector())
            _registered = True


class ClientCollector(Collector):
    """The metrics of all clients of this process. Safe to collect from any thread."""

    def describe(self) -> Iterator[Metric]:
        return iter(())  # a registry would otherwise collect to learn the names

    def collect(self) -> Iterator[Metric]:
        late, ages = STATISTICS.now()
        waiting = {key: float(len(those)) for key, those in ages.items()}
        oldest = {key: max(those, default=0.0) for key, those in ages.items()}
        yield _counter("attempts", "Attempts of calls, counted when they begin.", _CALL, STATISTICS.attempts.items())
        yield _counter("retries", "Attempts that repeat a call which failed.", _CALL, STATISTICS.retries.items())
        yield _counter("errors", "Attempts that failed, by gRPC status.", (*_CALL, "status"), STATISTICS.errors.items())
        yield _counter("late_calls", "Calls that take over 100 ms, counted as soon as they do.", _CALL, late.items())
        yield _gauge("waiting_calls", "Calls whose answer is waited for.", waiting.items())
        yield _gauge("oldest_call_seconds", "For how long the oldest of these calls has waited.", oldest.items())
        yield _histogram(
            "call_seconds",
            "Time of calls of one shard that have ended, retries included, by their largest number of rows.",
            (*_CALL, "rows"),
            STATISTICS.seconds.items(),
        )
        yield _histogram(
            "fetch_seconds", "Time of fetches from all shards together.", ("rows",), STATISTICS.fetch_seconds.items()
        )
        yield _histogram(
            "slowest_shard_seconds",
            "Time that the slowest shard of each of these fetches worked on it, as it says itself.",
            ("rows",),
            STATISTICS.slowest_shard_seconds.items(),
        )


def _counter(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"{_NAME}_{name}", text, labels=labels)
    for key, value in list(values):
        family.add_metric(key, value)
    return family


def _gauge(name: str, text: str, values: Iterable[tuple[tuple[str, str], float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{_NAME}_{name}", text, labels=_CALL)
    for key, value in values:
        family.add_metric(key, value)
    return family


def _histogram(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], Series]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"{_NAME}_{name}", text, labels=labels)
    for key, series in list(values):
        family.add_metric(key, *series.cumulative())
    return family
