"""How shards start: which directories they take, and what becomes of them when a start is cut short."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest

from weightserver import LocalCluster, ShardUnavailableError, StorageError, TableSpec, WeightClient
from weightserver.storage import LmdbStorage

ROOT = Path(__file__).parents[2]
SERVE = [sys.executable, "-m", "weightserver", "serve", "--listen", "127.0.0.1:0"]
SPEC = TableSpec(num_rows=100, dim=4, rows_per_block=3)
ROWS = np.arange(SPEC.num_rows)


def refused(directory: Path, *options: str) -> str:
    """The one line that a start ends with."""
    command = [*SERVE, "--data-dir", str(directory), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done
    return done.stderr.removeprefix("weightserver serve: ").rstrip()


def make_table(cluster: LocalCluster) -> None:
    with WeightClient(cluster.addresses) as client:
        client.create_table(SPEC)
        client.extend_schedule(0, np.full(10, 0.1, np.float32))
        client.open_session("run")
        client.push_gradients(ROWS, np.ones((SPEC.num_rows, SPEC.dim), np.float32), step=0)


def rows_stored(cluster: LocalCluster) -> int:
    with WeightClient(cluster.addresses) as client:
        return client.describe().rows_stored


# ---- empty directories


def test_an_empty_directory_takes_init(tmp_path: Path) -> None:
    advice = "is its disk mounted? Give --init to begin a new, empty shard here"
    assert refused(tmp_path / "missing") == f"{tmp_path}/missing is missing: {advice}"
    (tmp_path / "empty" / "lost+found").mkdir(parents=True)
    assert refused(tmp_path / "empty") == f"{tmp_path}/empty is empty: {advice}"
    assert [path.name for path in tmp_path.rglob("*")] == ["empty", "lost+found"], "what is refused stays as it is"
    with LocalCluster(1, tmp_path, serve_options=["--data-dir", str(tmp_path / "empty")]) as cluster:
        make_table(cluster)
    options = ["--data-dir", str(tmp_path / "empty"), "--init"]
    with LocalCluster(1, tmp_path, serve_options=options) as cluster:
        assert rows_stored(cluster) == SPEC.num_rows
    log = (tmp_path / "shard-0.log").read_text()
    assert log.count("--init does nothing") == 1
    assert "warning" in next(line for line in log.splitlines() if "--init does nothing" in line)


def test_a_shard_that_never_began_takes_init(tmp_path: Path) -> None:
    """LMDB makes a file before anything is in it."""
    lmdb.open(str(tmp_path), lib_version=0).close()
    with pytest.raises(StorageError, match="is empty: is its disk mounted"):
        LmdbStorage(tmp_path, must_exist=True)
    LmdbStorage(tmp_path).close()
    LmdbStorage(tmp_path, must_exist=True).close()


@pytest.mark.parametrize("left_by", ["this version", pytest.param("0.1", marks=pytest.mark.guard)])
def test_a_cluster_refuses_a_shard_that_went_away(left_by: str, tmp_path: Path) -> None:
    with LocalCluster(2, tmp_path) as cluster:
        make_table(cluster)
    marker = tmp_path / "cluster.json"
    assert json.loads(marker.read_text()) == {"num_shards": 2, "finished": True}
    if left_by == "0.1":
        marker.unlink()
    before = (tmp_path / "shard-0" / "data.mdb").read_bytes()
    (tmp_path / "shard-1").rename(tmp_path / "away")
    with pytest.raises(ShardUnavailableError, match=r"shard 1 did not start: .*shard-1 is missing: is its disk"):
        LocalCluster(2, tmp_path)
    (tmp_path / "shard-1").mkdir()
    with pytest.raises(ShardUnavailableError, match=r"shard 1 did not start: .*shard-1 is empty: is its disk mounted"):
        LocalCluster(2, tmp_path)
    (tmp_path / "shard-1").rmdir()
    assert (tmp_path / "shard-0" / "data.mdb").read_bytes() == before
    (tmp_path / "away").rename(tmp_path / "shard-1")
    with LocalCluster(2, tmp_path) as cluster:
        assert rows_stored(cluster) == SPEC.num_rows
        shutil.rmtree(tmp_path / "shard-1")
        with pytest.raises(ShardUnavailableError, match="shard-1 is missing"):
            cluster.restart(1)
    assert json.loads(marker.read_text()) == {"num_shards": 2, "finished": True}


@pytest.mark.guard
def test_a_first_start_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    """One of two shards has begun when the other cannot."""
    (tmp_path / "shard-1").write_text("in the way")
    with pytest.raises(ShardUnavailableError, match="shard-1 is a file"):
        LocalCluster(2, tmp_path)
    assert (tmp_path / "shard-0" / "data.mdb").exists()
    (tmp_path / "shard-1").unlink()
    with LocalCluster(2, tmp_path) as cluster:
        make_table(cluster)
