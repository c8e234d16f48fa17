"""Clusters changed to other numbers of shards and rows per block."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.comparing import rows_in, same
from tests.helpers.operations import (
    NUM_STORED,
    ROWS,
    SPEC,
    Table,
    Weightserver,
    assert_one_line,
    dies,
    make_table,
    targets_in,
)
from tests.helpers.stored import get, put, stored
from weightserver import (
    ClusterError,
    LocalCluster,
    ShardUnavailableError,
    StorageError,
    TableMismatchError,
    TableSpec,
    WeightClient,
)
from weightserver.core.blocks import BlockCodec
from weightserver.core.versions import Version
from weightserver.operations import reshard as resharding
from weightserver.operations.inspect import inspect_directory
from weightserver.operations.verify import verify_directory
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.records import read_state, write_spec
from weightserver.storage.shard_builder import ShardBuilder


@pytest.mark.guard
def test_a_resharded_clusters_checkpoint_can_be_released(
    weightserver: Weightserver, tables: Callable[[int], Table], tmp_path: Path
) -> None:
    sources, _, _ = tables(2)
    assert weightserver("reshard", "--source", *sources, "--target", *targets_in(tmp_path, 1))[0] == 0
    with LocalCluster(1, tmp_path) as cluster:
        assert weightserver("release", "two", *cluster.addresses) == (0, "released two\n", "")


def identity(directory: Path, checkpoint: str) -> str:
    """The identity of a checkpoint in a directory."""
    storage = LmdbStorage(directory, readonly=True)
    with storage.read() as txn:
        found = read_state(txn).checkpoint(checkpoint).checkpoint_id.hex()
    storage.close()
    assert len(found) == 32
    return found


@pytest.mark.parametrize(
    ("old", "new", "rows_per_block"), [(2, 3, 7), pytest.param(3, 2, 1, marks=pytest.mark.guard)], ids=str
)
def test_resharded_rows_are_the_same(
    old: int,
    new: int,
    rows_per_block: int,
    small_pieces: None,
    weightserver: Weightserver,
    tables: Callable[[int], Table],
    tmp_path: Path,
) -> None:
    sources, kept, _ = tables(old)
    before = [inspect_directory(source) for source in sources]
    targets = targets_in(tmp_path / "new", new)
    command = ["reshard", "--source", *sources[::-1], "--target", *targets, "--checkpoint", "one"]
    status, said, error = weightserver(*command, "--rows-per-block", rows_per_block)
    assert status == 0, error
    assert said == (
        f"{old} shards became {new} with {NUM_STORED} rows of checkpoint one (step 2), {rows_per_block} per block; "
        "2 later updates remain only in the old shards\n"
    )
    assert [inspect_directory(source) for source in sources] == before
    assert [verify_directory(target).problems for target in targets] == [[]] * new
    assert {identity(directory, "one") for directory in targets} == {identity(sources[0], "one")}
    seen = [inspect_directory(target) for target in targets]
    assert {(shard["spec"]["rows_per_block"], shard["clock"]) for shard in seen} == {(rows_per_block, 2)}
    assert sum(shard["rows_stored"] for shard in seen) == NUM_STORED
    assert same(rows_in(targets), kept)
    assert same(rows_in(targets, checkpoint="one"), kept)


def test_resharding_the_current_rows(
    weightserver: Weightserver, tables: Callable[[int], Table], tmp_path: Path
) -> None:
    sources, _, now = tables(2)
    targets = targets_in(tmp_path / "new", 3)
    status, said, _ = weightserver("reshard", "--source", *sources, "--target", *targets, "--current")
    assert (status, said.endswith("rows of step 4, 7 per block; 0 later updates remain only in the old shards\n")) == (
        0,
        True,
    )
    assert same(rows_in(targets), now)
    assert [verify_directory(target).problems for target in targets] == [[], [], []]
    assert {tuple(inspect_directory(target)["checkpoints"]) for target in targets} == {()}


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster that is resharded in its place."""
    with LocalCluster(2, tmp_path) as cluster:
        yield cluster


MOVED = np.r_[0:8, 12:16]
"""Rows of both shards. With 4 rows per block, rows 4 to 7 are of shard 1; with 8, of shard 0."""
ONES = np.ones((len(MOVED), 4), np.float32)


