"""A shard's Prometheus metrics: one registry a process, served on a port of its own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from weightserver.shard import Shard

# 100 µs to 30 s; fetches of a few rows lie at the lower end, of 65,536 rows around 30 ms, a full disk at the upper.
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)


class ShardMetrics:
    """What one shard counts; safe to call from any thread."""

    def __init__(self, *, shard: int, num_shards: int, version: str) -> None:
        self.registry = CollectorRegistry()
        Info("weightserver_build", "Version and place of this shard.", registry=self.registry).info(
            {"version": version, "shard": str(shard), "num_shards": str(num_shards)}
        )
        self._seconds = Histogram(
            "weightserver_request_seconds",
            "Time from a request's arrival to the end of its answer.",
            ["method", "status"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._rows = Counter(
            "weightserver_rows", "Rows fetched, pushed to, or written as state.", ["operation"], registry=self.registry
        )
        self._bytes = Counter(
            "weightserver_row_bytes",
            "Bytes of the rows fetched, pushed, or written as state.",
            ["operation"],
            registry=self.registry,
        )
        self._duplicates = Counter(
            "weightserver_duplicate_writes", "Writes recognised as applied before.", registry=self.registry
        )

        self._unauthenticated = Counter(
            "weightserver_unauthenticated_calls", "Calls refused for want of the token.", registry=self.registry
        )

        self._refused = Counter(
            "weightserver_refused_calls",
            "Calls refused because as many of their lane were in progress as may be.",
            ["lane"],
            registry=self.registry,
        )
        self._cut_off = Counter(
            "weightserver_cut_off_calls",
            "Calls ended because their caller neither sent nor took a message.",
            ["lane"],
            registry=self.registry,
        )

    def follow(self, shard: Shard) -> None:
        """Publishes what the shard holds, read at each scrape."""
        for name, text, value in (
            (
                "weightserver_clock_steps",
                "Highest number of finished updates a write carried.",
                lambda: shard.state.clock,
            ),
            ("weightserver_horizon_steps", "Learning rates known.", lambda: shard.horizon),
            ("weightserver_session_epoch", "Epoch of the newest session.", lambda: shard.state.epoch),
            ("weightserver_stored_rows", "Rows ever written.", lambda: shard.state.rows_stored),
            ("weightserver_disk_bytes", "What the data file takes on disk.", shard.disk_bytes),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)

    def request_memory(self, used_bytes: Callable[[], float]) -> None:
        Gauge(
            "weightserver_request_memory_bytes", "What the requests in progress have reserved.", registry=self.registry
        ).set_function(used_bytes)

    def certificate_holds_until(self, end: datetime) -> None:
        Gauge(
            "weightserver_certificate_expiry_timestamp_seconds",
            "When the shard's TLS certificate expires, in seconds since 1970.",
            registry=self.registry,
        ).set(end.timestamp())

    def unauthenticated(self) -> None:
        self._unauthenticated.inc()

    def refused(self, lane: str) -> None:
        self._refused.labels(lane).inc()

    def cut_off(self, lane: str) -> None:
        self._cut_off.labels(lane).inc()

    def answered(self, method: str, status: str, seconds: float) -> None:
        self._seconds.labels(method, status).observe(seconds)

    def fetched(self, rows: int, num_bytes: int) -> None:
        self._count("fetch", rows, num_bytes)

    def pushed(self, rows: int, num_bytes: int, *, duplicate: bool) -> None:
        self._count("push", rows, num_bytes, duplicate=duplicate)

    def written(self, rows: int, num_bytes: int, *, duplicate: bool) -> None:
        self._count("write_state", rows, num_bytes, duplicate=duplicate)

    def _count(self, operation: str, rows: int, num_bytes: int, *, duplicate: bool = False) -> None:
        if duplicate:
            self._duplicates.inc()
        else:
            self._rows.labels(operation).inc(rows)
            self._bytes.labels(operation).inc(num_bytes)
