"""A live view of shards in a terminal, from their metrics."""

from __future__ import annotations

import itertools
import math
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

_TIMEOUT_SECONDS = 5.0
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Sample:
    """One scrape of a shard."""

    time: float = field(default_factory=time.monotonic)
    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Metric to the sum over its labels; calls also by method, as in weightserver_request_seconds_count Fetch."""
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    """Histogram, as above, to how many were at most so much."""
    shard: str = ""
    error: str = ""


def scrape(address: str) -> Sample:
    """What a shard tells on its metrics address now; what kept it from telling, where it does not."""
    sample = Sample()
    try:
        with _opener.open(f"http://{address}/metrics", timeout=_TIMEOUT_SECONDS) as answer:
            page = answer.read().decode()
        for family in text_string_to_metric_families(page):
            for name, labels, value, *_ in family.samples:
                for key in {name, f"{name} {labels.get('method', '')}".strip()}:
                    if "le" in labels:
                        sample.buckets[key.replace("_bucket", "", 1)][float(labels["le"])] += value
                    else:
                        sample.values[key] += value
                if name == "weightserver_build_info":
                    sample.shard = f"{labels['shard']} of {labels['num_shards']}"
        if not sample.shard:
            sample.error = "no weight server's metrics: give the --metrics-port"
    except HTTPException:
        sample.error = "it speaks no HTTP: give the --metrics-port"
    except (OSError, ValueError) as error:
        sample.error = str(getattr(error, "reason", error))
    return sample


def quantile(share: float, buckets: dict[float, float]) -> float:
    """The value that `share` of the observations do not pass, linear within a bucket; NaN without observations.

    Args:
        buckets: upper bound to the number of observations up to it, the last bound infinite.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return math.nan
    wanted = share * buckets[bounds[-1]]
    for below, bound in itertools.pairwise([0.0, *bounds]):
        if buckets[bound] >= wanted:
            if math.isinf(bound):
                return below
            before = buckets.get(below, 0.0)
            return below + (bound - below) * (wanted - before) / max(buckets[bound] - before, 1e-300)
    return math.nan


def view(addresses: Sequence[str], before: Sequence[Sample], now: Sequence[Sample]) -> Group:
    """Of each shard, what happened between two scrapes, and what it holds now."""
    traffic = _table("shard", "fetch/s", "rows/s", "MB/s", "p50", "p99", "write/s", "commit p99", "refused/s")
    holds = _table("shard", "step", "epoch", "rows stored", "checkpoints", "disk", "disk free", "memory")
    down = []
    for address, old, new in zip(addresses, before, now, strict=True):
        if new.error:
            down.append(f"{address} is down: {new.error}")
        else:
            traffic.add_row(new.shard, *_rates(old, new))
            holds.add_row(new.shard, *_holdings(new.values))
    return Group(*down, traffic, "", holds)


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, header_style="bold")
    for column in table.columns:
        column.no_wrap = True
        column.justify = "right"
    return table


def _rates(old: Sample, new: Sample) -> Iterator[str]:
    restarted = old.error or new.values["process_start_time_seconds"] != old.values["process_start_time_seconds"]
    since = Sample(time=old.time) if restarted else old
    seconds = max(new.time - since.time, 1e-9)

    def rate(*names: str) -> float:
        return sum(new.values[name] - since.values[name] for name in names) / seconds

    def latency(share: float, name: str) -> str:
        value = quantile(share, {end: n - since.buckets[name][end] for end, n in new.buckets[name].items()})
        return "-" if math.isnan(value) else f"{1000 * value:.1f} ms"

    calls, writes = "weightserver_request_seconds_count", ("PushGradients", "WriteState")
    yield f"{rate(f'{calls} Fetch'):,.1f}"
    yield f"{rate('weightserver_rows_total'):,.0f}"
    yield f"{rate('weightserver_row_bytes_total') / 1e6:,.1f}"
    yield latency(0.5, "weightserver_request_seconds Fetch")
    yield latency(0.99, "weightserver_request_seconds Fetch")
    yield f"{rate(*(f'{calls} {method}' for method in writes)):,.1f}"
    yield latency(0.99, "weightserver_commit_seconds")
    yield f"{rate('weightserver_refused_calls_total'):,.1f}"


def _holdings(values: dict[str, float]) -> Iterator[str]:
    yield f"{values['weightserver_clock_steps']:,.0f}"
    yield f"{values['weightserver_session_epoch']:.0f}"
    yield f"{values['weightserver_stored_rows']:,.0f}"
    kept, step = values["weightserver_checkpoints"], values["weightserver_newest_checkpoint_step"]
    yield f"{kept:.0f}, to {step:,.0f}" if kept else "none"
    for name in ("weightserver_disk_bytes", "weightserver_volume_free_bytes", "process_resident_memory_bytes"):
        yield f"{values[name] / 1e9:,.2f} GB"


def watch(addresses: Sequence[str], *, interval_seconds: float, count: int | None) -> None:
    """Shows it `count` times, or until Ctrl-C; a terminal's is replaced each time, else each follows the last.

    Raises:
        ValueError: an interval or a count that cannot be, or no shard answers at the first time.
    """
    if not 0.1 <= interval_seconds <= 3600:
        raise ValueError(f"--interval-seconds must lie in 0.1..3600, got {interval_seconds}")
    if count is not None and count < 1:
        raise ValueError(f"--count must be at least 1, got {count}")
    console = Console()
    with ThreadPoolExecutor(len(addresses)) as threads:
        before = list(threads.map(scrape, addresses))
        if all(sample.error for sample in before):
            first = f"{addresses[0]}: {before[0].error}"
            raise ValueError(f"no shard tells its metrics ({first}): give the addresses of their --metrics-port")
        with Live(console=console, auto_refresh=False) as live:
            for _ in range(count) if count is not None else itertools.count():
                time.sleep(interval_seconds)
                now = list(threads.map(scrape, addresses))
                if console.is_terminal:
                    live.update(view(addresses, before, now), refresh=True)
                else:
                    console.print(view(addresses, before, now))
                before = [old if new.error else new for old, new in zip(before, now, strict=True)]
