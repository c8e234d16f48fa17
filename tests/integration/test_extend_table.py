"""A table that grows while it is served: old rows stay identical, new rows are as in a table created with them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.comparing import rows_in, same
from tests.helpers.dense_sgd import Oracle
from tests.helpers.operations import Weightserver, assert_one_line, reshard_all, targets_in
from tests.helpers.row_model import schedule
from tests.integration.tables import begin
from weightserver import LocalCluster, RowState, TableSpec, WeightClient
from weightserver.core.initial import initial_rows
from weightserver.operations.backup import backup
from weightserver.operations.backup_files import read_backup
from weightserver.operations.backup_places import Folder
from weightserver.operations.export import export_rows
from weightserver.operations.inspect import inspect_directory
from weightserver.operations.restore import restore
from weightserver.operations.verify import verify_directory

SPEC = TableSpec(num_rows=100, dim=6, momentum=0.9, weight_decay=1e-3, rows_per_block=7, seed=4)
LARGER = replace(SPEC, num_rows=263)  # neither ends with a block
OLD, ALL = np.arange(SPEC.num_rows), np.arange(LARGER.num_rows)
NUM_STEPS, GROWN_AT = 60, 20
RATES = schedule(NUM_STEPS)


def gradients(step: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns some of the rows, and float32 [n, D]."""
    generator = np.random.default_rng(step)
    rows = np.sort(generator.choice(num_rows, 20, replace=False))
    return rows, generator.standard_normal((20, SPEC.dim), dtype=np.float32)


def push(client: WeightClient, step: int, num_rows: int) -> None:
    rows, values = gradients(step, num_rows)
    client.push_gradients(rows, values, step=step)


@pytest.mark.guard
def test_a_grown_table_is_what_a_larger_one_would_have_been(client: WeightClient, cluster: LocalCluster) -> None:
    """Compares with dense SGD over all rows, and bit for bit with a table created with them."""
    oracle = Oracle(LARGER, RATES)
    epoch = begin(client, SPEC, RATES)
    with WeightClient(cluster.addresses) as small:  # knows the smaller table, and continues with it
        small.open_session("run", join=epoch)
        small.extend_schedule(0, RATES)
        for step in range(NUM_STEPS):
            if step == GROWN_AT:
                before = client.fetch_state(OLD)
                assert client.extend_table(263) == LARGER
                assert client.extend_table(263) == LARGER, "the same again is no error"
                assert same(client.fetch_state(OLD), before)
                new = client.fetch_state(ALL[100:])
                assert np.array_equal(new.weight, initial_rows(LARGER, ALL[100:]))
                assert not new.last_step.any()
                assert client.describe().spec == LARGER
            num_rows = 100 if step < GROWN_AT or step % 2 else 263
            push(small if step % 2 else client, step, num_rows)
            rows, values = gradients(step, num_rows)
            dense = np.zeros((263, SPEC.dim))
            dense[rows] = values
            oracle.step(step, dense)
        oracle.assert_equals(client.fetch_state(ALL, step=NUM_STEPS))
        grown = client.fetch_state(ALL)
        assert same(small.fetch_state(OLD), RowState(**{name: array[:100] for name, array in vars(grown).items()}))
        assert np.array_equal(small.fetch([262], step=NUM_STEPS), client.fetch([262], step=NUM_STEPS)), "it asks again"
    client.push_gradients([200], np.ones((1, SPEC.dim), np.float32), step=GROWN_AT - 5)  # late, of before it was there
    late = client.fetch_state([200])

    client.drop_table()
    begin(client, LARGER, RATES)
    for step in range(NUM_STEPS):
        push(client, step, 100 if step < GROWN_AT or step % 2 else 263)
    assert same(client.fetch_state(ALL), grown)
    client.push_gradients([200], np.ones((1, SPEC.dim), np.float32), step=GROWN_AT - 5)
    assert same(client.fetch_state([200]), late)


@pytest.mark.guard
def test_operations_on_a_grown_table(tmp_path: Path, weightserver: Weightserver) -> None:
    """Checkpoints and backups of before and after, a rollback, an export, a reshard, a lost shard: of rows in bfloat16,
    which the other tests of operations do not have."""
    small, larger = (replace(spec, dtype="bfloat16") for spec in (SPEC, LARGER))
    with LocalCluster(2, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
        begin(client, small, RATES)
        push(client, 0, 100)
        client.checkpoint("before", step=1)
        before = client.fetch_state(OLD)
        backup(client, tmp_path / "small")
        client.extend_table(263)
        for step in range(1, 5):
            push(client, step, 263)
        client.checkpoint("after", step=5)
        after = client.fetch_state(ALL)
        assert backup(client, tmp_path / "late", checkpoint="before").spec == larger
        backup(client, tmp_path / "large")
        export_rows(client, tmp_path / "export", checkpoint="before")

        kept = client.fetch_state(ALL, checkpoint="before")
        assert same(RowState(**{name: array[:100] for name, array in vars(kept).items()}), before)
        assert np.array_equal(kept.weight[100:], initial_rows(larger, ALL[100:]))
        push(client, 5, 263)
        client.rollback("after")
        assert same(client.fetch_state(ALL), after)
        reshard_all(client, targets_in(tmp_path / "three", 3), rows_per_block=4)
    sizes = [read_backup(Folder(tmp_path / name)).spec.num_rows for name in ("small", "late", "large")]
    assert sizes == [100, 263, 263]

    old, copied, three = (targets_in(tmp_path / name, n) for name, n in (("old", 2), ("copied", 2), ("three", 3)))
    assert [inspect_directory(directory)["spec"]["num_rows"] for directory in old] == [263, 263]
    assert [verify_directory(directory).problems for directory in old] == [[], []]
    assert same(rows_in(three), after)
    for name, expected in (("small", before), ("late", kept), ("large", after)):
        restored = targets_in(tmp_path / f"{name}-new", 2)
        for shard, directory in enumerate(restored):
            restore(tmp_path / name, directory, shard=shard)
        assert same(rows_in(restored), expected)
    shutil.copytree(old[0], copied[0])
    restore(tmp_path / "small", copied[1], shard=1)  # it was lost
    with LocalCluster(2, tmp_path / "copied") as cluster, WeightClient(cluster.addresses) as client:
        rollback = ["rollback", "before", *cluster.addresses, "--yes"]
        assert_one_line(weightserver(*rollback), "has 263 rows, that of shard 1 100")
        assert weightserver("extend", *cluster.addresses, "--num-rows", 263)[0] == 0
        assert weightserver(*rollback)[0] == 0
        assert client.describe().spec == larger, "a rollback shrinks nothing"
        assert same(client.fetch_state(ALL), kept)
        assert client.describe().rows_stored == 20
