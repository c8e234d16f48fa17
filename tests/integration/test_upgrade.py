"""Directories that earlier versions wrote are upgraded and served, with nothing lost. See golden/README.md."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tests.helpers.comparing import rows_in, same
from tests.helpers.failpoints import POINTS, DyingCluster
from weightserver import (
    ClusterError,
    DataLossError,
    FencedError,
    LocalCluster,
    RowState,
    ShardUnavailableError,
    StorageError,
    WeightClient,
)
from weightserver.operations.backup import backup
from weightserver.operations.backup_files import read_backup
from weightserver.operations.compact import compact
from weightserver.operations.inspect import inspect_directory
from weightserver.operations.reshard import reshard
from weightserver.operations.restore import restore
from weightserver.operations.verify import verify_directory
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.storage import records
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.records import FORMAT, earlier_identity, read_identity
from weightserver.storage.shard_builder import ShardBuilder

GOLDEN = Path(__file__).parent.parent / "golden"
SHARDS, NUM_ROWS = ("shard-0", "shard-1"), 70
CHECKPOINTS = ("one", "two", "three")


def answers(version: str) -> dict[str, Any]:
    """The answers that a client of that version got."""
    with np.load(GOLDEN / f"version_{version}" / "seen.npz", allow_pickle=False) as stored:
        return dict(stored)


def unpacked(version: str, directory: Path) -> Path:
    """The directory of that version's cluster of two shards, and of a backup."""
    with tarfile.open(GOLDEN / f"version_{version}" / "table.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "table"


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return answers("0.1")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return unpacked("0.1", tmp_path)


def told(seen: dict[str, Any], checkpoint: str = "now", step: int | str = "stored") -> RowState:
    return RowState(**{name: seen[f"{checkpoint}/{step}/{name}"] for name in RowState.__dataclass_fields__})


def assert_rows(client: WeightClient, seen: dict[str, Any], *, checkpoint: str = "", as_of: str = "") -> None:
    """Compares the current rows, or those of a checkpoint, with the recorded ones."""
    rows = np.arange(NUM_ROWS)
    for step in (None, 28):
        state = client.fetch_state(rows, step=step, checkpoint=checkpoint)
        assert same(state, told(seen, as_of or checkpoint or "now", step or "stored")), (checkpoint, step)


def assert_nothing_lost(client: WeightClient, seen: dict[str, Any]) -> None:
    info, checkpoints = client.describe(), client.checkpoints()
    assert [info.epoch, info.clock, info.horizon, info.rows_stored] == seen["numbers"].tolist()
    assert [shard.rows_stored for shard in info.shards] == seen["rows_stored"].tolist()
    assert info.run == str(seen["run"])
    assert [kept.name for kept in checkpoints] == seen["checkpoints"].tolist()
    assert [kept.step for kept in checkpoints] == seen["steps"].tolist()
    assert [kept.checkpoint_id.hex() for kept in checkpoints] == seen["identities"].tolist()
    for shard in range(len(info.shards)):
        assert np.array_equal(client.learning_rates(shard=shard), seen["learning_rates"])
    assert_rows(client, seen)
    for name in CHECKPOINTS:
        assert_rows(client, seen, checkpoint=name)


def content(directory: Path) -> dict[str, list[tuple[bytes, bytes]]]:
    """All records in the LMDB file of a stopped shard."""
    with lmdb.open(str(directory), max_dbs=5, readonly=True, lock=False) as env, env.begin() as txn:
        names = [name for name, _ in txn.cursor()]
        return {name.decode(): list(txn.cursor(env.open_db(name, txn, create=False))) for name in names}


def formats(directory: Path) -> list[int]:
    return [inspect_directory(directory / shard)["format"] for shard in SHARDS]


def block_formats(*directories: Path) -> Counter[int]:
    """How many versions of blocks have each format."""
    return Counter(value[0] for directory in directories for _, value in content(directory)["blocks"])


@pytest.mark.guard  # seconds
def test_the_first_start_loses_nothing(old: Path, seen: dict[str, Any]) -> None:
    assert formats(old) == [2, 2]
    with LocalCluster(2, old) as cluster, WeightClient(cluster.addresses) as client:
        assert_nothing_lost(client, seen)
        answers = [client.call_shard(shard, "Describe", pb.DescribeRequest()) for shard in range(2)]
        (identity,) = {answer.table_identity for answer in answers}
        assert len(identity) == 16
        assert len({answer.opener for answer in answers}) == 1
        marks = client.marks()
        assert len({mark.partition(":")[0] for mark in marks}) == 2
    assert formats(old) == [FORMAT, FORMAT]
    assert [verify_directory(old / shard).problems for shard in SHARDS] == [[], []]

    before = [content(old / shard) for shard in SHARDS]
    with LocalCluster(2, old) as cluster, WeightClient(cluster.addresses) as client:
        client.expect(marks)
        assert_nothing_lost(client, seen)
    assert [content(old / shard) for shard in SHARDS] == before, "a second start changes nothing"

    with LocalCluster(2, old) as cluster, WeightClient(cluster.addresses) as client:
        with pytest.raises(FencedError, match="no session is open"):
            client.push_gradients([1], np.ones((1, 3), np.float32), step=12)
        assert client.open_session("third") == seen["numbers"][0] + 1
        client.expect(marks)
        client.push_gradients(np.arange(NUM_ROWS), np.ones((NUM_ROWS, 3), np.float32), step=12)
        client.extend_table(NUM_ROWS + 1)
        client.checkpoint("four", step=13)
        assert [kept.name for kept in client.checkpoints()] == [*CHECKPOINTS, "four"]
        client.rollback("two")
        assert_rows(client, seen, as_of="two")
    assert [verify_directory(old / shard).problems for shard in SHARDS] == [[], []]


@pytest.mark.parametrize(
    ("point", "shard"),
    [
        pytest.param(point, shard, marks=[] if (point, shard) == ("written", 1) else pytest.mark.guard)
        for point in POINTS
        for shard in range(2)
    ],
)
def test_a_kill_during_the_upgrade_loses_nothing(point: str, shard: int, old: Path, seen: dict[str, Any]) -> None:
    (old / f"shard-{shard}.failpoint").write_text(f"{point} 1")  # the upgrade is the first commit of a start
    with pytest.raises(ShardUnavailableError, match=f"shard {shard} did not start"):
        DyingCluster(2, old)
    assert inspect_directory(old / SHARDS[shard])["format"] == (FORMAT if point == "after" else 2)
    with LocalCluster(2, old) as cluster, WeightClient(cluster.addresses) as client:
        assert_nothing_lost(client, seen)
        client.open_session("third")
    assert formats(old) == [FORMAT, FORMAT]


@pytest.mark.guard
def test_commands_that_only_read_keep_modes(old: Path, tmp_path: Path, seen: dict[str, Any]) -> None:
    files = [old / shard / "data.mdb" for shard in SHARDS]
    before = [path.read_bytes() for path in files]
    for shard, directory in enumerate(SHARDS):
        assert verify_directory(old / directory).problems == []
        looked = inspect_directory(old / directory)
        assert (looked["format"], looked["checkpoints"]) == (2, list(CHECKPOINTS))
        assert [looked["epoch"], looked["clock"], looked["horizon"]] == seen["numbers"][:3].tolist()
        assert looked["rows_stored"] == seen["rows_stored"][shard]
    sources = [old / shard for shard in SHARDS]
    reshard(sources, [tmp_path / "one" / "shard-0"], current=True)
    reshard(
        sources, [tmp_path / "three" / f"shard-{number}" for number in range(3)], checkpoint="two", rows_per_block=5
    )
    assert [path.read_bytes() for path in files] == before
    for source in sources:
        compact(source, tmp_path / "compacted" / source.name)  # which marks the source as one that was compacted
    assert formats(tmp_path / "compacted") == [2, 2]

    with LocalCluster(2, tmp_path / "compacted") as cluster, WeightClient(cluster.addresses) as client:
        assert_nothing_lost(client, seen)
        identity = client.describe().identity
    with LocalCluster(1, tmp_path / "one") as cluster, WeightClient(cluster.addresses) as client:
        assert_rows(client, seen)
        assert np.array_equal(client.learning_rates(), seen["learning_rates"])
        assert client.describe().identity == identity
        client.open_session("third")
    with LocalCluster(3, tmp_path / "three") as cluster, WeightClient(cluster.addresses) as client:
        assert_rows(client, seen, as_of="two")
        assert_rows(client, seen, checkpoint="two")
        assert client.describe().identity == identity
        client.open_session("third")


@pytest.mark.guard
def test_its_backup_is_restored(old: Path, tmp_path: Path, seen: dict[str, Any]) -> None:
    for shard, directory in enumerate(SHARDS):
        restore(old / "backup", tmp_path / "restored" / directory, shard=shard)
    with LocalCluster(2, tmp_path / "restored") as cluster, WeightClient(cluster.addresses) as client:
        assert_rows(client, seen, as_of="three")
        assert_rows(client, seen, checkpoint="three")
        assert np.array_equal(client.learning_rates(), seen["learning_rates"][:30])
        client.open_session("third")
        client.push_gradients([1], np.ones((1, 3), np.float32), step=12)


@pytest.mark.guard
def test_a_restored_shard_next_to_an_upgraded_one(old: Path, seen: dict[str, Any]) -> None:
    """Both hold one table at different times, until all are rolled back to the checkpoint of the backup."""
    shutil.rmtree(old / "shard-1")
    made = restore(old / "backup", old / "shard-1", shard=1)
    assert made == read_backup(old / "backup")
    with LocalCluster(2, old) as cluster, WeightClient(cluster.addresses) as client:
        identity = client.describe().identity
        assert identity == earlier_identity({"num_rows": 1, **json.loads(json.dumps(made.spec.as_stored()))})
        with pytest.raises(ClusterError, match="shard 1 was not rolled back or restored together with shard 0"):
            client.open_session("third")
        client.open_session("third", force=True)
        client.rollback("three")
        assert_rows(client, seen, as_of="three")
        client.open_session("fourth")


@pytest.mark.guard
def test_the_old_directory_put_back_is_refused(old: Path, tmp_path: Path) -> None:
    """It is upgraded again, and does not descend from the writes that the first upgrade acknowledged."""
    shutil.copytree(old / "shard-1", tmp_path / "kept")
    with LocalCluster(2, old) as cluster, WeightClient(cluster.addresses, retry_seconds=10) as client:
        client.open_session("third")
        client.push_gradients(np.arange(NUM_ROWS), np.ones((NUM_ROWS, 3), np.float32), step=12)
        cluster.processes[1].kill()
        cluster.processes[1].wait()
        shutil.rmtree(old / "shard-1")
        shutil.copytree(tmp_path / "kept", old / "shard-1")
        cluster.restart(1)
        with pytest.raises(DataLossError, match="shard 1 lacks what it had acknowledged"):
            client.push_gradients(np.arange(NUM_ROWS), np.ones((NUM_ROWS, 3), np.float32), step=13)
        with WeightClient(cluster.addresses) as another, pytest.raises(DataLossError, match="lacks what shard 0 knows"):
            another.open_session("fourth")


@pytest.mark.guard  # seconds
def test_version_0_2_is_served(tmp_path: Path) -> None:
    """Only the number of its format is upgraded, and marks that its client kept still hold."""
    seen, old = answers("0.2"), unpacked("0.2", tmp_path)
    marks = seen["marks"].tolist()
    assert formats(old) == [3, 3]
    assert [verify_directory(old / shard).problems for shard in SHARDS] == [[], []]
    for shard, directory in enumerate(SHARDS):
        restore(old / "backup", tmp_path / "restored" / directory, shard=shard)

    before = [content(old / shard) for shard in SHARDS]
    with LocalCluster(2, old) as cluster, WeightClient(cluster.addresses) as client:
        client.expect(marks)
        assert_nothing_lost(client, seen)
    after = [content(old / shard) for shard in SHARDS]
    for one, other in zip(before, after, strict=True):
        changed = {key for database in one for key, _ in set(other[database]) ^ set(one[database])}
        assert changed == {b"identity"}, "serving changed the directory"
    assert formats(old) == [FORMAT, FORMAT]

    with LocalCluster(2, old) as cluster, WeightClient(cluster.addresses) as client:
        assert client.open_session("third") == seen["numbers"][0] + 1
        client.push_gradients(np.arange(NUM_ROWS), np.ones((NUM_ROWS, 3), np.float32), step=12)
        client.expect(marks)
        client.checkpoint("four", step=13)
        assert [kept.name for kept in client.checkpoints()] == [*CHECKPOINTS, "four"]
        client.rollback("two")
        assert_rows(client, seen, as_of="two")
    assert [verify_directory(old / shard).problems for shard in SHARDS] == [[], []]

    with LocalCluster(2, tmp_path / "restored") as cluster, WeightClient(cluster.addresses) as client:
        assert_rows(client, seen, as_of="three")
        assert_rows(client, seen, checkpoint="three")


# ---- blocks with and without checksums of groups


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=[pytest.mark.guard] * (point != "written")) for point in POINTS]
)
def test_a_kill_during_the_upgrade_from_0_2_loses_nothing(point: str, tmp_path: Path) -> None:
    seen, old = answers("0.2"), unpacked("0.2", tmp_path)
    (old / "shard-1.failpoint").write_text(f"{point} 1")
    with pytest.raises(ShardUnavailableError, match="shard 1 did not start"):
        DyingCluster(2, old)
    assert inspect_directory(old / SHARDS[1])["format"] == (FORMAT if point == "after" else 3)
    with LocalCluster(2, old) as cluster, WeightClient(cluster.addresses) as client:
        client.expect(seen["marks"].tolist())
        assert_nothing_lost(client, seen)
    assert formats(old) == [FORMAT, FORMAT]


