"""Damaged data other than blocks, and full or read-only disks."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tests.helpers.commands import weightserver
from tests.helpers.operations import assert_one_line
from tests.helpers.stored import get, put
from tests.integration.test_lost_writes import Trained
from weightserver import StorageError, TableSpec, __version__
from weightserver.common.version import FORMAT
from weightserver.core.lineage import Lineage
from weightserver.operations.inspect import inspect_directory
from weightserver.operations.verify import verify_directory
from weightserver.shard.shard import Shard
from weightserver.storage import directory as owner_files
from weightserver.storage.interface import Transaction
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.records import put_json, write_lineage, write_peers
from weightserver.storage.shard_builder import ShardBuilder

SPEC = TableSpec(num_rows=4_000, dim=64, rows_per_block=7)


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_files, "_OWNER_SECONDS", 0.1)


def make_shard(parent: Path, spec: TableSpec = SPEC) -> Path:
    """A stopped shard whose rows are all written and kept as checkpoint "kept"."""
    made = Trained(parent / "shard-0", spec)
    made.push(np.arange(spec.num_rows), 2)
    made.checkpoint("kept")
    made.storage.close()
    return made.directory


def serve(directory: Path) -> None:
    """Starts as a process that serves the directory does."""
    storage = LmdbStorage(directory)
    try:
        Shard(storage, shard=0, num_shards=1)
    finally:
        storage.close()


def tree_page(directory: Path) -> int:
    """The number of the last leaf of `blocks`: its values have pages of their own."""
    data = (directory / "data.mdb").read_bytes()
    for page in reversed(range(2, len(data) // 4096)):
        content = data[4096 * page : 4096 * (page + 1)]
        first_value = int.from_bytes(content[16:18], "little")
        if int.from_bytes(content[:8], "little") == page and content[10] == 2 and content[first_value + 4] & 1:
            return page
    raise AssertionError("no leaf has large values")


def flip(directory: Path, position: int, bit: int) -> None:
    with (directory / "data.mdb").open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ bit]))


# ---- LMDB's own pages


@pytest.mark.parametrize(("offset", "bit"), [(12, 4), (10, 2), (8, 0), (10, 1)], ids=str)
def test_a_wrong_bit_in_a_tree_is_refused(offset: int, bit: int, tmp_path: Path) -> None:
    """LMDB would miss some blocks, or end the process. `inspect` reads no blocks, and does not use LMDB."""
    source = make_shard(tmp_path)
    serve(source)
    if bit:
        flip(source, 4096 * tree_page(source) + offset, bit)
    else:  # its number
        flip(source, 4096 * tree_page(source), 1)
    with pytest.raises(StorageError, match=r"shard-0: data.mdb is damaged \(.*\): restore it from a backup") as raised:
        serve(source)
    assert "\n" not in str(raised.value)
    assert verify_directory(source).problems
    assert inspect_directory(source)["rows_stored"] == 4_000


def test_damage_found_while_serving_ends_writes_but_not_reads(tmp_path: Path) -> None:
    source = make_shard(tmp_path)
    storage = LmdbStorage(source)
    flip(source, 4096 * tree_page(source) + 10, 1 | 2)  # a leaf that calls itself a branch
    last = SPEC.num_blocks - 1
    with pytest.raises(StorageError), storage.write() as txn:
        put(txn, last, 1, b"x" * 3000)
    with (
        pytest.raises(StorageError, match=r"shard-0: .*: restart the shard, which checks its data"),
        storage.write() as txn,
    ):
        put(txn, 0, 1, b"x" * 3000)
    with storage.read() as txn:
        assert get(txn, 0) is not None
    storage.close()


@pytest.mark.parametrize("key", [bytes(8) + b"w" * 8, b"identity"], ids=["of blocks", "of meta"])
def test_an_entry_of_another_database_is_no_version(key: bytes, tmp_path: Path) -> None:
    """As where an older page lies in the place of a lost one. Whatever meets it, the shard takes no more writes."""
    calls: list[Callable[[Transaction], object]] = [lambda txn: list(txn.versions()), lambda txn: get(txn, 0)]
    for number, call in enumerate(calls):
        storage = LmdbStorage(tmp_path / f"shard-{number}")
        with storage.write() as txn:
            txn.put("versions", key, b"x" * 500)
        with pytest.raises(StorageError, match="another database's pages lie in its versions"), storage.read() as txn:
            call(txn)
        assert "another database's pages" in storage.problem()
        with pytest.raises(StorageError, match="another database's pages"), storage.write():
            pass
        storage.close()


# ---- stored data other than blocks


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_bit_of_a_record_is_found(stride: int, tmp_path: Path) -> None:
    """Damages keys and values of everything but blocks: `verify` reports it, and readers refuse."""
    source = make_shard(tmp_path, replace(SPEC, num_rows=10))
    with contextlib.closing(LmdbStorage(source)) as storage, storage.write() as txn:
        write_lineage(txn, Lineage().joined(["0123456789abcdef:12"]))
        write_peers(txn, ["0123456789abcdef:9"])
    data = source / "data.mdb"
    whole = data.read_bytes()
    with lmdb.open(str(source), max_dbs=5, readonly=True, lock=False, lib_version=0) as env, env.begin() as txn:
        records = [
            (name, key + value)
            for name in ("meta", "schedule", "writers")
            for key, value in txn.cursor(env.open_db(name.encode(), txn, create=False))
        ]
    keys = [record[: record.find(b"\0")] for _, record in records]
    assert len(records) == 8, keys
    num_flips = 0
    for name, record in records:
        places = [at for at in range(len(whole)) if whole.startswith(record, at)]  # free pages hold old copies
        for offset in range(0, len(record), stride):
            changed = bytearray(whole)
            for at in places:
                changed[at + offset] ^= 1 << offset % 8
            data.write_bytes(changed)
            problems = verify_directory(source).problems
            assert problems, (name, offset)
            assert all("\n" not in problem for problem in problems)
            num_flips += 1
            if name == "writers":
                continue
            with pytest.raises(StorageError) as raised:
                serve(source)
            assert "\n" not in str(raised.value)
    assert num_flips > 500 // stride


@pytest.mark.parametrize("found", [4, "0.2", None])
def test_another_format_is_refused_by_all(found: object, tmp_path: Path) -> None:
    """Of version 0.2, whose formats were numbers at first, and of none."""
    source = make_shard(tmp_path)
    storage = LmdbStorage(source)
    with storage.write() as txn:
        put_json(txn, "identity", {"format": found, "shard": 0, "num_shards": 1, "colour": "red"})
    storage.close()
    message = (
        f"shard-0 has format {found}, weightserver {__version__} reads {FORMAT} only: use the version that wrote it, "
        "or begin anew"
    )
    attempts: list[Callable[[], object]] = [
        lambda: serve(source),
        lambda: inspect_directory(source),
        lambda: ShardBuilder(source, shard=0, num_shards=1, origin={}),
    ]
    for attempt in attempts:
        with pytest.raises(StorageError, match=message):
            attempt()
    assert [message in problem for problem in verify_directory(source).problems] == [True]


def test_a_refused_directory_stays_as_it_is(tmp_path: Path) -> None:
    """Other users keep their access to it: the version that wrote it may be one that lets them."""
    source = make_shard(tmp_path)
    storage = LmdbStorage(source)
    with storage.write() as txn:
        put_json(txn, "identity", {"format": "0.2", "shard": 0, "num_shards": 1})
    storage.close()

    def found() -> dict[Path, tuple[int, bytes]]:
        files = {path: path.read_bytes() for path in (source / "data.mdb", source / "owner.lock")}
        return {path: (path.stat().st_mode, files.get(path, b"")) for path in (source, *source.iterdir())}

    for path in (source, *source.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    before = found()
    refused = weightserver("serve", "--data-dir", source, "--listen", "127.0.0.1:0")
    assert_one_line(refused, "shard-0 has format 0.2")
    with pytest.raises(StorageError, match="has format"):
        ShardBuilder(source, shard=0, num_shards=1, origin={})
    assert found() == before


# ---- disks


@contextlib.contextmanager
def volume(path: Path, size: str = "12m") -> Iterator[Path]:
    """A small file system."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("command", ["serve a new one", "serve", "inspect", "verify"])
