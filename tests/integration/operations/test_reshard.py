"""Clusters changed to other numbers of shards and rows per block, a shard at a time, by running ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.comparing import rows_in, same
from tests.helpers.operations import (
    NUM_STORED,
    ROWS,
    SPEC,
    Weightserver,
    assert_one_line,
    dies,
    lose_blocks,
    make_table,
    push,
    reshard_all,
    targets_in,
)
from tests.helpers.stored import get, put, stored
from tests.helpers.watching import wait_until
from weightserver import (
    ClusterError,
    DataLossError,
    LocalCluster,
    ShardUnavailableError,
    StorageError,
    TableMismatchError,
    TableSpec,
    WeightClient,
)
from weightserver.client.results import TableInfo
from weightserver.core.blocks import BlockCodec
from weightserver.core.sharding import Sharding
from weightserver.core.versions import Version
from weightserver.operations.checkpoint_blocks import CheckpointReader
from weightserver.operations.inspect import inspect_directory
from weightserver.operations.reshard import reshard
from weightserver.operations.verify import verify_directory
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.shard_builder import ShardBuilder


@pytest.mark.parametrize(
    ("num_shards", "rows_per_block"),
    [(3, 7), *(pytest.param(*case, marks=pytest.mark.guard) for case in [(1, 63), (2, 1)])],
)
def test_each_new_shard_receives_its_rows(
    num_shards: int,
    rows_per_block: int,
    small_pieces: None,
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
) -> None:
    """The old shards are served, and written to, meanwhile."""
    kept, targets = make_table(client), targets_in(tmp_path / "new", num_shards)
    known = client.checkpoints()[0]
    for shard, target in enumerate(targets):
        push(client, 10 + shard, ROWS)
        options = ["--shard", f"{shard}/{num_shards}", "--rows-per-block", f"{rows_per_block}", "--checkpoint", "one"]
        addresses = ",".join(cluster.addresses)
        status, said, error = weightserver("reshard", "--from", addresses, "--target", target, *options)
        assert status == 0, error
        assert said.startswith(f"filled shard {shard} of {num_shards} with ")
        assert f" rows of checkpoint one (step 2), {rows_per_block} per block; {9 + shard} later updates" in said
    assert [verify_directory(target).problems for target in targets] == [[]] * num_shards
    seen = [inspect_directory(target) for target in targets]
    assert {(shard["spec"]["rows_per_block"], shard["clock"]) for shard in seen} == {(rows_per_block, 2)}
    assert sum(shard["rows_stored"] for shard in seen) == NUM_STORED
    assert same(rows_in(targets, checkpoint="one"), kept)
    with LocalCluster(num_shards, tmp_path / "new") as changed, WeightClient(changed.addresses) as reader:
        assert reader.checkpoints()[0].checkpoint_id == known.checkpoint_id
        assert same(reader.fetch_state(ROWS), kept)
        reader.open_session("run")
        push(reader, 5, ROWS)
        assert weightserver("release", "one", *changed.addresses) == (0, "released one\n", "")


def test_resharding_the_current_rows(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    """Where there is no checkpoint, say: all commands take the same one, also when they are repeated."""
    make_table(client)
    for name in ("one", "two"):
        client.release(name)
    now, targets = client.fetch_state(ROWS), targets_in(tmp_path / "new", 3)
    commands = [
        ["reshard", "--from", *cluster.addresses, "--shard", f"{shard}/3", "--target", target]
        for shard, target in enumerate(targets)
    ]
    assert_one_line(weightserver(*commands[0]), "there is no checkpoint on all shards")
    assert "--current takes one now, if nothing writes meanwhile" in weightserver(*commands[0])[2]
    for command in (*commands, commands[0]):
        status, said, error = weightserver(*command, "--current")
        assert status == 0, error
        assert said.endswith(
            "checkpoint current-4 (step 4), 7 per block; 0 later updates remain only in the old shards\n"
        )
    assert same(rows_in(targets), now)
    assert [verify_directory(target).problems for target in targets] == [[], [], []]
    push(client, 3, ROWS)  # a late gradient: the newest step is still 4
    assert_one_line(weightserver(*commands[0], "--current"), "end what writes, release 'current-4', and fill all new")


def test_shards_send_only_blocks_that_are_needed(
    client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(client)
    received, blocks = list[int](), CheckpointReader.blocks

    def count(reader: CheckpointReader) -> Any:
        for block in blocks(reader):
            received.append(block.number)
            yield block

    monkeypatch.setattr(CheckpointReader, "blocks", count)
    reshard_all(client, targets_in(tmp_path, 3))
    assert len(received) == len(set(received)), "without another size of blocks, each goes to one shard"
    for shard, target in enumerate(targets_in(tmp_path / "smaller", 3)):
        received.clear()
        reshard(client, target, shard=shard, num_shards=3, rows_per_block=2)
        sharding, size = Sharding(2, 3), SPEC.rows_per_block
        for block in received:
            assert shard in sharding.shard_of(ROWS[block * size : (block + 1) * size])


def test_a_table_that_changes_while_a_reshard_begins(
    cluster: LocalCluster, client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer extends it and takes a checkpoint once its size and learning rates were read."""
    make_table(client)
    describe = WeightClient.describe

    def describe_and_train(reader: WeightClient) -> TableInfo:
        monkeypatch.setattr(WeightClient, "describe", describe)
        info = describe(reader)
        client.extend_table(1_100)
        push(client, 4, np.arange(1_000, 1_100))
        client.checkpoint("three", step=5)
        return info

    with WeightClient(cluster.addresses) as another:
        monkeypatch.setattr(WeightClient, "describe", describe_and_train)
        made = reshard(another, tmp_path / "new/shard-0", shard=0, num_shards=1)
    kept = client.fetch_state(ROWS, checkpoint=made.checkpoint)
    with LocalCluster(1, tmp_path / "new") as filled, WeightClient(filled.addresses) as reader:
        assert reader.describe().clock == made.step, "it has the learning rates of all of the checkpoint's steps"
        assert same(reader.fetch_state(ROWS, checkpoint=made.checkpoint), kept)


