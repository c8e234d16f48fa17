"""Writes that arrive again: old requests change nothing, and a client knows which of its own are done.

Under faults of the network and of shards, test_histories.py shows that each call counts once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.faulty_proxy import Faults, FaultyProxy
from weightserver import LocalCluster, ShardUnavailableError, TableSpec, WeightClient
from weightserver.client.connection import ShardConnection
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.protocol._generated import weight_server_pb2 as pb

SPEC = TableSpec(num_rows=70_000, dim=8, momentum=0.0, weight_decay=0.0, init_std=0.0, rows_per_block=63)
ROWS = np.arange(SPEC.num_rows)
USED = ROWS[ROWS // SPEC.rows_per_block % 111 == 0]
"""The rows of eleven blocks, on both shards."""
RATES = np.ones(64, np.float32)
RUN = "exactly once"

METHODS = pb.DESCRIPTOR.services_by_name["WeightServer"].methods_by_name


def values(generator: np.random.Generator, rows: Int64Array) -> Float32Array:
    """Whole numbers other than 0, (n, D)."""
    return generator.choice([-3, -2, -1, 1, 2, 3], (len(rows), SPEC.dim)).astype(np.float32)


def test_every_old_request_again_changes_nothing(cluster: LocalCluster, client: WeightClient) -> None:
    """Requests of any kind, the newest first."""
    generator = np.random.default_rng(0)
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(FaultyProxy(address, seed=0, faults=Faults())) for address in cluster.addresses]
        writer = stack.enter_context(WeightClient([proxy.address for proxy in proxies]))

        def push() -> None:
            writer.push_gradients(USED, values(generator, USED), step=7)

        def write() -> None:
            writer.write_state(USED, values(generator, USED), values(generator, USED), 8)

        def begin() -> None:
            writer.create_table(SPEC)
            writer.extend_schedule(0, RATES)
            writer.open_session(RUN)

        begin()
        push()
        writer.extend_table(SPEC.num_rows + 100)  # not of the table that comes next
        writer.drop_table()
        for other in (replace(SPEC, correction="paper"), replace(SPEC, dtype="bfloat16")):
            writer.create_table(other)
            writer.drop_table()
        begin()
        client.extend_schedule(0, RATES)
        writer.extend_table(SPEC.num_rows + 5)
        push()
        writer.checkpoint("first", step=8)
        write()
        writer.checkpoint("second", step=8)
        writer.open_session(RUN)
        push()
        writer.rollback("first")
        push()
        writer.checkpoint("third", step=8)
        writer.copy_checkpoint("first", "copy")
        writer.release("first")
        write()

        def everything() -> list[object]:
            shards = [replace(shard, disk_bytes=0) for shard in client.describe().shards]
            states = [
                client.fetch_state(USED, step=step, checkpoint=checkpoint)
                for step in (None, len(RATES))
                for checkpoint in ("", "third")
            ]
            return [shards, client.checkpoints(), *map(vars, states)]

        before = everything()
        for proxy in proxies:
            again = proxy.replay()
            unused = {"Fetch", "ReadBlocks", "ReadSchedule", "SettleWrite"}
            assert {request.method for request in again} == set(METHODS) - unused
        np.testing.assert_equal(everything(), before)


# ---- writes whose answers are lost

SMALL = TableSpec(num_rows=100, dim=4, weight_decay=0.0)
SMALL_RATES = np.full(20, 0.1, np.float32)
GRADIENT = np.ones((1, 4), np.float32)


@pytest.fixture
def losing_answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Makes a write that every shard applies, and whose answers are lost."""
    original = ShardConnection.call

    def lost(self: ShardConnection, method: str, *arguments: Any, **options: Any) -> Any:
        answer = original(self, method, *arguments, **options)
        if method in ("PushGradients", "WriteState"):
            raise ShardUnavailableError("the answer was lost")
        return answer

    def make(call: Callable[[], None]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(ShardConnection, "call", lost)
            with pytest.raises(ShardUnavailableError, match="lost"):
                call()

    return make


@pytest.fixture
def other(cluster: LocalCluster) -> Iterator[WeightClient]:
    with WeightClient(cluster.addresses) as other:
        yield other


@pytest.fixture
def writer(client: WeightClient) -> WeightClient:
    client.create_table(SMALL)
    client.extend_schedule(0, SMALL_RATES)
    client.open_session("writer")
    client.checkpoint("empty", step=0)
    return client


def push(client: WeightClient, row: int, step: int = 0) -> None:
    client.push_gradients([row], GRADIENT, step=step)


def test_a_state_that_is_written_again_after_another_one_replaces_it(
    writer: WeightClient, losing_answer: Callable[[Callable[[], None]], None]
) -> None:
    """The first call is part of the rows, but no longer what they are."""

    def write(value: float) -> None:
        writer.write_state([1], value * GRADIENT, GRADIENT, 0)

    losing_answer(lambda: write(1))
    write(2)
    write(1)
    assert np.array_equal(writer.fetch_state([1]).weight, GRADIENT)


def test_a_push_of_a_dropped_table_is_not_taken_for_one_of_the_next(
    writer: WeightClient, other: WeightClient, losing_answer: Callable[[Callable[[], None]], None]
) -> None:
    losing_answer(lambda: push(writer, 1))
    push(writer, 2)
    other.drop_table()
    other.create_table(SMALL)
    writer.create_table(SMALL)
    writer.extend_schedule(0, SMALL_RATES)
    writer.open_session("writer again")
    push(writer, 1)
    assert writer.fetch_state([1]).last_step.tolist() == [1]


def test_the_learning_rates_that_a_client_returns_are_a_copy(writer: WeightClient) -> None:
    writer.learning_rates()[5] = 0.7
    assert writer.learning_rates()[5] == SMALL_RATES[5]