def test_a_full_disk_ends_no_process(command: str, tmp_path: Path) -> None:
    """LMDB writes to lock.mdb through a map, which a full disk cannot back for a new file."""
    source = make_shard(tmp_path, replace(SPEC, num_rows=500))
    with volume(tmp_path / "full") as full:
        there, new = full / "shard", full / "new"
        shutil.copytree(source, there)
        (there / "lock.mdb").unlink()
        new.mkdir(0o700)
        fill(full)
        outcome = weightserver(
            *{
                "serve a new one": ["serve", "--init", "--data-dir", new, "--listen", "127.0.0.1:0"],
                "serve": ["serve", "--data-dir", there, "--listen", "127.0.0.1:0"],
                "inspect": ["inspect", there],
                "verify": ["verify", there],
            }[command]
        )
    if command in ("inspect", "verify"):
        assert (outcome[0], outcome[2]) == (0, "")
    else:
        assert_one_line(outcome, f"{there if command == 'serve' else new}: [Errno 28] No space left on device")


def test_a_checkpoint_may_have_any_name(tmp_path: Path) -> None:
    """Also that of the newest state in what `verify` says."""
    made = Trained(tmp_path / "shard-0", SPEC)
    for name, rows in (("now", SPEC.num_rows // 2), ("later", SPEC.num_rows)):
        made.push(np.arange(rows), 2)
        made.checkpoint(name)
    made.storage.close()
    assert verify_directory(made.directory).problems == []


def test_a_read_only_disk_can_be_read(tmp_path: Path) -> None:
    source = make_shard(tmp_path)
    with volume(tmp_path / "disk") as disk:
        shutil.copytree(source, disk / "served")
        (disk / "never served").mkdir()
        shutil.copy(source / "data.mdb", disk / "never served")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for directory in (disk / "served", disk / "never served"):
            assert inspect_directory(directory)["rows_stored"] == 4_000
            assert verify_directory(directory).problems == []
            with pytest.raises(StorageError, match="Read-only file system"):
                serve(directory)


def test_files_in_place_of_directories_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file: give a directory"):
        serve(tmp_path / "file")
    with pytest.raises(ValueError, match="file is a file: give a directory"):
        ShardBuilder(tmp_path / "file", shard=0, num_shards=1, origin={})
    with pytest.raises(StorageError, match=f"^{tmp_path}/file/new: .*Not a directory"):
        ShardBuilder(tmp_path / "file" / "new", shard=0, num_shards=1, origin={})
