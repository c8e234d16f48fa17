"""Metrics that are read at each scrape: what a shard holds, and what its process has in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from weightserver.core.errors import StorageError
from weightserver.server.admission import MAX_THREADS, CallLimiter
from weightserver.server.health import ShardHealth
from weightserver.server.request_memory import RequestMemory
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard


def publish_shard(registry: CollectorRegistry, shard: Shard) -> None:
    """Publishes what the shard holds."""
    registry.register(_DiskCollector(shard))
    for name, text, value in (
        (
            "weightserver_clock_steps",
            "Highest number of finished updates that a write carried.",
            lambda: shard.state.clock,
        ),
        ("weightserver_horizon_steps", "Learning rates known.", lambda: shard.horizon),
        ("weightserver_generation", "Generation that new writes belong to.", lambda: shard.state.generation),
        ("weightserver_checkpoints", "Checkpoints kept.", lambda: len(shard.state.checkpoints)),
        (
            "weightserver_newest_checkpoint_step",
            "Step of the newest checkpoint kept; 0 without checkpoints.",
            lambda: max((kept.step for kept in shard.state.checkpoints), default=0),
        ),
        ("weightserver_table_rows", "Rows of the table.", lambda: shard.spec.num_rows if shard.spec else 0),
        ("weightserver_session_epoch", "Epoch of the newest session.", lambda: shard.state.epoch),
        ("weightserver_stored_rows", "Rows ever written.", lambda: shard.state.rows_stored),
    ):
        _gauge(registry, name, text, value)


def publish_load(
    registry: CollectorRegistry, memory: RequestMemory, limiter: CallLimiter, committer: Committer
) -> None:
    """Publishes what requests hold and how many wait."""
    _gauge(
        registry,
        "weightserver_request_memory_bytes",
        "Memory reserved by requests in progress.",
        lambda: memory.used_bytes,
    )
    _gauge(
        registry,
        "weightserver_commit_queue_writes",
        "Writes that wait for a transaction.",
        lambda: committer.num_waiting,
    )
    _gauge(
        registry,
        "weightserver_running_calls",
        f"Calls that have a thread; further ones wait while there are {MAX_THREADS}.",
        lambda: limiter.num_running,
    )
    _gauge(
        registry,
        "weightserver_waiting_calls",
        "Calls that have a thread and wait for memory.",
        lambda: memory.num_waiting,
    )


def publish_health(registry: CollectorRegistry, health: ShardHealth) -> None:
    _gauge(
        registry,
        "weightserver_serving",
        "1 while the shard serves, 0 if its database does not.",
        lambda: not health.look(),
    )


def publish_certificate(registry: CollectorRegistry, expires: datetime) -> None:
    Gauge(
        "weightserver_certificate_expiry_timestamp_seconds",
        "When the shard's TLS certificate expires, in seconds since 1970.",
        registry=registry,
    ).set(expires.timestamp())


def _gauge(registry: CollectorRegistry, name: str, text: str, value: Callable[[], float]) -> None:
    Gauge(name, text, registry=registry).set_function(value)


class _DiskCollector(Collector):
    """Publishes what the data file's bytes hold."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def collect(self) -> Iterator[GaugeMetricFamily]:
        try:
            usage, disk_bytes = self._shard.disk_usage(), self._shard.disk_bytes()
        except (
            OSError,
            StorageError,
        ):  # the directory is gone, or the shard is closing: only these metrics are missing
            return
        yield GaugeMetricFamily("weightserver_disk_bytes", "Size of the data file on disk.", value=disk_bytes)
        pages = GaugeMetricFamily(
            "weightserver_lmdb_bytes",
            "Bytes of the data file's pages by content; free pages are reused before the file grows.",
            labels=["pages"],
        )
        for name, num_bytes in {**usage.databases, "free": usage.free}.items():
            pages.add_metric([name], num_bytes)
        yield pages
        yield GaugeMetricFamily("weightserver_map_bytes", "Size to which the data file can grow.", value=usage.map_size)
        yield GaugeMetricFamily(
            "weightserver_volume_free_bytes", "Free space on the volume of the data.", value=usage.volume_free
        )
