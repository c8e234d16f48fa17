"""Shows a live view of shards in a terminal, from their metrics."""

from __future__ import annotations

import argparse
import itertools
import math
import time
import urllib.request
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table

from weightserver.operations.arguments import add_addresses, given_addresses

_TIMEOUT_SECONDS = 5.0
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Sample:
    """One scrape of a shard."""

    time: float = field(default_factory=time.monotonic)
    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Metric name to the sum over its labels; calls also by method: `weightserver_request_seconds_count Fetch`, memory
    by kind."""
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    """Histogram name, as in `values`, to upper bound to number of observations up to it."""
    shard: str = ""
    error: str = ""


def scrape(address: str) -> Sample:
    """Scrapes a shard's metrics address; a failure is the sample's `error`."""
    sample = Sample()
    try:
        with _opener.open(f"http://{address}/metrics", timeout=_TIMEOUT_SECONDS) as answer:
            page = answer.read().decode()
        for family in text_string_to_metric_families(page):
            for name, labels, value, *_ in family.samples:
                for key in {name, f"{name} {labels.get('method') or labels.get('kind', '')}".strip()}:
                    if "le" in labels:
                        sample.buckets[key.replace("_bucket", "", 1)][float(labels["le"])] += value
                    else:
                        sample.values[key] += value
                if name == "weightserver_build_info":
                    sample.shard = f"{labels['shard']} of {labels['num_shards']}"
        if not sample.shard:
            sample.error = "these are not a weight server's metrics: give the --metrics-port"
    except HTTPException:
        sample.error = "it does not answer HTTP: give the --metrics-port"
    except (OSError, ValueError) as error:
        sample.error = str(getattr(error, "reason", error))
    return sample


def quantile(share: float, buckets: dict[float, float]) -> float:
    """Estimates the quantile `share`, linear within a bucket; NaN without observations.

    Args:
        buckets: upper bound to the number of observations up to it, the last bound infinite.
    """
    bounds = sorted(buckets)
    counts = [buckets[bound] for bound in bounds]
    if not counts or not counts[-1]:
        return math.nan
    wanted = share * counts[-1]
    at = bisect_left(counts, wanted)
    below, before = (bounds[at - 1], counts[at - 1]) if at else (0.0, 0.0)
    return below if math.isinf(bounds[at]) else below + (bounds[at] - below) * (wanted - before) / (counts[at] - before)


def view(addresses: Sequence[str], before: Sequence[Sample], now: Sequence[Sample]) -> Group:
    """Tables of each shard's traffic between two scrapes and of its present contents."""
    traffic = _table("shard", "fetch/s", "rows/s", "MB/s", "p50", "p99", "write/s", "commit p99", "running")
    holds = _table("shard", "step", "epoch", "rows stored", "checkpoints", "disk", "disk free", "memory")
    notes = []
    for address, old, new in zip(addresses, before, now, strict=True):
        if new.error:
            notes.append(f"{address} is down: {new.error}")
        else:
            traffic.add_row(new.shard, *_rates(old, new))
            holds.add_row(new.shard, *_holdings(new.values))
            notes += _reader(new)
    return Group(*notes, traffic, "", holds)


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, header_style="bold")
    for column in table.columns:
        column.no_wrap = True
        column.justify = "right"
    return table


def _rates(old: Sample, new: Sample) -> Iterator[str]:
    if old.error:  # nothing is known of the time before
        yield from ["-"] * 7
        yield f"{new.values['weightserver_running_calls']:.0f}"
        return
    restarted = new.values["process_start_time_seconds"] != old.values["process_start_time_seconds"]
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
    yield f"{new.values['weightserver_running_calls']:.0f}"


def _holdings(values: dict[str, float]) -> Iterator[str]:
    yield f"{values['weightserver_clock_steps']:,.0f}"
    yield f"{values['weightserver_session_epoch']:.0f}"
    yield f"{values['weightserver_stored_rows']:,.0f}"
    kept, step = values["weightserver_checkpoints"], values["weightserver_newest_checkpoint_step"]
    yield f"{kept:.0f}, to {step:,.0f}" if kept else "none"
    for name in ("weightserver_disk_bytes", "weightserver_volume_free_bytes", "weightserver_memory_bytes anonymous"):
        yield decimal(int(values[name]))


def _reader(new: Sample) -> Iterator[str]:
    """Names the process that keeps an old snapshot of the shard's file, if one does."""
    pid, seconds, held = (new.values[f"weightserver_reader_{name}"] for name in ("pid", "age_seconds", "held_bytes"))
    if pid:
        held_size = decimal(int(held))
        yield f"shard {new.shard}: process {pid:.0f} reads a state {seconds:,.0f} s old; {held_size} wait for it"


def watch(addresses: Sequence[str], *, interval_seconds: float, count: int | None) -> None:
    """Shows the view `count` times, or until Ctrl-C; in a terminal each view replaces the last.

    Raises:
        ValueError: the interval or count is out of range, or no shard answers the first scrape.
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
            raise ValueError(f"no shard serves metrics ({first}): give the addresses of their --metrics-port")
        with Live(console=console, auto_refresh=False) as live:
            for _ in range(count) if count is not None else itertools.count():
                time.sleep(interval_seconds)
                now = list(threads.map(scrape, addresses))
                if console.is_terminal:
                    live.update(view(addresses, before, now), refresh=True)
                else:
                    console.print(view(addresses, before, now))
                before = [old if new.error else new for old, new in zip(before, now, strict=True)]


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_addresses(parser, "every shard's metrics")
    parser.add_argument("--interval-seconds", type=float, default=2.0, help="time between updates (default 2)")
    parser.add_argument("--count", type=int, help="number of updates (default until Ctrl-C)")


def run(arguments: argparse.Namespace) -> None:
    watch(given_addresses(arguments), interval_seconds=arguments.interval_seconds, count=arguments.count)