def connected(cluster: LocalCluster) -> WeightClient:
    """A client that has made a push to MOVED, and has taken checkpoint `kept`."""
    client = WeightClient(cluster.addresses, retry_seconds=1, connect_seconds=20)
    client.create_table(TableSpec(num_rows=64, dim=4, momentum=0, weight_decay=0, init_std=0, rows_per_block=4))
    client.extend_schedule(0, np.ones(9, np.float32))
    client.open_session("run")
    client.push_gradients(MOVED, ONES, step=0)
    client.checkpoint("kept", step=1)
    return client


def stop(cluster: LocalCluster, shard: int) -> None:
    cluster.processes[shard].terminate()
    cluster.processes[shard].wait()


def reshard_in_place(cluster: LocalCluster, rows_per_block: int, *, current: bool) -> None:
    """The same shards at the same addresses."""
    targets = [cluster.directory / f"shard-{shard}" for shard in range(2)]
    for shard in range(2):
        stop(cluster, shard)
    sources = [target.rename(cluster.directory / f"old-{shard}") for shard, target in enumerate(targets)]
    resharding.reshard(sources, targets, rows_per_block=rows_per_block, current=current)
    for shard in range(2):
        cluster.restart(shard)


def test_a_client_that_lives_through_a_reshard_loses_no_row(live: LocalCluster) -> None:
    with connected(live) as client:
        reshard_in_place(live, 8, current=False)
        client.open_session("run")
        for _ in range(2):
            with pytest.raises(TableMismatchError, match="rows_per_block=8"):
                client.push_gradients(MOVED, ONES, step=1)
            with pytest.raises(TableMismatchError, match="rows_per_block=8"):
                client.fetch(MOVED, step=1)
        assert client.describe().spec.rows_per_block == 8
        assert (client.fetch(MOVED, step=1) == -1).all(), "no shard has applied a part"
        client.push_gradients(MOVED, ONES, step=1)
        assert (client.fetch(MOVED, step=2) == -2).all()


@pytest.mark.parametrize("rows_per_block", [4, 8])
def test_half_a_write_is_not_completed_after_a_reshard(live: LocalCluster, rows_per_block: int) -> None:
    """The shards no longer know whose it was, and its other half may be of other shards."""
    with connected(live) as client:
        stop(live, 1)
        with pytest.raises(ShardUnavailableError):
            client.push_gradients(MOVED, ONES, step=1)
        reshard_in_place(live, rows_per_block, current=True)
        client.describe()
        client.open_session("run")
        for _ in range(2):
            with pytest.raises(ClusterError, match="resharded the rows since"):
                client.push_gradients(MOVED, ONES, step=1)
        assert (client.fetch(MOVED, step=2) == np.where(MOVED // 4 == 0, -2, -1)[:, None]).all()


@pytest.mark.guard
@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("weightserver.storage.shard_builder:ShardBuilder.flush", 10),  # halfway
        ("weightserver.storage.shard_builder:ShardBuilder.finish", 2),  # when two of three are finished
    ],
)
def test_a_killed_reshard_can_be_repeated(
    place: str, number: int, weightserver: Weightserver, tables: Callable[[int], Table], tmp_path: Path
) -> None:
    sources, kept, _ = tables(2)
    targets = targets_in(tmp_path / "new", 3)
    command = ["reshard", "--source", *sources, "--target", *targets, "--rows-per-block", 5]
    dies(place, number, *command, "--checkpoint", "one")
    if place.endswith("flush"):
        assert all(inspect_directory(target)["unfinished"] for target in targets)
        assert "it is unfinished: repeat" in verify_directory(targets[0]).problems[0]
    if place.endswith("finish"):  # one of those that are finished is used already
        changed = LmdbStorage(targets[0])
        with changed.write() as txn:
            content = bytearray(get(txn, 0) or b"")
            content[-1] ^= 1
            put(txn, 0, 1, content)
        changed.close()
    status, said, error = weightserver(*command, "--checkpoint", "one")
    assert status == 0, error
    assert f"2 shards became 3 with {NUM_STORED} rows of checkpoint one (step 2), 5 per block" in said
    assert same(rows_in(targets, checkpoint="one"), kept)
    assert weightserver(*command, "--checkpoint", "one")[:2] == (0, said), "it is done, and nothing is changed"
    if place.endswith("finish"):
        with contextlib.closing(LmdbStorage(targets[0], readonly=True)) as used, used.read() as txn:
            assert stored(txn)[:2] == [(0, 1), (0, 0)]


