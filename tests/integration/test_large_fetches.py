"""Long fetches over slow links, cut connections and killed shards: rows that arrived are not requested again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

from tests.helpers.comparing import same
from tests.helpers.faulty_proxy import Faults, FaultyProxy
from tests.helpers.watching import metric
from tests.integration.tables import SLOW, begin
from weightserver import LocalCluster, NoTableError, ShardUnavailableError, TableSpec, WeightClient
from weightserver.core.arrays import Int64Array
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import CHUNK_BYTES, decode_fetch_response, named_rows

SPEC = TableSpec(num_rows=40_000, dim=64, init_std=0.1)
ROWS = np.arange(SPEC.num_rows)
ROWS_PER_MESSAGE = CHUNK_BYTES // (4 * SPEC.dim) + SPEC.rows_per_block
"""The largest message: messages end with a block."""


class WatchedProxy(FaultyProxy):
    """Records which rows each fetch requests, and how many arrive.

    Args:
        before: called before each attempt of a fetch with its number; may abort it.
        seconds_per_message: how slow the link is.
    """

    def __init__(
        self,
        target: str,
        *,
        cut: bool = False,
        seconds_per_message: float = 0,
        before: Callable[[int, grpc.ServicerContext], None] = lambda attempt, context: None,
    ) -> None:
        self.asked: list[Int64Array] = []
        self.passed: list[int] = []
        self._seconds_per_message = seconds_per_message
        self._before = before
        super().__init__(target, seed=0, faults=Faults(cut_fetch=1 if cut else 0))

    def _fetch(self, method: str, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        attempt = len(self.asked)
        self.asked.append(named_rows(pb.FetchRequest.FromString(message).rows).array())
        self.passed.append(0)
        self._before(attempt, context)
        for answer in super()._fetch(method, message, context):
            time.sleep(self._seconds_per_message)
            self.passed[attempt] += len(decode_fetch_response(answer)[0]) // (4 * SPEC.dim)
            yield answer

    def check(self, *, lost: int = 0) -> None:
        """Checks that each attempt requested the rows that earlier ones did not receive, except for one message of at
        most `lost` rows, and that together they requested all."""
        assert np.array_equal(self.asked[0], ROWS)
        for (asked, passed), later in itertools.pairwise(zip(self.asked, self.passed, strict=True)):
            arrived = len(asked) - len(later[0])
            assert passed - lost <= arrived <= passed
            assert np.array_equal(later[0], asked[arrived:])


@pytest.fixture(scope="module")
def shard() -> Iterator[LocalCluster]:
    with LocalCluster(1) as cluster, WeightClient(cluster.addresses) as client:
        begin(client, SPEC)
        gradients = np.random.default_rng(0).standard_normal((SPEC.num_rows, SPEC.dim), np.float32)
        client.push_gradients(ROWS, gradients, step=0)
        yield cluster


def test_a_fetch_resumes_after_the_rows_that_arrived(shard: LocalCluster) -> None:
    """Every answer is cut after its first message, and retries last no longer than that."""
    with (
        WeightClient(shard.addresses) as direct,
        WatchedProxy(shard.addresses[0], cut=True) as proxy,
        WeightClient([proxy.address], retry_seconds=0) as client,
    ):
        for one in (direct, client):
            one.extend_schedule(0, SLOW)
        expected = direct.fetch_state(ROWS, step=5)
        asked = shard.metrics_addresses[0], 'weightserver_requested_rows_total{operation="fetch"}'
        before = metric(*asked)
        assert same(client.fetch_state(ROWS, step=5), expected)
        proxy.check()
        assert len(proxy.asked) > 9
        assert metric(*asked) - before == sum(map(len, proxy.asked))


@pytest.mark.guard
def test_a_fetch_may_take_longer_than_its_deadline(shard: LocalCluster) -> None:
    """The transfer takes at least 2 s, an attempt lasts 0.7 s."""
    with (
        WeightClient(shard.addresses) as direct,
        WatchedProxy(shard.addresses[0], seconds_per_message=0.2) as proxy,
        WeightClient([proxy.address], timeout_seconds=0.7, retry_seconds=30) as client,
    ):
        for one in (client, direct):
            one.extend_schedule(0, SLOW)
        assert np.array_equal(client.fetch(ROWS, step=3), direct.fetch(ROWS, step=3))
        proxy.check(lost=2 * ROWS_PER_MESSAGE)
        assert len(proxy.asked) > 3


@pytest.mark.guard
def test_arriving_rows_renew_the_time_for_retries(shard: LocalCluster) -> None:
    """The shard is down for 0.3 s after each message: ten times that exceeds `retry_seconds`."""
    back = [0.0]

    def before(attempt: int, context: grpc.ServicerContext) -> None:
        if attempt and len(proxy.asked[-1]) < len(proxy.asked[-2]):
            back[0] = time.monotonic() + 0.3
        if time.monotonic() < back[0]:
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")

    with (
        WatchedProxy(shard.addresses[0], cut=True, before=before) as proxy,
        WeightClient([proxy.address], retry_seconds=2) as client,
    ):
        started = time.monotonic()
        client.fetch(ROWS, step=1)
        assert time.monotonic() - started > 2
        proxy.check()


def test_an_unavailable_shard_is_reported_with_the_rows_that_arrived(shard: LocalCluster) -> None:
    def before(attempt: int, context: grpc.ServicerContext) -> None:
        if attempt >= 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")

    with (
        WatchedProxy(shard.addresses[0], cut=True, before=before) as proxy,
        WeightClient([proxy.address], retry_seconds=0.2) as client,
    ):
        with pytest.raises(ShardUnavailableError) as raised:
            client.fetch(ROWS, step=1)
        told = f"(UNAVAILABLE: away), {sum(proxy.passed)} of {len(ROWS)} rows had arrived: check that"
        assert told in str(raised.value)
        proxy.check()


def test_a_checkpoint_that_changes_under_a_fetch_ends_it(shard: LocalCluster) -> None:
    """Rows of another checkpoint with the same name are never mixed in."""

    def before(attempt: int, context: grpc.ServicerContext) -> None:
        if attempt == 2:
            direct.release("kept")
            direct.push_gradients(ROWS[-1:], np.ones((1, SPEC.dim), np.float32), step=1)
            direct.checkpoint("kept", step=2)

    with (
        WeightClient(shard.addresses) as direct,
        WatchedProxy(shard.addresses[0], cut=True, before=before) as proxy,
        WeightClient([proxy.address], retry_seconds=0) as client,
    ):
        direct.join_newest_session()
        direct.extend_schedule(0, SLOW)
        direct.checkpoint("kept", step=1)
        with pytest.raises(NoTableError, match="kept"):
            client.fetch(ROWS, step=1, checkpoint="kept")
        assert len(proxy.asked) == 3
