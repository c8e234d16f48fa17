"""Backups of a checkpoint of running shards."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.comparing import rows_in, same
from tests.helpers.operations import (
    NUM_STORED,
    ROWS,
    SPEC,
    STEPS,
    Weightserver,
    assert_one_line,
    make_table,
    push,
    targets_in,
)
from tests.integration.operations.backups import before_copying, by_another
from weightserver import Checkpoint, FencedError, LocalCluster, TableSpec, WeightClient
from weightserver.common.atomic_files import atomic_write
from weightserver.core.blocks import BlockCodec
from weightserver.core.initial import initial_rows
from weightserver.operations import backup as backups
from weightserver.operations import backup_places
from weightserver.operations.backup import backup
from weightserver.operations.backup_files import read_backup
from weightserver.operations.backup_places import Folder
from weightserver.operations.restore import restore
from weightserver.operations.verify import verify_directory
from weightserver.shard import reading


@pytest.mark.guard
def test_a_backup_is_one_checkpoint_while_training_continues(
    weightserver: Weightserver, small_pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are overwritten all the time, and its name is released once the backup holds it, as trainers do."""
    done, copy_shard = threading.Event(), backups._copy_shard
    with LocalCluster(2, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
        kept = make_table(client)
        before = client.checkpoints()

        def train_on() -> None:
            for step in range(4, STEPS):
                push(client, step, ROWS[step % 7 :: 3])
                if done.is_set():
                    return

        def release_and_copy(*arguments: Any) -> Any:
            if "one" in [known.name for known in client.checkpoints()]:
                client.release("one")
                push(client, 50, ROWS)
            return copy_shard(*arguments)

        monkeypatch.setattr(backups, "_copy_shard", release_and_copy)
        training = threading.Thread(target=train_on)
        training.start()
        try:
            made = by_another(cluster, tmp_path / "backup", checkpoint="one")
        finally:
            done.set()
            training.join()
        assert made.rows_stored == NUM_STORED
        held = f"backup-{made.identity[:16]}"
        assert client.checkpoints() == [Checkpoint(held, 2), Checkpoint("two", 3)]
        push(client, STEPS - 1, ROWS[:5])  # no session was fenced
        epoch = client.describe().epoch
        assert [known.checkpoint_id for known in before if known.name == "one"] == [bytes.fromhex(made.identity)]
    assert made == read_backup(Folder(tmp_path / "backup"))
    assert len(made.shards[0]["files"]) > 2
    for shard in range(2):
        status, said, _ = weightserver(
            "restore", tmp_path / "backup", "--data-dir", tmp_path / f"new/shard-{shard}", "--shard", shard
        )
        assert status == 0
        assert said.endswith("checkpoint one (step 2)\n")
        assert verify_directory(tmp_path / f"new/shard-{shard}").problems == []
    with LocalCluster(2, tmp_path / "new") as cluster, WeightClient(cluster.addresses) as client:
        info = client.describe()
        assert (info.spec, info.run, info.epoch, info.clock, info.horizon) == (SPEC, "run", epoch, 2, 2)
        assert info.rows_stored == NUM_STORED
        assert [(known, known.checkpoint_id.hex()) for known in client.checkpoints()] == [
            (Checkpoint("one", 2), made.identity),
            (Checkpoint(held, 2), made.identity),
        ]
        assert same(client.fetch_state(ROWS), kept)
        with pytest.raises(FencedError, match="was opened by no client, as after a restore"):
            client.open_session("an old writer", join=epoch)
        advice = "no shard has a checkpoint 'two': checkpoints(), or 'weightserver checkpoints', lists those of all"
        assert_one_line(weightserver("release", "two", *cluster.addresses), advice)
        assert client.describe().epoch == epoch, "nothing was opened for nothing"
        monkeypatch.setattr(backups, "_copy_shard", copy_shard)
        status, said, error = weightserver("backup", *cluster.addresses, "--output", tmp_path / "again")
        assert status == 0, error
        assert f"backed up {NUM_STORED} rows of checkpoint one (step 2)" in said
        assert read_backup(Folder(tmp_path / "again")).run == "run"
        with pytest.raises(FencedError, match="was superseded"):
            client.open_session("an old writer", join=epoch)
        assert (client.describe().epoch, client.describe().run) == (epoch + 1, "run")
        client.open_session("next")
        push(client, 50, ROWS)
        client.rollback("one")
        assert same(client.fetch_state(ROWS), kept)
        assert weightserver("release", "one", *cluster.addresses)[0] == 0


@pytest.mark.guard
def test_a_backup_ends_with_its_checkpoints_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table grows and gets new rows while the backup reads, and the last read is full."""
    blocks_per_read = 3
    spec = TableSpec(num_rows=2 * blocks_per_read * 512, dim=338, rows_per_block=512)
    rows, new = np.arange(0, spec.num_rows, 512), np.arange(spec.num_rows, 2 * spec.num_rows, 300)
    copy_shard: list[Any] = []
    assert max(1, reading.READ_BYTES // BlockCodec(spec).num_bytes) == blocks_per_read
    with LocalCluster(2, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(spec)
        client.extend_schedule(0, np.full(5, 0.1, np.float32))
        client.open_session("run")
        client.push_gradients(rows, np.ones((len(rows), spec.dim), np.float32), step=0)
        client.checkpoint("one", step=1)
        kept = client.fetch_state(rows)

        def extend_and_copy(*arguments: Any) -> Any:
            if not copy_shard:
                client.extend_table(2 * spec.num_rows)
                client.push_gradients(new, np.ones((len(new), spec.dim), np.float32), step=1)
            copy_shard.append(original(*arguments))
            return copy_shard[-1]

        original = backups._copy_shard
        monkeypatch.setattr(backups, "_copy_shard", extend_and_copy)
        assert by_another(cluster, tmp_path / "backup").rows_stored == len(rows)
    for shard, directory in enumerate(targets_in(tmp_path / "new", 2)):
        restore(tmp_path / "backup", directory, shard=shard)
    with LocalCluster(2, tmp_path / "new") as cluster, WeightClient(cluster.addresses) as client:
        assert client.describe().spec == spec
        assert same(client.fetch_state(rows), kept)
        client.extend_table(2 * spec.num_rows)
        assert np.array_equal(client.fetch_state(new).weight, initial_rows(spec, new))


def test_two_backups_of_one_checkpoint_at_once(
    cluster: LocalCluster, client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to end releases nothing that the other still reads, although the run has released its own."""
    kept = make_table(client)

    def another_backs_up() -> None:
        by_another(cluster, tmp_path / "other", checkpoint="one")
        client.release("one")
        push(client, 50, ROWS)

    before_copying(monkeypatch, another_backs_up)
    by_another(cluster, tmp_path / "backup", checkpoint="one")
    assert read_backup(Folder(tmp_path / "backup")).shards == read_backup(Folder(tmp_path / "other")).shards
    restore(tmp_path / "backup", tmp_path / "new/shard-0", shard=0)
    restore(tmp_path / "other", tmp_path / "new/shard-1", shard=1)
    assert same(rows_in(targets_in(tmp_path / "new", 2)), kept)


def test_the_last_backups_checkpoint_is_kept_until_the_next_has_ended(
    cluster: LocalCluster, client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that is started again meanwhile, and opens a session, does not fail the backup."""
    make_table(client)
    first = backup(client, tmp_path / "first", checkpoint="one")
    client.release("one")
    seen = list[str]()

    def watch(path: Path, *arguments: Any, **options: Any) -> None:
        atomic_write(path, *arguments, **options)
        trainer.open_session("run")
        if path.name == "manifest.json":
            seen.extend(known.name for known in client.checkpoints())

    monkeypatch.setattr(backup_places, "atomic_write", watch)
    with WeightClient(cluster.addresses) as trainer:
        second = backup(client, tmp_path / "second")
        names = [f"backup-{made.identity[:16]}" for made in (first, second)]
        assert set(seen) > {*names, "two"}, "the second is not yet complete"
        assert {known.name for known in client.checkpoints()} == {names[1], "two"}
        backup(client, tmp_path / "again", checkpoint="two")
    assert {known.name for known in client.checkpoints()} == {names[1], "two"}


def test_a_checkpoint_that_was_taken_again_is_backed_up_again(client: WeightClient, tmp_path: Path) -> None:
    """Taking it again gives it other marks than the shards' copy for backups has."""
    make_table(client)
    for name in ("first", "second"):
        client.checkpoint("last", step=4)
        backup(client, tmp_path / name, checkpoint="last")
    first, second = (read_backup(Folder(tmp_path / name)) for name in ("first", "second"))
    assert first.identity == second.identity


def test_a_backup_releases_no_checkpoint_of_the_users(client: WeightClient, tmp_path: Path) -> None:
    """Only the second name of a checkpoint itself is a backup's, whatever a user's name looks like."""
    make_table(client)
    client.checkpoint("backup-0123456789abcdef", step=6)
    newest = backup(client, tmp_path / "newest")
    assert newest.checkpoint == "backup-0123456789abcdef"
    push(client, 6, ROWS)
    client.checkpoint("last", step=7)
    last = backup(client, tmp_path / "last")
    names = {"one", "two", "backup-0123456789abcdef", "last", f"backup-{last.identity[:16]}"}
    assert client.describe().checkpoint_names == names


def test_backup_rejects_invalid_arguments(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    output = ["--output", tmp_path / "backup"]
    remote = weightserver("backup", *cluster.addresses, "--output", "gs://bucket/backup")
    assert remote[0] == 2
    assert "gs://bucket/backup is a URL: copy or mount what is there, or give s3://BUCKET/KEY" in remote[2]
    assert_one_line(
        weightserver("backup", *cluster.addresses, *output), "there is no checkpoint on all shards: WeightClient."
    )
    make_table(client)
    message = "there is no checkpoint 'three' on all shards, only ['one', 'two']"
    assert_one_line(weightserver("backup", *cluster.addresses, *output, "--checkpoint", "three"), message)
    assert not (tmp_path / "backup").exists()
    (tmp_path / "file").write_text("")
    assert_one_line(weightserver("backup", *cluster.addresses, "--output", tmp_path), "is not empty: give another")
    assert_one_line(weightserver("release", "three", *cluster.addresses), "no shard has a checkpoint 'three'")
    assert weightserver("release", "two", *cluster.addresses) == (0, "released two\n", "")
    push(client, 10, ROWS[:3])  # a release fences no session
    assert client.checkpoints() == [Checkpoint("one", 2)]
