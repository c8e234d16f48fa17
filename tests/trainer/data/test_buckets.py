"""Packs in a bucket of a real S3 server: the same images as on a disk, whatever the server and the cache go through."""

from __future__ import annotations

import copy
import errno
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.commands import data_command as call
from tests.helpers.conditions import no_condition_in_this_thread
from tests.helpers.dying_pack import contents as contents_on_disk
from tests.helpers.image_tree import plain_tree
from tests.helpers.object_store import KEY, SECRET, Fault, Proxy, credentials, object_store, stored
from tests.helpers.small_run import losses, small_run
from tests.helpers.watching import wait_until
from tests.trainer.data.written import write_tar
from trainer.__main__ import main as start
from trainer.data import bucket_packs, bucket_sources, cache, load_dataset, numbered_shards, pack_files
from trainer.data.bucket_sources import local_source
from trainer.data.config import SourceOptions
from trainer.data.listing import Listing
from trainer.data.manifest import Manifest, is_packed
from trainer.data.pack import PackOptions, merge, pack
from trainer.data.packed import PackedImages
from trainer.data.parts import Part
from trainer.data.planning import planned_pack
from trainer.data.reading import read_source
from trainer.embed import main as embed
from trainer.evaluate.__main__ import main as evaluate
from trainer.loop import train
from weightserver.common import object_store as objects
from weightserver.common.atomic_files import locked
from weightserver.common.object_store import ObjectStoreError, Reason
from weightserver.common.threads import in_other_thread

obstore = pytest.importorskip("obstore", reason="needs the extra s3")
NUM_IMAGES = 120
ROOT = Path(__file__).parents[3]
PACK = Path("s3://images/packed")
SOURCE_NAME = "s3://images/source/{00000..00002}.tar"
SOURCE = Path(SOURCE_NAME)
SEGMENT_BYTES = 10_000
READ_ALL = """
import sys
from pathlib import Path
from trainer.data import pack_files
from trainer.data.config import SourceOptions
from trainer.data.packed import PackedImages

pack_files.SEGMENT_BYTES = int(sys.argv[2])
images = PackedImages(Path("s3://images/packed"), SourceOptions(cache_dir=Path(sys.argv[1]), cache_gib=0.01))
print(sum(len(images.read(image)) for image in range(len(images))))
"""
TRAIN = """
from pathlib import Path
from tests.helpers.small_run import small_run
from trainer.loop import train
from trainer.stopping import exit_on_error

with exit_on_error("trainer"):
    settings = {"dataset": "packed", "num_images": None, "rows": "dense", "steps": 6, "cache_dir": Path("cache")}
    train(small_run(Path("run"), data_dir=Path("s3://images/packed"), cache_gib=0.01, **settings))
"""
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.guard]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack with test images."""
    root = tmp_path_factory.mktemp("images")
    pack(plain_tree(root / "train", NUM_IMAGES), root / "packed", PackOptions(tar_bytes=40_000))
    pack(plain_tree(root / "val", 20), root / "packed/test", PackOptions(tar_bytes=40_000))
    return root / "packed"


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The server, with the pack in its bucket."""
    with object_store(tmp_path_factory.mktemp("server"), "images") as proxy:
        upload_all(directory, PACK)
        yield proxy


def upload_all(directory: Path, target: Path) -> None:
    """As other programs do: without checksums."""
    for path in (path for path in directory.rglob("*") if path.is_file()):
        put(target / path.relative_to(directory), path.read_bytes())


def put(target: Path, content: bytes, attributes: Any = None) -> None:
    obstore.put(objects._bucket(target.parts[1]), "/".join(target.parts[2:]), content, attributes=attributes)


def attributes_of(path: Path) -> dict[str, str]:
    found = obstore.get(objects._bucket(path.parts[1]), "/".join(path.parts[2:])).attributes
    return {key: str(found[key]) for key in ("sha256", "crc32") if key in found}


