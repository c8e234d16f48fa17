"""Backups, lost shards, other numbers of shards, compacted directories: what the operator's commands make of rows."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.helpers.comparing import rows_in, same
from tests.helpers.small_run import EVERY, NUM_IMAGES, ONLY_ROWS, losses, small_run
from trainer.loop import train
from trainer.run.checkpoint import Checkpoints
from weightserver import (
    Checkpoint,
    DataLossError,
    FencedError,
    LocalCluster,
    RowState,
    StorageError,
    TableMismatchError,
    TableSpec,
    WeightClient,
)
from weightserver.cli import main
from weightserver.common.atomic_files import sha256
from weightserver.core.blocks import BlockCodec
from weightserver.core.initial import initial_rows
from weightserver.operations import backup as backups
from weightserver.operations import export as exports
from weightserver.operations import reshard as resharding
from weightserver.operations.backup import backup
from weightserver.operations.backup_files import read_backup
from weightserver.operations.compact import compact
from weightserver.operations.export import export_rows
from weightserver.operations.inspect import inspect_directory
from weightserver.operations.verify import verify_directory
from weightserver.shard import shard as shards
from weightserver.storage import lmdb_storage as storages
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.records import read_state, write_spec, write_state

SPEC = TableSpec(num_rows=1_000, dim=16, rows_per_block=7)
ROWS = np.arange(SPEC.num_rows)
NUM_STORED, STEPS = 334, 100

Weightserver = Callable[..., tuple[int | str | None, str, str]]


@pytest.fixture
def weightserver(capsys: pytest.CaptureFixture[str]) -> Weightserver:
    """Runs a command: its exit status, what it says, its complaint."""

    def run(*arguments: object) -> tuple[int | str | None, str, str]:
        capsys.readouterr()  # what was said before is not its
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        return stopped.value.code, *capsys.readouterr()

    return run


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that another process serves is waited for no longer."""
    monkeypatch.setattr(storages, "_OWNER_SECONDS", 0.1)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one answer each, or a few blocks, instead of 64 MiB."""
    monkeypatch.setattr(backups, "BATCH_BYTES", 2_000)
    monkeypatch.setattr(resharding, "BATCH_BYTES", 2_000)


def make_table(client: WeightClient) -> RowState:
    """Checkpoint `one`, of NUM_STORED written rows, which this returns; `two` behind it, and more."""
    client.create_table(SPEC)
    client.extend_schedule(0, np.linspace(0.2, 0.1, STEPS, dtype=np.float32))
    client.open_session("run")
    push(client, 0, ROWS[:700:3])
    push(client, 1, ROWS[:300:2])
    client.checkpoint("one", step=2)
    kept = client.fetch_state(ROWS)
    push(client, 2, ROWS[200:900:5])
    client.checkpoint("two", step=3)
    push(client, 3, ROWS[::11])
    return kept


def push(client: WeightClient, step: int, rows: np.ndarray) -> None:
    gradients = np.random.default_rng(step).standard_normal((len(rows), SPEC.dim)).astype(np.float32)
    client.push_gradients(rows, gradients, step=step)


def dies(place: str, number: int, *arguments: object) -> None:
    """Runs a command that kills itself with -9 behind that call of that number."""
    command = [sys.executable, "-m", "tests.helpers.dying_operation", place, str(number), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def assert_one_line(outcome: tuple[int | str | None, str, str], message: str) -> None:
    status, _, error = outcome
    assert (status, error.count("\n")) == (1, 1), error
    assert message in error


# ---- backup and restore


@pytest.mark.guard
def test_a_backup_is_one_checkpoint_while_training_goes_on(
    weightserver: Weightserver, small_pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the while its rows are written over; once it is held its name is released, as trainers do."""
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
            with WeightClient(cluster.addresses) as operator:
                made = backup(operator, tmp_path / "backup", checkpoint="one")
        finally:
            done.set()
            training.join()
        assert made.rows_stored == NUM_STORED
        assert client.checkpoints() == [Checkpoint("two", 3)], "still held"
        push(client, STEPS - 1, ROWS[:5])  # nobody was fenced
        epoch = client.describe().epoch
        assert [known.identity for known in before if known.name == "one"] == [bytes.fromhex(made.identity)]
    assert made == read_backup(tmp_path / "backup")
    assert len(made.shards[0]["files"]) == 2  # all blocks fit one answer of the shard
    for shard in range(2):
        status, said, _ = weightserver(
            "restore", tmp_path / "backup", "--data-dir", tmp_path / f"new/shard-{shard}", "--shard", shard
        )
        assert status == 0
        assert said.endswith("checkpoint one (step 2)\n")
        assert verify_directory(tmp_path / f"new/shard-{shard}").problems == []
    with LocalCluster(2, tmp_path / "new") as cluster, WeightClient(cluster.addresses) as client:
        info = client.describe()
        assert (info.spec, info.run, info.epoch, info.clock, info.horizon) == (SPEC, "run", epoch, 2, STEPS)
        assert info.rows_stored == NUM_STORED
        assert [(known, known.identity.hex()) for known in client.checkpoints()] == [
            (Checkpoint("one", 2), made.identity)
        ]
        assert same(client.fetch_state(ROWS), kept)
        with pytest.raises(FencedError, match="was opened by nobody, as behind a restore"):
            client.open_session("an old writer", join=epoch)
        client.open_session("next")
        push(client, 50, ROWS)
        client.rollback("one")
        assert same(client.fetch_state(ROWS), kept)