@pytest.mark.guard
def test_another_checkpoint_after_a_killed_reshard(
    weightserver: Weightserver, tables: Callable[[int], Table], tmp_path: Path
) -> None:
    """Nothing is left of the first attempt, which was to have more rows."""
    sources, kept, _ = tables(2)
    targets = targets_in(tmp_path / "new", 3)
    command = ["reshard", "--source", *sources, "--target", *targets]
    dies("weightserver.operations.reshard:fill", 1, *command, "--checkpoint", "two")
    assert weightserver(*command, "--checkpoint", "one")[0] == 0
    assert same(rows_in(targets), kept)


def test_a_reshard_that_lost_or_changed_a_row_is_noticed(
    small_pieces: None, tables: Callable[[int], Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, _, _ = tables(2)
    add = ShardBuilder.add

    def without(builder: ShardBuilder, version: Version, block: bytearray) -> None:
        if version.block != 4:
            add(builder, version, block)

    def changed(builder: ShardBuilder, version: Version, block: bytearray) -> None:
        if version.block == 4:
            BlockCodec(SPEC).views(block).momentum_buffer[2, 3] += 1
            BlockCodec(SPEC).seal(4, version.write_id, block)
        add(builder, version, block)

    for name, fault, message in (
        ("without", without, r"shard-1 holds \d+ of the \d+ rows"),
        ("changed", changed, "shard-1 holds rows that are not those of the old shards"),
    ):
        monkeypatch.setattr(ShardBuilder, "add", fault)
        targets = targets_in(tmp_path / name, 3)
        with pytest.raises(StorageError, match=message):
            resharding.reshard(sources, targets, checkpoint="one")
        assert inspect_directory(targets[1])["unfinished"]


def test_shards_without_a_checkpoint_are_resharded_with_their_current_rows(
    weightserver: Weightserver, tmp_path: Path
) -> None:
    with LocalCluster(1, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
        make_table(client)
        client.release("one")
        client.release("two")
        now = client.fetch_state(ROWS)
    sources, targets = targets_in(tmp_path / "old", 1), targets_in(tmp_path / "new", 2)
    command = ["reshard", "--source", *sources, "--target", *targets]
    message = "the shards keep no checkpoint in common: give --current for the rows as they are now"
    for more in ([], ["--checkpoint", "one"]):
        assert_one_line(weightserver(*command, *more), message)
    assert weightserver(*command, "--current")[0] == 0
    assert same(rows_in(targets), now)


def test_reshard_rejects_invalid_directories(
    weightserver: Weightserver, cluster: LocalCluster, tables: Callable[[int], Table], tmp_path: Path
) -> None:
    sources, _, _ = tables(2)
    targets = targets_in(tmp_path / "new", 3)
    (tmp_path / "empty").mkdir()

    def fails(message: str, source: list[Path] = sources, target: list[Path] = targets, more: Any = ()) -> None:
        assert_one_line(weightserver("reshard", "--source", *source, "--target", *target, *more), message)

    fails("belongs to a cluster of 2 shards, but 1 were given: give all", source=sources[:1])
    fails("a directory is given twice", source=[sources[0], sources[0]])
    shutil.copytree(sources[0], tmp_path / "copy")
    fails("two directories hold the same shard of 2", source=[sources[0], tmp_path / "copy"])
    fails("a directory is given twice", target=sources)
    fails("an old shard's directory: give one beside it", target=targets_in(sources[1] / "new", 3))
    assert not (sources[1] / "new").exists()
    fails("holds no weight server data", source=[tmp_path / "empty", sources[1]])
    fails("is served by another process", source=[cluster.directory / "shard-0", sources[1]])
    old_copy = Path(shutil.copytree(sources[0], tmp_path / "old copy"))
    (old_copy / "owner.lock").write_text("999999\n")
    fails("data.mdb lacks transactions that it had", source=[old_copy, sources[1]])
    fails("there is no checkpoint 'three' on all shards, only ['one', 'two']", more=["--checkpoint", "three"])
    fails("rows_per_block must lie in 1..2048, got 0", more=["--rows-per-block", 0])
    other = [Path(shutil.copytree(source, tmp_path / source.name)) for source in sources]
    fails("holds a shard's data: give another directory", target=other)
    assert not (tmp_path / "new").exists()
    storage = LmdbStorage(other[1])
    with storage.write() as txn:
        write_spec(txn, replace(SPEC, dim=8))
    storage.close()
    fails("hold different tables: give the directories of one table", source=[sources[0], other[1]])
