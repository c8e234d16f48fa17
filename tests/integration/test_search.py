"""Search over real shards, beside a dense computation on the rows that they answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from tests.helpers.dense_search import dense_nearest
from tests.helpers.faulty_proxy import Faults, FaultyProxy
from weightserver import (
    InvalidRequestError,
    LocalCluster,
    Neighbours,
    NoTableError,
    StepError,
    TableSpec,
    WeightClient,
)
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import MAX_NEIGHBOURS
from weightserver.server.pace import Pace
from weightserver.server.request_memory import search_bytes

SPEC = TableSpec(num_rows=3_001, dim=16, rows_per_block=7, init_std=0.1)
STORED = np.flatnonzero(np.random.default_rng(3).random(SPEC.num_rows) < 0.4)
STEPS = 30
RANDOM = np.random.default_rng(0)
QUERIES = RANDOM.standard_normal((5, SPEC.dim), np.float32)


def fill(client: WeightClient, spec: TableSpec = SPEC, rows: Int64Array = STORED) -> Float32Array:
    """Makes a table, and stores rows of clusters and zeros; returns their weights."""
    client.create_table(spec)
    client.extend_schedule(0, np.linspace(0.5, 0.1, STEPS, dtype=np.float32))
    client.open_session("search")
    generator = np.random.default_rng(1)
    weight = generator.standard_normal((30, spec.dim), np.float32)[rows % 30]
    weight += np.float32(1e-4) * (rows % 5 == 0)[:, None] * generator.standard_normal(weight.shape, np.float32)
    weight[::50] = 0
    client.write_state(rows, weight, generator.standard_normal(weight.shape, np.float32), rows % 4)
    return weight


def check(found: Neighbours, weight: Float32Array, rows: Int64Array, k: int, metric: str = "cosine") -> None:
    expected, similarity = dense_nearest(QUERIES, weight, k, metric)
    assert np.array_equal(found.rows, rows[expected])
    assert np.array_equal(found.similarity, similarity)
    assert [found.rows.dtype, found.similarity.dtype] == ["int64", "float32"]


@pytest.mark.parametrize("metric", ["cosine", "inner_product"])
def test_the_rows_found_are_those_of_a_dense_computation(client: WeightClient, metric: Any) -> None:
    weight = fill(client)
    check(client.nearest(QUERIES, 40, metric=metric), weight, STORED, 40, metric)
    corrected = client.fetch(STORED, step=20)
    check(client.nearest(QUERIES, 40, metric=metric, step=20), corrected, STORED, 40, metric)
    assert not np.array_equal(corrected, weight)


def test_rows_in_bfloat16_are_searched_as_they_are_stored(client: WeightClient) -> None:
    fill(client, replace(SPEC, dtype="bfloat16"))
    check(client.nearest(QUERIES, 40), client.fetch_state(STORED).weight, STORED, 40)
    check(client.nearest(QUERIES, 40, step=20), client.fetch(STORED, step=20), STORED, 40)


def test_fewer_rows_than_asked_for(client: WeightClient) -> None:
    client.create_table(SPEC)
    assert client.nearest(QUERIES, 3).rows.shape == (5, 0)  # nothing is stored
    rows = np.array([2, 7, 3_000])
    weight = fill(client, rows=rows)
    for k in (3, 4, MAX_NEIGHBOURS):
        check(client.nearest(QUERIES, k), weight, rows, k)
    none = client.nearest(QUERIES[:0], 2)
    assert none.rows.shape == none.similarity.shape == (0, 0)


def test_more_queries_than_one_call_takes(client: WeightClient) -> None:
    fill(client)
    many = np.tile(QUERIES, (500, 1))
    found, once = client.nearest(many, 3), client.nearest(QUERIES, 3)
    assert np.array_equal(found.rows, np.tile(once.rows, (500, 1)))
    assert np.array_equal(found.similarity, np.tile(once.similarity, (500, 1)))


@pytest.mark.parametrize("rows_per_block", [1, 64, 2_048])
def test_neither_shards_nor_blocks_change_a_bit(client: WeightClient, rows_per_block: int) -> None:
    """The shared cluster has two shards; another table of the same rows lies on one."""
    spec = TableSpec(num_rows=SPEC.num_rows, dim=SPEC.dim, rows_per_block=rows_per_block)
    weight = fill(client, spec)
    check(client.nearest(QUERIES, 25), weight, STORED, 25)


def test_a_search_of_a_checkpoint_does_not_see_later_writes(client: WeightClient) -> None:
    weight = fill(client)
    client.checkpoint("kept", step=3)
    client.extend_table(SPEC.num_rows + 100)
    later = np.arange(SPEC.num_rows + 100)
    ones = np.ones((len(later), SPEC.dim), np.float32)
    client.write_state(later, ones, ones, 4)
    check(client.nearest(QUERIES, 40, checkpoint="kept"), weight, STORED, 40)
    (kept,) = client.checkpoints()
    check(client.nearest(QUERIES, 40, checkpoint=kept), weight, STORED, 40)
    check(client.nearest(QUERIES, 9), ones[:9], later[:9], 9)
    with pytest.raises(NoTableError, match="no checkpoint 'lost'"):
        client.nearest(QUERIES, 1, checkpoint="lost")


def test_bad_input_is_refused_before_anything_is_sent(client: WeightClient) -> None:
    fill(client)
    for error, message, arguments in BAD:
        with pytest.raises(error, match=message) as raised:
            client.nearest(*arguments[:-1], **arguments[-1])
        assert "\n" not in str(raised.value)


BAD: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
    (ValueError, r"k must lie in 1\.\.4096, got 0", (QUERIES, 0, {})),
    (ValueError, r"k must lie in 1\.\.4096, got -3", (QUERIES, -3, {})),
    (ValueError, r"k must lie in 1\.\.4096, got 4097", (QUERIES, 4_097, {})),
    (TypeError, "k must be an integer, got 2.0", (QUERIES, 2.0, {})),
    (ValueError, r"vectors must have shape \[q, 16\], got \[5, 15\]", (QUERIES[:, :15], 1, {})),
    (ValueError, r"vectors must have shape \[q, 16\], got \[16\]", (QUERIES[0], 1, {})),
    (TypeError, "vectors must be float32, got float64: convert it first", (QUERIES.astype(np.float64), 1, {})),
    (ValueError, r"vectors must be finite, got nan at \[0, 0\]", (QUERIES * np.float32("nan"), 1, {})),
    (ValueError, "metric must be 'cosine' or 'inner_product', got 'l2'", (QUERIES, 1, {"metric": "l2"})),
    (ValueError, "step must not be negative", (QUERIES, 1, {"step": -1})),
    (StepError, r"step 31 is outside the schedule's 0\.\.30", (QUERIES, 1, {"step": 31})),
    (StepError, r"has seen \d updates, its state before update 1 is gone", (QUERIES, 1, {"step": 1})),
]


# ---- ranges of blocks, deadlines and retries


class Hurried:
    """A call's context with another deadline."""

    def __init__(self, context: grpc.ServicerContext, seconds: float) -> None:
        self._context, self._seconds = context, seconds

    def time_remaining(self) -> float:
        return self._seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class SearchProxy(FaultyProxy):
    """Allows each search 50 ms, and twice as much whenever it is repeated; calls `before` before each."""

    def __init__(self, target: str, before: Callable[[int], None]) -> None:
        self.asked: list[int] = []
        self._before = before
        super().__init__(target, seed=0, faults=Faults())

    def _call(self, method: str, message: bytes, context: grpc.ServicerContext) -> bytes:
        if method != "Search":
            return super()._call(method, message, context)
        first_block = pb.SearchRequest.FromString(message).first_block
        self.asked.append(first_block)
        self._before(len(self.asked))
        seconds = 0.05 * 2 ** self.asked.count(first_block)
        return super()._call(method, message, Hurried(context, seconds))