def test_versions_before_checksums_of_groups_refuse_directories_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of the directory's format, which comes before the first such block."""
    old = unpacked("0.2", tmp_path)
    with LocalCluster(2, old):
        pass
    assert block_formats(*(old / shard for shard in SHARDS)).keys() <= {1, 2}
    monkeypatch.setattr(records, "FORMAT", 3)
    monkeypatch.setattr(records, "_READABLE_FORMATS", (2, 3))
    for attempt in (inspect_directory, lambda source: reshard([source, old / SHARDS[1]], [tmp_path / "new"])):
        with pytest.raises(
            StorageError, match="shard-0 has format 4, this version reads 2 to 3: use the version of"
        ) as e:
            attempt(old / SHARDS[0])
        assert "\n" not in str(e.value)


@pytest.mark.guard  # seconds
@pytest.mark.parametrize("version", ["0.1", "0.2"])
def test_old_and_new_blocks_in_one_directory(version: str, tmp_path: Path) -> None:
    """Every operation takes them, and a write changes only the blocks that it touches."""
    old, rows = unpacked(version, tmp_path), np.arange(NUM_ROWS)
    sources = [old / shard for shard in SHARDS]
    before = block_formats(*sources)
    assert before.keys() <= {1, 2}
    with LocalCluster(2, old) as cluster, WeightClient(cluster.addresses) as client:
        client.open_session("third")
        client.push_gradients(rows[8:20], np.ones((12, 3), np.float32), step=12)  # blocks 2, 3 and 4
        client.checkpoint("four", step=13)
        client.push_gradients(rows[16:22], np.ones((6, 3), np.float32), step=13)  # 4 and 5
        client.checkpoint("five", step=14)
        now, kept = client.fetch_state(rows), client.fetch_state(rows, checkpoint="four")
        backup(client, tmp_path / "backup", checkpoint="four")
    mixed = block_formats(*sources)
    assert mixed[6] == 5
    assert mixed.keys() == {6, *before}
    assert [verify_directory(source).problems for source in sources] == [[], []]

    for shard, source in enumerate(sources):
        restore(tmp_path / "backup", tmp_path / "restored" / source.name, shard=shard)
        compact(source, tmp_path / "compacted" / source.name)
    compacted = [tmp_path / "compacted" / shard for shard in SHARDS]
    resharded = {name: tmp_path / name / "shard-0" for name in ("same blocks", "other blocks")}
    reshard(compacted, [resharded["same blocks"]], current=True)
    reshard(compacted, [resharded["other blocks"]], checkpoint="four", rows_per_block=7)
    assert block_formats(*compacted).keys() == mixed.keys()
    assert block_formats(*(tmp_path / "restored" / shard for shard in SHARDS)).keys() == {6}
    for made in resharded.values():
        assert block_formats(made).keys() == {6}
    for made in (*compacted, *(tmp_path / "restored" / shard for shard in SHARDS), *resharded.values()):
        assert verify_directory(made).problems == []
    assert same(rows_in(compacted), now)
    assert same(rows_in(compacted, checkpoint="four"), kept)
    assert same(rows_in([tmp_path / "restored" / shard for shard in SHARDS]), kept)
    assert same(rows_in([resharded["same blocks"]]), now)
    assert same(rows_in([resharded["other blocks"]]), kept)
    with LocalCluster(2, tmp_path / "compacted") as cluster, WeightClient(cluster.addresses) as client:
        client.open_session("fourth")
        client.rollback("four")
        assert same(client.fetch_state(rows), kept)
        client.rollback("two")
    assert [verify_directory(source).problems for source in compacted] == [[], []]


def test_a_build_that_0_2_began_is_continued_in_the_present_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that does not know the blocks to come must not finish it."""
    with monkeypatch.context() as patch:
        patch.setattr(records, "FORMAT", 3)
        with ShardBuilder(tmp_path / "new", shard=0, num_shards=1, origin={"of": 1}) as builder:
            builder.add([], next_block=3)
    for _ in range(2):
        with ShardBuilder(tmp_path / "new", shard=0, num_shards=1, origin={"of": 1}) as builder:
            assert builder.next_block == 3
        with closing(LmdbStorage(tmp_path / "new", readonly=True)) as storage, storage.read() as txn:
            identity = read_identity(txn)
            assert identity is not None
            assert identity.unfinished
            assert records.read_format(txn) == FORMAT
