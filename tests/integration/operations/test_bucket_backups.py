"""Backups in a bucket of a real S3 server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.comparing import rows_in, same
from tests.helpers.object_store import Fault, Proxy, credentials, object_store
from tests.helpers.operations import (
    ROWS,
    Weightserver,
    assert_one_line,
    dies,
    lose_blocks,
    make_table,
    push,
    targets_in,
)
from tests.helpers.watching import wait_until
from tests.integration.operations.backups import before_copying, by_another, restored
from weightserver import LocalCluster, WeightClient
from weightserver.common import object_store as objects
from weightserver.operations import backup as backups
from weightserver.operations.backup_places import MANIFEST, place_at
from weightserver.operations.restore import restore

BACKUPS = Path("s3://backups/a run")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with object_store(tmp_path_factory.mktemp("server"), "backups") as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _empty(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty bucket, and a server that answers."""
    monkeypatch.setattr(objects, "_RETRY_SECONDS", 1)
    objects._bucket.cache_clear()
    yield
    server.heal()
    monkeypatch.undo()
    objects._bucket.cache_clear()
    objects.remove(objects.below(Path("s3://backups")))


def stored() -> list[str]:
    """The objects of all backups."""
    return sorted(str(path.relative_to(BACKUPS)) for path in objects.below(BACKUPS))


@pytest.mark.guard
def test_a_chain_in_a_bucket_is_restored(
    weightserver: Weightserver,
    back_up: Callable[..., str],
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
) -> None:
    """Killed halfway, repeated, continued by increments; old ones removed, but those that are needed."""
    url = "s3://backups/a run"
    make_table(client)
    first = ["backup", *cluster.addresses, "--output", f"{url}/mon", "--checkpoint", "one"]
    dies("weightserver.common.object_store:write", 3, *first)
    assert stored(), "the test killed it too early"
    assert_one_line(
        weightserver("restore", f"{url}/mon", "--data-dir", tmp_path / "x", "--shard", 0), f"{url}/mon holds no backup"
    )
    assert back_up(f"{url}/mon", "--checkpoint", "one").endswith(f"bytes, to {url}/mon\n")
    assert_one_line(weightserver(*first), f"{url}/mon is not empty: give another folder")
    for name, step in (("tue", 4), ("wed", 5)):
        push(client, step, ROWS[210:222])
        client.checkpoint(name, step=step + 1)
        kept = client.fetch_state(ROWS)
        said = back_up(f"{url}/{name}", "--incremental", "--keep", 1)
        assert said.endswith(f", since backup {'mon' if name == 'tue' else 'tue'}\n")
    for shard, target in enumerate(targets_in(tmp_path / "new", 2)):
        status, _, error = weightserver("restore", f"{url}/wed", "--data-dir", target, "--shard", shard)
        assert status == 0, error
    assert same(rows_in(targets_in(tmp_path / "new", 2)), kept)
    objects.remove([BACKUPS / "tue/manifest.json"])
    assert_one_line(
        weightserver("restore", f"{url}/wed", "--data-dir", tmp_path / "x", "--shard", 0),
        f"{url}/wed needs its base tue, but {url}/tue holds no backup",
    )
    back_up(f"{url}/thu", "--keep", 1)
    assert {name.partition("/")[0] for name in stored()} == {"thu", "tue"}, "tue is no backup any more"


