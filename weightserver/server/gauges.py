"""Metrics that are read at each scrape: what a shard holds, and what its process has in progress."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weightserver.common.processes import usable_memory
from weightserver.core.errors import WeightServerError
from weightserver.server.admission import MAX_THREADS, StallWatch
from weightserver.server.health import ShardHealth
from weightserver.server.request_memory import RequestMemory
from weightserver.server.security import ServerTls
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard

Gauges = dict[str, tuple[str, Callable[[], float]]]
"""Name to what it means, and a function that returns its value now."""


def publish_shard(registry: CollectorRegistry, shard: Shard) -> None:
    """Publishes what the shard holds."""
    registry.register(_DiskCollector(shard))
    gauges: Gauges = {
        "clock_steps": ("Highest number of finished updates that a write carried.", lambda: shard.state.clock),
        "generation": ("Generation that new writes belong to.", lambda: shard.state.generation),
        "checkpoints": ("Checkpoints kept.", lambda: len(shard.state.checkpoints)),
        "newest_checkpoint_step": (
            "Step of the newest checkpoint kept; 0 without checkpoints.",
            lambda: max((kept.step for kept in shard.state.checkpoints), default=0),
        ),
        "table_rows": ("Rows of the table.", lambda: shard.spec.num_rows if shard.spec else 0),
        "session_epoch": ("Epoch of the newest session.", lambda: shard.state.epoch),
        "stored_rows": ("Rows ever written.", lambda: shard.state.rows_stored),
    }
    _publish(registry, gauges)


def publish_load(registry: CollectorRegistry, memory: RequestMemory, stalls: StallWatch, committer: Committer) -> None:
    """Publishes what requests hold and how many wait, and what the process takes."""
    registry.register(_ProcessCollector())
    calls = f"Calls that have a thread; further ones wait while there are {MAX_THREADS}."
    gauges: Gauges = {
        "request_memory_bytes": ("Memory reserved by requests in progress.", lambda: memory.used_bytes),
        "commit_queue_writes": ("Writes that wait for a transaction.", lambda: committer.num_waiting),
        "running_calls": (calls, lambda: stalls.num_running),
        "waiting_calls": ("Calls that have a thread and wait for memory.", lambda: memory.num_waiting),
        "memory_limit_bytes": ("Memory that the process may have: its container's, or the machine's.", usable_memory),
    }
    _publish(registry, gauges)


def publish_health(registry: CollectorRegistry, health: ShardHealth) -> None:
    _publish(registry, {"serving": ("1 while the database can be used, 0 if it cannot.", lambda: not health.look())})


def publish_certificate(registry: CollectorRegistry, tls: ServerTls) -> None:
    text = "When the shard's TLS certificate expires, in seconds since 1970."
    _publish(registry, {"certificate_expiry_timestamp_seconds": (text, lambda: tls.expires.timestamp())})


def _publish(registry: CollectorRegistry, gauges: Gauges) -> None:
    for name, (text, value) in gauges.items():
        Gauge(f"weightserver_{name}", text, registry=registry).set_function(value)


class _DiskCollector(Collector):
    """Publishes what the data file's bytes hold."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def collect(self) -> Iterator[GaugeMetricFamily]:
        try:
            usage, disk_bytes = self._shard.storage.disk_usage(), self._shard.storage.disk_bytes()
        except (OSError, WeightServerError):  # the directory or the disk is gone, say: the other metrics are shown
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
        for name, (text, number) in {
            "pid": ("Process, not the shard, with the oldest snapshot of the file; 0 without.", usage.reader.pid),
            "age_seconds": ("Age of that snapshot, since the shard first saw it.", usage.reader.age_seconds),
            "held_bytes": ("About so many free bytes wait for the end of that snapshot.", usage.reader.held_bytes),
        }.items():
            yield GaugeMetricFamily(f"weightserver_reader_{name}", text, value=number)
        yield GaugeMetricFamily(
            "weightserver_volume_free_bytes", "Free space on the volume of the data.", value=usage.volume_free
        )


class _ProcessCollector(Collector):
    """Publishes the process's memory by kind, and its processor time by threads, as Linux counts them."""

    _KINDS = (("RssAnon", "anonymous"), ("RssFile", "file"), ("VmSwap", "swap"))

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._seen: dict[str, float] = {}
        """Seconds of each thread that are in the sums."""
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        memory = GaugeMetricFamily(
            "weightserver_memory_bytes",
            "Memory of the process: its own (anonymous), pages of mapped files (file), and its own on disk (swap).",
            labels=["kind"],
        )
        status = Path("/proc/self/status").read_text()
        for name, kind in self._KINDS:
            if found := re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE):
                memory.add_metric([kind], 1024 * int(found[1]))
        yield memory
        threads = CounterMetricFamily(
            "weightserver_thread_cpu_seconds",
            "Processor time by the names of threads, without numbers; others are gRPC's own.",
            labels=["thread"],
        )
        for name, seconds in self._read().items():
            threads.add_metric([name], seconds)
        yield threads

    def _read(self) -> dict[str, float]:
        """Seconds by name, of threads that have ended too."""
        names = {str(thread.native_id): re.sub(r"[-_ ]*\d.*", "", thread.name) for thread in threading.enumerate()}
        with self._lock:
            before, self._seen = self._seen, {}
            for task in Path("/proc/self/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    self._seen[task.name] = seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
                    spent = seconds - before.get(task.name, 0.0)
                    # a later thread may have the number of one that has ended
                    self._seconds[names.get(task.name, "other")] += spent if spent >= 0 else seconds
            return dict(self._seconds)
