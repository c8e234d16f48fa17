"""Other users of the machine can neither read a shard's rows nor lock its directory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.integration.tables import begin
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.operations.backup import backup

NOBODY = 65534
SPEC = TableSpec(num_rows=40, dim=8, rows_per_block=10)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that all users can reach, with a umask that removes no rights."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        before = os.umask(0)
        try:
            yield Path(name)
        finally:
            os.umask(before)


def modes(directory: Path) -> dict[str, str]:
    """Returns the modes of a directory and everything in it."""
    paths = [directory, *directory.rglob("*")]
    return {str(path.relative_to(directory.parent)): oct(path.stat().st_mode & 0o777) for path in paths}


def write_rows(cluster: LocalCluster, backup_to: Path) -> None:
    with WeightClient(cluster.addresses) as client:
        begin(client, SPEC)
        client.push_gradients(np.arange(40), np.ones((40, 8), np.float32), step=0)
        client.checkpoint("kept", step=1)
        backup(client, backup_to)


@pytest.mark.guard
def test_files_with_rows_are_private(public: Path) -> None:
    with LocalCluster(1, public / "servers") as cluster:
        write_rows(cluster, public / "backup")
    shard = public / "servers/shard-0"
    private = {"shard-0": "0o700"} | {f"shard-0/{name}": "0o600" for name in ("data.mdb", "lock.mdb", "owner.lock")}
    assert modes(shard) == private
    assert modes(public / "servers")["servers/shard-0.log"] == "0o600"
    assert set(modes(public / "backup").values()) == {"0o700", "0o600"}
    assert {mode for name, mode in modes(public / "backup").items() if "." in name} == {"0o600"}

    for path in (shard, *shard.iterdir()):  # as version 0.1 left them
        path.chmod(0o755 if path.is_dir() else 0o644)
    log = public / "servers/shard-0.log"
    log.chmod(0o644)
    with LocalCluster(1, public / "servers"):
        assert modes(shard) == private
    lines = [line for line in log.read_text().splitlines() if "removed the access of other users" in line]
    assert len(lines) == 1
    assert all(str(path) in lines[0] for path in (shard, *shard.iterdir()))
    assert oct(log.stat().st_mode & 0o777) == "0o600"


@pytest.mark.guard
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_files_of_others_are_left_alone(public: Path) -> None:
    """Root may start a shard on another user's directory."""
    with LocalCluster(1, public / "servers"):
        pass
    shard = public / "servers/shard-0"
    for path in (shard, *shard.iterdir()):
        path.chmod(0o750 if path.is_dir() else 0o640)
        shutil.chown(path, NOBODY, NOBODY)
    before = modes(shard)
    with LocalCluster(1, public / "servers"):
        assert modes(shard) == before
    assert "could read or lock" not in (public / "servers/shard-0.log").read_text()
