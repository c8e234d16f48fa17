"""The paper's own correction, with one learning rate for a whole gap, on servers and in runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.row_model import TableModel, assert_rows_close, schedule
from tests.helpers.small_run import losses, small_run
from tests.integration.tables import begin
from trainer.loop import train
from weightserver import LocalCluster, TableSpec, WeightClient

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.guard
def test_rows_follow_the_papers_closed_form(tmp_path: Path) -> None:
    """Random rows of two writers in each step, gaps of up to hundreds of steps, fetches of future steps, a restart."""
    spec = TableSpec(num_rows=200, dim=6, weight_decay=1e-2, rows_per_block=5, correction="paper", seed=2)
    num_steps = 150
    rates = schedule(num_steps)
    generator = np.random.default_rng(0)
    oracle, everything = TableModel(spec, rates), np.arange(spec.num_rows)
    with LocalCluster(3, tmp_path) as cluster, WeightClient(cluster.addresses) as client:
        epoch = begin(client, spec, rates)
        with WeightClient(cluster.addresses) as other:
            other.open_session("run", join=epoch)
            other.extend_schedule(0, rates)
            for step in range(num_steps):
                often = generator.choice(40, 8, replace=False)
                seldom = 40 + generator.choice(150, 2, replace=False)  # 190.. are never pushed
                rows = np.sort(np.concatenate([often, seldom]))
                gradients = generator.standard_normal((2, 10, 6)).astype(np.float32)
                for writer, part in zip((client, other), gradients, strict=True):
                    writer.push_gradients(rows, part, step=step)
                oracle.update(rows, gradients.astype(np.float64).sum(axis=0), step)
                if step % 60 == 59:
                    for later in (step + 1, step + 2, num_steps):  # a fetch changes nothing for the next
                        assert_rows_close(client.fetch(everything, step=later), oracle.at(everything, later)[0])
                if step == 70:
                    cluster.restart(0)
        state = client.fetch_state(everything, step=num_steps)
        oracle.assert_equals(state, num_steps)
        gaps = num_steps - oracle.last_step
        assert gaps.max() == num_steps
        assert len(np.unique(gaps)) > 50


@pytest.mark.slow
def test_a_run_with_the_papers_correction_can_be_resumed(tmp_path: Path) -> None:
    settings = {"correction": "paper", "weight_decay": 0.05, "steps": 30}
    for name, more in (("remote", {"rows": "remote"}), ("resident", {}), ("exact", {"correction": "exact"})):
        train(small_run(tmp_path / name, **settings | more))
    assert losses(tmp_path / "resident") == losses(tmp_path / "remote")
    assert losses(tmp_path / "resident") != losses(tmp_path / "exact")
    train(small_run(tmp_path / "resident", resume=True, **settings))
    assert losses(tmp_path / "resident") == losses(tmp_path / "remote")
    with pytest.raises(ValueError, match="whose --correction is paper, not exact: give the same settings"):
        train(small_run(tmp_path / "resident", resume=True, **settings | {"correction": "exact"}))
