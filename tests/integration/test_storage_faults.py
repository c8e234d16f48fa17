"""Damaged, truncated, emptied and outdated data files are refused in one clear line, or served if they are intact."""

from __future__ import annotations

import itertools
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.comparing import same
from tests.helpers.operations import Weightserver
from tests.integration.tables import SLOW, begin
from tests.integration.test_damage import flip
from weightserver import LocalCluster, ShardUnavailableError, StorageError, TableSpec, WeightClient
from weightserver.operations import verify
from weightserver.operations.verify import verify_directory
from weightserver.storage.interface import Transaction
from weightserver.storage.lmdb_storage import LmdbStorage

SPEC = TableSpec(num_rows=40, dim=8, rows_per_block=10)
ROWS = np.arange(SPEC.num_rows)


def values(number: int, num_rows: int = SPEC.num_rows) -> np.ndarray:
    return np.random.default_rng(number).standard_normal((num_rows, SPEC.dim)).astype(np.float32)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A stopped shard whose rows were all written, kept as checkpoint "kept", and written again."""
    with LocalCluster(1, tmp_path) as cluster, WeightClient(cluster.addresses) as client:
        begin(client, SPEC)
        client.write_state(ROWS, values(0), values(1), 3)
        client.checkpoint("kept", step=3)
        client.write_state(ROWS, values(2), values(3), 5)
    return tmp_path / "shard-0"


def damage(path: Path, row: int, number: int) -> None:
    """Flips a byte of that row of `values(number)` wherever the file holds it: unused pages hold old copies."""
    content, wanted = path.read_bytes(), re.escape(values(number)[row].tobytes())
    found = [match.start() for match in re.finditer(wanted, content, re.DOTALL)]
    assert found
    for position in found:
        flip(path.parent, position + 7, 0x10)


@pytest.mark.parametrize(("number", "where"), [(0, "generation 0 (kept)"), (2, "generation 1 (now)")])
def test_a_damaged_version_is_named(data: Path, number: int, where: str, weightserver: Weightserver) -> None:
    assert weightserver("verify", data)[:2] == (0, "4 blocks, 8 versions, 0 problems\n")
    damage(data / "data.mdb", 13, number)
    status, said, _ = weightserver("verify", data)
    told = f"block 1 (rows 10..19), {where}: it is damaged (checksum) in rows 10..19"
    assert (status, said) == (1, f"{told}\n4 blocks, 8 versions, 1 problems\n")


def test_verify_makes_no_owner_lock(weightserver: Weightserver, data: Path) -> None:
    """Another user's would stop the shard; it is absent where it was removed, to serve an older copy."""
    (data / "owner.lock").unlink()
    before = sorted(data.iterdir())
    assert weightserver("verify", data)[:2] == (0, "4 blocks, 8 versions, 0 problems\n")
    assert sorted(data.iterdir()) == before