LARGE = TableSpec(num_rows=40_000, dim=64)
LARGE_QUERIES = RANDOM.standard_normal((1_000, LARGE.dim), np.float32)


@contextmanager
def large_table(directory: Path, *options: str) -> Iterator[tuple[LocalCluster, WeightClient]]:
    """One shard of ten chunks."""
    with LocalCluster(1, directory, serve_options=options) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(LARGE)
        client.extend_schedule(0, np.full(STEPS, 0.1, np.float32))
        client.open_session("search")
        weight = np.random.default_rng(5).standard_normal((LARGE.num_rows, LARGE.dim), np.float32)
        client.write_state(np.arange(LARGE.num_rows), weight, weight, 0)
        yield cluster, client


@pytest.mark.guard
def test_a_search_takes_longer_than_its_deadline_and_survives_a_killed_shard(tmp_path: Path) -> None:
    """Each call has time for a part of the blocks; the shard is killed between two calls, and under one."""

    def before(attempt: int) -> None:
        if attempt in (2, 4):
            cluster.processes[0].kill()
        if attempt == 4:
            cluster.processes[0].wait()
            threads.submit(cluster.restart, 0)
        elif attempt == 2:
            cluster.restart(0)

    with ThreadPoolExecutor(1) as threads, large_table(tmp_path) as (cluster, direct):
        expected = direct.nearest(LARGE_QUERIES, 10)
        with (
            SearchProxy(cluster.addresses[0], before) as proxy,
            WeightClient([proxy.address], timeout_seconds=20, retry_seconds=60) as client,
        ):
            found = client.nearest(LARGE_QUERIES, 10)
        assert np.array_equal(found.rows, expected.rows)
        assert np.array_equal(found.similarity, expected.similarity)
        assert proxy.asked == sorted(proxy.asked)  # blocks that were searched are not searched again
        assert len(set(proxy.asked)) > 1
        assert len(proxy.asked) > 4


