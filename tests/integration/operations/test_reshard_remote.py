"""Clusters changed to other numbers of shards and rows per block over the network, a shard at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    targets_in,
)
from weightserver import ClusterError, LocalCluster, WeightClient
from weightserver.core.sharding import Sharding
from weightserver.operations.checkpoint_blocks import CheckpointReader
from weightserver.operations.inspect import inspect_directory
from weightserver.operations.reshard_remote import reshard_from
from weightserver.operations.verify import verify_directory


@pytest.mark.parametrize(
    ("num_shards", "rows_per_block"),
    [(3, 7), *(pytest.param(*case, marks=pytest.mark.guard) for case in [(2, 4), (1, 63), (3, 1)])],
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
    assert sum(inspect_directory(target)["rows_stored"] for target in targets) == NUM_STORED
    assert same(rows_in(targets, checkpoint="one"), kept)
    with LocalCluster(num_shards, tmp_path / "new") as changed, WeightClient(changed.addresses) as reader:
        assert reader.checkpoints()[0].checkpoint_id == known.checkpoint_id
        assert same(reader.fetch_state(ROWS), kept)
        if num_shards == 2:
            reader.expect(known.marks)  # the new shards descend from the old ones' checkpoint
        reader.open_session("run")
        push(reader, 5, ROWS)


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
    for shard, target in enumerate(targets_in(tmp_path, 3)):
        reshard_from(client, target, shard=shard, num_shards=3)
    assert len(received) == len(set(received)), "without another size of blocks, each goes to one shard"
    for shard, target in enumerate(targets_in(tmp_path / "smaller", 3)):
        received.clear()
        reshard_from(client, target, shard=shard, num_shards=3, rows_per_block=2)
        sharding, size = Sharding(2, 3), SPEC.rows_per_block
        for block in received:
            assert shard in sharding.shard_of(ROWS[block * size : (block + 1) * size])


@pytest.mark.guard
def test_a_killed_shard_can_be_repeated(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    """Nothing of it is served; shards that are finished stay."""
    kept, targets = make_table(client), targets_in(tmp_path / "new", 2)
    options = ["--from", *cluster.addresses, "--rows-per-block", 5, "--checkpoint", "one"]
    commands = [["reshard", "--shard", f"{shard}/2", "--target", targets[shard], *options] for shard in range(2)]
    assert weightserver(*commands[0])[0] == 0
    dies("weightserver.storage.shard_builder:ShardBuilder.flush", 2, *commands[1])
    assert inspect_directory(targets[1])["unfinished"]
    for command in commands:
        assert weightserver(*command)[0] == 0
    assert same(rows_in(targets, checkpoint="one"), kept)
    other = [*commands[0][:-1], "two"]
    assert_one_line(weightserver(*other), "holds a shard's data: give another directory")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ["--checkpoint", "two"],
            "or filled from different checkpoints: restore all shards from one backup, or fill all with the same "
            "'weightserver reshard --checkpoint'",
            id="checkpoint",
        ),
        pytest.param(
            ["--checkpoint", "one", "--rows-per-block", 5],
            "were filled with the same 'weightserver reshard --rows-per-block'",
            id="blocks",
        ),
    ],
)
def test_new_shards_that_were_filled_differently_are_not_rolled_back(
    options: list[Any],
    message: str,
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
) -> None:
    make_table(client)
    targets = targets_in(tmp_path / "new", 2)
    for shard, chosen in enumerate((["--checkpoint", "one"], options)):
        command = ["reshard", "--from", *cluster.addresses, "--shard", f"{shard}/2", "--target", targets[shard]]
        assert weightserver(*command, *chosen)[0] == 0
    before = [inspect_directory(target)["epoch"] for target in targets]
    with LocalCluster(2, tmp_path / "new") as filled:
        assert_one_line(weightserver("rollback", "one", *filled.addresses, "--yes"), message)
    assert [inspect_directory(target)["epoch"] for target in targets] == before, "no session was opened"


def test_blocks_that_were_not_sent_are_noticed(
    client: WeightClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(client)
    lose_blocks(monkeypatch)
    with pytest.raises(ClusterError, match="sent other blocks of checkpoint 'two' than it keeps: check its directory"):
        reshard_from(client, tmp_path / "new", shard=0, num_shards=2)
    assert inspect_directory(tmp_path / "new")["unfinished"]


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
    fails("--from fills one shard with a checkpoint: give --shard I/N", *addresses)
    fails("--from fills one shard with a checkpoint", *addresses, "--shard", "0/1", "--current")
    fails("give either --from, the addresses of all old shards, or --source, their directories")
    fails("give either --from", *addresses, "--source", tmp_path)
    fails("--shard is for --from", "--source", tmp_path, "--shard", "0/1")
    fails("rows_per_block must lie in 1..2048, got 0", *addresses, "--shard", "0/1", "--rows-per-block", 0)
    fails("no checkpoint 'three' on all shards", *addresses, "--shard", "0/1", "--checkpoint", "three")
    missing = ["--from", cluster.addresses[0], "--shard", "0/1"]
    fails("1 of 2 shards were given: add the address of shard 1", *missing)
