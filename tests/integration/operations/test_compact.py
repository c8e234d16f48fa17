"""Compacted copies of directories, of which only one can be served."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import commands
from tests.helpers.comparing import same
from tests.helpers.operations import ROWS, Table, Weightserver, assert_one_line, dies, make_table, no_room, push
from weightserver import LocalCluster, RowState, StorageError, WeightClient
from weightserver.operations.compact import compact
from weightserver.operations.inspect import inspect_directory
from weightserver.operations.verify import verify_directory
from weightserver.storage.lmdb_storage import LmdbStorage


@pytest.mark.guard
def test_a_compacted_directory_holds_the_same_in_less_space(weightserver: Weightserver, tmp_path: Path) -> None:
    """Versions that no checkpoint needs, here those of released ones, are omitted."""
    with LocalCluster(1, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
        make_table(client)
        for step in range(5, 12):
            client.checkpoint(f"step {step}", step=step)
            push(client, step, ROWS)
        client.rollback("step 9")
        for step in range(5, 9):
            client.release(f"step {step}")
        kept, early = client.fetch_state(ROWS), client.fetch_state(ROWS, checkpoint="one")
    source, target = tmp_path / "old/shard-0", tmp_path / "new/shard-0"
    before = inspect_directory(source)
    status, said, error = weightserver("compact", source, "--output", target)
    assert status == 0, error
    after = inspect_directory(target)
    assert said == f"{source} takes {before['disk_bytes']} bytes, {target} {after['disk_bytes']}\n"
    differ = {"disk_bytes": 0, "directory": "", "block_versions": 0}
    assert after | differ == before | differ
    assert inspect_directory(source) == before
    verdict = verify_directory(target)
    assert (verdict.problems, verdict.num_blocks) == ([], 143)
    assert after["block_versions"] == verdict.num_versions < before["block_versions"]
    assert verdict.num_versions <= 3 * 143  # "one", "two" and "step 9", the present state
    assert after["disk_bytes"] < 1.3 * verdict.num_versions * 4096
    assert (target.stat().st_mode & 0o777, (target / "data.mdb").stat().st_mode & 0o777) == (0o700, 0o600)
    with LocalCluster(1, tmp_path / "new") as cluster, WeightClient(cluster.addresses) as client:
        assert same(client.fetch_state(ROWS), kept)
        assert same(client.fetch_state(ROWS, checkpoint="one"), early)
        client.open_session("next")
        push(client, 20, ROWS)
        client.rollback("two")
        assert_one_line(weightserver("compact", target, "--output", tmp_path / "x"), "is served by another process")
    assert verify_directory(target).problems == []
    assert_one_line(weightserver("compact", tmp_path, "--output", tmp_path / "x"), "holds no weight server data")
    assert_one_line(weightserver("compact", target, "--output", source), "is not empty: give another directory")
    assert not (tmp_path / "x").exists()


def served_in_between(source: Path) -> str:
    """The error of a supervisor's `serve` of the directory."""
    status, _, errors = commands.weightserver("serve", "--data-dir", source, "--listen", "127.0.0.1:0")
    assert (status, errors.count("\n")) == (1, 1), errors
    return errors


COPY, TOMBSTONE, RENAME = (
    "weightserver.storage.lmdb_storage:LmdbStorage.copy",
    "pathlib:Path.symlink_to",
    "pathlib:Path.replace",
)


