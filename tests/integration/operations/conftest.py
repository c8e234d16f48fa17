"""Fixtures of the tests of the operator's commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.operations import Weightserver
from weightserver import LocalCluster
from weightserver.operations import backup as backups
from weightserver.storage import directory as owner_files
from weightserver.storage import shard_builder


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not wait for directories that another process serves."""
    monkeypatch.setattr(owner_files, "_OWNER_SECONDS", 0.1)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes pieces of one answer, or of a few blocks, instead of 64 MiB."""
    monkeypatch.setattr(backups, "_FILE_BYTES", 2_000)
    monkeypatch.setattr(shard_builder, "BATCH_BYTES", 2_000)


@pytest.fixture
def back_up(weightserver: Weightserver, cluster: LocalCluster) -> Callable[..., str]:
    """Runs `weightserver backup`, which must succeed; returns what it says."""

    def run(output: Path | str, *options: object) -> str:
        status, said, error = weightserver("backup", *cluster.addresses, "--output", output, *options)
        assert status == 0, error
        return said

    return run