def test_verify_says_that_a_shard_began_meanwhile(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without owner.lock nothing keeps it from starting, and from using pages again that are read."""
    (data / "owner.lock").unlink()
    check = verify._verify

    def beside_a_shard(txn: Transaction, verdict: verify.Verdict) -> None:
        with LocalCluster(1, data.parent):
            check(txn, verdict)

    monkeypatch.setattr(verify, "_verify", beside_a_shard)
    with pytest.raises(StorageError, match="began to be served while it was read: stop that shard"):
        verify_directory(data)


def start(data: Path, message: str, *options: str) -> None:
    with pytest.raises(ShardUnavailableError, match=message) as raised:
        LocalCluster(1, data.parent, serve_options=options)
    assert "\n" not in str(raised.value)


@pytest.mark.guard
def test_a_missing_file_does_not_start_a_new_shard(data: Path) -> None:
    path = data / "data.mdb"
    whole = path.read_bytes()
    message = "was served before and its data.mdb is gone or empty: is its disk mounted"
    for remove in (lambda: path.write_bytes(b""), path.unlink):
        remove()
        start(data, message)
        start(data, message, "--init")
    path.write_bytes(whole)
    with LocalCluster(1, data.parent) as cluster, WeightClient(cluster.addresses) as client:
        np.testing.assert_array_equal(client.fetch_state(ROWS).weight, values(2))


@pytest.mark.guard
def test_an_old_copy_is_noticed(data: Path) -> None:
    old = shutil.copyfile(data / "data.mdb", data.parent / "old.mdb")
    with LocalCluster(1, data.parent) as cluster, WeightClient(cluster.addresses) as client:
        client.extend_schedule(0, SLOW)
        client.open_session("run")
        client.push_gradients(ROWS, values(4), step=5)
    shutil.copyfile(old, data / "data.mdb")
    start(data, "data.mdb lacks transactions that it had, .* remove owner.lock to serve it as it is")
    (data / "owner.lock").unlink()
    with LocalCluster(1, data.parent) as cluster, WeightClient(cluster.addresses) as client:
        np.testing.assert_array_equal(client.fetch_state(ROWS).weight, values(2))


def test_a_first_page_whose_number_changed_is_noticed(tmp_path: Path) -> None:
    """LMDB takes that of its first two pages that has the higher number, after a kill too. No wrong bit in one lets it
    serve the transaction before the last."""
    served, killed, number_at = LmdbStorage(tmp_path / "served"), tmp_path / "killed", 144
    for count in range(5):
        with served.write() as txn:
            txn.put("meta", b"count", bytes([count]))
    shutil.copytree(tmp_path / "served", killed)
    served.close()
    whole, note = (killed / "data.mdb").read_bytes(), (killed / "owner.lock").read_bytes()
    numbers = [int.from_bytes(whole[at : at + 8], "little") for at in (number_at, 4096 + number_at)]
    num_refused = 0
    for page, bit in itertools.product(range(2), range(64)):
        changed = bytearray(whole)
        changed[4096 * page + number_at + bit // 8] ^= 1 << bit % 8
        (killed / "data.mdb").write_bytes(changed)
        try:
            found = LmdbStorage(killed)
        except StorageError:
            num_refused += 1
        else:
            assert numbers[page] < max(numbers)
            with found.read() as txn:
                assert bytes(txn.get("meta", b"count") or b"") == b"\4"
            found.close()
        (killed / "owner.lock").write_bytes(note)
    assert 64 + 60 <= num_refused < 128


@pytest.mark.guard
def test_every_flipped_byte_is_found(data: Path) -> None:
    """For any byte of the file: verify finds the flip, the shard refuses to start, or nothing depends on it."""
    path, log = data / "data.mdb", data.parent / "shard-0.log"
    with LocalCluster(1, data.parent) as cluster, WeightClient(cluster.addresses) as client:
        before, clock = client.fetch_state(ROWS), client.describe().clock
    whole, generator, unseen = path.read_bytes(), random.Random(0), []
    meta = 16 + 4096 * np.arange(2)[:, None] + np.arange(136)  # of both first pages, whose newer one counts
    positions = sorted({*generator.sample(range(len(whole)), 150), *map(int, generator.sample(list(meta.flat), 20))})
    for position in positions:
        path.write_bytes(whole)
        flip(data, position, 0x10)
        if not verify_directory(data).problems:
            unseen.append(position)
    assert 0 < len(unseen) < len(positions)
    for position in {*unseen[:3], *generator.sample(unseen, 3)}:
        path.write_bytes(whole)
        flip(data, position, 0x10)
        try:
            with LocalCluster(1, data.parent) as cluster, WeightClient(cluster.addresses) as client:
                assert same(client.fetch_state(ROWS), before), position
                assert client.describe().clock == clock
        except ShardUnavailableError:
            assert "lacks transactions that it had" in log.read_text().splitlines()[-1]
