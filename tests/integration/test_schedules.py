"""Learning rates that change from step to step, that two clients give differently, and that are undone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.dense_sgd import Oracle
from tests.helpers.operations import Weightserver, assert_one_line, reshard_all, targets_in
from tests.helpers.row_model import schedule
from weightserver import ClusterError, LocalCluster, StepError, TableMismatchError, TableSpec, WeightClient
from weightserver.client import rates as client_rates
from weightserver.core.arrays import Float32Array
from weightserver.operations.backup import backup
from weightserver.operations.restore import restore
from weightserver.shard.shard import Shard
from weightserver.storage.lmdb_storage import LmdbStorage

SPEC = TableSpec(num_rows=60, dim=4, momentum=0.9, weight_decay=1e-3, rows_per_block=7, seed=2)
ROWS = np.arange(SPEC.num_rows)
NUM_STEPS = 20
RATES = schedule(NUM_STEPS)


def gradients(step: int) -> Float32Array:
    return np.random.default_rng(step).standard_normal((len(ROWS), SPEC.dim)).astype(np.float32)


def push(client: WeightClient, step: int, rows: np.ndarray = ROWS) -> None:
    client.push_gradients(rows, gradients(step)[rows], step=step)


def begin(client: WeightClient, rates: Float32Array = RATES) -> int:
    client.create_table(SPEC)
    client.extend_schedule(0, rates)
    return client.open_session("test")


def assert_dense_sgd(client: WeightClient, rates: Float32Array, num_pushed: int) -> None:
    """Every row as after `num_pushed` updates of all rows, at the last step of these learning rates."""
    oracle = Oracle(SPEC, rates)
    for step in range(len(rates)):
        oracle.step(step, gradients(step).astype(np.float64) * (step < num_pushed))
    oracle.assert_equals(client.fetch_state(ROWS, step=len(rates)))


def used(cluster: LocalCluster, shard: int) -> list[float]:
    with WeightClient(cluster.addresses) as client:
        return client.learning_rates(shard=shard).tolist()


def test_learning_rates_given_step_by_step(client: WeightClient, cluster: LocalCluster) -> None:
    """Each is known when its step begins; a write takes it along, and costs one commit on each shard."""
    begin(client, RATES[:0])
    for step in range(NUM_STEPS):
        with pytest.raises(StepError, match=rf"rates of {step + 1} steps, but .* know those of {step}: extend"):
            push(client, step)
        client.extend_schedule(step, RATES[step : step + 1])
        client.fetch(ROWS, step=step)
        push(client, step)
    with WeightClient(cluster.addresses) as reader:
        assert reader.describe().horizon == NUM_STEPS
        assert_dense_sgd(reader, RATES, NUM_STEPS)
        assert np.array_equal(reader.learning_rates(), RATES)


def test_shards_that_were_given_different_ones_are_told(
    client: WeightClient, cluster: LocalCluster, weightserver: Weightserver
) -> None:
    """Two writers of one session, at the same time, on different shards. The rollback that mends them can be tried."""
    epoch = begin(client)
    push(client, 0)
    client.checkpoint("before", step=1)
    with WeightClient(cluster.addresses) as other:
        other.open_session("test", join=epoch)
        other.extend_schedule(1, 2 * RATES[1:])
        push(client, 1, ROWS[:7])
        push(other, 1, ROWS[7:14])
        for one, rate, rows in ((client, RATES[1], ROWS[7:14]), (other, 2 * RATES[1], ROWS[:7])):  # the other's shard
            message = rf"the learning rate of step 1 is .* and was used, not {rate:g}: only steps from 2 on"
            with pytest.raises(TableMismatchError, match=message):
                one.fetch(ROWS, step=2)
            with pytest.raises(TableMismatchError, match=message):
                push(one, 2, rows)
        calls: list[Callable[[], object]] = [
            client.describe,
            other.describe,
            lambda: client.checkpoint("mixed", step=2),
            lambda: other.checkpoint("mixed", step=2),
        ]
        for call in calls:
            with pytest.raises(ClusterError, match=r"different learning rates for step 1, .*weightserver rollback"):
                call()
        assert [kept.name for kept in client.checkpoints()] == ["before"]
        message = "would undo run 'test' from step 2 to 1: give --yes"
        assert_one_line(weightserver("rollback", "before", *cluster.addresses), message)
        client.rollback("before")
        for step in range(1, NUM_STEPS):
            push(client, step)
        assert_dense_sgd(client, RATES, NUM_STEPS)


def test_a_rollback_forgets_what_was_used_since(client: WeightClient, cluster: LocalCluster) -> None:
    begin(client)
    for step in range(10):
        push(client, step)
        if step == 4:
            client.checkpoint("kept", step=5)
    client.rollback("kept")
    assert used(cluster, 0) == used(cluster, 1) == RATES[:5].tolist()
    with pytest.raises(TableMismatchError, match="only steps from 5 on may be rewritten"):
        client.extend_schedule(4, [1.0])
    client.extend_schedule(5, 2 * RATES[5:])
    cluster.restart(0)
    for step in range(5, NUM_STEPS):
        push(client, step)
    assert_dense_sgd(client, np.append(RATES[:5], 2 * RATES[5:]), NUM_STEPS)


def test_copies_of_a_checkpoint_have_its_learning_rates(
    client: WeightClient, cluster: LocalCluster, tmp_path: Path
) -> None:
    """Directories that are restored and resharded; those used after the checkpoint stay behind."""
    begin(client)
    for step in range(8):
        push(client, step)
        if step == 4:
            client.checkpoint("kept", step=5)
    backup(client, tmp_path / "backup", checkpoint="kept")
    restored, resharded = targets_in(tmp_path / "restored", 2), targets_in(tmp_path / "resharded", 3)
    for shard, directory in enumerate(restored):
        restore(tmp_path / "backup", directory, shard=shard)
    with LocalCluster(2, tmp_path / "restored") as copies, WeightClient(copies.addresses) as reader:
        reshard_all(reader, resharded)
    for shard, directory in (*enumerate(restored), *enumerate(resharded)):
        num_shards = 2 if directory in restored else 3
        with closing(LmdbStorage(directory)) as storage:
            assert Shard(storage, shard=shard, num_shards=num_shards).used_rates.values.tolist() == RATES[:5].tolist()


def test_shards_whose_writes_used_fewer_rates_than_a_fetch_brought_are_told_the_others(
    client: WeightClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an evaluation reads between writes of rows that were updated at different steps; in one attempt each."""
    monkeypatch.setattr(client_rates.CarriedRates, "are_missing", lambda *_: pytest.fail("a shard had to ask"))
    client.create_table(SPEC)
    client.open_session("run")
    client.extend_schedule(0, RATES[:7])
    rows = np.array([0, SPEC.rows_per_block])  # of both shards
    zeros = np.zeros((2, SPEC.dim), np.float32)
    client.fetch(rows, step=7)
    client.write_state(rows, zeros, zeros, [7, 7])
    client.extend_schedule(7, RATES[7:])
    client.write_state(rows, zeros, zeros, [7, 8])
    client.write_state(rows, zeros, zeros, [9, 9])
    assert client.describe().clock == 9


@pytest.mark.parametrize("part", [7, client_rates._MOST_CARRIED])
def test_more_learning_rates_than_one_request_carries(
    part: int, client: WeightClient, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that lacks many gets them in parts, again after a restart; those of a write are then stored."""
    num_steps = 400_000 if part > 7 else 40
    monkeypatch.setattr(client_rates, "_MOST_CARRIED", part)
    rates = np.linspace(0.1, 0.01, num_steps, dtype=np.float32)
    begin(client, rates)
    first = client.fetch(ROWS, step=num_steps)
    cluster.restart(1)
    assert np.array_equal(client.fetch(ROWS, step=num_steps), first)
    cluster.restart(0)
    push(client, num_steps - 1)
    for shard in (0, 1):
        cluster.restart(shard)
        assert np.array_equal(client.learning_rates(shard=shard), rates)
    with WeightClient(cluster.addresses) as reader:
        assert np.array_equal(reader.fetch(ROWS, step=num_steps), client.fetch(ROWS, step=num_steps))
        assert np.array_equal(reader.learning_rates(), rates)