@pytest.mark.guard
def test_the_memory_of_a_search_is_bounded(tmp_path: Path) -> None:
    with large_table(tmp_path) as (cluster, client):
        process, ended, peak = psutil.Process(cluster.processes[0].pid), threading.Event(), [0]

        def own_bytes() -> int:
            memory = process.memory_info()
            return int(memory.rss - memory.shared)

        def watch() -> None:
            while not ended.wait(0.005):
                peak[0] = max(peak[0], own_bytes())

        before, thread = own_bytes(), threading.Thread(target=watch)
        thread.start()
        for num_queries, k in ((1_000, 256), (64, 4_096), (1, 4_096)):
            client.nearest(LARGE_QUERIES[:num_queries], k, step=3)
        ended.set()
        thread.join()
        assert peak[0] - before < search_bytes(LARGE, 1_024, 256)


@pytest.mark.guard  # seconds
def test_a_shard_with_too_little_memory_refuses_in_one_line(tmp_path: Path) -> None:
    with large_table(tmp_path, "--request-memory-mib", "64") as (_, client):
        assert client.nearest(LARGE_QUERIES[:1], 3).rows.shape == (1, 3)
        with pytest.raises(InvalidRequestError, match=r"needs \d+ MiB of memory.*--request-memory-mib$"):
            client.nearest(LARGE_QUERIES, 256)


@pytest.mark.guard  # seconds
def test_searches_take_turns(client: WeightClient) -> None:
    """Each shard works on one search at a time."""
    weight = fill(client)
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(lambda _: client.nearest(QUERIES, 5), range(24)):
            check(found, weight, STORED, 5)


class Context:
    """A caller without a deadline."""

    def time_remaining(self) -> None: ...

    def is_active(self) -> bool:
        return True


def test_a_search_leaves_a_training_run_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("weightserver.server.pace.time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    pace = Pace()
    may_continue = pace.budget(Context())
    now[0] += 0.2
    assert may_continue()
    assert slept == []
    pace.note_training()
    now[0] += 0.3
    assert may_continue()
    assert slept == [pytest.approx(0.3)]
    now[0] += 0.2
    assert not may_continue()  # a second has passed
