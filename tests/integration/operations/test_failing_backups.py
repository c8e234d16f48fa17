"""Backups that fail, are killed or interrupted, or meet others: what they leave, and what they say."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.comparing import same
from tests.helpers.operations import (
    ROWS,
    Weightserver,
    assert_one_line,
    dies,
    lose_blocks,
    make_table,
    push,
)
from tests.helpers.watching import frozen, wait_until
from tests.integration.operations.backups import before_copying, by_another, restored
from weightserver import ClusterError, LocalCluster, NoTableError, WeightClient
from weightserver.client.calls import WATCH, Call
from weightserver.operations import backup as backups
from weightserver.operations.backup import backup
from weightserver.operations.backup_files import Backup, read_backup
from weightserver.operations.backup_places import Folder


@pytest.mark.guard
def test_a_backup_with_missing_rows_is_refused(
    client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(client)
    message = r"shard \d sent other blocks of checkpoint 'backup-.*' than it keeps: check its directory"
    with monkeypatch.context() as lossy:
        lose_blocks(lossy)
        with pytest.raises(ClusterError, match=message):
            backup(client, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    assert client.describe().checkpoint_names == {"one", "two"}, "else one that always fails would fill the disks"
    push(client, 4, ROWS)
    client.checkpoint("three", step=5)
    last = backup(client, tmp_path / "backup")
    assert client.describe().checkpoint_names == {"one", "two", "three", f"backup-{last.identity[:16]}"}


def test_a_failed_backup_takes_nothing_from_another_of_its_checkpoint(
    cluster: LocalCluster, client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other begins and completes while the failing one is at work."""
    make_table(client)
    made = list[Backup]()

    def another_and_a_full_disk() -> None:
        made.append(by_another(cluster, tmp_path / "other"))
        raise OSError(28, "No space left on device")

    before_copying(monkeypatch, another_and_a_full_disk)
    with pytest.raises(OSError, match="No space left"):
        backup(client, tmp_path / "backup")
    assert f"backup-{made[0].identity[:16]}" in client.describe().checkpoint_names


def test_a_backup_says_that_one_of_a_later_checkpoint_has_ended(
    cluster: LocalCluster, client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(client)
    before_copying(monkeypatch, lambda: by_another(cluster, tmp_path / "later", checkpoint="two"))
    message = r"checkpoint 'one' or of its base, was released .* by another backup .*: repeat the command"
    with pytest.raises(NoTableError, match=message):
        backup(client, tmp_path / "backup", checkpoint="one")
    assert backup(client, tmp_path / "backup", checkpoint="one").checkpoint == "one"


def test_an_increment_says_that_another_backup_has_released_its_base(
    cluster: LocalCluster, client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the same checkpoint, to another place at the same time; repeated, it needs no base."""
    make_table(client)
    backup(client, tmp_path / "a/mon", checkpoint="one")
    before_copying(monkeypatch, lambda: by_another(cluster, tmp_path / "b/tue", checkpoint="two"))
    message = r"checkpoint 'two' or of its base, was released .* by another backup .*: repeat the command"
    with pytest.raises(NoTableError, match=message):
        backup(client, tmp_path / "a/tue", checkpoint="two", incremental=True)
    assert not (tmp_path / "a/tue").exists()
    made = backup(client, tmp_path / "a/tue", checkpoint="two", incremental=True)
    assert (made.base, made.shards) == ("", read_backup(Folder(tmp_path / "b/tue")).shards)


def test_backups_that_end_at_once_release_the_same(
    cluster: LocalCluster, client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier one left is released by the other while the first is about to."""
    make_table(client)
    backup(client, tmp_path / "one", checkpoint="one")

    def release_after_another(client: WeightClient, name: str, **options: bool) -> None:
        with WeightClient(cluster.addresses) as another:
            release(another, name, join=True)
        release(client, name, **options)

    release = WeightClient.release
    monkeypatch.setattr(WeightClient, "release", release_after_another)
    made = backup(client, tmp_path / "two", checkpoint="two")
    assert client.describe().checkpoint_names == {"one", "two", f"backup-{made.identity[:16]}"}


def test_an_interrupt_ends_a_backup_whose_shards_stand_still(
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although its threads wait for answers, and the signal does not wake the main thread: one that comes just before
    that thread begins to wait does not either."""
    make_table(client)
    unanswered = list[Call]()

    def waiting() -> list[Call]:
        return [call for call in list(WATCH.waiting) if call.method != "OpenSession"]  # of the lease of `client`

    def interrupt() -> None:
        wait_until(lambda: len(waiting()) > 1)
        unanswered.extend(waiting())
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def copy_shard(client: WeightClient, shard: int, *arguments: Any) -> Any:
        with frozen(cluster, shard):
            return original(client, shard, *arguments)

    original = backups._copy_shard
    before_copying(monkeypatch, threading.Thread(target=interrupt).start)
    monkeypatch.setattr(backups, "_copy_shard", copy_shard)
    outcome = weightserver("backup", *cluster.addresses, "--output", tmp_path / "backup")
    assert "failed" not in [call.outcome for call in unanswered], "a call was only ended by its deadline"
    assert outcome[0] == 130
    assert outcome[2].endswith("weightserver backup: interrupted\n")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("weightserver.client.client:pb.CopyCheckpointRequest", 1),  # before the shards keep the checkpoint
        ("weightserver.operations.backup_places:atomic_write", 3),  # after files of both shards
        pytest.param(
            "weightserver.operations.backup_places:atomic_write", 5, marks=pytest.mark.slow
        ),  # after its manifest
    ],
)
@pytest.mark.guard
def test_a_killed_backup_can_be_repeated(
    place: str, number: int, weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    """What the shards kept for it goes when a later backup has ended."""
    kept = make_table(client)
    arguments = ["backup", *cluster.addresses, "--output", tmp_path / "backup", "--checkpoint", "one"]
    dies(place, number, *arguments)
    assert_one_line(
        weightserver("restore", tmp_path / "backup", "--data-dir", tmp_path / "x", "--shard", 0), "holds no backup"
    )
    push(client, 5, ROWS)
    status, said, error = weightserver(*arguments)
    assert status == 0, error
    assert "of checkpoint one (step 2) of 2 shards" in said
    assert_one_line(weightserver(*arguments), "is not empty: give another directory")
    assert [path.name for path in sorted((tmp_path / "backup").iterdir())] == ["manifest.json", "shard-0", "shard-1"]
    assert not [*tmp_path.rglob("*.partial")]
    later = backup(client, tmp_path / "later", checkpoint="two")
    assert client.describe().checkpoint_names == {"one", "two", f"backup-{later.identity[:16]}"}
    assert same(restored(tmp_path / "backup", tmp_path / "new"), kept)
