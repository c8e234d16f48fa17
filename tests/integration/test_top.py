"""`weightserver top` against shards at work, and its quantiles against NumPy's."""

from __future__ import annotations

import math
import re
import threading
from collections import defaultdict

import numpy as np
import pytest
from rich.console import Console

from tests.helpers.commands import weightserver
from tests.integration.tables import begin
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.operations.top import Sample, quantile, scrape, view


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99])
def test_quantiles_are_those_of_the_values_to_a_bucket(share: float) -> None:
    values = np.random.default_rng(0).lognormal(-5, 1, 10_000)
    bounds = [*np.geomspace(1e-5, 1, 60), math.inf]
    buckets = {bound: float((values <= bound).sum()) for bound in bounds}
    assert quantile(share, buckets) == pytest.approx(np.quantile(values, share), rel=0.05)


def test_quantiles_of_few_values() -> None:
    assert math.isnan(quantile(0.5, {}))
    assert math.isnan(quantile(0.5, {1.0: 0.0, math.inf: 0.0}))
    assert quantile(0.5, {1.0: 0.0, 2.0: 4.0, math.inf: 4.0}) == 1.5
    assert quantile(0.99, {1.0: 1.0, math.inf: 9.0}) == 1.0, "all that is known: more than the last bound"


@pytest.mark.guard
def test_top_shows_the_activity_of_shards(client: WeightClient, cluster: LocalCluster) -> None:
    epoch = begin(client, TableSpec(num_rows=2000, dim=16, rows_per_block=10))
    client.push_gradients(np.arange(1000), np.ones((1000, 16), np.float32), step=41)
    client.checkpoint("kept", step=42)
    stop = threading.Event()

    def read() -> None:
        while not stop.wait(0.01):
            client.fetch(np.arange(100), step=42)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        status, shown, errors = weightserver(
            "top", *cluster.metrics_addresses, "127.0.0.1:1", "--count", "1", "--interval-seconds", "4"
        )
    finally:
        stop.set()
        reader.join()
    assert status == 0, errors
    for shard in (0, 1):
        traffic, holds = re.findall(rf"^ {shard} of 2 +(.*\S) *$", shown, re.MULTILINE)
        fetches, rows, *_ = (float(value.replace(",", "")) for value in traffic.split()[:3])
        assert fetches > 1
        assert rows == pytest.approx(50 * fetches, rel=0.2, abs=60)  # half of 100 rows on each
        p50, p99 = re.findall(r"([\d.]+) ms", traffic)[:2]
        assert 0 < float(p50) <= float(p99)
        assert re.match(rf"42 +{epoch} +500 +1, to 42 +\d[\d.]* [kM]B +", holds), holds
    assert "127.0.0.1:1 is down: [Errno 111] Connection refused" in shown


def test_the_memory_of_a_shard_is_its_own(cluster: LocalCluster) -> None:
    """Without pages of its file, which the system keeps as long as it has room."""
    found = scrape(cluster.metrics_addresses[0])
    assert 0 < found.values["weightserver_memory_bytes anonymous"] < found.values["process_resident_memory_bytes"]
    found.values |= {"weightserver_memory_bytes anonymous": 5e6, "process_resident_memory_bytes": 7e9}
    shown = Console(width=120)
    with shown.capture() as text:
        shown.print(view(["a"], [found], [found]))
    assert text.get().rstrip().endswith("5.0 MB")


def test_a_shard_that_missed_a_look_shows_rates_since_its_last_one() -> None:
    calls = "weightserver_request_seconds_count Fetch"

    def sample(time: float, count: float) -> Sample:
        return Sample(time=time, values=defaultdict(float, {calls: count}), shard="0 of 1")

    shown = Console(width=120)
    with shown.capture() as text:
        before, now = [sample(0, 1000), sample(0, 0)], [sample(10, 1050), Sample(error="away")]
        shown.print(view(["a", "b", "c"], [*before, Sample(error="away")], [*now, sample(10, 10**7)]))
    down, _, traffic, late, *_ = text.get().splitlines()
    assert down == "b is down: away", "first, where no screen is too short for it"
    assert traffic.split()[:4] == ["0", "of", "1", "5.0"]
    assert late.split()[3:] == ["-"] * 7 + ["0"], "one look says no rate"
