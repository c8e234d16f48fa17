"""A fetch whose answer is one message: the shard sends it together with the status, and is asked for it by metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest

from tests.helpers.raw_calls import raw_channel
from weightserver import LocalCluster, StepError, TableSpec, WeightClient
from weightserver.core.initial import initial_rows
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import CHUNK_BYTES, MARK_KEY, ONE_MESSAGE_KEY, OWN_TIME_KEY, rows_to_proto
from weightserver.server.admission import CallLimiter
from weightserver.server.request_memory import RequestMemory
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


def test_their_errors_are_those_of_other_fetches(client: WeightClient) -> None:
    client.open_session("errors")
    client.push_gradients([7], np.ones((1, SPEC.dim), np.float32), step=4)
    with pytest.raises(StepError, match=r"shard 0 at .*: row 7 has seen 5 updates, its state before update 3 is gone"):
        client.fetch([7], step=3)


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


# ---- what a call holds until its answer is sent


class Answered:
    """A call that a limiter has answered with one message."""

    def __init__(self, *, caller_is_gone: bool = False) -> None:
        self.memory, self.sent = RequestMemory(1 << 20), list[Callable[[], None]]()
        self.limiter = CallLimiter(self.memory, stall_seconds=0.0, on_refused=Mock(), on_cut_off=Mock())
        self.context = Mock(spec=grpc.ServicerContext)
        self.context.add_callback.side_effect = lambda sent: self.sent.append(sent) or not caller_is_gone
        handler = grpc.unary_stream_rpc_method_handler(lambda request, context: iter_of(request), bytes)
        details = Mock(method=FETCH, invocation_metadata=tuple(ONE_MESSAGE))
        answering = self.limiter.intercept_service(lambda _: handler, details)
        self.message = answering.stream_unary(iter([b"message"]), self.context)

    @property
    def num_places(self) -> int:
        return self.limiter._lanes["Fetch"]._num_free


def iter_of(message: Any) -> Iterator[Any]:
    yield message


def test_a_call_keeps_its_place_and_memory_until_its_answer_is_sent() -> None:
    call = Answered()
    assert call.message == b"message"
    taken = call.num_places
    assert call.memory.used_bytes == 2 * len(b"message")
    call.sent[0]()
    assert call.num_places == taken + 1
    assert call.memory.used_bytes == 0


def test_a_caller_that_does_not_read_is_cut_off() -> None:
    call = Answered()
    call.limiter._cut_off(0)
    call.context.cancel.assert_called_once()
    call.sent[0]()
    call.limiter._cut_off(0)
    call.context.cancel.assert_called_once()


def test_a_call_whose_caller_is_gone_keeps_nothing() -> None:
    call = Answered(caller_is_gone=True)
    assert call.memory.used_bytes == 0
    assert not call.limiter._calls
