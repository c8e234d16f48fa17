"""Fencing: ranks of one epoch, superseded by a newer session."""

from __future__ import annotations

from collections.abc import Iterator

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
