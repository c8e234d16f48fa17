"""A shard's Prometheus metrics: one registry per process, served on its own port."""

from __future__ import annotations

from functools import cache, partial
from itertools import product

import grpc
from prometheus_client import Counter, Gauge, Histogram, Info, ProcessCollector

from weightserver.common.metrics import SIZE_CLASSES, Durations, Histograms, Registry
from weightserver.core import kernel
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.status import ERROR_OF_STATUS, outcome_of

_METHODS = tuple(method.name for method in pb.DESCRIPTOR.services_by_name["WeightServer"].methods)
_STATUSES = (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, *ERROR_OF_STATUS)
_OPERATIONS = ("fetch", "push", "write_state")


class ShardMetrics:
    """All metrics of one shard, whose number they have as a label. Thread-safe."""

    def __init__(self, *, shard: int, num_shards: int, version: str) -> None:
        self.registry = registry = Registry(shard=str(shard))
        Info("weightserver_build", "Version, kernel and place of this shard.", registry=registry).info(
            {"version": version, "kernel": kernel.name(), "num_shards": str(num_shards)}
        )
        Gauge("weightserver_cluster_shards", "Shards of the cluster, this one included.", registry=registry).set(
            num_shards
        )
        ProcessCollector(registry=registry)
        counter = partial(Counter, registry=registry)
        seconds = partial(_seconds, registry)
        self.fenced = counter("weightserver_fenced_writes", "Writes refused because a newer session exists.")
        text = "Calls refused because their token is missing or wrong."
        refused = counter("weightserver_unauthenticated_calls", text, ["reason"])
        self._unauthenticated = {reason: refused.labels(reason) for reason in ("missing", "wrong")}
        self.cut_off = counter(
            "weightserver_cut_off_calls", "Calls cancelled because their caller neither sent nor received a message."
        )
        self.damaged = counter("weightserver_damaged_reads", "Calls that met a stored record with changed bytes.")
        self._duplicates = counter("weightserver_duplicate_writes", "Repeated writes that were already applied.")
        # A rate misses the step from a missing series to 1, so these exist from the start; and labels() takes longer
        # than observe() and inc().
        self._seconds = Histograms(
            "weightserver_request_seconds",
            "Time from a request's arrival to the end of its answer.",
            ("method", "size_class", "outcome"),
            registry,
        ).labels
        text = "Answered requests; every method with every status."
        self._number = cache(counter("weightserver_requests", text, ("method", "status", "outcome")).labels)
        for method, status in product(_METHODS, _STATUSES):
            self._number(method, status.name, outcome_of(status))
        for size_class in SIZE_CLASSES:
            self._seconds("Fetch", size_class, "ok")
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
        text = "Rows that fetches asked for, pushes and state writes brought."
        asked = counter("weightserver_requested_rows", text, ["operation"])
        rows = counter("weightserver_rows", "Rows fetched, pushed to, or written as state.", ["operation"])
        text = "Bytes of the rows fetched, pushed, or written as state."
        num_bytes = counter("weightserver_row_bytes", text, ["operation"])
        self._of_rows = {name: (asked.labels(name), rows.labels(name), num_bytes.labels(name)) for name in _OPERATIONS}
        self._wait = seconds("weightserver_commit_wait_seconds", "Time that a write waited for its transaction.")
        self._commit_seconds = seconds(
            "weightserver_commit_seconds", "Time that a transaction took, from its first write until it was on disk."
        )
        sizes = (1, 2, 4, 8, 16, 32, 64)
        self._commit_writes = Histogram(
            "weightserver_commit_writes", "Writes in one transaction.", buckets=sizes, registry=registry
        )

    def answered(self, method: str, status: grpc.StatusCode, size_class: str, seconds: float) -> None:
        """Counts and times a call."""
        outcome = outcome_of(status)
        self._seconds(method, size_class, outcome).observe(seconds)
        self._number(method, status.name, outcome).inc()

    def refused_token(self, method: str, reason: str) -> None:
        """Counts a call, also of a method that does not exist, whose token is "missing" or "wrong"."""
        self._unauthenticated[reason].inc()
        if method in _METHODS:
            status = grpc.StatusCode.UNAUTHENTICATED
            self._number(method, status.name, outcome_of(status)).inc()

    def fetch_stages(self, seconds: dict[str, float]) -> None:
        for name, stage in self._fetch_stages.items():
            stage.observe(seconds.get(name, 0.0))

    def wrote(self, operation: str, rows: int, num_bytes: int, seconds: dict[str, float], *, duplicate: bool) -> None:
        """Counts a push or state write, and times its stages."""
        self.count(operation, rows, *((0, 0) if duplicate else (rows, num_bytes)))
        self._duplicates.inc(duplicate)
        for name, stage in self._write_stages.items():
            stage.observe(seconds.get(name, 0.0))

    def count(self, operation: str, wanted: int, rows: int, num_bytes: int) -> None:
        """Counts the rows of a request, and those that were answered or written, with their bytes."""
        asked, all_rows, all_bytes = self._of_rows[operation]
        asked.inc(wanted)
        all_rows.inc(rows)
        all_bytes.inc(num_bytes)

    def committed(self, waits: list[float], seconds: float) -> None:
        """Counts one transaction, unless all callers left before it: `waits` are the seconds that its writes waited."""
        if waits:
            self._commit_seconds.observe(seconds)
            self._commit_writes.observe(len(waits))
            for wait in waits:
                self._wait.observe(wait)


def _seconds(registry: Registry, name: str, text: str) -> Durations:
    return Histograms(name, text, (), registry).labels()


def _stages(kind: str, names: tuple[str, ...], text: str, registry: Registry) -> dict[str, Durations]:
    """A histogram of the seconds of each stage of a `kind` of call."""
    stages = Histograms(f"weightserver_{kind}_stage_seconds", text, ("stage",), registry)
    return {name: stages.labels(name) for name in names}