@pytest.mark.guard
@pytest.mark.parametrize(
    ("blocks_per_read", "dim", "num_rows_known"),
    [
        (1, 1_100, True),
        (1, 1_100, False),
        (3, 340, True),
        (3, 340, False),
    ],
)
def test_a_backup_ends_with_its_checkpoints_table(
    blocks_per_read: int, dim: int, num_rows_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which becomes larger, and gets new rows, while the backup reads; its last read is full. Checkpoints that version
    0.1 took do not tell how large it was."""
    spec = TableSpec(num_rows=2 * blocks_per_read * 512, dim=dim, rows_per_block=512)
    rows, new, copy_shard = np.arange(0, spec.num_rows, 512), np.arange(spec.num_rows, 2 * spec.num_rows, 300), []
    assert max(1, shards.READ_BYTES // BlockCodec(spec).num_bytes) == blocks_per_read
    with LocalCluster(2, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(spec)
        client.extend_schedule(0, np.full(5, 0.1, np.float32))
        client.open_session("run")
        client.push_gradients(rows, np.ones((len(rows), spec.dim), np.float32), step=0)
        client.checkpoint("one", step=1)
        kept = client.fetch_state(rows)
    if not num_rows_known:
        for directory in targets_in(tmp_path / "old", 2):
            forget_num_rows(directory)
    with LocalCluster(2, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
        client.open_session("run")

        def extend_and_copy(*arguments: Any) -> Any:
            if not copy_shard:
                client.extend_table(2 * spec.num_rows)
                client.push_gradients(new, np.ones((len(new), spec.dim), np.float32), step=1)
            copy_shard.append(original(*arguments))
            return copy_shard[-1]

        original = backups._copy_shard
        monkeypatch.setattr(backups, "_copy_shard", extend_and_copy)
        with WeightClient(cluster.addresses) as operator:
            assert backup(operator, tmp_path / "backup").rows_stored == len(rows)
    for shard, directory in enumerate(targets_in(tmp_path / "new", 2)):
        backups.restore(tmp_path / "backup", directory, shard=shard)
    with LocalCluster(2, tmp_path / "new") as cluster, WeightClient(cluster.addresses) as client:
        assert client.describe().spec == spec
        assert same(client.fetch_state(rows), kept)
        client.extend_table(2 * spec.num_rows)
        assert np.array_equal(client.fetch_state(new).weight, initial_rows(spec, new))


def forget_num_rows(directory: Path) -> None:
    """Makes a shard's checkpoints those of version 0.1."""
    storage = LmdbStorage(directory)
    with storage.write() as txn:
        state = read_state(txn)
        write_state(txn, replace(state, checkpoints=tuple(replace(known, num_rows=0) for known in state.checkpoints)))
    storage.close()


def test_a_backup_that_could_not_be_restored_gets_no_manifest(
    client: WeightClient, small_pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removed a file of it, or gave it another name."""
    make_table(client)
    original = backups._copy_shard

    def copy_less(*arguments: Any) -> Any:
        copied = original(*arguments)
        last = max(name for name in copied["files"] if name.startswith("blocks"))
        return copied | {"files": {name: file for name, file in copied["files"].items() if name != last}}

    monkeypatch.setattr(backups, "_copy_shard", copy_less)
    with pytest.raises(StorageError, match="shard-0 lacks files"):
        backup(client, tmp_path / "backup")
    assert not (tmp_path / "backup/manifest.json").exists()
    monkeypatch.setattr(backups, "_copy_shard", original)
    assert backup(client, tmp_path / "backup").rows_stored > 0


@pytest.mark.guard
def test_what_is_restored_descends_from_its_checkpoint_and_nothing_later(
    weightserver: Weightserver, tmp_path: Path
) -> None:
    """So that who knows the checkpoint goes on with it, and who was told of more is refused; resharded shards too."""
    with LocalCluster(2, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
        make_table(client)
        cluster.restart(1)
        one, two = client.checkpoints()
        client.release("two")  # of another incarnation
        later = client.marks()
        backup(client, tmp_path / "backup", checkpoint="one")
    assert len(one.marks) == len(two.marks) == 2
    sources = targets_in(tmp_path / "old", 2)
    for shard, directory in enumerate(targets_in(tmp_path / "restored", 2)):
        backups.restore(tmp_path / "backup", directory, shard=shard)
    resharding.reshard(sources, targets_in(tmp_path / "resharded", 2), checkpoint="one")
    for name in ("restored", "resharded"):
        for _ in range(2):  # again behind a restart
            with LocalCluster(2, tmp_path / name) as cluster, WeightClient(cluster.addresses) as client:
                client.expect(one.marks)
                for marks in (two.marks, later):
                    with pytest.raises(DataLossError, match="does not descend from"):
                        client.expect(marks)
                client.open_session("next")


@pytest.mark.guard
def test_a_backup_of_a_large_table_is_small_and_ends(tmp_path: Path) -> None:
    """Rows that nobody wrote take no space and no time, those written behind the checkpoint neither."""
    spec = TableSpec(num_rows=10**9, dim=16)
    with LocalCluster(2, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(spec)
        client.extend_schedule(0, np.full(5, 0.1))
        client.open_session("run")
        client.checkpoint("nothing", step=0)
        client.push_gradients([7, 10**9 - 1], np.ones((2, 16), np.float32), step=0)
        client.checkpoint("two rows", step=1)
        assert backup(client, tmp_path / "nothing", checkpoint="nothing").rows_stored == 0
        made = backup(client, tmp_path / "two")
        assert (made.checkpoint, made.rows_stored) == ("two rows", 2)
        assert made.num_bytes < 50_000
        expected = client.fetch_state([7, 8, 10**9 - 1])
    for name, stored in (("nothing", 0), ("two", 2)):
        for shard in range(2):
            backups.restore(tmp_path / name, tmp_path / f"{name}-new/shard-{shard}", shard=shard)
        with LocalCluster(2, tmp_path / f"{name}-new") as cluster, WeightClient(cluster.addresses) as client:
            assert client.describe().rows_stored == stored
            state = client.fetch_state([7, 8, 10**9 - 1])
            assert same(state, expected) == (stored == 2)
            assert np.array_equal(state.weight[1:2], initial_rows(spec, np.array([8])))


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("weightserver.client.client:pb.CopyCheckpointRequest", 1),  # while the shards are told to hold the checkpoint
        ("weightserver.operations.backup:atomic_write", 3),  # in the first shard
        ("weightserver.operations.backup:_write_json", 2),  # behind its manifest, before the checkpoint is let go
        ("weightserver.operations.backup:_release", 1),  # when it is let go
        pytest.param(
            "weightserver.operations.backup:_write_json", 1, marks=pytest.mark.slow
        ),  # before any shard holds it
        pytest.param("weightserver.operations.backup:_hold", 1, marks=pytest.mark.slow),  # before the first file
        pytest.param("weightserver.operations.backup:atomic_write", 5, marks=pytest.mark.slow),  # in the second shard
    ],
)
@pytest.mark.guard
def test_a_killed_backup_goes_on(
    place: str, number: int, weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    kept = make_table(client)
    arguments = ["backup", *cluster.addresses, "--output", tmp_path / "backup"]
    dies(place, number, *arguments, "--checkpoint", "one")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "backup").glob("shard-*/blocks-*.safetensors")}
    if not (tmp_path / "backup/manifest.json").exists():
        assert_one_line(
            weightserver("restore", tmp_path / "backup", "--data-dir", tmp_path / "x", "--shard", 0),
            "holds an unfinished backup: repeat its command",
        )
    assert_one_line(weightserver(*arguments, "--checkpoint", "two"), "a backup begun of 'one': give another")
    push(client, 5, ROWS)
    status, said, error = weightserver(*arguments)
    assert status == 0, error
    assert "of checkpoint one (step 2) of 2 shards" in said
    assert_one_line(weightserver(*arguments), "holds a backup already, of 'one'")
    assert [path.name for path in sorted((tmp_path / "backup").iterdir())] == ["manifest.json", "shard-0", "shard-1"]
    assert [known.name for known in client.checkpoints()] == ["one", "two"], "the backup still holds one"
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert not list((tmp_path / "backup").rglob("*.partial"))
    for shard in range(2):
        backups.restore(tmp_path / "backup", tmp_path / f"new/shard-{shard}", shard=shard)
    assert same(rows_in(targets_in(tmp_path / "new", 2)), kept)


def test_a_backup_killed_before_anything_is_there_begins_anew(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    make_table(client)
    arguments = ["backup", *cluster.addresses, "--output", tmp_path / "backup"]
    dies("weightserver.common.atomic_files:sync", 2, *arguments)
    assert not (tmp_path / "backup/unfinished.json").exists()
    assert weightserver(*arguments)[0] == 0
    assert not list((tmp_path / "backup").glob("*.partial"))


def flipped(content: bytes, at: float = 0.5) -> bytes:
    """With one bit changed, halfway in unless told otherwise."""
    changed = bytearray(content)
    changed[int(len(content) * at)] ^= 4
    return bytes(changed)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(flipped, id="a bit"),
        pytest.param(lambda content: content[:-1], id="cut"),
        pytest.param(lambda content: flipped(content, 20 / len(content)), id="header", marks=pytest.mark.slow),
        pytest.param(lambda _: b"", id="empty", marks=pytest.mark.slow),
        pytest.param(None, id="missing", marks=pytest.mark.slow),
    ],
)
@pytest.mark.guard
def test_a_damaged_piece_of_a_stopped_backup_is_copied_again(
    damage: Callable[[bytes], bytes] | None,
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
) -> None:
    """Of two that were there."""
    spec = TableSpec(num_rows=12_000, dim=128)
    client.create_table(spec)
    client.extend_schedule(0, np.full(5, 0.1, np.float32))
    client.open_session("run")
    rows = np.arange(spec.num_rows)
    client.push_gradients(rows, np.ones((len(rows), 128), np.float32), step=0)
    client.checkpoint("one", step=1)
    kept = client.fetch_state(rows)
    arguments = ["backup", *cluster.addresses, "--output", tmp_path / "backup"]
    dies("weightserver.operations.backup:atomic_write", 4, *arguments)
    first, _ = sorted((tmp_path / "backup/shard-0").glob("blocks-*.safetensors"))
    whole = first.read_bytes()
    if damage:
        first.write_bytes(damage(whole))
    else:
        first.unlink()
    status, said, error = weightserver(*arguments)
    assert status == 0, error
    assert f"backed up {spec.num_rows} rows of checkpoint one" in said
    for shard in range(2):
        backups.restore(tmp_path / "backup", tmp_path / f"new/shard-{shard}", shard=shard)
    with LocalCluster(2, tmp_path / "new") as new, WeightClient(new.addresses) as reader:
        assert same(reader.fetch_state(rows), kept)


@pytest.mark.guard
@pytest.mark.parametrize("content", [b"{}", b"[]", b'{"checkpoint": "on', b"\xff", b'{"checkpoint": "one", "more": 1}'])
def test_a_stopped_backup_that_cannot_be_read_says_so(
    content: bytes, weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    make_table(client)
    (tmp_path / "unfinished.json").write_bytes(content)
    outcome = weightserver("backup", *cluster.addresses, "--output", tmp_path)
    assert_one_line(outcome, "unfinished.json is damaged: remove the directory, start again, and remove the backup-")


def test_of_two_backups_into_one_directory_one_goes_on(
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_table(client)
    arguments, copy_shard, others = (
        ["backup", *cluster.addresses, "--output", tmp_path / "new"],
        backups._copy_shard,
        [],
    )

    def copy_beside_another(*arguments_of_shard: Any) -> Any:
        others.append(weightserver(*arguments))
        return copy_shard(*arguments_of_shard)

    monkeypatch.setattr(backups, "_copy_shard", copy_beside_another)
    assert weightserver(*arguments)[0] == 0
    assert len(others) == 2
    for other in others:
        assert_one_line(other, "is being written by another process: let it end, or give another")
    assert read_backup(tmp_path / "new").rows_stored > 0


def test_exports_have_the_mode_of_new_files_and_backups_are_private(client: WeightClient, tmp_path: Path) -> None:
    make_table(client)
    before = os.umask(0o027)
    try:
        backup(client, tmp_path / "backup")
        export_rows(client, tmp_path / "rows")
    finally:
        os.umask(before)

    def modes(name: str) -> dict[str, int]:
        paths = [tmp_path / name, *(tmp_path / name).rglob("*")]
        kinds = [(("directory" if path.is_dir() else "file"), oct(path.stat().st_mode & 0o777)) for path in paths]
        return {" ".join(kind): kinds.count(kind) for kind in kinds}

    assert modes("backup") == {"directory 0o700": 3, "file 0o600": 5}
    assert modes("rows") == {"directory 0o750": 1, "file 0o640": 1}


@pytest.mark.guard
def test_a_restored_cluster_can_be_backed_up_and_its_checkpoints_released(
    weightserver: Weightserver, tmp_path: Path
) -> None:
    """Nobody has opened its epoch; a session is opened, under the run's name, and the writers of before stay out."""
    with LocalCluster(2, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
        kept = make_table(client)
        backup(client, tmp_path / "backup", checkpoint="one")
        epoch = client.describe().epoch
    for shard in range(2):
        backups.restore(tmp_path / "backup", tmp_path / f"new/shard-{shard}", shard=shard)
    with LocalCluster(2, tmp_path / "new") as cluster, WeightClient(cluster.addresses) as client:
        assert_one_line(weightserver("release", "two", *cluster.addresses), "no shard has a checkpoint 'two'")
        assert client.describe().epoch == epoch, "nothing was opened for nothing"
        again = ["backup", *cluster.addresses, "--output", tmp_path / "again"]
        status, said, error = weightserver(*again)
        assert status == 0, error
        assert f"backed up {NUM_STORED} rows of checkpoint one (step 2)" in said
        assert same(client.fetch_state(ROWS), kept)
        with pytest.raises(FencedError, match="was superseded"):
            client.open_session("an old writer", join=epoch)
        assert (client.describe().epoch, client.describe().run) == (epoch + 1, "run")
        assert weightserver("release", "one", *cluster.addresses)[0] == 0
        assert client.checkpoints() == []
    assert read_backup(tmp_path / "again").run == "run"


@pytest.mark.guard
def test_a_resharded_clusters_checkpoint_can_be_released(
    weightserver: Weightserver, tables: Callable[[int], Table], tmp_path: Path
) -> None:
    sources, _, _ = tables(2)
    assert weightserver("reshard", "--source", *sources, "--target", *targets_in(tmp_path, 1))[0] == 0
    with LocalCluster(1, tmp_path) as cluster:
        assert weightserver("release", "two", *cluster.addresses) == (0, "released two\n", "")


@pytest.mark.guard
def test_a_shard_restored_beside_others_is_rolled_back_to_before_a_backup(
    weightserver: Weightserver, tmp_path: Path
) -> None:
    with LocalCluster(2, tmp_path / "servers") as cluster, WeightClient(cluster.addresses) as client:
        kept = make_table(client)
        backup(client, tmp_path / "backup", checkpoint="one")
        client.open_session("run, resumed")
        cluster.processes[1].kill()
        cluster.processes[1].wait()
        shutil.rmtree(cluster.directory / "shard-1")
        backups.restore(tmp_path / "backup", cluster.directory / "shard-1", shard=1)
        cluster.restart(1)
        command = ["backup", *cluster.addresses, "--output", tmp_path / "again"]
        message = "shard 1 is at session 1, shard 0 at 2, as where one was restored beside the others: take all to one"
        assert_one_line(weightserver(*command), message)
        assert not (tmp_path / "again").exists()
        assert_one_line(weightserver("release", "one", *cluster.addresses), message)
        assert weightserver("rollback", "one", *cluster.addresses, "--yes")[0] == 0
        with pytest.raises(DataLossError, match="shard 1 lacks what it had acknowledged"):
            client.fetch_state(ROWS)  # it was told of more
        with WeightClient(cluster.addresses) as reader:
            assert same(reader.fetch_state(ROWS), kept)
        assert weightserver(*command)[0] == 0


@pytest.mark.guard
def test_a_killed_restore_goes_on(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    kept, targets = make_table(client), targets_in(tmp_path / "new", 2)
    backup(client, tmp_path / "backup", checkpoint="one")
    commands = [
        ["restore", tmp_path / "backup", "--data-dir", target, "--shard", shard] for shard, target in enumerate(targets)
    ]
    dies("weightserver.storage.shard_builder:ShardBuilder.add", 1, *commands[0])
    assert "unfinished" in inspect_directory(targets[0])
    for command in commands:
        assert weightserver(*command)[0] == 0
    dies("weightserver.operations.restore:restore", 1, *commands[0][:3], tmp_path / "x", "--shard", 0)
    outcome = weightserver(*commands[0][:3], tmp_path / "x", "--shard", 0)
    assert_one_line(outcome, "was restored from")  # it is all there
    assert "before: serve it, or give another directory" in outcome[2]
    assert same(rows_in([tmp_path / "x", targets[1]]), kept)
    assert same(rows_in(targets), kept)


def test_a_backup_whose_checkpoint_went_away_says_so(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    make_table(client)
    arguments = ["backup", *cluster.addresses, "--output", tmp_path / "backup"]
    dies("weightserver.operations.backup:atomic_write", 3, *arguments, "--checkpoint", "two")
    client.open_session("back")
    client.rollback("one")
    assert_one_line(
        weightserver(*arguments), "cannot go on, its rows were rolled back or released: remove the directory"
    )
    assert client.checkpoints() == [Checkpoint("one", 2)]


def test_backups_that_cannot_be(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    output = ["--output", tmp_path / "backup"]
    assert_one_line(weightserver("backup", *cluster.addresses, *output), "there is no checkpoint on all shards")
    make_table(client)
    message = "there is no checkpoint 'three' on all shards, only ['one', 'two']"
    assert_one_line(weightserver("backup", *cluster.addresses, *output, "--checkpoint", "three"), message)
    assert not (tmp_path / "backup").exists()
    (tmp_path / "file").write_text("")
    assert_one_line(weightserver("backup", *cluster.addresses, "--output", tmp_path), "is not empty: give another")
    assert_one_line(weightserver("release", "three", *cluster.addresses), "no shard has a checkpoint 'three'")
    assert weightserver("release", "two", *cluster.addresses) == (0, "released two\n", "")
    push(client, 10, ROWS[:3])  # a release fences nobody
    assert client.checkpoints() == [Checkpoint("one", 2)]


def test_restores_that_cannot_be(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    """A bad backup leaves nothing that could be served."""
    make_table(client)
    good = tmp_path / "backup"
    backup(client, good)

    def fails(message: str, *, source: Path = good, target: Path | None = None, shard: int = 0, more: Any = ()) -> None:
        target = target or tmp_path / "new"
        outcome = weightserver("restore", source, "--data-dir", target, "--shard", shard, *more)
        assert_one_line(outcome, message)

    fails("holds no backup", source=tmp_path)
    fails("has shards 0..1, not 2", shard=2)
    fails("is of 2 shards, not 3: restore all of them, then 'reshard'", more=["--num-shards", 3])
    fails("is served by another process", target=cluster.directory / "shard-0")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes").write_text("mine")
    fails("is not empty", target=tmp_path / "used")
    assert not (tmp_path / "new").exists()

    def damaged(pattern: str, change: Callable[[bytearray], bytes]) -> Path:
        copy = Path(shutil.copytree(good, tmp_path / f"damaged-{len(list(tmp_path.iterdir()))}"))
        (path,) = copy.glob(pattern)
        path.write_bytes(change(bytearray(path.read_bytes())))
        return copy

    fails("manifest.json is damaged", source=damaged("manifest.json", lambda content: content[:-5]))
    fails(
        "manifest.json is damaged (checksum)",
        source=damaged("manifest.json", lambda content: content.replace(b'"epoch": ', b'"epoch": 9')),
    )
    fails("has format 2, this version reads 1", source=damaged("*.json", lambda c: c.replace(b't": 1', b't": 2', 1)))
    assert not (tmp_path / "new").exists()
    fails("is damaged or missing: use another backup", source=damaged("shard-0/blocks*", flipped))
    certified = damaged("shard-0/blocks*", flipped)
    (path,) = certified.glob("shard-0/blocks*")
    manifest = read_backup(certified)
    manifest.shards[0]["files"][path.name]["sha256"] = sha256(path)
    text = json.dumps({"format": 1, "sha256": manifest.digest, "backup": asdict(manifest)})
    (certified / "manifest.json").write_text(text)
    fails("is damaged (checksum): use another backup", source=certified, target=tmp_path / "certified")
    command = [sys.executable, "-m", "weightserver", "serve", "--data-dir", str(tmp_path / "new"), "--num-shards", "2"]
    refused = subprocess.run([*command, "--listen", "127.0.0.1:0"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "is unfinished: repeat the 'restore' or 'reshard' that was stopped" in refused.stderr
    backup(client, tmp_path / "other")
    fails("was begun from something else: remove it, or finish that first", source=tmp_path / "other")
    assert weightserver("restore", good, "--data-dir", tmp_path / "new", "--shard", 0)[0] == 0
    fails("was restored from")
    fails("holds a shard's data: give another directory", shard=1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], RowState]:
    """Every loss of a run, and its rows at the end."""
    torch.set_num_threads(1)
    with LocalCluster(2) as cluster, WeightClient(cluster.addresses) as client:
        output = tmp_path_factory.mktemp("undisturbed") / "run"
        train(run_on(cluster, output))
        return losses(output), client.fetch_state(np.arange(NUM_IMAGES))


def run_on(cluster: LocalCluster, output: Path, **changes: Any) -> Any:
    return small_run(output, servers=",".join(cluster.addresses), encoder=ONLY_ROWS, **changes)


def assert_goes_on(
    cluster: LocalCluster, output: Path, undisturbed: tuple[list[float], RowState], **changes: Any
) -> None:
    """From a checkpoint to the end, as if nothing had happened."""
    train(run_on(cluster, output, resume=True, **changes))
    expected, state = undisturbed
    assert losses(output) == expected
    with WeightClient(cluster.addresses) as client:
        assert same(client.fetch_state(np.arange(NUM_IMAGES)), state)


@pytest.mark.parametrize(
    "lost", [pytest.param([1], id="one shard"), pytest.param([0, 1], id="all shards", marks=pytest.mark.slow)]
)
@pytest.mark.guard
def test_lost_shards_are_restored_and_the_run_goes_on(
    lost: list[int], undisturbed: tuple[list[float], RowState], weightserver: Weightserver, tmp_path: Path
) -> None:
    """The backup is of an older checkpoint than the newest; the other shards are rolled back to it."""
    output, name = tmp_path / "run", f"step-{EVERY:012d}"
    with LocalCluster(2, tmp_path / "servers") as cluster, WeightClient(cluster.addresses) as client:
        train(run_on(cluster, output))
        arguments = ["backup", *cluster.addresses, "--output", tmp_path / "backup", "--checkpoint", name]
        assert weightserver(*arguments)[0] == 0
        before = client.describe().epoch
        with WeightClient(cluster.addresses) as old_writer:
            old_writer.open_session("another", join=before)
            for shard in lost:
                cluster.processes[shard].kill()
                cluster.processes[shard].wait()
                data_dir = cluster.directory / f"shard-{shard}"
                shutil.rmtree(data_dir)
                if len(lost) == 1:  # only its data is gone, as `serve` would print_error
                    data_dir.mkdir()
                    (data_dir / "owner.lock").write_text("999999\n")
                restore = ["restore", tmp_path / "backup", "--data-dir", data_dir, "--shard", shard, "--num-shards", 2]
                assert weightserver(*restore)[0] == 0
                cluster.restart(shard)
            rows = np.arange(5, 10)  # of shard 1
            with pytest.raises(DataLossError, match="lacks what it had acknowledged"):
                old_writer.push_gradients(rows, np.ones((len(rows), 16), np.float32), step=30)
        with WeightClient(cluster.addresses) as operator:
            assert [known.name for known in operator.checkpoints()] == [name], "complete on all shards"
            with pytest.raises(FencedError, match=r"open a (session first|new one)"):
                operator.open_session("another", join=before)
        assert weightserver("rollback", name, *cluster.addresses, "--yes")[0] == 0
        with WeightClient(cluster.addresses) as operator:
            epochs = {shard.epoch for shard in operator.describe().shards}
        assert len(epochs) == 1
        assert epochs.pop() > before
        with pytest.raises(DataLossError, match=f"lacks what it had acknowledged: .*, or give --resume-step {EVERY},"):
            train(run_on(cluster, output, resume=True))
        assert_goes_on(cluster, output, undisturbed, resume_step=EVERY)


@pytest.mark.guard
def test_the_documented_backup_of_a_run_lacks_nothing(
    undisturbed: tuple[list[float], RowState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer takes another checkpoint between the commands, and removes the one that is backed up later. Then
    everything is lost but /backup."""
    text = (Path(__file__).parents[2] / "docs/operations.md").read_text().partition("\n## Backups\n")[2]
    commands = list(itertools.takewhile(lambda line: line.startswith("    "), text.strip("\n").splitlines()))
    assert len(commands) == 4
    output, backed_up = tmp_path / "runs/a", tmp_path / "backup"
    with LocalCluster(2, tmp_path / "servers") as cluster, WeightClient(cluster.addresses) as client:
        places = {
            "127.0.0.1:50051 127.0.0.1:50052": " ".join(cluster.addresses),
            "/backup": str(backed_up),
            "runs/a": str(output),
            "weightserver ": f"{sys.executable} -m weightserver ",
        }
        pattern = re.compile("|".join(places))

        def do(*lines: str) -> None:
            script = "\n".join(pattern.sub(lambda found: places[found.group()], line) for line in lines)
            subprocess.run(["bash", "-ec", script], check=True, timeout=60)

        save = Checkpoints.save

        def save_and_copy(checkpoints: Checkpoints, step: int, *arguments: Any) -> None:
            save(checkpoints, step, *arguments)
            if step == EVERY:
                do(*commands[:2])
            if step == 2 * EVERY:
                do(*commands[2:])

        monkeypatch.setattr(Checkpoints, "save", save_and_copy)
        train(run_on(cluster, output, keep_checkpoints=2))
        assert f"step-{EVERY:012d}" not in [known.name for known in client.checkpoints()]
    monkeypatch.setattr(Checkpoints, "save", save)
    shutil.rmtree(output)
    for shard in range(2):
        backups.restore(backed_up / "a", tmp_path / f"new/shard-{shard}", shard=shard)
    shutil.copytree(backed_up / "a-run", output)
    with LocalCluster(2, tmp_path / "new") as cluster, WeightClient(cluster.addresses) as client:
        train(run_on(cluster, output, resume=True))
        assert same(client.fetch_state(np.arange(NUM_IMAGES)), undisturbed[1])
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [record["loss"] for record in records] == undisturbed[0][EVERY:]


# ---- reshard


Table = tuple[list[Path], RowState, RowState]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Table]:
    """By the number of shards: their directories, which nobody serves and tests leave as they are; the table's rows at
    checkpoint `one`, and as they are now."""

    @functools.cache
    def made(num_shards: int) -> Table:
        directory = tmp_path_factory.mktemp("table")
        with LocalCluster(num_shards, directory) as cluster, WeightClient(cluster.addresses) as client:
            return targets_in(directory, num_shards), make_table(client), client.fetch_state(ROWS)

    return made


def identity(directory: Path, checkpoint: str) -> str:
    """Of a checkpoint that a directory holds."""
    storage = LmdbStorage(directory, readonly=True)
    with storage.read() as txn:
        found = read_state(txn).checkpoint(checkpoint).identity
    storage.close()
    assert len(found) == 32
    return found


def targets_in(directory: Path, num_shards: int) -> list[Path]:
    return [directory / f"shard-{shard}" for shard in range(num_shards)]


@pytest.mark.parametrize(
    ("old", "new", "rows_per_block"),
    [
        (2, 3, 7),
        (3, 1, 7),
        *(pytest.param(*case, marks=pytest.mark.guard) for case in [(2, 2, 4), (3, 2, 1), (2, 1, 63)]),
    ],
    ids=str,
)
def test_resharded_rows_are_the_same(
    old: int,
    new: int,
    rows_per_block: int,
    small_pieces: None,
    weightserver: Weightserver,
    tables: Callable[[int], Table],
    tmp_path: Path,
) -> None:
    sources, kept, _ = tables(old)
    before = [inspect_directory(source) for source in sources]
    targets = targets_in(tmp_path / "new", new)
    command = ["reshard", "--source", *sources[::-1], "--target", *targets, "--checkpoint", "one"]
    status, said, error = weightserver(*command, "--rows-per-block", rows_per_block)
    assert status == 0, error
    assert said == (
        f"{old} shards became {new} with {NUM_STORED} rows of checkpoint one (step 2), {rows_per_block} per block; "
        "2 later updates remain only in the old shards\n"
    )
    assert [inspect_directory(source) for source in sources] == before
    assert [verify_directory(target).problems for target in targets] == [[]] * new
    assert {identity(directory, "one") for directory in targets} == {identity(sources[0], "one")}
    seen = [inspect_directory(target) for target in targets]
    assert {(shard["spec"]["rows_per_block"], shard["clock"], shard["horizon"]) for shard in seen} == {
        (rows_per_block, 2, STEPS)
    }
    assert sum(shard["rows_stored"] for shard in seen) == NUM_STORED
    assert same(rows_in(targets), kept)
    assert same(rows_in(targets, checkpoint="one"), kept)


def test_resharding_the_rows_of_now(weightserver: Weightserver, tables: Callable[[int], Table], tmp_path: Path) -> None:
    sources, _, now = tables(2)
    targets = targets_in(tmp_path / "new", 3)
    status, said, _ = weightserver("reshard", "--source", *sources, "--target", *targets, "--current")
    assert (status, said.endswith("rows of step 4, 7 per block; 0 later updates remain only in the old shards\n")) == (0, True)
    assert same(rows_in(targets), now)
    assert [verify_directory(target).problems for target in targets] == [[], [], []]
    assert {tuple(inspect_directory(target)["checkpoints"]) for target in targets} == {()}


@pytest.mark.guard
@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("weightserver.storage.shard_builder:ShardBuilder.add", 20),  # halfway
        ("weightserver.storage.shard_builder:ShardBuilder.finish", 2),  # when two of three are finished
        pytest.param("weightserver.storage.shard_builder:ShardBuilder._begin", 2, marks=pytest.mark.slow),
        pytest.param(
            "weightserver.storage.shard_builder:ShardBuilder.add", 4, marks=pytest.mark.slow
        ),  # between two directories
        pytest.param("weightserver.operations.reshard:_Resharding.fill", 1, marks=pytest.mark.slow),
        pytest.param("weightserver.storage.shard_builder:ShardBuilder.finish", 3, marks=pytest.mark.slow),
    ],
)
def test_a_killed_reshard_goes_on(
    place: str, number: int, weightserver: Weightserver, tables: Callable[[int], Table], tmp_path: Path
) -> None:
    sources, kept, _ = tables(2)
    targets = targets_in(tmp_path / "new", 3)
    command = ["reshard", "--source", *sources, "--target", *targets, "--rows-per-block", 5]
    dies(place, number, *command, "--checkpoint", "one")
    if place.endswith(("add", "fill")):
        assert all(inspect_directory(target)["unfinished"] for target in targets)
        assert "it is unfinished: repeat" in verify_directory(targets[0]).problems[0]
        other = [*command, "--checkpoint", "two"]
        assert_one_line(weightserver(*other), "was begun from something else: remove it, or finish that first")
    if place.endswith("finish"):  # one of those that are finished is used already
        changed = LmdbStorage(targets[0])
        with changed.write() as txn:
            content = bytearray(txn.newest_block(0) or b"")
            content[-1] ^= 1
            txn.put_block(0, 1, content)
        changed.close()
    status, said, error = weightserver(*command, "--checkpoint", "one")
    assert status == 0, error
    assert f"2 shards became 3 with {NUM_STORED} rows of checkpoint one (step 2), 5 in a block" in said
    assert same(rows_in(targets, checkpoint="one"), kept)
    assert weightserver(*command, "--checkpoint", "one")[:2] == (0, said), "it is done, and nothing is changed"
    if place.endswith("finish"):
        with contextlib.closing(LmdbStorage(targets[0], readonly=True)) as used, used.read() as txn:
            assert txn.generations(0) == [1, 0]


def test_a_reshard_that_lost_or_changed_a_row_is_noticed(
    small_pieces: None, tables: Callable[[int], Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, _, _ = tables(2)
    converted = resharding._Resharding._converted

    def without(work: Any, first: int) -> Iterator[tuple[int, bytearray]]:
        yield from (found for found in converted(work, first) if found[0] != 4)

    def changed(work: Any, first: int) -> Iterator[tuple[int, bytearray]]:
        codec = resharding.BlockCodec(work.new)
        for number, block in converted(work, first):
            if number == 4:
                codec.views(block).momentum_buffer[2, 3] += 1
                codec.seal(4, block)
            yield number, block

    for name, fault in (("without", without), ("changed", changed)):
        monkeypatch.setattr(resharding._Resharding, "_converted", fault)
        targets = targets_in(tmp_path / name, 3)
        with pytest.raises(StorageError, match=r"shard-1: block 4 is not what .* holds: remove the new directories"):
            resharding.reshard(sources, targets, checkpoint="one")
        assert all(inspect_directory(target)["unfinished"] for target in targets)


@pytest.mark.guard
def test_a_run_goes_on_with_other_shards(
    undisturbed: tuple[list[float], RowState], weightserver: Weightserver, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with LocalCluster(2, tmp_path / "old") as cluster:
        train(run_on(cluster, output))
    command = ["reshard", "--source", *sorted((tmp_path / "old").glob("shard-*/")), "--rows-per-block", 8]
    assert weightserver(*command, "--target", *targets_in(tmp_path / "new", 3))[0] == 0
    with LocalCluster(3, tmp_path / "new") as cluster:
        with pytest.raises(TableMismatchError, match="holds another table"):
            train(run_on(cluster, output, resume=True))
        assert_goes_on(cluster, output, undisturbed, rows_per_block=8)


def test_reshards_that_cannot_be(
    weightserver: Weightserver, cluster: LocalCluster, tables: Callable[[int], Table], tmp_path: Path
) -> None:
    sources, _, _ = tables(2)
    targets = targets_in(tmp_path / "new", 3)
    (tmp_path / "empty").mkdir()

    def fails(message: str, source: list[Path] = sources, target: list[Path] = targets, more: Any = ()) -> None:
        assert_one_line(weightserver("reshard", "--source", *source, "--target", *target, *more), message)

    fails("is of a cluster of 2 shards, 1 were given: give all", source=sources[:1])
    fails("a directory is given twice", source=[sources[0], sources[0]])
    shutil.copytree(sources[0], tmp_path / "copy")
    fails("two directories hold the same shard of 2", source=[sources[0], tmp_path / "copy"])
    fails("a directory is given twice", target=sources)
    fails("holds no weight server data", source=[tmp_path / "empty", sources[1]])
    fails("is served by another process", source=[cluster.directory / "shard-0", sources[1]])
    old_copy = Path(shutil.copytree(sources[0], tmp_path / "old copy"))
    (old_copy / "owner.lock").write_text("999999\n")
    fails("data.mdb lacks transactions that it had", source=[old_copy, sources[1]])
    assert_one_line(weightserver("compact", old_copy, "--output", tmp_path / "x"), "lacks transactions that it had")
    fails("there is no checkpoint 'three' on all shards, only ['one', 'two']", more=["--checkpoint", "three"])
    fails("rows_per_block must lie in 1..2048, got 0", more=["--rows-per-block", 0])
    other = [Path(shutil.copytree(source, tmp_path / source.name)) for source in sources]
    fails("holds a shard's data: give another directory", target=other)
    assert not (tmp_path / "new").exists()
    storage = LmdbStorage(other[1])
    with storage.write() as txn:
        write_spec(txn, replace(SPEC, dim=8))
    storage.close()
    fails("hold different tables: give those of one", source=[sources[0], other[1]])


# ---- compact


@pytest.mark.guard
def test_a_compacted_directory_holds_the_same_in_less_space(weightserver: Weightserver, tmp_path: Path) -> None:
    """Without versions that no checkpoint needs, here those of released ones."""
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
    assert verdict.num_versions <= 3 * 143  # "one", "two" and "step 9", which is what is there now
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
    """What a supervisor's `serve` of the directory complains of."""
    command = [sys.executable, "-m", "weightserver", "serve", "--data-dir", str(source), "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    return done.stderr


COPY, TOMBSTONE, RENAME = (
    "weightserver.operations.compact:write_synced",
    "pathlib:Path.symlink_to",
    "pathlib:Path.replace",
)


@pytest.mark.parametrize(
    ("place", "number"),
    [
        pytest.param("weightserver.storage.lmdb_storage:LmdbStorage.copy", 1, marks=pytest.mark.guard),
        pytest.param(COPY, 1, marks=pytest.mark.guard),
        pytest.param("weightserver.common.atomic_files:sync", 1, marks=pytest.mark.guard),
        pytest.param(TOMBSTONE, 1, marks=pytest.mark.guard),
        pytest.param("weightserver.storage.tombstone:sync", 1, marks=pytest.mark.guard),
        pytest.param("weightserver.operations.compact:leave_tombstone", 1, marks=pytest.mark.guard),
        pytest.param(RENAME, 1, marks=pytest.mark.guard),
        pytest.param("weightserver.operations.compact:sync", 2, marks=pytest.mark.guard),
    ],
)
def test_a_killed_compact_and_a_supervisor_lose_no_write(
    place: str, number: int, weightserver: Weightserver, tmp_path: Path
) -> None:
    """Killed anywhere: the source is served and written to again, or refused; the repeated command has all writes."""
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


def read_rows(directory: Path) -> RowState:
    """As they are in a directory that nobody serves."""
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
    """The commands of operations.md, one by one; between them a supervisor starts the shard."""
    text = (Path(__file__).parents[2] / "docs/operations.md").read_text().partition("\n## Space\n")[2]
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
    subprocess.run(lines[0], shell=True, check=True, cwd=Path(__file__).parents[2], capture_output=True)
    assert f"ws0 was compacted to {served}.new: serve that copy" in served_in_between(served)
    subprocess.run(lines[1], shell=True, check=True)
    assert "--init" in served_in_between(served)
    subprocess.run(lines[2], shell=True, check=True)
    served.rename(tmp_path / "data/shard-0")
    with LocalCluster(1, tmp_path / "data") as cluster, WeightClient(cluster.addresses) as client:
        assert same(client.fetch_state(ROWS), kept)


# ---- export


@pytest.mark.guard
def test_an_export_of_several_files_is_whole_or_not_there(
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed, with a full disk, and while another export writes there."""
    make_table(client)
    state, new = client.fetch_state(ROWS, step=4), tmp_path / "out/new"
    command = ["export", *cluster.addresses, "--output", new]
    dies("weightserver.operations.export:atomic_write", 3, *command)
    assert not list(new.glob("*rows*"))
    monkeypatch.setattr(exports, "_BYTES_PER_FILE", 20_000)
    original, written, others = exports.atomic_write, [], []

    def full(path: Path, write: Callable[[Path], object]) -> None:
        if len(written) == 3:
            raise OSError(f"{path} cannot be written (No space left on device)")
        written.append(path)
        original(path, write)

    monkeypatch.setattr(exports, "atomic_write", full)
    assert_one_line(weightserver(*command), "No space left on device")
    assert not list(new.glob("*rows*"))
    shutil.rmtree(tmp_path / "out")
    written.clear()
    assert_one_line(weightserver(*command), "No space left on device")
    assert not (tmp_path / "out").exists()

    def beside_another(path: Path, write: Callable[[Path], object]) -> None:
        others.append(weightserver(*command))
        original(path, write)

    monkeypatch.setattr(exports, "atomic_write", beside_another)
    assert weightserver(*command)[1].endswith(f"wrote {len(others)} files to {new}\n")
    assert len(others) > 5
    for other in others:
        assert_one_line(other, "is being written by another process")
    assert [path.name for path in new.parent.iterdir()] == ["new"]
    files = [load_file(path) for path in sorted(new.iterdir())]
    assert len(files) == len(others)
    assert np.array_equal(np.concatenate([file["row"] for file in files]), ROWS)
    assert np.array_equal(np.concatenate([file["weight"] for file in files]), state.weight)
    assert_one_line(weightserver(*command), "is not empty: give another directory")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--step=-1", "step must not be negative"),
        ("--step=101", "step 101 is outside the schedule's 0..100"),
        ("--step=1", "has seen 4 updates, its state before update 1 is gone"),
        ("--checkpoint=three", "there is no checkpoint 'three' on all shards, only ['one', 'two']"),
    ],
)
def test_exports_that_cannot_be(
    option: str, message: str, weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    make_table(client)
    assert_one_line(weightserver("export", *cluster.addresses, "--output", tmp_path / "a/b", option), message)
    assert not (tmp_path / "a").exists()


def test_an_export_into_what_a_link_names(
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_table(client)
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("disk")
    command = ["export", *cluster.addresses, "--output"]
    assert weightserver(*command, tmp_path / "link")[0] == 0
    assert len(list((tmp_path / "disk").iterdir())) == 1
    assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o700
    monkeypatch.chdir(tmp_path)
    assert_one_line(weightserver(*command, "."), "or the current directory: give a new directory in it")
    assert_one_line(weightserver(*command, "/proc"), "is a mounted disk or the current")


# ---- a full disk


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Files may take 24 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (24 << 10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.guard
@pytest.mark.parametrize("command", ["backup", "restore", "reshard", "compact", "export"])
def test_a_full_disk_is_one_line_and_leaves_nothing_to_be_taken_for_whole(
    command: str,
    weightserver: Weightserver,
    client: WeightClient,
    cluster: LocalCluster,
    tables: Callable[[int], Table],
    tmp_path: Path,
) -> None:
    """When there is room again the same command works."""
    make_table(client)
    new = tmp_path / "new"
    (source, other), _, _ = tables(2)
    if command == "compact":
        source = Path(shutil.copytree(source, tmp_path / "source"))
    if command == "restore":
        backup(client, tmp_path / "made", checkpoint="one")
    arguments, whole = {
        "backup": ([*cluster.addresses, "--output", new], "manifest.json"),
        "restore": ([tmp_path / "made", "--data-dir", new, "--shard", 0], None),
        "reshard": (["--source", source, other, "--target", new], None),
        "compact": ([source, "--output", new], "data.mdb"),
        "export": ([*cluster.addresses, "--output", new], "rows-000000000000-000000000999.safetensors"),
    }[command]
    with no_room():
        status, _, error = weightserver(command, *arguments)
    assert_one_line((status, "", error), "too large")
    assert whole is None or not (new / whole).exists()
    assert not list(tmp_path.rglob("*.partial"))
    assert weightserver(command, *arguments)[0] == 0
    assert whole is None or (new / whole).exists()


# ---- rolling restart


@pytest.mark.guard
def test_shards_are_restarted_in_turn_while_a_run_trains(
    undisturbed: tuple[list[float], RowState], tmp_path: Path
) -> None:
    """SIGTERM, the shard drains and ends, another process serves its directory."""
    output, restarts = tmp_path / "run", []
    with LocalCluster(2, tmp_path / "servers") as cluster:

        def restart_all() -> None:
            for number in range(2):
                metrics = output / "metrics.jsonl"
                while not metrics.exists() or metrics.read_text().count("\n") < 12 * number + 4:
                    time.sleep(0.002)
                ended = cluster.processes[number]
                cluster.restart(number)
                restarts.append((ended.returncode, len(metrics.read_text().splitlines())))

        operator = threading.Thread(target=restart_all)
        operator.start()
        train(run_on(cluster, output))
        operator.join()
        with WeightClient(cluster.addresses) as client:
            state = client.fetch_state(np.arange(NUM_IMAGES))
    assert [code for code, _ in restarts] == [0, 0], "a shard did not end well"
    assert restarts[-1][1] < len(undisturbed[0]), "the run was over before"
    assert losses(output) == undisturbed[0]
    assert same(state, undisturbed[1])
