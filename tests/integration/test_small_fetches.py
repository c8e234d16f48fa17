"""A fetch whose answer is one message: the shard sends it together with the status, and is asked for it by metadata."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.helpers.raw_calls import raw_channel
from weightserver import LocalCluster, StepError, TableSpec, WeightClient
from weightserver.core.initial import initial_rows
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import CHUNK_BYTES, MARK_KEY, ONE_MESSAGE_KEY, OWN_TIME_KEY, rows_to_proto
from weightserver.server.service import NAME

SPEC = TableSpec(num_rows=100_000, dim=1024, rows_per_block=50)
MOST_ROWS = CHUNK_BYTES // (4 * SPEC.dim)
"""In one message."""
FETCH = f"/{NAME}/Fetch"
ONE_MESSAGE = [(ONE_MESSAGE_KEY, "1")]


@pytest.fixture(scope="module", params=[1, 2])
def client(request: pytest.FixtureRequest) -> Iterator[WeightClient]:
    with LocalCluster(request.param) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(SPEC)
        client.extend_schedule(0, np.full(10, 0.1, np.float32))
        yield client


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with LocalCluster(1) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(SPEC)
        with raw_channel(cluster.addresses[0]) as channel:
            yield channel


@pytest.mark.parametrize("num_rows", [1, MOST_ROWS - 1, MOST_ROWS, MOST_ROWS + 1, 3 * MOST_ROWS])
def test_fetches_of_any_size_are_complete(client: WeightClient, num_rows: int) -> None:
    rows = 25 + np.arange(num_rows)  # from the middle of a block
    assert np.array_equal(client.fetch(rows, step=0), initial_rows(SPEC, rows))
    state = client.fetch_state(rows)
    assert np.array_equal(state.weight, initial_rows(SPEC, rows))
    assert not state.momentum_buffer.any()


def test_a_fetch_that_a_shard_refuses_leaves_nothing_in_memory(client: WeightClient) -> None:
    """Nor do the answers of others, to which the requests were sent at the same time."""
    message = r"shard 0 at .*: row 7 has seen 5 updates, its state before update 3 is gone"
    client.open_session("errors")
    client.push_gradients([7], np.ones((1, SPEC.dim), np.float32), step=4)

    def refused(times: int) -> int:
        for _ in range(times):
            with pytest.raises(StepError, match=message) as raised:
                client.fetch([7, 57], step=3)
            assert (raised.value.row, raised.value.step) == (7, 3)
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = refused(100)
    assert refused(200) - before < 2_000_000


def test_both_kinds_of_answers_are_the_same(channel: grpc.Channel) -> None:
    """So a client of this version works with a shard that overlooks the key, and the other way round."""
    request = pb.FetchRequest(rows=rows_to_proto(np.arange(25, 25 + MOST_ROWS)), raw=True, state=True)
    asked = request.SerializeToString()
    for metadata in ([], ONE_MESSAGE):
        (streamed,) = channel.unary_stream(FETCH)(asked, metadata=metadata)
        message, call = channel.unary_unary(FETCH).with_call(asked, metadata=metadata)
        assert message == streamed
        assert len(message) > 2 * CHUNK_BYTES
        assert {MARK_KEY, OWN_TIME_KEY} <= {key for key, _ in call.trailing_metadata()}


@pytest.mark.parametrize("num_rows", [0, MOST_ROWS + 60])
def test_other_answers_than_one_message_are_refused(channel: grpc.Channel, num_rows: int) -> None:
    request = pb.FetchRequest(rows=rows_to_proto(np.arange(num_rows)), raw=True).SerializeToString()
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(FETCH)(request, metadata=ONE_MESSAGE)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "ask for fewer rows" in refused.value.details()
