"""Backups that have only what was written since another one, and the removal of old ones."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.helpers.comparing import same
from tests.helpers.operations import (
    NUM_STORED,
    ROWS,
    SPEC,
    Weightserver,
    assert_one_line,
    flipped,
    make_table,
    push,
)
from tests.integration.operations.backups import by_another, restored
from weightserver import ClusterError, LocalCluster, RowState, StorageError, TableSpec, WeightClient
from weightserver.common.atomic_files import LOCK, directory_lock
from weightserver.operations import backup as operation
from weightserver.operations import backup_places
from weightserver.operations.backup import backup
from weightserver.operations.backup_files import Backup, BackupReader, read_backup
from weightserver.operations.backup_places import Folder
from weightserver.operations.restore import restore

FEW = ROWS[210:222]
"""Rows of three blocks, two of which make_table() has written."""


def make_chain(client: WeightClient, directory: Path) -> dict[str, RowState]:
    """Makes a backup `full` of checkpoint `one`, and increments `tue` and `wed`; returns the rows of each."""
    kept = {"full": make_table(client)}
    assert backup(client, directory / "full", checkpoint="one", incremental=True).base == ""
    for step, name, rows in ((4, "tue", FEW), (5, "wed", FEW[:1])):
        push(client, step, rows)
        client.checkpoint(name, step=step + 1)
        client.release("two" if name == "tue" else "tue")
        kept[name] = client.fetch_state(ROWS)
        backup(client, directory / name, incremental=True)
    push(client, 6, ROWS)
    return kept


def rewrite(place: Path, made: Backup) -> None:
    text = json.dumps({"format": "0.3", "sha256": made.digest, "backup": asdict(made)})
    (place / "manifest.json").write_text(text)


def test_each_backup_of_a_chain_is_its_checkpoint(client: WeightClient, tmp_path: Path) -> None:
    kept = make_chain(client, tmp_path)
    made = {name: read_backup(Folder(tmp_path / name)) for name in kept}
    assert [(one.base, one.base_sha256) for one in made.values()] == [
        ("", ""),
        ("full", made["full"].digest),
        ("tue", made["tue"].digest),
    ]
    assert made["full"].rows_stored == NUM_STORED
    assert made["wed"].rows_stored == SPEC.rows_per_block, "of one block, all rows of which were written"
    assert len(made["wed"].shards[1]["files"]) == 1, "its schedule: nothing of it was written"
    for name, rows in kept.items():
        assert same(restored(tmp_path / name, tmp_path / f"new-{name}"), rows), name


@pytest.mark.parametrize(
    ("nights", "bases"),
    [(["a", "b", "a", "b"], {"a": ["", ""], "b": ["", ""]}), (["ab"] * 3, {"a": ["", "0", "1"], "b": ["", "", ""]})],
    ids=["by turns", "both each night"],
)
def test_two_places_break_each_others_increments(
    nights: list[str], bases: dict[str, list[str]], client: WeightClient, tmp_path: Path
) -> None:
    """The shards keep the last backup's checkpoint, wherever that is. Each backup, in a copied folder too, is whole or
    has its base."""
    make_table(client)
    made, rows = dict[str, str](), list[RowState]()
    for night, places in enumerate(nights):
        push(client, 4 + night, FEW[night:])
        client.checkpoint(f"night-{night}", step=5 + night)
        rows.append(client.fetch_state(ROWS))
        for place in places:
            name = f"{place}/{night}"
            made[name] = backup(client, tmp_path / "backups" / name, incremental=True).base
    assert {place: [base for name, base in made.items() if name[0] == place] for place in "ab"} == bases
    (tmp_path / "backups").rename(tmp_path / "copied")
    for name in made:
        assert same(restored(tmp_path / "copied" / name, tmp_path / "new" / name), rows[int(name[2:])]), name


def test_a_chain_without_a_link_says_which(weightserver: Weightserver, client: WeightClient, tmp_path: Path) -> None:
    """Nothing is made of it, and each backup that lacks none is restored."""
    kept = make_chain(client, tmp_path)
    full, tue = tmp_path / "full", tmp_path / "tue"

    def fails(message: str) -> None:
        outcome = weightserver("restore", tmp_path / "wed", "--data-dir", tmp_path / "new", "--shard", 0)
        assert_one_line(outcome, message)

    tue.rename(tmp_path / "away")
    fails(f"{tmp_path}/wed needs its base tue, but {tue} holds no backup")
    shutil.copytree(full, tue)
    fails(f"{tmp_path}/wed needs its base tue, but {tue} is another backup: use another one")
    assert not (tmp_path / "new").exists()
    shutil.rmtree(tue)
    (tmp_path / "away").rename(tue)
    (path,) = full.glob("shard-0/blocks*")
    path.write_bytes(flipped(path.read_bytes()))
    fails(f"{path} is damaged or missing: use another backup")
    path.write_bytes(flipped(path.read_bytes()))
    changed = read_backup(Folder(tue))
    (name,) = changed.shards[0]["files"].keys() - {"schedule.safetensors"}
    del changed.shards[0]["files"][name]  # with a manifest that says so
    rewrite(tue, changed)
    rewrite(tmp_path / "wed", replace(read_backup(Folder(tmp_path / "wed")), base_sha256=changed.digest))
    with pytest.raises(StorageError, match="wed has other blocks of shard 0 than it had"):
        restore(tmp_path / "wed", tmp_path / "new", shard=0)
    assert same(restored(full, tmp_path / "again"), kept["full"])
    older = read_backup(Folder(full))
    del older.shards[0]["digest"]  # as an earlier commit of this version wrote it
    rewrite(full, older)
    with pytest.raises(StorageError, match="full has other blocks of shard 0 than it had"):
        restore(full, tmp_path / "older", shard=0)


@pytest.mark.parametrize("what", ["rolled back", "released", "an earlier checkpoint", "another table", "moved away"])
def test_a_backup_without_a_base_is_full(
    what: str, back_up: Callable[..., str], client: WeightClient, tmp_path: Path
) -> None:
    """The shards no longer know what was written since the last one, or it is not there."""
    make_table(client)
    last = backup(client, tmp_path / "last", checkpoint="two")
    options = ["--incremental"]
    match what:
        case "rolled back":
            client.rollback("one")
        case "released":
            client.release(f"backup-{last.identity[:16]}")
            client.checkpoint("three", step=4)
        case "an earlier checkpoint":
            options += ["--checkpoint", "one"]
        case "another table":
            client.drop_table()
            make_table(client)
        case "moved away":
            (tmp_path / "elsewhere").mkdir()
            (tmp_path / "last").rename(tmp_path / "elsewhere/last")
    assert back_up(tmp_path / "next", *options).endswith("/next, all: there is no base\n")
    whole = backup(client, tmp_path / "whole", checkpoint=read_backup(Folder(tmp_path / "next")).checkpoint)
    assert read_backup(Folder(tmp_path / "next")).shards == whole.shards


def test_a_base_that_is_removed_meanwhile_makes_no_backup(
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By --keep of another command, which does not know of the increment yet."""
    backups = tmp_path / "backups"
    make_table(client)
    backup(client, backups / "mon", checkpoint="one")

    def remove_after_copying(*arguments: Any) -> Any:
        copied = copy_shards(*arguments)
        Folder(backups / "mon").remove()
        return copied

    copy_shards = operation._copy_shards
    monkeypatch.setattr(operation, "_copy_shards", remove_after_copying)
    outcome = weightserver("backup", *cluster.addresses, "--output", backups / "tue", "--incremental")
    assert outcome[0] == 1
    assert "backup mon, the base of this one, was removed while it was copied" in outcome[2]
    assert len(client.describe().checkpoint_names) == 3, "one, two, and what the shards keep for the removed one"
    assert not [*backups.iterdir()]


