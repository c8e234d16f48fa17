"""Metrics of a shard, compared with simple counts and with their own sums."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import grpc
import numpy as np
import pytest
from prometheus_client import Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.measuring import scrape
from tests.helpers.watching import metric, page
from weightserver import FencedError, LocalCluster, StepError, TableSpec, WeightClient
from weightserver.client import metrics as metrics_of_clients
from weightserver.common import metrics as shared
from weightserver.common.stages import StageClock
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.status import ERROR_OF_STATUS
from weightserver.server.gauges import publish_shard
from weightserver.server.metrics import ShardMetrics
from weightserver.shard.shard import Shard
from weightserver.storage.lmdb_storage import LmdbStorage


@pytest.fixture
def metrics() -> ShardMetrics:
    return ShardMetrics(shard=0, num_shards=1, version="0")


def test_every_moment_belongs_to_one_stage() -> None:
    started = time.perf_counter()
    clock = StageClock("first")
    for number in range(10):
        clock.start("even" if number % 2 else "odd")
        time.sleep(0.002)
    clock.start("last")
    assert set(clock.seconds) == {"first", "odd", "even"}
    assert sum(clock.seconds.values()) <= clock.elapsed_seconds() <= time.perf_counter() - started
    assert min(clock.seconds["odd"], clock.seconds["even"]) >= 0.01


def test_a_shard_reports_its_work(client: WeightClient, cluster: LocalCluster) -> None:
    """Reads from its page every metric that a fetch, a write and a checkpoint change."""
    address = cluster.metrics_addresses[0]

    def sample(name: str) -> float:
        return metric(address, f"weightserver_{name}")

    client.create_table(TableSpec(num_rows=4000, dim=8, rows_per_block=10))
    client.extend_schedule(0, np.full(200, 0.1, np.float32))
    epoch = client.open_session("first")
    names = {
        "fetches": "fetch_stage_seconds_count",
        "end to end": 'request_seconds_sum{method="Fetch",outcome="ok"}',
        "stages": "fetch_stage_seconds_sum",
        "requested": 'requested_rows_total{operation="fetch"}',
        "pushed": 'requested_rows_total{operation="push"}',
        "commits": "commit_seconds_count",
        "writes": "commit_writes_sum",
        "waits": "commit_wait_seconds_count",
        "fenced": "fenced_writes_total",
    }
    client.push_gradients([0], np.ones((1, 8), np.float32), step=0)  # all labels are there
    client.fetch([0], step=1)
    before = {key: sample(name) for key, name in names.items()}
    client.push_gradients(np.arange(10), np.ones((10, 8), np.float32), step=99)  # shard 0 has the first block
    client.fetch(np.arange(20), step=120)  # ten rows that have seen 100 updates, the others are shard 1's
    client.fetch_state(np.arange(10))  # raw: older than the clock, which is 100
    client.checkpoint("here", step=100)
    with WeightClient(cluster.addresses) as late:
        late.open_session("first", join=epoch)
        client.open_session("second")
        with pytest.raises(FencedError):
            late.push_gradients([0], np.ones((1, 8), np.float32), step=99)
    moved = {key: sample(name) - before[key] for key, name in names.items()}

    assert moved["fetches"] == 2 * 5, "each stage of each fetch"
    assert moved["stages"] <= moved["end to end"]

    def covered() -> float:
        """The share of a large fetch's time that is some stage's."""
        before = sample(names["stages"]), sample(names["end to end"])
        client.fetch(np.arange(4000), step=120)
        return (sample(names["stages"]) - before[0]) / (sample(names["end to end"]) - before[1])

    assert max(covered() for _ in range(10)) > 0.8
    assert (moved["requested"], moved["pushed"]) == (20, 10)
    assert moved["commits"] <= moved["writes"] == moved["waits"] == 4, "a push, a checkpoint, a session, a refusal"
    assert moved["fenced"] >= 1
    held = {name: sample(name) for name in ("newest_checkpoint_step", "checkpoints", "generation", "table_rows")}
    assert held == {"newest_checkpoint_step": 100, "checkpoints": 1, "generation": 1, "table_rows": 4000}
    assert sample("lmdb_bytes") == pytest.approx(sample("disk_bytes"), rel=0.1)
    assert sample("volume_free_bytes") > 0
    assert sample("map_bytes") >= sample("lmdb_bytes") + (256 << 20)
    assert sample("cut_off_calls_total") >= 0, "there before the first"
    assert sample("commit_queue_writes") == 0


def test_a_process_shows_its_memory_and_its_threads_time(cluster: LocalCluster, client: WeightClient) -> None:
    address = cluster.metrics_addresses[0]
    names = ('memory_bytes{kind="anonymous"}', 'memory_bytes{kind="file"}', "thread_cpu_seconds_total")
    anonymous, of_files, seconds = (metric(address, f"weightserver_{name}") for name in names)
    assert anonymous + of_files == pytest.approx(metric(address, "process_resident_memory_bytes"), rel=0.2)
    assert anonymous > 1 << 20
    assert seconds <= metric(address, "process_cpu_seconds_total") + 0.1
    client.create_table(TableSpec(num_rows=40_000, dim=128))
    of_calls = 'weightserver_thread_cpu_seconds_total{thread="grpc"}'
    metric(address, of_calls)
    before = metric(address, of_calls)
    for _ in range(5):
        client.fetch(np.arange(40_000), step=0)
    assert metric(address, of_calls) > before, "the threads that answer calls"


def test_every_metric_says_what_it_is(cluster: LocalCluster, client: WeightClient) -> None:
    """And not when it was created."""
    client.create_table(TableSpec(num_rows=40, dim=8))
    pages = page(cluster.metrics_addresses[0]), shared.page(metrics_of_clients.registry).decode()
    assert all("_total" in text and "_created" not in text for text in pages)
    for family in text_string_to_metric_families(pages[0]):
        assert family.documentation.endswith(".") or family.name.startswith("process_"), family.name
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_rows", "_steps", "_writes")), family.name


@pytest.mark.parametrize("gone", ["disk", "directory"])
def test_a_shard_whose_disk_failed_shows_its_other_metrics(metrics: ShardMetrics, tmp_path: Path, gone: str) -> None:
    storage = LmdbStorage(tmp_path / "shard")
    publish_shard(metrics.registry, Shard(storage, shard=0, num_shards=1))

    def names() -> set[str]:
        return {family.name for family in metrics.registry.collect()}

    before = names()
    if gone == "disk":
        storage._fail("a meta page could not be written")
    else:
        storage.directory.rename(tmp_path / "moved")
    of_the_file = {"disk_bytes", "lmdb_bytes", "map_bytes", "volume_free_bytes"}
    of_the_file |= {"reader_pid", "reader_age_seconds", "reader_held_bytes"}
    assert before - names() == {f"weightserver_{name}" for name in of_the_file}
    storage.close()


def test_every_status_of_every_method_exists_from_the_start(metrics: ShardMetrics) -> None:
    """Those of calls that never come, too; and each answer is counted under its own."""
    statuses = {"OK", "CANCELLED", *(status.name for status in ERROR_OF_STATUS)}
    methods = [method.name for method in pb.DESCRIPTOR.services_by_name["WeightServer"].methods]

    def counted() -> dict[tuple[str, str], float]:
        samples = [sample for family in metrics.registry.collect() for sample in family.samples]
        return {
            (sample.labels["method"], sample.labels["status"]): sample.value
            for sample in samples
            if sample.name == "weightserver_requests_total"
        }

    calls = list(product(methods, sorted(statuses)))
    assert counted() == dict.fromkeys(calls, 0)
    for number, (method, status) in enumerate(calls, start=1):
        for _ in range(number):
            metrics.answered(method, grpc.StatusCode[status], "none", 0.01)
    assert counted() == {call: number for number, call in enumerate(calls, start=1)}


def test_both_sides_count_the_same_calls_in_the_same_series(client: WeightClient, cluster: LocalCluster) -> None:
    client.create_table(TableSpec(num_rows=8000, dim=8, rows_per_block=10))
    client.extend_schedule(0, np.full(10, 0.1, np.float32))
    client.open_session("first")
    expected = {
        ("Fetch", "128", "ok"): 3,
        ("Fetch", "32768", "ok"): 2,
        ("Fetch", "128", "refused"): 1,
        ("PushGradients", "2048", "ok"): 1,
    }

    def count(text: str) -> dict[tuple[str, str, str], float]:
        """The calls of shard 1 that a page shows."""
        return {
            (sample.labels["method"], sample.labels["size_class"], sample.labels["outcome"]): sample.value
            for family in text_string_to_metric_families(text)
            if family.name in ("weightserver_request_seconds", "weightserver_client_call_seconds")
            for sample in family.samples
            if sample.name.endswith("_count") and sample.labels["shard"] == "1"
        }

    def counts() -> list[dict[tuple[str, str, str], float]]:
        return [count(shared.page(metrics_of_clients.registry).decode()), count(page(cluster.metrics_addresses[1]))]

    before = counts()
    for _ in range(3):
        client.fetch(np.arange(20), step=0)
    for _ in range(2):
        client.fetch(np.arange(8000), step=0)
    client.push_gradients(np.arange(1000), np.ones((1000, 8), np.float32), step=0)
    with pytest.raises(StepError):
        client.fetch_state(np.arange(10, 20), step=0)  # older than what is stored
    for was, now in zip(before, counts(), strict=True):
        assert {call: now[call] - was.get(call, 0) for call in expected} == expected


def test_a_histogram_is_the_same_for_the_page_and_for_the_library() -> None:
    """And finds a time within a step of 1.25, up to the seconds of a call's deadline."""
    registry = shared.Registry(shard="0")
    family = shared.Histograms("x_seconds", "Text.", ("name",), registry)
    random = np.random.default_rng(0)
    durations = 10 ** random.uniform(-5, 3, 500)
    for seconds in durations:
        family.labels('a "b"\\\n').observe(seconds)
    (mine,) = text_string_to_metric_families(shared.page(registry).decode())
    (theirs,) = text_string_to_metric_families(generate_latest(registry).decode())
    assert mine.samples == theirs.samples
    for sample in mine.samples:
        assert (sample.labels["name"], sample.labels["shard"]) == ('a "b"\\\n', "0")
        if sample.name == "x_seconds_bucket":
            assert sample.value == np.sum(durations <= float(sample.labels["le"]))
    bounds = np.array(shared.SECONDS)
    assert len(bounds) <= 60
    assert bounds[0] <= 0.0002
    assert bounds[-1] == 600
    assert np.all(bounds[1:] <= np.where(bounds[1:] < 24, 1.25, 3.4) * bounds[:-1])
    assert set(shared.LATE_SECONDS.values()) <= set(shared.SECONDS), "the alert asks for their buckets"


