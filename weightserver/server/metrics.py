"""A shard's Prometheus metrics: one registry per process, served on its own port."""

from __future__ import annotations

from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

from weightserver.core import kernel
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.status import ERROR_OF_STATUS

# 100 µs to 30 s: fetches of a few rows take about 1 ms, of 65,536 rows around 30 ms, a full disk seconds. The alerts
# watch the objective of 100 ms.
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)
_COUNTS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304)
_METHODS = tuple(method.name for method in pb.DESCRIPTOR.services_by_name["WeightServer"].methods)
_STATUSES = ("OK", "CANCELLED", *(status.name for status in ERROR_OF_STATUS))
_OPERATIONS = ("fetch", "push", "write_state")


class ShardMetrics:
    """All metrics of one shard. Thread-safe."""

    def __init__(self, *, shard: int, num_shards: int, version: str) -> None:
        self.registry = CollectorRegistry()
        Info("weightserver_build", "Version, kernel and place of this shard.", registry=self.registry).info(
            {"version": version, "kernel": kernel.name(), "shard": str(shard), "num_shards": str(num_shards)}
        )
        Gauge("weightserver_cluster_shards", "Shards of the cluster, this one included.", registry=self.registry).set(
            num_shards
        )
        ProcessCollector(registry=self.registry)
        self.calls = CallMetrics(self.registry)
        self.rows = RowMetrics(self.registry)
        self.commits = CommitMetrics(self.registry)


class CallMetrics:
    """Times answered calls and counts refused ones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, of_call = partial(Counter, registry=registry), ("method", "status")
        text = "Time from a request's arrival to the end of its answer."
        seconds = Histogram("weightserver_request_seconds", text, of_call, buckets=_SECONDS, registry=registry)
        number = counter("weightserver_requests", "Answered requests; every method with every status.", of_call)
        self._fenced = counter("weightserver_fenced_writes", "Writes refused because a newer session exists.")
        self._unauthenticated = counter(
            "weightserver_unauthenticated_calls", "Calls refused because they lack the token."
        )
        self._cut_off = counter(
            "weightserver_cut_off_calls", "Calls cancelled because their caller neither sent nor received a message."
        )
        self._damaged = counter("weightserver_damaged_reads", "Calls that met a stored record with changed bytes.")
        # labels() takes longer than observe() and inc().
        self._seconds, self._number = cache(seconds.labels), cache(number.labels)
        # A rate misses the step from a missing series to 1, so these exist from the start.
        for method in _METHODS:
            for status in _STATUSES:
                self._number(method, status)
        for status in ("OK", "CANCELLED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "INTERNAL"):
            self._seconds("Fetch", status)
        self.fenced, self.damaged = self._fenced.inc, self._damaged.inc
        self.unauthenticated, self.cut_off = self._unauthenticated.inc, self._cut_off.inc

    def answered(self, method: str, status: str, seconds: float) -> None:
        self._seconds(method, status).observe(seconds)
        self._number(method, status).inc()


class RowMetrics:
    """Counts the rows of fetches and writes, and times the stages of both."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._fetch_stages = _stages(
            "fetch",
            ("queue", "receive", "read", "correct", "send"),
            "Time that an answered fetch spent waiting for its turn (queue) and for its request (receive), reading and "
            "verifying blocks (read), correcting and framing rows (correct), and waiting until they were received "
            "(send).",
            registry,
        )
        self._write_stages = _stages(
            "write",
            ("queue", "receive", "work", "commit"),
            "Time that an answered push or state write spent waiting for its turn (queue) and for its messages "
            "(receive), being checked (work), and waiting until it was on disk (commit).",
            registry,
        )
        counter, of_operation = partial(Counter, registry=registry), ("operation",)
        text = "Rows in one request to this shard."
        request_rows = Histogram("weightserver_request_rows", text, of_operation, buckets=_COUNTS, registry=registry)
        rows = counter("weightserver_rows", "Rows fetched, pushed to, or written as state.", of_operation)
        num_bytes = counter(
            "weightserver_row_bytes", "Bytes of the rows fetched, pushed, or written as state.", of_operation
        )
        # All exist from the start, for a rate; looking them up in each call would take 3 µs.
        self._request_rows = {operation: request_rows.labels(operation) for operation in _OPERATIONS}
        self._rows = {operation: rows.labels(operation) for operation in _OPERATIONS}
        self._bytes = {operation: num_bytes.labels(operation) for operation in _OPERATIONS}
        self._duplicates = counter("weightserver_duplicate_writes", "Repeated writes that were already applied.")

    def requested(self, operation: str, num_rows: int) -> None:
        self._request_rows[operation].observe(num_rows)

    def fetch_stages(self, seconds: dict[str, float]) -> None:
        for name, stage in self._fetch_stages.items():
            stage.observe(seconds.get(name, 0.0))

    def write_stages(self, seconds: dict[str, float]) -> None:
        for name, stage in self._write_stages.items():
            stage.observe(seconds.get(name, 0.0))

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
            self._rows[operation].inc(rows)
            self._bytes[operation].inc(num_bytes)


def _stages(kind: str, names: tuple[str, ...], text: str, registry: CollectorRegistry) -> dict[str, Histogram]:
    """A histogram of the seconds of each stage of a `kind` of call."""
    seconds = Histogram(f"weightserver_{kind}_stage_seconds", text, ["stage"], buckets=_SECONDS, registry=registry)
    return {name: seconds.labels(name) for name in names}


class CommitMetrics:
    """Times transactions and the writes in them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        seconds = partial(Histogram, buckets=_SECONDS, registry=registry)
        self._wait = seconds("weightserver_commit_wait_seconds", "Time that a write waited for its transaction.")
        self._seconds = seconds(
            "weightserver_commit_seconds", "Time that a transaction took, from its first write until it was on disk."
        )
        sizes, text = (1, 2, 4, 8, 16, 32, 64), "Writes in one transaction."
        self._writes = Histogram("weightserver_commit_writes", text, buckets=sizes, registry=registry)

    def committed(self, waits: list[float], seconds: float) -> None:
        """Counts one transaction, unless all callers left before it: `waits` are the seconds that its writes waited."""
        if waits:
            self._seconds.observe(seconds)
            self._writes.observe(len(waits))
            for wait in waits:
                self._wait.observe(wait)
