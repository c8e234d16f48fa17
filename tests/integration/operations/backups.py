"""Backups as these tests make and restore them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.comparing import rows_in
from tests.helpers.operations import targets_in
from weightserver import LocalCluster, RowState, WeightClient
from weightserver.operations import backup as operation
from weightserver.operations.backup_files import Backup
from weightserver.operations.restore import restore


def by_another(cluster: LocalCluster, output: Path, **options: Any) -> Backup:
    """A backup by a client of its own."""
    with WeightClient(cluster.addresses) as another:
        return operation.backup(another, output, **options)


def restored(backed_up: Path, directory: Path) -> RowState:
    """The rows of both shards of a backup, which are restored to a new directory."""
    for shard, target in enumerate(targets_in(directory, 2)):
        restore(backed_up, target, shard=shard)
    return rows_in(targets_in(directory, 2))


def before_copying(patch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """The next backup does `action` once its checkpoint is kept, and then copies the shards."""
    copy_shards = operation._copy_shards

    def after_it(*arguments: Any) -> Any:
        patch.setattr(operation, "_copy_shards", copy_shards)
        action()
        return copy_shards(*arguments)

    patch.setattr(operation, "_copy_shards", after_it)
