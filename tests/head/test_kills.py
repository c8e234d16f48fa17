"""A shard that is killed during a step and started again: training continues, and no update is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.own_loop import DIM, NUM_CLASSES, SETTINGS, STEPS, Dense, Encoder, loaded, shuffled, trained
from weightserver import LocalCluster
from weightserver.torch import ClassifierHead


@pytest.mark.guard
@pytest.mark.parametrize("rows", ["resident", "remote"])
def test_a_shard_is_killed_and_started_again(tmp_path: Path, one_thread: None, rows: Any) -> None:
    batches = shuffled(0, STEPS)
    with (
        LocalCluster(2, tmp_path) as cluster,
        ClassifierHead(NUM_CLASSES, DIM, rows=rows, servers=cluster.addresses, **SETTINGS) as head,
    ):
        encoder, losses = Encoder(), []
        for stop in (4, 9, STEPS):
            losses += trained(head, [loaded(batches[head.num_steps :])], steps=stop, encoder=encoder).losses
            head.announce(batches[min(stop, STEPS - 1)])  # rows are under way
            cluster.processes[stop % 2].kill()
            cluster.restart(stop % 2)
            head.forget_announced()
        expected = Dense(head).trained(batches)
        rows_now = head.rows(range(NUM_CLASSES))
    assert losses == pytest.approx(expected.losses, rel=1e-4)
    assert (rows_now - expected.rows).abs().max() < 2e-5