def test_a_link_and_an_unfinished_backup_are_no_backups(
    back_up: Callable[..., str], client: WeightClient, tmp_path: Path
) -> None:
    """The link would name another backup one day, and its removal would take what it names."""
    backups = tmp_path / "backups"
    make_table(client)
    backup(client, backups / "mon", checkpoint="one")
    backup(client, backups / "unfinished", checkpoint="one")
    (backups / "unfinished").rename(backups / ".tue.partial")  # killed when it had written its manifest
    (backups / "latest").symlink_to("mon")
    assert back_up(backups / "wed", "--incremental", "--keep", 2).endswith("since backup mon\n")
    assert (backups / "mon/manifest.json").exists()
    assert (backups / "latest").is_symlink()


def test_checkpoints_of_one_step_have_an_order(
    back_up: Callable[..., str], client: WeightClient, tmp_path: Path
) -> None:
    """That in which they were taken: the newest is backed up, and an increment has no later base."""
    make_table(client)
    client.checkpoint("z", step=4)
    few = client.fetch_state(FEW)
    client.write_state(FEW, few.weight + 1, few.momentum_buffer, 4)
    client.checkpoint("a", step=4)
    backup(client, tmp_path / "newest")
    assert same(restored(tmp_path / "newest", tmp_path / "new"), client.fetch_state(ROWS))
    said = back_up(tmp_path / "earlier", "--checkpoint", "z", "--incremental")
    assert said.endswith("/earlier, all: there is no base\n")