@pytest.mark.guard
@pytest.mark.parametrize("another_one", ["is killed", "is first", "is removed again"])
def test_of_two_commands_to_one_name_one_succeeds(
    another_one: str,
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second has another checkpoint, and removes the files of the first once it is complete."""
    url = "s3://backups/a run/mon"
    make_table(client)
    copy_shards = backups._copy_shards

    def begin_another(*arguments: Any) -> Any:
        copied = copy_shards(*arguments)
        monkeypatch.setattr(backups, "_copy_shards", copy_shards)
        if another_one == "is killed":
            dies("weightserver.common.object_store:write", 3, "backup", *cluster.addresses, "--output", url)
            return copied
        by_another(cluster, BACKUPS / "mon", checkpoint="one")
        if another_one == "is removed again":
            place_at(BACKUPS / "mon").remove()
        return copied

    monkeypatch.setattr(backups, "_copy_shards", begin_another)
    outcome = weightserver("backup", *cluster.addresses, "--output", url)
    if another_one == "is killed":
        assert outcome[0] == 0, outcome[2]
    else:
        assert outcome[0] == 1
        assert outcome[2].endswith(f"another command wrote to {url} meanwhile: give another folder\n")
    for shard in range(2):
        restoring = weightserver("restore", url, "--data-dir", tmp_path / f"{shard}", "--shard", shard)
        if another_one == "is removed again":
            assert_one_line(restoring, f"{url} holds no backup")
        else:
            checkpoint = "two" if another_one == "is killed" else "one (step 2)"
            assert f"checkpoint {checkpoint}" in restoring[1]
    assert len({name.split("-")[-1] for name in stored() if "shard-" in name}) == (another_one != "is removed again")


def test_what_lies_in_the_folder_of_a_backup_stays(
    cluster: LocalCluster, client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another backup, when that of the folder is complete, and when it is removed."""
    kept = make_table(client)
    before_copying(monkeypatch, lambda: by_another(cluster, BACKUPS / "all/mon", checkpoint="one"))
    backups.backup(client, BACKUPS / "all")
    backups.backup(client, BACKUPS / "next", keep=1)
    assert "all/manifest.json" not in stored()
    assert same(restored(BACKUPS / "all/mon", tmp_path), kept)


def test_few_parts_of_an_object_share_a_slow_connection(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has to arrive in the time of a request."""
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)  # the least that stores take
    content = os.urandom(22 << 20)
    server.heal()
    objects.write(BACKUPS / "mon/file", content)
    assert server.most_at_once == objects._PARTS_AT_ONCE
    assert objects.read(BACKUPS / "mon/file") == content


def test_a_folder_that_a_console_has_made_is_empty(server: Proxy) -> None:
    """By an object without content, whose name ends in a slash."""
    objects.write(BACKUPS / "mon/folder", b"")
    server.listed = (b"mon/folder<", b"mon/<")
    with place_at(BACKUPS / "mon").new() as write:
        write(MANIFEST, b"complete")
    server.heal()
    assert stored() == ["mon/folder", "mon/manifest.json"]


@pytest.mark.guard
def test_ctrl_c_ends_a_backup_that_waits_for_a_silent_store(
    cluster: LocalCluster, client: WeightClient, server: Proxy
) -> None:
    """Its threads wait, one for each shard."""
    make_table(client)
    server.silent = "/backups/a%20run/mon/shard-"
    command = ["backup", *cluster.addresses, "--output", "s3://backups/a run/mon"]
    with subprocess.Popen(
        [sys.executable, "-m", "weightserver", *command],
        env=os.environ | credentials(server.url),
        stderr=subprocess.PIPE,
    ) as process:
        try:
            wait_until(lambda: any(one.path.startswith(server.silent) for one in server.requests))
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=objects._REQUEST_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130
    assert errors.decode().endswith("weightserver backup: interrupted\n")


def test_ctrl_c_while_the_manifest_is_made_leaves_a_whole_backup(
    cluster: LocalCluster, client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or none: the store may have it although its answer did not come."""
    make_table(client)
    create = objects.create

    def interrupted(*arguments: Any) -> bytes:
        create(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(objects, "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backups.backup(client, BACKUPS / "mon", checkpoint="one")
    for shard in range(len(cluster.addresses)):
        restore(BACKUPS / "mon", tmp_path / str(shard), shard=shard)


@pytest.mark.guard
def test_a_bucket_that_refuses_is_one_line(
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    server: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What others have below the name stays, and nothing of the backup is left."""
    make_table(client)

    def fails(message: str, output: str = "s3://backups/a run/mon") -> None:
        assert_one_line(weightserver("backup", *cluster.addresses, "--output", output), message)

    fails("s3://backups is a whole bucket: give s3://BUCKET/NAME", "s3://backups")
    fails(": no such bucket, or names in it that cannot be read", "s3://none/a/mon")
    objects.write(BACKUPS / "mon/notes", b"mine")
    fails("s3://backups/a run/mon is not empty: give another folder")
    fails("s3://backups/a run is not empty: give another folder", "s3://backups/a run")
    assert stored() == ["mon/notes"]
    with monkeypatch.context() as lossy:
        lose_blocks(lossy)
        fails("sent other blocks of checkpoint", "s3://backups/a run/tue")
    assert stored() == ["mon/notes"]
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_SECRET_ACCESS_KEY", "another")
        objects._bucket.cache_clear()
        fails(": access is denied: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the rights of their role, and w")
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_ENDPOINT_URL", server.url.removeprefix("http://"))
        objects._bucket.cache_clear()
        fails(": begin it with https:// or http://")
    objects._bucket.cache_clear()
    server.always = Fault.BUSY
    fails(": no usable answer in up to")
    restoring = weightserver("restore", "s3://backups/a run/mon", "--data-dir", tmp_path / "x", "--shard", 0)
    assert_one_line(restoring, "s3://backups/a run/mon/manifest.json: no usable answer in up to")
    assert not (tmp_path / "x").exists()
