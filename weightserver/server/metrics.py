"""A shard's Prometheus metrics: one registry a process, served on a port of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from weightserver.core.arrays import Int64Array
from weightserver.core.errors import StorageError
from weightserver.server.admission import LANES, MAX_WAITING
from weightserver.server.histogram import GapHistogram, Histogram
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard

# 100 µs to 30 s; fetches of a few rows lie at the lower end, of 65,536 rows around 30 ms, a full disk at the upper.
# 100 ms is the objective that the alerts watch.
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)
_COUNTS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304)


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
        for status in ("OK", "CANCELLED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "INTERNAL"):
            self._seconds.labels("Fetch", status)  # a rate does not see the step from no series to 1
        self._stage_seconds = Histogram(
            "weightserver_fetch_stage_seconds",
            "Time that an answered fetch spent waiting for its turn (queue), reading and verifying blocks (read), "
            "correcting rows (correct), framing them (serialise), and until they were taken (send).",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._stages = {
            name: self._stage_seconds.labels(name) for name in ("queue", "read", "correct", "serialise", "send")
        }
        self._request_rows = Histogram(
            "weightserver_request_rows",
            "Rows in one request to this shard.",
            ["operation"],
            buckets=_COUNTS,
            registry=self.registry,
        )
        self._gaps = GapHistogram()
        self.registry.register(self._gaps)
        self._commit_wait = Histogram(
            "weightserver_commit_wait_seconds",
            "Time that a write waited for the transaction that holds it.",
            buckets=_SECONDS,
            registry=self.registry,
        ).labels()
        self._commit_seconds = Histogram(
            "weightserver_commit_seconds",
            "Time that a transaction took, from its first write until it was on disk.",
            buckets=_SECONDS,
            registry=self.registry,
        ).labels()
        self._commit_writes = Histogram(
            "weightserver_commit_writes",
            "Writes in one transaction.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        ).labels()
        self._fenced = Counter(
            "weightserver_fenced_writes", "Writes refused because a newer session exists.", registry=self.registry
        )
        ProcessCollector(registry=self.registry)
        rows = Counter(
            "weightserver_rows", "Rows fetched, pushed to, or written as state.", ["operation"], registry=self.registry
        )
        num_bytes = Counter(
            "weightserver_row_bytes",
            "Bytes of the rows fetched, pushed, or written as state.",
            ["operation"],
            registry=self.registry,
        )
        self._rows, self._bytes = cache(rows.labels), cache(num_bytes.labels)  # a fetch would pay 3 µs to look them up
        self._duplicates = Counter(
            "weightserver_duplicate_writes", "Writes recognised as applied before.", registry=self.registry
        )

        self._unauthenticated = Counter(
            "weightserver_unauthenticated_calls", "Calls refused for want of the token.", registry=self.registry
        )

        self._refused = Counter(
            "weightserver_refused_calls",
            "Calls refused because as many of their lane were in progress, and waited, as may be.",
            ["lane"],
            registry=self.registry,
        )
        self._cut_off = Counter(
            "weightserver_cut_off_calls",
            "Calls ended because their caller neither sent nor took a message.",
            ["lane"],
            registry=self.registry,
        )
        for lane in LANES:  # there from the start: a rate does not see the step from no series to 1
            self._refused.labels(lane)
            self._cut_off.labels(lane)

    def follow(self, shard: Shard) -> None:
        """Publishes what the shard holds, read at each scrape."""
        self.registry.register(_DiskCollector(shard))
        for name, text, value in (
            (
                "weightserver_clock_steps",
                "Highest number of finished updates a write carried.",
                lambda: shard.state.clock,
            ),
            ("weightserver_horizon_steps", "Learning rates known.", lambda: shard.horizon),
            (
                "weightserver_generation",
                "Generation that writes go to.",
                lambda: shard.state.generation,
            ),
            ("weightserver_checkpoints", "Checkpoints kept.", lambda: len(shard.state.checkpoints)),
            (
                "weightserver_newest_checkpoint_step",
                "Step of the newest checkpoint kept; 0 where there is none.",
                lambda: max((kept.step for kept in shard.state.checkpoints), default=0),
            ),
            ("weightserver_table_rows", "Rows of the table.", lambda: shard.spec.num_rows if shard.spec else 0),
            ("weightserver_session_epoch", "Epoch of the newest session.", lambda: shard.state.epoch),
            ("weightserver_stored_rows", "Rows ever written.", lambda: shard.state.rows_stored),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)

    def follow_committer(self, committer: Committer) -> None:
        Gauge(
            "weightserver_commit_queue_writes", "Writes that wait for a transaction.", registry=self.registry
        ).set_function(lambda: committer.num_waiting)

    def request_memory(self, used_bytes: Callable[[], float]) -> None:
        Gauge(
            "weightserver_request_memory_bytes", "What the requests in progress have reserved.", registry=self.registry
        ).set_function(used_bytes)

    def waiting_calls(self, num_waiting: Callable[[str], float]) -> None:
        gauge = Gauge(
            "weightserver_waiting_calls", "Calls that wait for a place in their lane.", ["lane"], registry=self.registry
        )
        for lane, most in MAX_WAITING.items():
            if most:
                gauge.labels(lane).set_function(partial(num_waiting, lane))

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

    def fenced(self) -> None:
        self._fenced.inc()

    def fetch_stages(self, seconds: dict[str, float]) -> None:
        for name, stage in self._stages.items():
            stage.observe(seconds.get(name, 0.0))

    def correction_gaps(self, gaps: Int64Array) -> None:
        self._gaps.observe(gaps)

    def committed(self, waits: list[float], seconds: float) -> None:
        """Takes one group of writes; one whose callers all left is none."""
        if waits:
            self._commit_seconds.observe(seconds)
            self._commit_writes.observe(len(waits))
            for wait in waits:
                self._commit_wait.observe(wait)

    def requested(self, operation: str, num_rows: int) -> None:
        self._request_rows.labels(operation).observe(num_rows)

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
            self._rows(operation).inc(rows)
            self._bytes(operation).inc(num_bytes)


class _DiskCollector(Collector):
    """Where the data file's bytes go, read at each scrape."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def collect(self) -> Iterator[GaugeMetricFamily]:
        try:
            usage, disk_bytes = self._shard.disk_usage(), self._shard.disk_bytes()
        except (OSError, StorageError):  # the directory is gone, or the shard ends: the other metrics are told
            return
        yield GaugeMetricFamily("weightserver_disk_bytes", "What the data file takes on disk.", value=disk_bytes)
        pages = GaugeMetricFamily(
            "weightserver_lmdb_bytes",
            "Bytes of the data file's pages by what they hold; free ones are written again before the file grows.",
            labels=["pages"],
        )
        for name, num_bytes in {**usage.databases, "free": usage.free}.items():
            pages.add_metric([name], num_bytes)
        yield pages
        yield GaugeMetricFamily("weightserver_map_bytes", "What the data file can grow to.", value=usage.map_size)
        yield GaugeMetricFamily(
            "weightserver_volume_free_bytes", "What the volume of the data has left.", value=usage.volume_free
        )