def test_an_increment_needs_the_blocks_of_its_base_on_the_shards(client: WeightClient, tmp_path: Path) -> None:
    make_table(client)
    made = backup(client, tmp_path / "full", checkpoint="one")
    made.shards[1]["digest"] = made.shards[0]["digest"]
    rewrite(tmp_path / "full", made)
    with pytest.raises(ClusterError, match="shard 1 keeps other blocks of checkpoint 'one' than its backup has"):
        backup(client, tmp_path / "next", incremental=True)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("cluster")] == ["full"]


def test_a_table_grows_between_two_links(client: WeightClient, tmp_path: Path) -> None:
    make_table(client)
    backup(client, tmp_path / "small", checkpoint="one")
    client.extend_table(1_200)
    push(client, 4, np.arange(990, 1_100))
    client.checkpoint("large", step=5)
    rows = client.fetch_state(np.arange(1_200))
    made = backup(client, tmp_path / "large", incremental=True)
    assert (made.base, made.spec.num_rows) == ("small", 1_200)
    assert same(restored(tmp_path / "large", tmp_path / "new"), rows)


def test_two_commands_remove_the_same_backups(
    client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(client)
    for name in ("mon", "tue"):
        backup(client, tmp_path / "backups" / name)
    remove = Folder.remove

    def remove_after_another(place: Folder) -> None:
        remove(place)
        remove(place)

    monkeypatch.setattr(Folder, "remove", remove_after_another)
    backup(client, tmp_path / "backups/wed", keep=1)
    assert [path.name for path in (tmp_path / "backups").iterdir()] == ["wed"]


def test_of_two_commands_at_once_the_newer_removes_the_others_backup(
    cluster: LocalCluster, client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each removed the other's, none would be left."""
    make_table(client)

    def remove_after_another(place: Any, made: Backup, keep: int) -> None:
        monkeypatch.setattr(operation, "_remove_others", remove_others)
        by_another(cluster, tmp_path / "backups/newer")
        remove_others(place, made, keep)

    remove_others = operation._remove_others
    monkeypatch.setattr(operation, "_remove_others", remove_after_another)
    backup(client, tmp_path / "backups/older", keep=1)
    assert {path.name for path in (tmp_path / "backups").iterdir()} == {"newer", "older"}
    backup(client, tmp_path / "backups/newest", keep=1)
    assert {path.name for path in (tmp_path / "backups").iterdir()} == {"newest"}


def test_a_clock_that_was_ahead_makes_no_backup_the_newest_for_ever(client: WeightClient, tmp_path: Path) -> None:
    make_table(client)
    backups = tmp_path / "backups"
    for name in ("mon", "tue"):
        made = backup(client, backups / name)
        rewrite(backups / name, replace(made, created="2999-01-01T00:00:00.000000+00:00"))
    for name in ("wed", "thu"):
        backup(client, backups / name, keep=2)
    assert {path.name for path in backups.iterdir()} == {"wed", "thu"}


def test_what_lies_in_a_backup_that_is_removed_stays(client: WeightClient, tmp_path: Path) -> None:
    backups, kept = tmp_path / "backups", make_table(client)
    backup(client, backups / "all", checkpoint="one")
    backup(client, backups / "all/mon", checkpoint="one")
    backup(client, backups / "next", keep=1)
    assert not (backups / "all/manifest.json").exists()
    assert same(restored(backups / "all/mon", tmp_path / "new"), kept)


def test_what_killed_backups_left_is_removed(client: WeightClient, tmp_path: Path) -> None:
    """They have a name of their own each night, so that no command is repeated which would remove it."""
    backups, file = tmp_path / "backups", "shard-0/blocks-000000000000000.safetensors"
    make_table(client)
    for name in (".mon.partial", ".tue.partial", ".wed.partial", ".notes.partial"):
        (backups / name / "shard-0").mkdir(parents=True)
        (backups / name / file).write_bytes(b"some")
    (backups / "mon").mkdir()
    (backups / "mon" / LOCK).touch()
    (backups / ".wed.partial/manifest.json").touch()
    (backups / ".notes.partial/mine").touch()
    with directory_lock(backups / "tue"):  # which a living command has
        backup(client, backups / "thu", keep=1)
        left = {path.name for path in backups.iterdir()}
    assert left == {".tue.partial", "tue", ".wed.partial", ".notes.partial", "thu"}


def test_a_backup_that_is_complete_meanwhile_is_not_what_a_killed_one_left(
    client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(client)
    partial = tmp_path / "backups/.mon.partial"
    (partial / "shard-0").mkdir(parents=True)

    def found(path: Path, pattern: str) -> Iterator[Path]:
        for one in rglob(path, pattern):
            yield one
            partial.rename(tmp_path / "backups/mon")

    rglob = Path.rglob
    monkeypatch.setattr(Path, "rglob", found)
    backup(client, tmp_path / "backups/tue", keep=1)
    assert {path.name for path in (tmp_path / "backups").iterdir()} == {"mon", "tue"}


def test_what_a_killed_removal_left_is_removed(
    client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(client)
    backup(client, tmp_path / "backups/mon")
    with monkeypatch.context() as killed:
        killed.setattr(backup_places, "shutil", Mock(rmtree=Mock(side_effect=KeyboardInterrupt)))
        with pytest.raises(KeyboardInterrupt):
            backup(client, tmp_path / "backups/tue", keep=1)
    backup(client, tmp_path / "backups/wed", keep=1)
    assert [path.name for path in (tmp_path / "backups").iterdir()] == ["wed"]


def test_the_newest_backups_are_kept_with_what_they_need(
    weightserver: Weightserver, back_up: Callable[..., str], client: WeightClient, tmp_path: Path
) -> None:
    """What is of another table stays, and what is no backup."""
    backups = tmp_path / "backups"
    make_table(client)
    backup(client, backups / "other", checkpoint="one")
    client.drop_table()
    rows = make_chain(client, backups)
    (backups / "notes").mkdir()

    def keep(name: str, number: int, *options: str) -> set[str]:
        back_up(backups / name, "--keep", number, *options)
        return {path.name for path in backups.iterdir()} - {"other", "notes"}

    assert keep("thu", 1, "--incremental") == {"full", "tue", "wed", "thu"}
    assert keep("fri", 3) == {"full", "tue", "wed", "thu", "fri"}, "wed needs tue, tue needs full"
    assert same(restored(backups / "wed", tmp_path / "new"), rows["wed"])
    assert keep("sat", 2, "--incremental") == {"fri", "sat"}
    assert keep("sun", 1) == {"sun"}
    assert (backups / "other/manifest.json").exists()
    message = "--keep 0 would remove this backup too: give at least 1"
    assert_one_line(weightserver("backup", "localhost:1", "--output", backups / "x", "--keep", 0), message)


def test_one_copy_of_a_backups_file_stays_in_memory(tmp_path: Path) -> None:
    """While its blocks are read, of each backup of a chain."""
    spec = TableSpec(num_rows=12_600, dim=128)
    rows = np.arange(spec.num_rows)
    values = np.zeros((spec.num_rows, spec.dim), np.float32)
    with LocalCluster(1, tmp_path / "cluster") as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(spec)
        client.open_session("run")
        client.write_state(rows, values, values, 0)
        client.checkpoint("one", step=0)
        made = backup(client, tmp_path / "full")
    reader = BackupReader.of(Folder(tmp_path / "full"))
    tracemalloc.start()
    try:
        blocks = reader.blocks(0)
        next(blocks)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert made.num_bytes / 2 < kept < made.num_bytes * 1.5