def test_a_scrape_of_64_shards_series_calls_few_functions() -> None:
    """Which take under half a percent of a core every 5 s. In a process of its own, whose metrics it fills."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        scraped = pool.submit(scrape, 1).result(120)
    assert scraped["samples"] > 30_000
    assert scraped["calls"] < 4 * scraped["samples"]


def test_counters_and_gauges_are_the_same_for_the_page_and_for_the_library() -> None:
    registry = shared.Registry(shard="0")
    counter = shared.Counters("calls", "Text.", ("name",), registry).labels('a "b"\\\n')
    counter.inc()
    counter.inc(True)
    shared.Gauges("waiting", "Text.", ("name",), registry).labels("c").set_function(lambda: 3.5)
    mine, theirs = (
        list(text_string_to_metric_families(text.decode()))
        for text in (shared.page(registry), generate_latest(registry))
    )
    assert mine == theirs
    values = {(family.type, sample.name): sample.value for family in mine for sample in family.samples}
    assert values == {("counter", "calls_total"): 2, ("gauge", "waiting"): 3.5}


def test_a_registry_in_another_has_the_labels_of_both() -> None:
    """As a trainer's, which shows its client's metrics with the run and the rank."""
    outer, inner = shared.Registry(run="a", rank="0"), shared.Registry(shard="1")
    shared.Histograms("x_seconds", "Text.", ("method",), inner).labels("Fetch").observe(0.5)
    Counter("y", "Text.", ["method"], registry=inner).labels("Fetch").inc()
    outer.register(inner)
    for registry, own in ((outer, {"run": "a", "rank": "0"}), (inner, {})):
        samples = [s for f in text_string_to_metric_families(shared.page(registry).decode()) for s in f.samples]
        assert {sample.name for sample in samples} == {
            "x_seconds_bucket",
            "x_seconds_count",
            "x_seconds_sum",
            "y_total",
        }
        for sample in samples:
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            assert labels == own | {"shard": "1", "method": "Fetch"}, sample.name