@pytest.mark.parametrize(
    ("place", "number"),
    [
        pytest.param(COPY, 1, marks=pytest.mark.guard),
        pytest.param("weightserver.operations.compact:sync", 1, marks=pytest.mark.slow),
        pytest.param(TOMBSTONE, 1, marks=pytest.mark.slow),
        pytest.param("weightserver.storage.tombstone:sync", 1, marks=pytest.mark.guard),
        pytest.param("weightserver.operations.compact:leave_tombstone", 1, marks=pytest.mark.slow),
        pytest.param(RENAME, 1, marks=pytest.mark.guard),
        pytest.param("weightserver.operations.compact:sync", 3, marks=pytest.mark.guard),
    ],
)
def test_a_killed_compact_and_a_supervisor_lose_no_write(
    place: str, number: int, weightserver: Weightserver, tmp_path: Path
) -> None:
    """Wherever it is killed, the source is served and written to again, or refused; repeating it copies all writes."""
    with LocalCluster(1, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
        make_table(client)
    source, target = tmp_path / "old/shard-0", tmp_path / "new/shard-0"
    dies(place, number, "compact", source, "--output", target)
    marked, whole = os.path.lexists(source / "compacted-to"), (target / "data.mdb").exists()
    assert marked or not whole, "both directories can be served"
    if marked:
        assert f"to serve the old data nevertheless, remove {source}/compacted-to" in served_in_between(source)
    else:
        with LocalCluster(1, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
            client.open_session("supervised")
            push(client, 20, ROWS)
    expected = read_rows(source)
    again = weightserver("compact", source, "--output", target)
    if whole:
        assert_one_line(again, f"{source} was compacted to {target}: serve that copy")
    else:
        assert again[0] == 0, again
        assert not (target / "data.mdb.partial").exists()
    with LocalCluster(1, tmp_path / "new") as cluster, WeightClient(cluster.addresses) as client:
        assert same(client.fetch_state(ROWS), expected)


@pytest.mark.guard
def test_a_compact_killed_behind_its_tombstone_and_repeated_on_a_full_disk_can_be_repeated_again(
    weightserver: Weightserver, tables: Callable[[int], Table], tmp_path: Path
) -> None:
    """Until one succeeds, the source is refused, so what says that it may be repeated stays; the space is freed."""
    (original, _), _, _ = tables(2)
    source, target = Path(shutil.copytree(original, tmp_path / "source")), tmp_path / "new"
    dies("weightserver.operations.compact:leave_tombstone", 1, "compact", source, "--output", target)
    with no_room():
        assert_one_line(weightserver("compact", source, "--output", target), "Input/output")
    assert [(path.name, path.stat().st_size) for path in target.iterdir()] == [("data.mdb.partial", 0)]
    with pytest.raises(StorageError, match=f"is being compacted to {target}: repeat"):
        LmdbStorage(source)
    assert weightserver("compact", source, "--output", target)[0] == 0
    assert verify_directory(target).problems == []
    assert inspect_directory(target)["rows_stored"] == inspect_directory(source)["rows_stored"]


def read_rows(directory: Path) -> RowState:
    """The current rows in a directory that is not being served."""
    copy = directory.with_name("copy") / "shard-0"
    copy.mkdir(parents=True)
    shutil.copy(directory / "data.mdb", copy)
    with LocalCluster(1, copy.parent) as cluster, WeightClient(cluster.addresses) as client:
        return client.fetch_state(ROWS)


@pytest.mark.guard
def test_a_compacted_directory_is_not_written_to_or_taken_for_the_shard(
    weightserver: Weightserver, tables: Callable[[int], Table], tmp_path: Path
) -> None:
    (original, _), _, _ = tables(2)
    source, target = Path(shutil.copytree(original, tmp_path / "source")), tmp_path / "deep/new"
    assert weightserver("compact", source, "--output", target)[0] == 0
    message = (
        f"{source} was compacted to {target}: serve that copy; to serve the old data nevertheless, remove {source}/"
    )
    other = tmp_path / "other"
    assert message in served_in_between(source)
    for output in (target, other):
        assert_one_line(weightserver("compact", source, "--output", output), message)
    target.rename(tmp_path / "moved")
    assert_one_line(weightserver("compact", source, "--output", target), message)
    assert_one_line(weightserver("reshard", "--source", source, original, "--target", other), message)
    with pytest.raises(StorageError, match="was compacted to"):
        LmdbStorage(source)
    assert verify_directory(source).problems == []
    assert inspect_directory(source)["rows_stored"] == inspect_directory(tmp_path / "moved")["rows_stored"]
    (source / "compacted-to").unlink()
    assert weightserver("compact", source, "--output", other)[0] == 0
    LmdbStorage(tmp_path / "moved").close()
    assert not target.exists()


def test_the_tombstone_is_durable_before_the_copy_counts(
    tables: Callable[[int], Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (original, _), _, _ = tables(2)
    source, target = Path(shutil.copytree(original, tmp_path / "source")), tmp_path / "new/shard"
    done = []

    def record(name: str, describe: Callable[..., str]) -> None:
        call = getattr(os, name)

        def recorded(*arguments: Any, **options: Any) -> None:
            done.append(f"{name} {describe(*arguments)}")
            call(*arguments, **options)

        monkeypatch.setattr(os, name, recorded)

    record("fsync", lambda descriptor: str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path)))
    record("symlink", lambda _, link, *options: str(Path(link).relative_to(tmp_path)))
    record("replace", lambda _, path: str(Path(path).relative_to(tmp_path)))
    compact(source, target)
    assert done == [
        "fsync .",
        "fsync new",
        "fsync new/shard/data.mdb.partial",
        "fsync new/shard",
        "symlink source/compacted-to",
        "fsync source",
        "replace new/shard/data.mdb",
        "fsync new/shard",
    ]
    with pytest.raises(StorageError, match=f"was compacted to {target}: serve that copy"):
        LmdbStorage(source)


@pytest.mark.guard
def test_the_documented_compaction_loses_nothing_to_a_supervisor(tmp_path: Path) -> None:
    """Runs the commands of operations.md; between them a supervisor starts the shard."""
    text = (Path(__file__).parents[3] / "docs/operations.md").read_text().partition("\n## Space\n")[2]
    block = re.search(r"(?:^ {4}.*\n)+", text, re.MULTILINE)
    assert block is not None
    with LocalCluster(1, tmp_path / "data") as cluster, WeightClient(cluster.addresses) as client:
        make_table(client)
        kept = client.fetch_state(ROWS)
    served = (tmp_path / "data/shard-0").rename(tmp_path / "data/ws0")
    commands = (
        block.group()
        .replace("/data/", f"{tmp_path}/data/")
        .replace("weightserver ", f"{sys.executable} -m weightserver ")
    )
    lines = [command.strip() for line in commands.splitlines() for command in line.split("&&")]
    assert len(lines) == 3
    subprocess.run(lines[0], shell=True, check=True, cwd=Path(__file__).parents[3], capture_output=True)
    assert f"ws0 was compacted to {served}.new: serve that copy" in served_in_between(served)
    subprocess.run(lines[1], shell=True, check=True)
    assert "--init" in served_in_between(served)
    subprocess.run(lines[2], shell=True, check=True)
    served.rename(tmp_path / "data/shard-0")
    with LocalCluster(1, tmp_path / "data") as cluster, WeightClient(cluster.addresses) as client:
        assert same(client.fetch_state(ROWS), kept)
