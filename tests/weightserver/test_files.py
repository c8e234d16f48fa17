"""Power loss: every new file and directory is synced, and so is every directory with a new entry."""

from __future__ import annotations

import errno
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from tests.helpers.power_loss import PowerLoss
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common import atomic_files
from weightserver.common.atomic_files import (
    atomic_directory,
    atomic_write,
    directory_lock,
    make_directory,
    sync,
    write_synced,
)
from weightserver.operations.backup import backup
from weightserver.operations.export import export_rows
from weightserver.operations.restore import restore
from weightserver.shard.shard import Shard
from weightserver.storage.lmdb_storage import LmdbStorage

SPEC = TableSpec(num_rows=40, dim=8, rows_per_block=10)


@pytest.fixture
def power_loss(monkeypatch: pytest.MonkeyPatch) -> PowerLoss:
    return PowerLoss(monkeypatch)


@pytest.mark.parametrize("there", ["", "a", "a/b", "a/b/shard-0"])
def test_a_new_shard_survives_a_power_loss(there: str, power_loss: PowerLoss, tmp_path: Path) -> None:
    """The shard has opened its directory, which existed, or which it made along with missing parents. Which transaction
    was last is written down at once, and synced when it ends."""
    directory = tmp_path / "a/b/shard-0"
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    for parent in directory.parents[1:3]:
        if parent.exists():
            sync(parent)
    storage = LmdbStorage(directory)
    Shard(storage, shard=0, num_shards=1)
    assert (directory / "data.mdb").exists()
    assert power_loss.lost(tmp_path) == {"a/b/shard-0/owner.lock"}
    storage.close()
    assert power_loss.lost(tmp_path) == set()


def test_written_files_survive_a_power_loss(power_loss: PowerLoss, tmp_path: Path) -> None:
    def write(text: str) -> None:
        atomic_write(tmp_path / "replaced", lambda path: path.write_text(text))

    write("old")
    write("new")
    sync(tmp_path)
    with atomic_directory(tmp_path / "deep/whole") as partly:
        atomic_write(partly / "file", lambda path: path.write_text("whole"))
    assert power_loss.lost(tmp_path) == set()


def test_results_of_operations_survive_a_power_loss(power_loss: PowerLoss, tmp_path: Path) -> None:
    sync(tmp_path)
    with LocalCluster(1, tmp_path / "servers/here") as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(SPEC)
        client.extend_schedule(0, np.full(10, 0.1, np.float32))
        client.open_session("run")
        client.push_gradients(np.arange(40), np.ones((40, 8), np.float32), step=0)
        client.checkpoint("kept", step=1)
        backup(client, tmp_path / "deep/backup")
        export_rows(client, tmp_path / "deep/rows")
    restore(tmp_path / "deep/backup", tmp_path / "deep/restored/shard-0", shard=0)
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"backup", "rows", "restored"}
    of_its_process = {path for path in power_loss.lost(tmp_path) if path.startswith("servers/here/shard-0")}
    assert power_loss.lost(tmp_path) - of_its_process == set()


def test_threads_that_make_one_directory_do_not_disturb_each_other(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for number in range(100):
                list(pool.map(make_directory, [tmp_path / str(number) / "a" / "b"] * 8))
    finally:
        sys.setswitchinterval(interval)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=str(tmp_path / "file")):
        make_directory(tmp_path / "file")


def test_a_lock_that_is_removed_before_it_is_taken_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_file = atomic_files.lock_file

    def removed(descriptor: int, path: Path, **options: bool) -> bool:
        monkeypatch.undo()
        path.unlink()  # by the process that had it
        return lock_file(descriptor, path, **options)

    monkeypatch.setattr(atomic_files, "lock_file", removed)
    again = pytest.raises(OSError, match="is being written by another process")
    with directory_lock(tmp_path / "a"), again, directory_lock(tmp_path / "a"):
        pass
    assert not (tmp_path / "a").exists()


def test_a_disk_that_is_found_full_when_a_file_is_synced_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*step-…\.begun\.partial'"):
        write_synced(tmp_path / "step-….begun.partial", lambda path: None)
