"""Writes whose answers are lost: what a client may take for done, and what it must send again or refuse."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from weightserver import ClusterError, LocalCluster, ShardUnavailableError, TableSpec, WeightClient
from weightserver.client.connection import ShardConnection

SPEC = TableSpec(num_rows=100, dim=4, weight_decay=0.0)
RATES = np.full(20, 0.1, np.float32)
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
    client.create_table(SPEC)
    client.extend_schedule(0, RATES)
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


def test_a_push_that_is_repeated_after_another_one_counts_once(
    writer: WeightClient, losing_answer: Callable[[Callable[[], None]], None]
) -> None:
    losing_answer(lambda: push(writer, 1))
    push(writer, 2)
    push(writer, 1)
    once, other = writer.fetch_state([1, 2]).momentum_buffer
    assert np.array_equal(once, other)


def test_a_push_that_another_client_rolled_back_is_not_taken_for_done(
    writer: WeightClient, other: WeightClient, losing_answer: Callable[[Callable[[], None]], None]
) -> None:
    losing_answer(lambda: push(writer, 1))
    push(writer, 2)  # finds that the first was applied
    other.open_session("other")
    other.rollback("empty")
    writer.open_session("writer again")
    with pytest.raises(ClusterError, match="roll back to a checkpoint"):
        push(writer, 1)
    writer.rollback("empty")
    push(writer, 1)
    assert writer.fetch_state([1]).last_step.tolist() == [1]


def test_a_push_of_a_dropped_table_is_not_taken_for_one_of_the_next(
    writer: WeightClient, other: WeightClient, losing_answer: Callable[[Callable[[], None]], None]
) -> None:
    losing_answer(lambda: push(writer, 1))
    push(writer, 2)
    other.drop_table()
    other.create_table(SPEC)
    writer.create_table(SPEC)
    writer.extend_schedule(0, RATES)
    writer.open_session("writer again")
    push(writer, 1)
    assert writer.fetch_state([1]).last_step.tolist() == [1]


def test_a_process_does_not_write_by_the_client_of_another(
    writer: WeightClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a fork, both would give the same number to different writes."""
    process = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: process + 1)
        with pytest.raises(ValueError, match="made in another process"):
            push(writer, 1)
    push(writer, 1)


def test_the_learning_rates_that_a_client_returns_are_a_copy(writer: WeightClient) -> None:
    writer.learning_rates()[5] = 0.7
    assert writer.learning_rates()[5] == RATES[5]
