"""A shard's Prometheus metrics: one registry per process, served on its own port."""

from __future__ import annotations

from functools import cache, partial
from itertools import product

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
        self.registry = registry = CollectorRegistry()
        Info("weightserver_build", "Version, kernel and place of this shard.", registry=registry).info(
            {"version": version, "kernel": kernel.name(), "shard": str(shard), "num_shards": str(num_shards)}
        )
        Gauge("weightserver_cluster_shards", "Shards of the cluster, this one included.", registry=registry).set(
            num_shards
        )
        ProcessCollector(registry=registry)
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.fenced = counter("weightserver_fenced_writes", "Writes refused because a newer session exists.")
        self.unauthenticated = counter(
            "weightserver_unauthenticated_calls", "Calls refused because they lack the token."
        )
        self.cut_off = counter(
            "weightserver_cut_off_calls", "Calls cancelled because their caller neither sent nor received a message."
        )
        self.damaged = counter("weightserver_damaged_reads", "Calls that met a stored record with changed bytes.")
        self._duplicates = counter("weightserver_duplicate_writes", "Repeated writes that were already applied.")
        # A rate misses the step from a missing series to 1, so these exist from the start; and labels() takes longer
        # than observe() and inc().
        text, of_call = "Time from a request's arrival to the end of its answer.", ("method", "status")
        self._seconds = cache(histogram("weightserver_request_seconds", text, of_call, buckets=_SECONDS).labels)
        text = "Answered requests; every method with every status."
        self._number = cache(counter("weightserver_requests", text, of_call).labels)
        for call in product(_METHODS, _STATUSES):
            self._number(*call)
        for status in ("OK", "CANCELLED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "INTERNAL"):
            self._seconds("Fetch", status)
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
        text = "Rows in one request to this shard."
        request_rows = histogram("weightserver_request_rows", text, ["operation"], buckets=_COUNTS)
        rows = counter("weightserver_rows", "Rows fetched, pushed to, or written as state.", ["operation"])
        text = "Bytes of the rows fetched, pushed, or written as state."
        num_bytes = counter("weightserver_row_bytes", text, ["operation"])
        self._of_rows = {
            name: (request_rows.labels(name), rows.labels(name), num_bytes.labels(name)) for name in _OPERATIONS
        }
        seconds = partial(histogram, buckets=_SECONDS)
        self._wait = seconds("weightserver_commit_wait_seconds", "Time that a write waited for its transaction.")
        self._commit_seconds = seconds(
            "weightserver_commit_seconds", "Time that a transaction took, from its first write until it was on disk."
        )
        sizes = (1, 2, 4, 8, 16, 32, 64)
        self._commit_writes = histogram("weightserver_commit_writes", "Writes in one transaction.", buckets=sizes)

    def answered(self, method: str, status: str, seconds: float) -> None:
        """Counts and times a call."""
        self._seconds(method, status).observe(seconds)
        self._number(method, status).inc()

    def fetched(self, wanted: int, rows: int, num_bytes: int) -> None:
        """Counts a fetch, and what of it was answered."""
        self._count("fetch", wanted, rows, num_bytes)

    def fetch_stages(self, seconds: dict[str, float]) -> None:
        for name, stage in self._fetch_stages.items():
            stage.observe(seconds.get(name, 0.0))

    def wrote(self, operation: str, rows: int, num_bytes: int, seconds: dict[str, float], *, duplicate: bool) -> None:
        """Counts a push or state write, and times its stages."""
        self._count(operation, rows, *((0, 0) if duplicate else (rows, num_bytes)))
        self._duplicates.inc(duplicate)
        for name, stage in self._write_stages.items():
            stage.observe(seconds.get(name, 0.0))

    def _count(self, operation: str, wanted: int, rows: int, num_bytes: int) -> None:
        request_rows, all_rows, all_bytes = self._of_rows[operation]
        request_rows.observe(wanted)
        all_rows.inc(rows)
        all_bytes.inc(num_bytes)

    def committed(self, waits: list[float], seconds: float) -> None:
        """Counts one transaction, unless all callers left before it: `waits` are the seconds that its writes waited."""
        if waits:
            self._commit_seconds.observe(seconds)
            self._commit_writes.observe(len(waits))
            for wait in waits:
                self._wait.observe(wait)


def _stages(kind: str, names: tuple[str, ...], text: str, registry: CollectorRegistry) -> dict[str, Histogram]:
    """A histogram of the seconds of each stage of a `kind` of call."""
    seconds = Histogram(f"weightserver_{kind}_stage_seconds", text, ["stage"], buckets=_SECONDS, registry=registry)
    return {name: seconds.labels(name) for name in names}
