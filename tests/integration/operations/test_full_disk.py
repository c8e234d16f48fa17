"""Operations on a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.operations import Weightserver, assert_one_line, make_table, no_room
from weightserver import LocalCluster, WeightClient
from weightserver.operations.backup import backup


@pytest.mark.guard
@pytest.mark.parametrize("command", ["backup", "restore", "reshard", "export"])
def test_a_full_disk_is_one_line_and_leaves_no_incomplete_output(
    command: str,
    weightserver: Weightserver,
    client: WeightClient,
    cluster: LocalCluster,
    tmp_path: Path,
) -> None:
    """With free space again, the same command succeeds."""
    make_table(client)
    new = tmp_path / "new"
    if command == "restore":
        backup(client, tmp_path / "made", checkpoint="one")
    arguments, whole = {
        "backup": ([*cluster.addresses, "--output", new], "manifest.json"),
        "restore": ([tmp_path / "made", "--data-dir", new, "--shard", 0], None),
        "reshard": (["--from", *cluster.addresses, "--shard", "0/1", "--target", new], None),
        "export": ([*cluster.addresses, "--output", new], "rows-000000000000-000000000999.safetensors"),
    }[command]
    with no_room():
        status, _, error = weightserver(command, *arguments)
    assert_one_line((status, "", error), "too large")
    assert whole is None or not (new / whole).exists()
    assert not list(tmp_path.rglob("*.partial"))
    assert weightserver(command, *arguments)[0] == 0
    assert whole is None or (new / whole).exists()
