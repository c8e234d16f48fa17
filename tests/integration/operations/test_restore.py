"""Shards restored from backups."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import commands
from tests.helpers.comparing import rows_in, same
from tests.helpers.operations import (
    ROWS,
    Weightserver,
    assert_one_line,
    dies,
    flipped,
    make_table,
    reshard_all,
    targets_in,
)
from weightserver import DataLossError, LocalCluster, NoTableError, StorageError, WeightClient
from weightserver.common.atomic_files import sha256
from weightserver.operations.backup import backup
from weightserver.operations.backup_files import read_backup
from weightserver.operations.backup_places import Folder
from weightserver.operations.inspect import inspect_directory
from weightserver.operations.restore import restore
from weightserver.storage.lmdb_storage import LmdbStorage


@pytest.mark.guard
def test_restored_shards_descend_from_their_checkpoint_and_nothing_later(tmp_path: Path) -> None:
    """Clients that know the checkpoint continue; those that know later writes are refused. Likewise after a reshard."""
    with LocalCluster(2, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
        make_table(client)
        cluster.restart(1)
        one, two = client.checkpoints()
        client.release("two")  # of another incarnation
        later = client.marks()
        backup(client, tmp_path / "backup", checkpoint="one")
        reshard_all(client, targets_in(tmp_path / "resharded", 2), checkpoint="one")
    assert len(one.marks) == len(two.marks) == 2
    for shard, directory in enumerate(targets_in(tmp_path / "restored", 2)):
        restore(tmp_path / "backup", directory, shard=shard)
    for name in ("restored", "resharded"):
        with LocalCluster(2, tmp_path / name) as cluster:
            for is_restarted in (False, True):
                if is_restarted:
                    cluster.restart(1)
                with WeightClient(cluster.addresses) as client:
                    client.expect(one.marks)
                    for marks in (two.marks, later):
                        with pytest.raises(DataLossError, match="does not descend from"):
                            client.expect(marks)
                    client.open_session("next")


@pytest.mark.guard
def test_a_shard_restored_next_to_others_is_rolled_back_before_a_backup(
    weightserver: Weightserver, tmp_path: Path
) -> None:
    with LocalCluster(2, tmp_path / "servers") as cluster, WeightClient(cluster.addresses) as client:
        kept = make_table(client)
        backup(client, tmp_path / "backup", checkpoint="one")
        client.open_session("run, resumed")
        cluster.processes[1].kill()
        cluster.processes[1].wait()
        shutil.rmtree(cluster.directory / "shard-1")
        restore(tmp_path / "backup", cluster.directory / "shard-1", shard=1)
        cluster.restart(1)
        command = ["backup", *cluster.addresses, "--output", tmp_path / "again"]
        message = "shard 1 is at session 1, shard 0 at 2, as after restoring only one of them: take all to one"
        assert_one_line(weightserver(*command), message)
        assert not (tmp_path / "again").exists()
        assert_one_line(weightserver("release", "one", *cluster.addresses), message)
        assert weightserver("rollback", "one", *cluster.addresses, "--yes")[0] == 0
        client._shards.connections()[1]._retry_seconds = 0.3
        with pytest.raises(DataLossError, match="shard 1 lacks what it had acknowledged"):
            client.fetch_state(ROWS)  # it knows of more
        with WeightClient(cluster.addresses) as reader:
            assert same(reader.fetch_state(ROWS), kept)
        assert weightserver(*command)[0] == 0


@pytest.mark.guard
def test_shards_restored_from_different_backups_are_told(weightserver: Weightserver, tmp_path: Path) -> None:
    """They keep no checkpoint in common, so there is none to return to, and none is to be released."""
    who = "shards [0] and [1] keep different checkpoints 'one'"
    with LocalCluster(2, tmp_path / "old") as cluster, WeightClient(cluster.addresses) as client:
        kept = make_table(client)
        backup(client, tmp_path / "earlier", checkpoint="one")
        client.release("one")
        client.checkpoint("one", step=4)
        backup(client, tmp_path / "later", checkpoint="one")
    for shard, source in enumerate(("earlier", "later")):
        restore(tmp_path / source, tmp_path / f"new/shard-{shard}", shard=shard)
    with LocalCluster(2, tmp_path / "new") as cluster:
        status, listed, remarks = weightserver("checkpoints", *cluster.addresses)
        assert (status, listed) == (0, "")
        assert f"{who}: shard 1 was not rolled back or restored together with shard 0" in remarks
        assert "release" not in remarks, "it would be refused"
        message = f"{who}, as after a checkpoint() that failed on others, or on shards restored from different backups "
        message += "or filled from different checkpoints: restore all shards from one backup, or fill all with the same"
        assert_one_line(weightserver("rollback", "one", *cluster.addresses, "--yes"), message)
        with WeightClient(cluster.addresses) as client, pytest.raises(NoTableError, match=re.escape(who)):
            client.fetch_state(ROWS, checkpoint="one")
    shutil.rmtree(tmp_path / "new/shard-1")
    restore(tmp_path / "earlier", tmp_path / "new/shard-1", shard=1)
    with LocalCluster(2, tmp_path / "new") as cluster, WeightClient(cluster.addresses) as client:
        assert same(client.fetch_state(ROWS), kept)


@pytest.mark.guard
def test_a_killed_restore_can_be_repeated(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    kept, targets = make_table(client), targets_in(tmp_path / "new", 2)
    backup(client, tmp_path / "backup", checkpoint="one")
    commands = [
        ["restore", tmp_path / "backup", "--data-dir", target, "--shard", shard] for shard, target in enumerate(targets)
    ]
    dies("weightserver.storage.directory:OwnerLock.record_transaction", 1, *commands[0])
    with pytest.raises(StorageError, match="shard-0 holds no shard yet: repeat the 'restore'"):
        LmdbStorage(targets[0], must_exist=True)  # as 'serve' without --init does
    dies("weightserver.storage.shard_builder:ShardBuilder.add", 1, *commands[0])
    assert "unfinished" in inspect_directory(targets[0])
    for command in commands:
        assert weightserver(*command)[0] == 0
    dies("weightserver.operations.restore:restore", 1, *commands[0][:3], tmp_path / "x", "--shard", 0)
    outcome = weightserver(*commands[0][:3], tmp_path / "x", "--shard", 0)
    assert_one_line(outcome, "was already restored from")  # it is complete
    assert ": serve it, or give another directory" in outcome[2]
    assert same(rows_in([tmp_path / "x", targets[1]]), kept)
    assert same(rows_in(targets), kept)


@pytest.mark.guard  # seconds
def test_restore_rejects_invalid_arguments_and_damaged_backups(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    """A damaged backup leaves nothing that can be served."""
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

    def damaged(pattern: str, change: Callable[[bytes], bytes]) -> Path:
        copy = Path(shutil.copytree(good, tmp_path / f"damaged-{len(list(tmp_path.iterdir()))}"))
        (path,) = copy.glob(pattern)
        path.write_bytes(change(path.read_bytes()))
        return copy

    fails("manifest.json is damaged", source=damaged("manifest.json", lambda content: content[:-5]))
    fails(
        "manifest.json is damaged (checksum)",
        source=damaged("manifest.json", lambda content: content.replace(b'"epoch": ', b'"epoch": 9')),
    )

    def earlier(content: bytes) -> bytes:
        """As a commit before increments wrote it."""
        stored = json.loads(content)
        del stored["backup"]["base"], stored["backup"]["base_sha256"]
        fields = json.dumps(stored["backup"], sort_keys=True).encode()
        return json.dumps(stored | {"sha256": hashlib.sha256(fields).hexdigest()}).encode()

    fails("or was made by another commit before the release of 0.3.0", source=damaged("manifest.json", earlier))
    foreign = damaged("*.json", lambda content: content.replace(b'"format": "0.3"', b'"format": 2', 1))
    fails("has format 2, weightserver 0.3.0 reads 0.3 only: use the version that wrote it", source=foreign)
    assert not (tmp_path / "new").exists()
    fails("is damaged or missing: use another backup", source=damaged("shard-0/blocks*", flipped))
    certified = damaged("shard-0/blocks*", flipped)
    (path,) = certified.glob("shard-0/blocks*")
    manifest = read_backup(Folder(certified))
    manifest.shards[0]["files"][path.name]["sha256"] = sha256(path)
    text = json.dumps({"format": "0.3", "sha256": manifest.digest, "backup": asdict(manifest)})
    (certified / "manifest.json").write_text(text)
    fails("is damaged (checksum) in rows ", source=certified, target=tmp_path / "certified")
    command = ["serve", "--data-dir", tmp_path / "new", "--num-shards", 2, "--listen", "127.0.0.1:0"]
    assert_one_line(
        commands.weightserver(*command), "is unfinished: repeat the 'restore' or 'reshard' that was stopped"
    )
    assert weightserver("restore", good, "--data-dir", tmp_path / "new", "--shard", 0)[0] == 0
    fails("was already restored from")
    fails("holds a shard's data: give another directory", shard=1)
