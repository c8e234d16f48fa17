"""Fixtures of the tests of the operator's commands."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.helpers.operations import ROWS, Table, make_table, targets_in
from weightserver import LocalCluster, WeightClient
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


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Table]:
    """Makes a table by number of shards: its directories, which are not served and which tests do not change; its rows
    at checkpoint `one`; its current rows."""

    @functools.cache
    def made(num_shards: int) -> Table:
        directory = tmp_path_factory.mktemp("table")
        with LocalCluster(num_shards, directory) as cluster, WeightClient(cluster.addresses) as client:
            return targets_in(directory, num_shards), make_table(client), client.fetch_state(ROWS)

    return made
