"""Fencing: ranks of one epoch, superseded by a newer session."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.helpers.comparing import same
from weightserver import (
    FencedError,
    LocalCluster,
    TableSpec,
    WeightClient,
)

SPEC = TableSpec(num_rows=60, dim=4, rows_per_block=4)
ROWS = np.arange(SPEC.num_rows)
ONES = np.ones((SPEC.num_rows, SPEC.dim), np.float32)
NUM_RANKS = 3
RATES = np.full(2_000, 0.01, np.float32)


@pytest.fixture
def ranks(client: WeightClient, cluster: LocalCluster) -> Iterator[list[WeightClient]]:
    """Clients of one epoch: the first opens it, the others join."""
    client.create_table(SPEC)
    client.extend_schedule(0, RATES)
    epoch = client.open_session("old")
    others = [WeightClient(cluster.addresses, retry_seconds=10) for _ in range(NUM_RANKS - 1)]
    for other in others:
        other.extend_schedule(0, RATES)
        other.open_session("old", join=epoch)
    yield [client, *others]
    for other in others:
        other.close()


def test_a_newer_session_fences_every_rank(ranks: list[WeightClient], cluster: LocalCluster) -> None:
    for rank in ranks:
        rank.push_gradients(ROWS, ONES, step=0)
    ranks[0].checkpoint("theirs", step=1)
    with WeightClient(cluster.addresses) as newer:
        with pytest.raises(FencedError, match="no session is open"):
            newer.rollback("theirs")
        newer.open_session("new")
        before = newer.fetch_state(ROWS)
        for rank in ranks:
            for call in (
                lambda rank=rank: rank.push_gradients(ROWS, ONES, step=1),
                lambda rank=rank: rank.write_state(ROWS, ONES, ONES, 5),
                lambda rank=rank: rank.checkpoint("mine", step=1),
                lambda rank=rank: rank.rollback("theirs"),
                lambda rank=rank: rank.release("theirs"),
                lambda rank=rank: rank.open_session("old", join=newer.describe().epoch - 1),
            ):
                with pytest.raises(FencedError, match=r"superseded by epoch \d+ \(run 'new'\)"):
                    call()
        assert same(newer.fetch_state(ROWS), before)
        assert [kept.name for kept in newer.checkpoints()] == ["theirs"]


def test_old_ranks_that_keep_writing_while_a_newer_session_rolls_back(
    ranks: list[WeightClient], cluster: LocalCluster
) -> None:
    """Once the newer session is open, no write of the old ranks is applied."""
    ranks[0].push_gradients(ROWS, ONES, step=0)
    kept = ranks[0].fetch_state(ROWS)
    ranks[0].checkpoint("kept", step=1)
    written = threading.Semaphore(0)

    def write_until_refused(rank: WeightClient) -> int:
        for step in range(1, 2_000):
            try:
                rank.push_gradients(ROWS, ONES, step=step)
            except FencedError:
                return step
            written.release()
        raise AssertionError("it was never refused")

    with WeightClient(cluster.addresses) as newer, ThreadPoolExecutor(NUM_RANKS) as pool:
        writers = [pool.submit(write_until_refused, rank) for rank in ranks]
        for _ in range(10 * NUM_RANKS):
            assert written.acquire(timeout=30)
        newer.open_session("new")
        newer.extend_schedule(0, RATES)
        for _ in range(5):
            newer.rollback("kept")
            assert same(newer.fetch_state(ROWS), kept)
            newer.push_gradients(ROWS[:7], ONES[:7], step=3)
        newer.rollback("kept")
        assert all(writer.result(30) > 1 for writer in writers)
        assert same(newer.fetch_state(ROWS), kept)
        assert newer.describe().clock == 1