# ---- clients that live through it

MOVED = np.r_[0:8, 12:16]
"""Rows of both shards. With 4 rows per block, rows 4 to 7 are of shard 1; with 8, of shard 0."""
ONES = np.ones((len(MOVED), 4), np.float32)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster that is resharded in its place."""
    with LocalCluster(2, tmp_path) as cluster:
        yield cluster


def connected(cluster: LocalCluster) -> WeightClient:
    """A client that has made a push to MOVED, and has taken checkpoint `kept`."""
    client = WeightClient(cluster.addresses, retry_seconds=20)
    client.create_table(TableSpec(num_rows=64, dim=4, momentum=0, weight_decay=0, init_std=0, rows_per_block=4))
    client.extend_schedule(0, np.ones(9, np.float32))
    client.open_session("run")
    client.push_gradients(MOVED, ONES, step=0)
    client.checkpoint("kept", step=1)
    return client


def stop(cluster: LocalCluster, shard: int) -> None:
    cluster.processes[shard].terminate()
    cluster.processes[shard].wait()


def reshard_in_place(
    cluster: LocalCluster, rows_per_block: int, *, current: bool, then: Callable[[], object] = lambda: None
) -> None:
    """The same shards at the same addresses; `then` runs before the old ones are stopped."""
    new = targets_in(cluster.directory / "new", 2)
    with WeightClient(cluster.addresses) as other:
        reshard_all(other, new, rows_per_block=rows_per_block, current=current)
    then()
    for shard, directory in enumerate(targets_in(cluster.directory, 2)):
        stop(cluster, shard)
        directory.rename(cluster.directory / f"old-{shard}")
        new[shard].rename(directory)
    for shard in range(2):
        cluster.restart(shard)


def test_a_client_that_lives_through_a_reshard_loses_no_row(live: LocalCluster) -> None:
    with connected(live) as client:
        reshard_in_place(live, 8, current=False)
        client.open_session("run")
        for _ in range(2):
            with pytest.raises(TableMismatchError, match="rows_per_block=8"):
                client.push_gradients(MOVED, ONES, step=1)
            with pytest.raises(TableMismatchError, match="rows_per_block=8"):
                client.fetch(MOVED, step=1)
        assert client.describe().spec.rows_per_block == 8
        assert (client.fetch(MOVED, step=1) == -1).all(), "no shard has applied a part"
        client.push_gradients(MOVED, ONES, step=1)
        assert (client.fetch(MOVED, step=2) == -2).all()


def test_new_shards_of_the_current_rows_hold_all_but_later_writes(live: LocalCluster) -> None:
    """Of what clients have heard of the old shards."""
    with connected(live) as client:
        marks = list[list[str]]()

        def hear_and_write() -> None:
            client.describe()
            marks.append(client.marks())
            client.push_gradients(MOVED, ONES, step=1)
            marks.append(client.marks())

        reshard_in_place(live, 4, current=True, then=hear_and_write)
        with WeightClient(live.addresses) as later:
            later.expect(marks[0])
            with pytest.raises(DataLossError, match="lacks what it had acknowledged"):
                later.expect(marks[1])


@pytest.mark.parametrize("rows_per_block", [4, 8])
def test_half_a_write_is_not_completed_after_a_reshard(live: LocalCluster, rows_per_block: int) -> None:
    """The shards no longer know whose it was, and its other half may be of other shards."""
    with connected(live) as client:
        stop(live, 1)
        (_, stopped) = client._shards.connections()
        with ThreadPoolExecutor(1) as thread:
            push = thread.submit(client.push_gradients, MOVED, ONES, step=1)
            wait_until(lambda: client.call_shard(0, "Describe", pb.DescribeRequest()).clock == 2)
            stopped._retry_seconds = 0.0
            with pytest.raises(ShardUnavailableError):
                push.result()
        stopped._retry_seconds = 20.0
        live.restart(1)
        reshard_in_place(live, rows_per_block, current=True, then=client.describe)
        client.describe()
        client.open_session("run")
        for _ in range(2):
            with pytest.raises(ClusterError, match="resharded the rows since"):
                client.push_gradients(MOVED, ONES, step=1)
        assert (client.fetch(MOVED, step=2) == np.where(MOVED // 4 == 0, -2, -1)[:, None]).all()


# ---- interrupted, damaged, misused


@pytest.mark.guard
def test_a_killed_reshard_can_be_repeated(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    """Nothing of it is served, and nothing is left of it, although it was to have more rows; shards that are finished
    stay, and one of them is used already."""
    kept, targets = make_table(client), targets_in(tmp_path / "new", 2)
    options = ["--from", *cluster.addresses, "--rows-per-block", 5, "--checkpoint"]
    commands = [["reshard", "--shard", f"{shard}/2", "--target", targets[shard], *options] for shard in range(2)]
    assert weightserver(*commands[0], "one")[0] == 0
    with contextlib.closing(LmdbStorage(targets[0])) as used, used.write() as txn:
        content = bytearray(get(txn, 0) or b"")
        content[-1] ^= 1
        put(txn, 0, 1, content)
    dies("weightserver.operations.reshard:fill", 1, *commands[1], "two")
    assert inspect_directory(targets[1])["unfinished"]
    assert "it is unfinished: repeat" in verify_directory(targets[1]).problems[0]
    for command in commands:
        assert weightserver(*command, "one")[0] == 0
    assert same(rows_in(targets, checkpoint="one"), kept)
    assert_one_line(weightserver(*commands[0], "two"), "holds a shard's data: give another directory")
    with contextlib.closing(LmdbStorage(targets[0], readonly=True)) as used, used.read() as txn:
        assert stored(txn)[:2] == [(0, 1), (0, 0)]


def test_a_reshard_that_lost_or_changed_a_row_is_noticed(
    small_pieces: None, client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(client)
    add = ShardBuilder.add

    def without(builder: ShardBuilder, version: Version, block: bytearray) -> None:
        if version.block != 4:
            add(builder, version, block)

    def changed(builder: ShardBuilder, version: Version, block: bytearray) -> None:
        if version.block == 4:
            BlockCodec(SPEC).views(block).momentum_buffer[2, 3] += 1
            BlockCodec(SPEC).seal(4, version.write_id, block)
        add(builder, version, block)

    for name, fault, message in (
        ("without", without, r"without holds \d+ of the \d+ rows"),
        ("changed", changed, "changed holds rows that are not those of the old shards"),
    ):
        monkeypatch.setattr(ShardBuilder, "add", fault)
        with pytest.raises(StorageError, match=message):
            reshard(client, tmp_path / name, shard=1, num_shards=3, checkpoint="one")
        assert inspect_directory(tmp_path / name)["unfinished"]


def test_blocks_that_were_not_sent_are_noticed(
    client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(client)
    lose_blocks(monkeypatch)
    with pytest.raises(ClusterError, match="sent other blocks of checkpoint 'two' than it keeps: check its directory"):
        reshard(client, tmp_path / "new", shard=0, num_shards=2)
    assert inspect_directory(tmp_path / "new")["unfinished"]


def test_new_shards_that_were_filled_differently_are_not_rolled_back(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    make_table(client)
    targets = targets_in(tmp_path / "new", 2)
    for shard, rows_per_block in enumerate((7, 5)):
        command = ["reshard", "--from", *cluster.addresses, "--shard", f"{shard}/2", "--target", targets[shard]]
        assert weightserver(*command, "--checkpoint", "one", "--rows-per-block", rows_per_block)[0] == 0
    before = [inspect_directory(target)["epoch"] for target in targets]
    with LocalCluster(2, tmp_path / "new") as filled:
        message = "were filled with the same 'weightserver reshard --rows-per-block'"
        assert_one_line(weightserver("rollback", "one", *filled.addresses, "--yes"), message)
    assert [inspect_directory(target)["epoch"] for target in targets] == before, "no session was opened"


def test_invalid_arguments_are_refused(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    target, addresses = tmp_path / "new", ["--from", *cluster.addresses]

    def fails(message: str, *given: object) -> None:
        assert_one_line(weightserver("reshard", "--target", target, *given), message)
        assert not target.exists()

    fails("shard 0 holds no table", *addresses, "--shard", "0/1")
    make_table(client)
    for shard in ("0/0", "3/3", "-1/3", "1", "a/b", "0/2147483648"):
        status, _, error = weightserver("reshard", "--target", target, *addresses, f"--shard={shard}")
        assert status != 0
        assert (
            f"--shard: must be I/N with I from 0 to N - 1 and N at most 2147483647, such as 0/3, got {shard}" in error
        )
    fails("rows_per_block must lie in 1..2048, got 0", *addresses, "--shard", "0/1", "--rows-per-block", 0)
    fails("no checkpoint 'three' on all shards", *addresses, "--shard", "0/1", "--checkpoint", "three")
    missing = ["--from", cluster.addresses[0], "--shard", "0/1"]
    fails("1 of 2 shards were given: add the address of shard 1", *missing)