@pytest.fixture
def bucket(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The same without requests so far, for packs of many segments."""
    monkeypatch.setattr(pack_files, "SEGMENT_BYTES", SEGMENT_BYTES)
    monkeypatch.setattr(bucket_packs, "SEGMENT_BYTES", SEGMENT_BYTES)
    server.heal()
    yield server
    server.heal()
    objects._bucket.cache_clear()


def options(tmp_path: Path, mib: float = 10) -> SourceOptions:
    return SourceOptions(cache_dir=tmp_path / "cache", cache_gib=mib / 1024)


def contents(images: PackedImages | Listing) -> list[bytes]:
    return [images.read(image) for image in range(len(images))]


def wait_for_the_fetching(images: PackedImages) -> None:
    """Until each thread that fetches ahead has come to a last job."""
    ended = threading.Barrier(cache._THREADS + 1)
    for _ in range(cache._THREADS):
        images._files._cache._queue.put(lambda: ended.wait(60))  # type: ignore[union-attr]
    ended.wait(60)


def num_segments(directory: Path) -> int:
    """Number of segments with images."""
    images, found = PackedImages(directory), set()
    for row in range(len(images)):
        offset, length = images._place(row)
        found |= {(images._tar(row), place // SEGMENT_BYTES) for place in (offset, offset + length - 1)}
    return len(found)


def test_a_run_on_a_bucket_is_that_on_a_disk(bucket: Proxy, directory: Path, tmp_path: Path) -> None:
    """Busy answers and cut ones change nothing; what is cached is not fetched again; evaluations read buckets too."""
    settings: dict[str, Any] = {"dataset": "packed", "num_images": None, "rows": "dense", "steps": 6}
    cached = {"cache_dir": tmp_path / "cache", "cache_gib": 0.01}
    train(small_run(tmp_path / "disk", data_dir=directory, **settings))
    bucket.faults.extend([Fault.BUSY, Fault.CUT] * 4)
    train(small_run(tmp_path / "bucket", data_dir=PACK, **settings, **cached))
    assert losses(tmp_path / "bucket") == losses(tmp_path / "disk")
    assert not bucket.faults
    assert json.loads((tmp_path / "bucket/config.json").read_text())["data_dir"] == "s3://images/packed"
    assert len({(one.path, one.range) for one in bucket.ranges()}) <= num_segments(directory) + 4 * 2
    bucket.heal()
    train(small_run(tmp_path / "again", data_dir=PACK, **settings, **cached))
    assert losses(tmp_path / "again") == losses(tmp_path / "disk")
    assert not bucket.ranges()
    upload_all(directory, Path("s3://images/copy"))
    run = ["--run", str(tmp_path / "again"), "--output", str(tmp_path), "--name", "result"]
    for where, data_dir in (([], "s3://images/packed"), (["--data-dir", "s3://images/copy"], "s3://images/copy")):
        evaluate(["knn", *run, *where])
        assert json.loads((tmp_path / "result.json").read_text())["data_dir"] == data_dir
    report = ["report", str(tmp_path / "again"), "--output", str(tmp_path / "report.html"), "--data-dir"]
    with pytest.raises(SystemExit) as ended:
        start([*report, "s3://images/copy"])
    assert ended.value.code == 0


def test_processes_share_a_cache_and_fetch_each_segment_once(bucket: Proxy, directory: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", READ_ALL, str(tmp_path / "cache"), str(SEGMENT_BYTES)]
    ran = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    expected = sum(map(len, contents(PackedImages(directory))))
    assert [int(process.communicate()[0]) for process in ran] == [expected] * 2
    fetched = [(one.path, one.range) for one in bucket.ranges()]
    assert len(fetched) == len(set(fetched)) == num_segments(directory)


def test_a_cache_keeps_its_limit_and_what_was_used_last(bucket: Proxy, directory: Path, tmp_path: Path) -> None:
    """The images are right when most segments have left again; a segment in use stays."""
    limit = 6 * SEGMENT_BYTES
    images = PackedImages(PACK, options(tmp_path, limit / 2**20))
    near = PackedImages(directory)
    first = images.read_row(0)
    for row in range(len(images)):
        assert images.read_row(row) == near.read_row(row)
        assert sum(path.stat().st_size for path in (tmp_path / "cache/pieces").iterdir()) <= limit
        assert images.read_row(0) == first
    fetched = [one for one in bucket.ranges() if one.path.endswith("rows-000000000000.tar")]
    assert sum(one.range.startswith("0-") for one in fetched) == 1
    assert len(bucket.ranges()) >= num_segments(directory)


def test_a_piece_waits_for_the_room_of_others_that_are_being_fetched(
    bucket: Proxy, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes by the clock, but not for that of a process that was killed."""
    images = PackedImages(PACK, options(tmp_path, 2 * SEGMENT_BYTES / 2**20))
    other, killed = (tmp_path / "cache/pieces" / name for name in ("of-another-process.1", "of-a-killed-process.2"))
    for path in (other, killed):
        path.write_bytes(bytes(2 * SEGMENT_BYTES))
    os.utime(other, (0, 0))
    waited, sleep = list[float](), time.sleep

    def wait(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():  # one of the server's
            sleep(seconds)
            return
        waited.append(seconds)
        other.unlink()  # it is fetched, and has left the cache

    monkeypatch.setattr("trainer.data.cache.time.sleep", wait)
    with locked(other):
        assert images.read_row(0) == PackedImages(directory).read_row(0)
    assert len(waited) == 1
    assert not killed.exists()


def test_what_is_coming_is_fetched_before_it_is_read(bucket: Proxy, directory: Path, tmp_path: Path) -> None:
    images = PackedImages(PACK, options(tmp_path))
    ids = np.arange(NUM_IMAGES)
    assert 0 < images.read_ahead(ids) < 1
    assert images.read_ahead(ids) == 0, "begun already"
    wait_for_the_fetching(images)
    bucket.heal()
    assert contents(images) == contents(PackedImages(directory))
    assert not bucket.requests
    small = PackedImages(PACK, options(tmp_path / "small", 8 * SEGMENT_BYTES / 2**20))
    assert small.read_ahead(ids) > 1
    wait_for_the_fetching(small)


def test_a_silent_server_is_asked_again(bucket: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_REQUEST_SECONDS", 2)
    objects._bucket.cache_clear()
    images = PackedImages(PACK, options(tmp_path))
    bucket.faults.extend([Fault.SILENT, Fault.BUSY, Fault.CUT])
    assert images.read_row(0)
    assert not bucket.faults


@pytest.mark.parametrize("file", ["rows-000000000000.tar", "index-000000000000.bin"])
@pytest.mark.parametrize("reason", [Reason.DAMAGED, Reason.REPLACED])
def test_a_file_of_a_pack_that_is_damaged_or_replaced_ends_the_run(
    bucket: Proxy, directory: Path, tmp_path: Path, file: str, reason: Reason
) -> None:
    """By content of the same length, before or while it is read; no other image is taken for the pack's. What was
    fetched before, such as the whole index, stays as it was."""
    target = Path("s3://images", tmp_path.name)
    bucket_packs.upload_pack(directory, target)
    images = PackedImages(target, options(tmp_path))
    assert images.read_row(0) == PackedImages(directory).read_row(0)
    noted, content = attributes_of(target / file), bytearray(objects.read(target / file))
    content[-2_000 if file.startswith("rows") else -20] ^= 1
    put(target / file, bytes(content), noted | ({"sha256": "of another"} if reason is Reason.REPLACED else {}))
    fresh = PackedImages(target, options(tmp_path / "another"))
    for read in (images, fresh) if file.startswith("rows") else (fresh,):
        with pytest.raises(ObjectStoreError) as ended:
            assert contents(read) == contents(PackedImages(directory))
        assert str(ended.value) == f"{objects.shown(target / file)}: {reason.value}"


def test_a_file_without_checksums_that_is_replaced_while_it_is_read_ends_the_run(
    bucket: Proxy, directory: Path, tmp_path: Path
) -> None:
    target, file = Path("s3://images/by-hand"), "rows-000000000000.tar"
    upload_all(directory, target)
    images = PackedImages(target, options(tmp_path))
    images.read_row(0)
    put(target / file, bytes((directory / file).stat().st_size))
    with pytest.raises(ObjectStoreError, match="tar: it is another object than it was"):
        contents(images)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (("AWS_SECRET_ACCESS_KEY", "another secret"), Reason.DENIED),
        (("AWS_ACCESS_KEY_ID", "another key"), Reason.DENIED),
        (("AWS_ENDPOINT_URL", "http://127.0.0.1:9"), Reason.NO_ANSWER),
        (Fault.BUSY, Reason.NO_ANSWER),
        (Fault.CUT, Reason.NO_ANSWER),
        (Fault.SILENT, Reason.NO_ANSWER),
    ],
)
def test_a_store_that_refuses_ends_the_run_in_one_line(
    fault: tuple[str, str] | Fault, reason: Reason, bucket: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its start, and as it reads; the line has the place, and nothing of the credentials."""
    opened = PackedImages(PACK, options(tmp_path))
    monkeypatch.setattr(objects, "_REQUEST_SECONDS", 1)
    monkeypatch.setattr(objects, "_RETRY_SECONDS", 1)
    objects._bucket.cache_clear()
    if isinstance(fault, Fault):
        bucket.always = fault
    else:
        monkeypatch.setenv(*fault)
    with pytest.raises(ObjectStoreError) as ended:
        load_dataset("packed", PACK, options=options(tmp_path))
    assert str(ended.value) == f"s3://images/packed/manifest.json: {reason.value}"
    assert not any(secret in repr(ended.value) for secret in (KEY, SECRET, "another"))
    with pytest.raises(ObjectStoreError) as ended:
        opened.read_row(0)
    assert ended.value.reason is reason


def test_missing_credentials_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line; but those of a role, which a machine's metadata service or a file has, are left to obstore."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as metadata:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{metadata.getsockname()[1]}")
        assert objects._has_credentials()
    for name in ("ANOTHER_VARIABLE", "AWS_ACCESS_KEY_ID"):
        monkeypatch.setenv(name, KEY)
        objects._bucket.cache_clear()
        with pytest.raises(ObjectStoreError) as ended:
            objects.read(PACK)
        assert str(ended.value) == f"s3://images: {Reason.NO_CREDENTIALS.value}"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/a/token")
    assert objects._has_credentials()


@pytest.mark.parametrize(
    ("command", "number", "silent", "status", "message"),
    [
        (["-m", "trainer.data", "pack", "tree", "s3://images/new"], signal.SIGINT, "/", 130, "interrupted"),
        (["-m", "trainer.data", "inspect", str(SOURCE)], signal.SIGINT, "/images/source/0", 130, "interrupted"),
        (["-c", TRAIN], signal.SIGTERM, "/images/packed/rows-", 1, Reason.ENDING.value),
    ],
)
def test_signals_end_commands_that_wait_for_a_silent_store(
    bucket: Proxy, shards: Path, tmp_path: Path, command: list[str], number: int, silent: str, status: int, message: str
) -> None:
    """They wait in the main thread, or in several others, long before the store is given up."""
    plain_tree(tmp_path / "tree", 3)
    bucket.heal()
    bucket.silent = silent
    with subprocess.Popen(
        [sys.executable, *command, "--cache-dir", "cache"],
        env=os.environ | credentials(bucket.url) | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_until(lambda: any(one.path.startswith(silent) for one in bucket.requests))
            process.send_signal(number)
            _, errors = process.communicate(timeout=objects._REQUEST_SECONDS)
        finally:
            process.kill()
    assert process.returncode == status, errors
    assert message in errors.splitlines()[-1]


def test_no_interrupt_leaves_a_lock_taken(bucket: Proxy, tmp_path: Path) -> None:
    bucket.heal()
    with no_condition_in_this_thread():
        place = local_source(SOURCE, options(tmp_path))
    assert len([*place.parent.glob("*.tar")]) == 3


def test_an_interrupt_leaves_out_what_is_not_copied_yet(
    bucket: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = queue.SimpleQueue[Path](), threading.Event()

    def copy(_: object, target: Path) -> None:
        begun.put(target)
        go_on.wait()

    def interrupt() -> None:
        begun.get()
        raise KeyboardInterrupt

    bucket.heal()
    monkeypatch.setattr(bucket_sources, "_COPIES", 1)
    monkeypatch.setattr(bucket_sources, "_copy", copy)
    monkeypatch.setattr(bucket_sources, "in_other_thread", partial(in_other_thread, look=interrupt))
    with pytest.raises(KeyboardInterrupt):
        local_source(SOURCE, options(tmp_path))
    go_on.set()
    with locked(options(tmp_path).in_cache("sources", ".lock")):  # they have ended
        assert begun.empty()


def test_bad_arguments_and_disks_are_one_line(
    bucket: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="give --cache-dir"):
        load_dataset("packed", PACK)
    with pytest.raises(ValueError, match="--cache-gib is too small for what is read at once"):
        PackedImages(PACK, options(tmp_path, 100 / 2**20)).read_row(0)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--cache-dir .*file cannot be written \(Not a directory\)"):
        PackedImages(PACK, SourceOptions(cache_dir=tmp_path / "file"))
    for place in ("a-key:a-secret@images/packed", "a-key:an/a-secret@images/packed", "a-secret@images/packed"):
        assert call("pack", tmp_path, f"s3://{place}") == call("pack", tmp_path, f"gs://{place}") == 2
        (*_, line) = capsys.readouterr().err.splitlines()
        assert "@images/packed has credentials, which files and messages would repeat: give s3://BUCKET/KEY" in line
        assert not any(secret in line for secret in ("a-key", "a-secret"))
    for place in ("s3://nowhere/packed", "s3://images/nothing"):
        with pytest.raises(ObjectStoreError, match=f"^{place}/manifest.json: {re.escape(Reason.MISSING.value)}$"):
            load_dataset("packed", Path(place), options=options(tmp_path))
    put(Path("s3://images/damaged/manifest.json"), b"{}")
    with pytest.raises(ValueError, match=r"^s3://images/damaged/manifest\.json is damaged"):
        Manifest.load(Path("s3://images/damaged"))
    with pytest.raises(ValueError, match=r"^s3://images/packed was packed with no --stray"):
        load_dataset("packed", PACK, options=replace(options(tmp_path), stray="use"))
    with pytest.raises(ValueError, match=r"^s3://images/packed holds packed images"):
        load_dataset("folder", PACK)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for call_of_disk, message in (("os.utime", "cannot be written"), ("os.pread", "cannot be read")):
        read = PackedImages(PACK, options(tmp_path / "read"))
        read.read_row(0)
        with monkeypatch.context() as failing:
            failing.setattr(call_of_disk, fail)
            with pytest.raises(ValueError, match=message):
                read.read_row(0)
    monkeypatch.setattr("os.posix_fallocate", full)
    images = PackedImages(PACK, options(tmp_path))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"\(No space left on device\): free space, or give a lower --cache-gib"):
            images.read_row(0)
    assert not list((tmp_path / "cache/pieces").iterdir())


@pytest.mark.parametrize("what", ["a pack", "numbered tars"])
def test_a_full_disk_of_the_cache_is_one_line(what: str, bucket: Proxy, shards: Path, tmp_path: Path) -> None:
    """A file system of 48 KiB, less than the pack, or than a tar that is listed; nothing half-written stays on it."""
    private = ["unshare", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*private, "true"], capture_output=True).returncode != 0:
        pytest.skip("a small file system needs root, to mount it")
    script = 'mount -t tmpfs -o size=48k tmpfs "$0" && { "$@"; find "$0" -path "*/pieces/*.*"; }'
    (place := tmp_path / "cache").mkdir()
    read = ["-c", READ_ALL, str(place), str(SEGMENT_BYTES)]
    if what == "numbered tars":
        read = ["-m", "trainer.data", "inspect", SOURCE_NAME, "--cache-dir", str(place), "--cache-gib", "1e-6"]
    command = [*private, "sh", "-c", script, str(place), sys.executable, *read]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == ""
    assert "(No space left on device): free space, or give a lower --cache-gib" in done.stderr.splitlines()[-1]


def test_credentials_that_have_expired_are_one_line(bucket: Proxy) -> None:
    """At once: another request would get the same answer."""
    bucket.always = Fault.EXPIRED
    with pytest.raises(ObjectStoreError, match="whether AWS_SESSION_TOKEN has expired"):
        objects.read(PACK / "manifest.json")
    assert len(bucket.requests) == 1


def test_a_bucket_is_trained_on_by_its_name_alone(
    bucket: Proxy, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a folder is: a pack, and numbered archives here or there; no other URL."""
    chosen = ["--cache-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "run"), "--print-config"]
    for place in ("s3://images/packed", "s3://images/source/{00000..00002}.tar", str(shards / "{00000..00002}.tar")):
        with pytest.raises(SystemExit) as ended:
            start([place, *chosen])
        assert ended.value.code == 0
        assert f'data_dir = "{place}"' in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        start(["gs://images/packed", *chosen])
    assert ended.value.code == 2
    assert "gs://images/packed is a URL: copy or mount what is there" in capsys.readouterr().err
    assert call("inspect", "s3://images/packed", *chosen[:2]) == 0
    assert capsys.readouterr().out.startswith(f"s3://images/packed: a pack of {NUM_IMAGES} images")


@pytest.fixture
def shards(bucket: Proxy, tmp_path: Path) -> Path:
    """Three tars of samples, here and in the bucket."""
    for number in range(3):
        members = dict[str, bytes]()
        for image in sorted(plain_tree(tmp_path / f"tree-{number}", 12).rglob("*.jpg")):
            members[f"{number}{image.stem}.jpg"] = image.read_bytes()
            members[f"{number}{image.stem}.cls"] = b"%d" % (int(image.stem) % 3)
        with write_tar(tmp_path / "shards" / f"{number:05d}.tar", members).open("ab") as padded:
            padded.truncate(20 * tarfile.RECORDSIZE)  # all have one length
    upload_all(tmp_path / "shards", SOURCE.parent)
    return tmp_path / "shards"


def test_sources_in_a_bucket_are_those_on_a_disk(bucket: Proxy, shards: Path, tmp_path: Path) -> None:
    """They are copied once, and again where they changed; they pack to the same files."""
    bucket.faults.extend([Fault.BUSY, Fault.CUT])
    far, near = read_source(SOURCE, options(tmp_path)), read_source(shards / "{00000..00002}.tar")
    assert bytes(far.train.listing.content) == bytes(near.train.listing.content)
    assert contents(far.train.listing) == contents(near.train.listing)
    bucket.heal()
    command = ["pack", SOURCE_NAME, tmp_path / "far", "--cache-dir", tmp_path / "cache"]
    assert call(*command) == call("pack", shards / "{00000..00002}.tar", tmp_path / "near") == 0
    assert Manifest.load(tmp_path / "far").shards == Manifest.load(tmp_path / "near").shards
    assert not bucket.ranges()
    assert len(bucket.lists()) == 1
    content = (shards / "00000.tar").read_bytes()
    noted = {"crc32": "3610a686"}  # by another program
    put(SOURCE.with_name("00001.tar"), content, noted)  # of the same length, perhaps in the same second
    (tmp_path / "cache/sources/images/source/gone.tar").write_bytes(content)
    copied = read_source(SOURCE.parent, options(tmp_path)).train.listing
    assert len(copied) == 36
    assert {one.path for one in bucket.ranges()} == {"/images/source/00001.tar"}
    assert contents(copied)[:12] == contents(copied)[12:24], "what the object holds now"


def test_numbered_tars_that_are_too_large_to_copy_are_read_where_they_are(
    bucket: Proxy, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part asks for its own images alone and keeps nothing of them; its tars are those of one process."""
    here = shards / "{00000..00002}.tar"
    by_one = read_source(here).train.listing.content
    monkeypatch.setattr(numbered_shards, "SHARDS_A_PROCESS", 1)
    assert read_source(here).train.listing.content == by_one
    near = pack(here, tmp_path / "near", PackOptions(tar_bytes=20_000))
    bucket.faults.extend([Fault.BUSY, Fault.CUT])
    far = tmp_path / "far"
    for number in (0, 1):
        source = SourceOptions(cache_dir=tmp_path / f"cache-{number}", cache_gib=1e-6)
        bucket.requests.clear()
        pack(SOURCE, far, PackOptions(source=source, part=Part(number, 2), tar_bytes=20_000))
    planned = Manifest.load(far).ranges[-1]
    own = planned.tars(Part(1, 2))
    asked = [one.range.split("-") for one in bucket.ranges()]
    assert len(asked) == own.stop - own.start
    assert sum(int(last) - int(first) + 1 for first, last in asked) < sum(shard.bytes for shard in near.shards) / 2
    assert not list((tmp_path / "cache-1").rglob("*"))
    assert not list((tmp_path / "cache-0").rglob("*"))
    merged = merge(far)
    assert merged.shards == near.shards
    assert f"{SOURCE_NAME} is larger than --cache-gib: its images are read there" in capsys.readouterr().err
    small = ["--cache-dir", str(tmp_path / "cache"), "--cache-gib", "1e-6"]
    bucket.requests.clear()
    assert call("inspect", SOURCE_NAME, *small) == 0
    assert "duplicates: not looked for in a bucket" in capsys.readouterr().out
    assert len(bucket.ranges()) == 3 + 36, "three copies to list, and each image once"
    with pytest.raises(SystemExit):
        embed(["encoder", SOURCE_NAME, "--output", str(tmp_path / "features"), "--part", "0/2", *small])
    assert (
        f"{SOURCE_NAME} is larger than --cache-gib, and each part would read all of it: pack it, and embed the pack"
        in capsys.readouterr().err
    )
    bucket.faults.extend([Fault.BUSY, Fault.CUT])
    assert contents(read_source(SOURCE, source).train.listing) == contents(
        read_source(SOURCE, options(tmp_path)).train.listing
    )


def test_a_tar_that_cannot_be_listed_is_one_line(
    bucket: Proxy, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name in the bucket, from another process too."""
    monkeypatch.setattr(numbered_shards, "SHARDS_A_PROCESS", 1)
    source = SourceOptions(cache_dir=tmp_path / "cache", cache_gib=1e-6)
    boxes = write_tar(tmp_path / "boxes.tar", dict.fromkeys(("1.jpg", "1.json"), b'{"boxes": [1, 2]}'))
    put(SOURCE.with_name("00001.tar"), boxes.read_bytes())
    with pytest.raises(ValueError, match=r"^00001\.tar:1\.json: \[1, 2\] is no label.* another column or key$"):
        read_source(SOURCE, replace(source, label_key="boxes"))
    put(SOURCE.with_name("00001.tar"), (shards / "00001.tar").read_bytes()[: tarfile.BLOCKSIZE + 10])
    with pytest.raises(ValueError, match=r"^s3://images/source/00001\.tar is not a complete tar"):
        read_source(SOURCE, source)
    refused = ObjectStoreError(SOURCE, Reason.DENIED)
    assert str(copy.copy(refused)) == str(refused), "as it comes from another process"


@pytest.mark.parametrize("left", [0, tarfile.BLOCKSIZE, 5 * tarfile.BLOCKSIZE])
def test_a_tar_that_is_cut_off_after_it_was_listed_ends_the_pack(
    left: int, bucket: Proxy, shards: Path, tmp_path: Path
) -> None:
    """Before an image that is read where it lies, between it and its header, or in the middle of it."""
    source = PackOptions(source=SourceOptions(cache_dir=tmp_path / "cache", cache_gib=1e-6))
    with planned_pack(SOURCE, tmp_path / "packed", replace(source, part=Part(0, 1))):
        put(SOURCE.with_name("00001.tar"), (shards / "00001.tar").read_bytes()[:left])
    with pytest.raises(ObjectStoreError) as ended:
        pack(SOURCE, tmp_path / "packed", replace(source, part=Part(0, 1)))
    assert str(ended.value) == f"s3://images/source/00001.tar: {Reason.CUT_OFF.value}"


def test_images_of_a_bucket_have_their_names_there(
    bucket: Proxy, shards: Path, tmp_path: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever --cache-dir copies them: none is added twice, parts join, and no file or message names the copies."""
    packed = tmp_path / "packed"

    def command(source: Path, output: Path, cache_dir: str, *more: str) -> list[object]:
        return ["pack", objects.shown(source), output, "--cache-dir", tmp_path / cache_dir, *more]

    assert call(*command(SOURCE, packed, "one")) == 0
    whole = Manifest.load(packed)
    assert call(*command(SOURCE, packed, "two")) == call(*command(SOURCE, packed, "two", "--extend")) == 0
    assert Manifest.load(packed) == whole
    assert whole.sizes == (36,)
    for number, source in enumerate((SOURCE, SOURCE.parent, SOURCE.with_name("00001.tar"))):
        joined = tmp_path / f"joined-{number}"
        for part, cache_dir in enumerate(("one", "two")):
            assert call(*command(source, joined, cache_dir, "--part", f"{part}/2")) == 0
        assert merge(joined).is_of(source)
        assert Manifest.load(joined).shards == whole.shards or source.name == "00001.tar"
    assert Manifest.load(tmp_path / "joined-0") == whole
    capsys.readouterr()
    assert call("inspect", packed) == call("inspect", SOURCE_NAME, "--cache-dir", tmp_path / "two") == 0
    said = capsys.readouterr().out
    assert f"  36 images of {SOURCE_NAME}\n" in said
    assert f"\n{SOURCE_NAME}\n" in said
    assert f"{SOURCE_NAME.replace('{00000..00002}', '00001')}:10000.jpg of s3://" in said, "the first duplicate"
    files = [path for path in tmp_path.glob("[pj]*/*") if path.is_file()]
    assert not [path for path in files if str(tmp_path).encode() in path.read_bytes()]
    assert str(tmp_path / "two") not in said
    manifest = packed / "manifest.json"
    cache = f"{tmp_path}/old/sources/"  # as packs were written before
    manifest.write_text(manifest.read_text().replace("s3://", cache))
    assert refused(*command(SOURCE, packed, "two", "--extend")) == (
        f"pic pack: {packed} may hold images of s3://images/source already, by the name of their copy "
        f"{cache}images/source: replace {cache} by s3:// in its manifest.json if it does, or give another directory"
    )


def test_sources_that_are_missing_or_too_large_are_one_line(bucket: Proxy, shards: Path, tmp_path: Path) -> None:
    for source, mib, message in (
        ("s3://images/source/{00001..00003}.tar", 10.0, "1 of its 3 files are missing, first {}/00003.tar"),
        ("s3://images/no/{00001..00003}.tar", 10.0, "3 of its 3 files are missing"),
        ("s3://nowhere/{00001..00003}.tar", 10.0, f"s3://nowhere: {Reason.UNLISTED.value}"),
        ("s3://images/no", 10.0, f"s3://images/no: {Reason.MISSING.value}"),
        ("s3://images/source", 0.01, "more than --cache-gib: give more"),
        ("s3://images/source/{00001..00001}.zip", 10.0, "1 of its 1 files are missing"),
    ):
        with pytest.raises(ValueError, match=re.escape(message.format(SOURCE_NAME.rpartition("/")[0]))):
            read_source(Path(source), options(tmp_path, mib))
    with pytest.raises(ValueError, match="give --cache-dir"):
        read_source(SOURCE)
    assert not list((tmp_path / "cache").rglob("*.tar"))
    bucket.listed = (b"source/00001.tar", b"source//0001.tar")
    with pytest.raises(ValueError, match="names in it that cannot be read"):
        read_source(SOURCE.parent, options(tmp_path))


def test_an_object_that_is_replaced_after_it_was_listed_is_not_copied_in_part(
    bucket: Proxy, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a longer one."""
    listed = bucket_sources._objects(SOURCE)
    monkeypatch.setattr(bucket_sources, "_objects", lambda source: listed)
    put(SOURCE.with_name("00001.tar"), (shards / "00001.tar").read_bytes() + bytes(10_240))
    with pytest.raises(ObjectStoreError, match=r"00001\.tar: it is another object than it was"):
        local_source(SOURCE, options(tmp_path))


def test_a_pack_is_uploaded_continued_and_extended(bucket: Proxy, tmp_path: Path) -> None:
    """An upload that is cut off leaves no pack; the same command sends what is missing, and the manifest last."""
    target, place = Path("s3://images/made"), tmp_path / "made"
    tree = plain_tree(tmp_path / "tree/train", 30).parent
    plain_tree(tree / "val", 10)
    pack(tree, place, PackOptions())
    command = ["pack", place, "s3://images/made"]
    bucket.refused = "/images/made/images-"
    assert call(*command) == 1
    assert not is_packed(target)
    bucket.heal()
    assert call(*command) == 0
    sent = [one.path for one in bucket.requests if one.method == "PUT"]
    assert sent[-1] == "/images/made/manifest.json"
    assert not [path for path in sent if path.startswith("/images/made/test/rows-")], "they were sent before"
    assert stored(target) == contents_on_disk(place)
    near = load_dataset("packed", place, image_size=16)
    far = load_dataset("packed", target, image_size=16, options=options(tmp_path / "other"))
    assert np.array_equal(far.train_images[:], near.train_images[:])
    assert np.array_equal(far.train_labels, near.train_labels)
    assert np.array_equal(far.test_labels, near.test_labels)
    pack(plain_tree(tree / "train", 6, first=30).parent, place, PackOptions(extend=True))
    assert call(*command) == 0
    assert Manifest.load(target) == Manifest.load(place)
    assert Manifest.load(target).sizes == (30, 6)
    bucket.heal()
    assert call(*command) == 0
    assert {one.path for one in bucket.requests if one.method == "PUT"} == {"/images/made/.claim"}
    whole = stored(target)
    tar, index = target / "rows-000000000000.tar", target / "test/index-000000000000.bin"
    objects.remove([tar])
    objects.write(index, objects.read(index)[:-1])
    assert call(*command) == 0
    assert stored(target) == whole, "what is missing or too short is sent again"


def test_another_pack_at_the_place_of_an_upload_stays_as_it_is(
    bucket: Proxy, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """Test images are sent first, and would be those of another pack."""
    tree = plain_tree(tmp_path / "tree/train", 6).parent
    plain_tree(tree / "val", 4)
    pack(tree, tmp_path / "split", PackOptions())
    pack(tree / "train", tmp_path / "plain", PackOptions(order_seed=3))
    for there, here in (("plain", "split"), ("split/test", "plain")):
        target = "s3://images/another"
        assert call("pack", tmp_path / there, f"{target}/{there}") == 0
        before = stored(Path(target))
        wrong = refused("pack", tmp_path / here, f"{target}/{there.removesuffix('/test')}")
        assert re.search("holds (another pack|test images)", wrong)
        assert stored(Path(target)) == before
    assert call("verify", "s3://images/another/split") == 1, "there are test images only"


def test_a_pack_of_parts_is_uploaded_and_verified(
    bucket: Proxy, tmp_path: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It needs no --cache-dir; what is damaged here is not sent, and the manifest only when all else is there."""
    target, joined = Path("s3://images/joined"), tmp_path / "joined"
    tree = plain_tree(tmp_path / "tree/train", 30).parent
    plain_tree(tree / "val", 10)

    upload_it = ["pack", joined, "s3://images/joined"]
    for part in range(2):
        pack(tree, joined, PackOptions(tar_bytes=10_000, part=Part(part, 2)))
        assert "joined is not finished: repeat the command that packs it; 'pic pack merge'" in refused(*upload_it)
    assert call("pack", "merge", joined) == 0
    assert "holds packed images, which are uploaded as they are: omit the options" in refused(*upload_it, "--extend")
    names = ["images-000000000000.tsv", "rows-000000000000.tar", "index-000000000000.bin"]  # as they are sent
    for path in (joined / name for name in names):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert f"{path.name} is damaged: pack the images again" in refused(*upload_it)
        assert not is_packed(target)
        path.write_bytes(content)
    assert objects.below(target)
    capsys.readouterr()
    assert call(*upload_it) == 0
    assert capsys.readouterr().out.endswith(f"s3://images/joined holds the pack; {joined} is not needed any more\n")
    far, near = PackedImages(target, options(tmp_path)), PackedImages(joined)
    assert contents(far) == contents(near)
    assert list(map(far.path, range(30))) == list(map(near.path, range(30)))
    assert call("verify", "s3://images/joined") == call("verify", "s3://images/joined/test") == 0
    assert capsys.readouterr().out.startswith("s3://images/joined: all files match their checksums\n")
    for name in (*names, "shards-000000000000.jsonl"):
        content, noted = objects.read(target / name), attributes_of(target / name)
        put(target / name, content, noted | {"sha256": "of another"})
        line = f"pic verify: s3://images/joined/{name} is missing or does not match its checksum: pack the images"
        assert refused("verify", "s3://images/joined").startswith(line)
        objects.remove([target / name])
        if not name.startswith("shards"):  # by which the manifest is complete
            assert refused("verify", "s3://images/joined").startswith(line)
        put(target / name, content, noted)
    assert call("verify", "s3://images/joined") == 0


def test_of_two_commands_that_pack_to_one_place_one_is_refused(
    bucket: Proxy, directory: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """Also after the first was killed, which may be repeated anywhere, or given up."""
    tree, target = plain_tree(tmp_path / "tree", 3), Path("s3://images/two")
    upload_it = ["pack", shutil.copytree(directory, tmp_path / "copy"), "s3://images/two"]
    with bucket_packs.claimed(target, b"the first"):
        for command in (upload_it, ["pack", tree, "s3://images/two", "--cache-dir", tmp_path / "cache"]):
            line = refused(*command)
            assert line.endswith("wait for it or repeat it, or remove s3://images/two/.claim if it is given up")
    assert not objects.below(target)
    objects.write(target / ".claim", Manifest.load(directory).plan.encode())  # as it is left by one that is killed
    assert call(*upload_it) == 0
    assert is_packed(target)
    assert target / ".claim" not in objects.below(target)
