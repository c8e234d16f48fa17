"""Training with rows in bfloat16: near training with float32, the same bits however rows travel, and when resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.small_run import EVERY, PowerLoss, losses, power_loss_at, small_run
from tests.integration.test_stores import (
    NUM_ROWS,
    Recorded,
    assert_same_bits,
    relative,
    remote,
    replay,
    resident,
    table,
)
from trainer.loop import train
from trainer.schedule import learning_rates
from weightserver import LocalCluster, TableMismatchError, WeightClient
from weightserver.operations.inspect import inspect_directory
from weightserver.torch import ClassifierHead, VisitSchedule
from weightserver.torch.rates import LearningRates
from weightserver.torch.rows import DenseRows

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_near(actual: Recorded, dense: Recorded, error: float) -> None:
    """Training that ends alike, though not the same: the losses, and the rows up to the roundings of a row's way."""
    assert actual.losses[-50:].mean() == pytest.approx(dense.losses[-50:].mean(), rel=0.02)
    difference = np.linalg.norm(actual.rows.weight - dense.rows.weight, axis=1)
    assert np.median(difference / np.linalg.norm(dense.rows.weight, axis=1)) < error


@pytest.mark.guard
def test_rows_in_bfloat16_train_near_dense_ones(cluster: LocalCluster) -> None:
    """Resident rows are rounded when they leave, remote ones in each step, so they lie farther off."""
    spec, num_steps = replace(table(), dtype="bfloat16"), 250
    rates = learning_rates(num_steps=num_steps, base=0.5, warmup_steps=25)
    dense = replay(DenseRows(table(), LearningRates(table(), rates)), 60, num_steps)
    with remote(cluster, spec, rates) as store:
        fetched = replay(store, 60, num_steps)
    assert_near(fetched, dense, 0.05)
    with resident(cluster, spec, rates, capacity=120, prefetch_steps=4) as store:
        kept = replay(store, 60, num_steps)
        assert store.counters.pushed_bytes / store.counters.pushed_rows == 2 * 2 * spec.dim + 8
    assert_near(kept, dense, 0.03)
    assert relative(kept.rows.weight, dense.rows.weight) > 1e-3, "it is rounded"


@pytest.mark.guard
def test_delays_change_no_bit_of_rows_in_bfloat16(cluster: LocalCluster) -> None:
    """In epoch order, rows return from the servers or, if writes are slow, from the queue: rounded alike."""
    spec, num_steps = replace(table(), dtype="bfloat16"), 150
    rates = learning_rates(num_steps=num_steps, base=0.5, warmup_steps=15)
    schedule = VisitSchedule(num_rows=NUM_ROWS, window_size=NUM_ROWS, window_stride=NUM_ROWS, seed=5)
    runs = []
    for delays in (None, 1):
        with resident(cluster, spec, rates, capacity=92, prefetch_steps=4, delays=delays) as store:
            runs.append(replay(store, 60, num_steps, schedule))
    assert_same_bits(*runs)


@pytest.mark.guard
@pytest.mark.parametrize("rows", ["resident", "remote"])
def test_a_run_with_rows_in_bfloat16_resumes_exactly(rows: str, tmp_path: Path) -> None:
    settings = {"rows": rows, "row_precision": "bfloat16"}
    train(small_run(tmp_path / "undisturbed", **settings))
    output = tmp_path / "run"
    with pytest.raises(PowerLoss):
        train(small_run(output, **settings), on_step=power_loss_at(3 * EVERY - 1))
    with pytest.raises(ValueError, match="whose --row-precision is bfloat16, not float32: give the same"):
        train(small_run(output, rows=rows, resume=True))
    train(small_run(output, **settings, resume=True))
    assert losses(output) == losses(tmp_path / "undisturbed")
    train(small_run(tmp_path / "float32", rows=rows))
    exact = losses(tmp_path / "float32")
    assert losses(output) != exact
    assert np.allclose(losses(output), exact, rtol=0.02)
    spec = inspect_directory(output / "servers" / "shard-0")["spec"]
    assert spec["dtype"] == json.loads((output / "config.json").read_text())["row_precision"] == "bfloat16"


def test_dense_rows_are_float32() -> None:
    with pytest.raises(ValueError, match="--row-precision bfloat16 is for rows on weight servers, but --rows dense"):
        small_run(Path("none"), rows="dense", row_precision="bfloat16").check()
    with pytest.raises(ValueError, match="--row-precision must be float32 or bfloat16, got float16"):
        small_run(Path("none"), row_precision="float16").check()
    with pytest.raises(ValueError, match="rows='dense' are float32, not bfloat16: omit dtype"):
        ClassifierHead(100, 4, num_negatives=8, rows="dense", dtype="bfloat16")


def test_a_head_stores_rows_in_bfloat16(cluster: LocalCluster, client: WeightClient, tmp_path: Path) -> None:
    with ClassifierHead(50, 4, num_negatives=8, directory=tmp_path, dtype="bfloat16") as head:
        head.open()
        rows = head.rows(np.arange(50)).numpy()
    assert inspect_directory(tmp_path / "shard-0")["spec"]["dtype"] == "bfloat16"
    assert ((rows.view(np.uint32) & 0xFFFF) == 0).all()
    with ClassifierHead(50, 4, num_negatives=8, servers=cluster.addresses, dtype="bfloat16") as head:
        head.open()
    with (
        ClassifierHead(50, 4, num_negatives=8, servers=cluster.addresses) as other,
        pytest.raises(TableMismatchError, match="holds another table"),
    ):
        other.open()
