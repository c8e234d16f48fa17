"""Writes that arrive again: old requests change nothing, and a client knows which of its own are done.

Under faults of the network and of shards, test_histories.py shows that each call counts once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.faulty_proxy import Faults, FaultyProxy
from tests.integration.tables import SLOW, begin
from weightserver import LocalCluster, ShardUnavailableError, TableSpec, WeightClient
from weightserver.client.connection import ShardConnection
from weightserver.core.arrays import Float32Array
from weightserver.protocol._generated import weight_server_pb2 as pb

SPEC = TableSpec(num_rows=70_000, dim=8, momentum=0.0, weight_decay=0.0, init_std=0.0, rows_per_block=63)
ROWS = np.arange(SPEC.num_rows)
USED = ROWS[ROWS // SPEC.rows_per_block % 111 == 0]
"""The rows of eleven blocks, on both shards."""
RATES = np.ones(64, np.float32)
METHODS = pb.DESCRIPTOR.services_by_name["WeightServer"].methods_by_name


def values(generator: np.random.Generator) -> Float32Array:
    """Whole numbers other than 0, for the rows that are used."""
    return generator.choice([-3, -2, -1, 1, 2, 3], (len(USED), SPEC.dim)).astype(np.float32)


def test_every_old_request_again_changes_nothing(cluster: LocalCluster, client: WeightClient) -> None:
    """Requests of any kind, the newest first."""
    generator = np.random.default_rng(0)
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(FaultyProxy(address, seed=0, faults=Faults())) for address in cluster.addresses]
        writer = stack.enter_context(WeightClient([proxy.address for proxy in proxies]))

        def push() -> None:
            writer.push_gradients(USED, values(generator), step=7)

        def write() -> None:
            writer.write_state(USED, values(generator), values(generator), 8)

        begin(writer, SPEC, RATES)
        push()
        writer.extend_table(SPEC.num_rows + 100)  # not of the table that comes next
        writer.drop_table()
        for other in (replace(SPEC, correction="paper"), replace(SPEC, dtype="bfloat16")):
            writer.create_table(other)
            writer.drop_table()
        begin(writer, SPEC, RATES)
        client.extend_schedule(0, RATES)
        writer.extend_table(SPEC.num_rows + 5)
        push()
        writer.checkpoint("first", step=8)
        write()
        writer.checkpoint("second", step=8)
        writer.open_session("run")
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


def test_a_state_that_is_written_again_after_another_one_replaces_it(
    client: WeightClient, losing_answer: Callable[[Callable[[], None]], None]
) -> None:
    """The first call is part of the rows, but no longer what they are."""
    begin(client, SMALL)

    def write(value: float) -> None:
        client.write_state([1], value * GRADIENT, GRADIENT, 0)

    losing_answer(lambda: write(1))
    write(2)
    write(1)
    assert np.array_equal(client.fetch_state([1]).weight, GRADIENT)


def test_a_push_of_a_dropped_table_is_not_taken_for_one_of_the_next(
    client: WeightClient, cluster: LocalCluster, losing_answer: Callable[[Callable[[], None]], None]
) -> None:
    begin(client, SMALL)
    losing_answer(lambda: client.push_gradients([1], GRADIENT, step=0))
    client.push_gradients([2], GRADIENT, step=0)
    with WeightClient(cluster.addresses) as other:
        other.drop_table()
        other.create_table(SMALL)
    begin(client, SMALL, session="run again")
    client.push_gradients([1], GRADIENT, step=0)
    assert client.fetch_state([1]).last_step.tolist() == [1]


def test_the_learning_rates_that_a_client_returns_are_a_copy(client: WeightClient) -> None:
    begin(client, SMALL)
    client.learning_rates()[5] = 0.7
    assert client.learning_rates()[5] == SLOW[5]
