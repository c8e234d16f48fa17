"""Parts of a pack in a bucket of a real S3 server: killed, repeated elsewhere and joined, they are the pack of one
process on a disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.commands import data_command as call
from tests.helpers.dying_pack import Killed, contents
from tests.helpers.image_tree import plain_tree, split_tree
from tests.helpers.object_store import KEY, SECRET, Proxy, object_store, stored
from tests.helpers.watching import wait_until
from tests.trainer.data.written import write_tar
from trainer.data import bucket_packs, finished_tars, load_dataset, planning
from trainer.data.config import SourceOptions
from trainer.data.finished_tars import FinishedTars
from trainer.data.manifest import Manifest
from trainer.data.pack import PackOptions, merge, pack
from trainer.data.packed import PackedImages
from trainer.data.packer import Packer
from trainer.data.parts import Part
from trainer.data.planning import plan_in_bucket
from weightserver.common import object_store as objects
from weightserver.common.object_store import ObjectStoreError, Reason

ROOT = Path(__file__).parents[3]
PART = """
import sys
from pathlib import Path
from trainer.data import planning
from trainer.data.config import SourceOptions
from trainer.data.pack import PackOptions, pack
from trainer.data.parts import to_part
from trainer.stopping import exit_on_error

planning._LOOK_SECONDS = 0.2
source, target, part, cache = sys.argv[1:]
with exit_on_error("part"):
    options = PackOptions(tar_bytes=40_000, threads=2, part=to_part(part), source=SourceOptions(cache_dir=Path(cache)))
    pack(Path(source), Path(target), options)
"""

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.guard]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_tree(tmp_path_factory.mktemp("images") / "tree")


@pytest.fixture(scope="module")
def whole(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack of one process on a disk."""
    directory = tmp_path_factory.mktemp("packed")
    pack(tree, directory, PackOptions(tar_bytes=40_000))
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with object_store(tmp_path_factory.mktemp("server"), "images") as proxy:
        yield proxy


@pytest.fixture
def bucket(server: Proxy) -> Iterator[Proxy]:
    server.heal()
    yield server
    server.heal()


@pytest.fixture
def target(bucket: Proxy, tmp_path: Path) -> Path:
    """A place in the bucket that nothing else is packed to."""
    return Path("s3://images", tmp_path.name)


def options(cache: Path, part: Part | None = None, **changes: Any) -> PackOptions:
    return PackOptions(**{"tar_bytes": 40_000, "threads": 2, "part": part, "source": source_options(cache)} | changes)


def source_options(cache: Path) -> SourceOptions:
    return SourceOptions(cache_dir=cache)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets others act before the next call of a function or, with `after`, when it has ended."""

    def prepare(place: Any, name: str, others: Callable[[], object], *, after: bool = False) -> None:
        own = getattr(place, name)

        def called(*arguments: Any) -> Any:
            monkeypatch.setattr(place, name, own)
            if after:
                found = own(*arguments)
                others()
                return found
            others()
            return own(*arguments)

        monkeypatch.setattr(place, name, called)

    return prepare


@contextmanager
def process(tree: Path, target: Path, part: str, cache: Path) -> Iterator[subprocess.Popen[str]]:
    """Packs a part; is killed at the end, if it still runs."""
    command = [sys.executable, "-c", PART, str(tree), objects.shown(target), part, str(cache)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def first_line(started: subprocess.Popen[str]) -> str:
    """What a process says first; it has begun then."""
    assert started.stderr
    return started.stderr.readline().strip()


def test_parts_on_several_machines_are_the_pack_of_one_process(
    bucket: Proxy,
    tree: Path,
    whole: Path,
    target: Path,
    tmp_path: Path,
    done: Callable[..., str],
    refused: Callable[..., str],
) -> None:
    """One waits for the list of images; one is killed, and repeated elsewhere as parts of another number."""
    place, shown = f"/images/{target.name}", objects.shown(target)
    tars = Manifest.load(whole).ranges[-1].tars(Part(0, 2))
    last = f"{place}/rows-{tars[-1]:012d}.tar"
    with process(tree, target, "1/2", tmp_path / "two") as second:
        assert first_line(second) == "waiting for part 0/2, which lists the images"
        bucket.silent = last
        with process(tree, target, "0/2", tmp_path / "one") as first:
            wait_until(lambda: any(one.path == last for one in bucket.requests))
            first.send_signal(signal.SIGKILL)
        assert [path.name for path in (tmp_path / "one").rglob("*.tar")] == [Path(last).name], (
            "what was sent is removed"
        )
        _, errors = second.communicate(timeout=300)
        assert second.returncode == 0, errors
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not [secret for secret in (KEY, SECRET) if secret in errors or secret.encode() in written]
    before = set(bucket.writes(".tar")) - {last}
    assert len(before) > len(tars)
    bucket.heal()
    with pytest.raises(ValueError, match=rf"^{shown} is not completely packed: .*; 'pic pack merge' joins parts"):
        PackedImages(target, source_options(tmp_path / "two"))
    assert f"{shown} is not finished: repeat the command that packs it; 'pic pack merge' joins parts" in (
        refused("verify", shown)
    )
    for number in (1, 2, 0):
        bucket.requests.clear()
        assert not pack(tree, target, options(tmp_path / "three", Part(number, 3))).complete
        read = [one.path for one in bucket.requests if one.method == "GET" and one.path.endswith("manifest.json")]
        assert read == [f"{place}/manifest.json", f"{place}/test/manifest.json"], "once"
        assert not [path for path in (tmp_path / "three").rglob("*") if path.suffix in (".tar", ".bin")]
        assert not set(bucket.writes(".tar")) & before, "what was finished is not sent again"
    said = done("pack", "merge", shown, "--cache-dir", tmp_path / "four")
    assert said.startswith(f"{shown}: 53 images in 1 range(s), 3 named classes, ")
    assert stored(target) == contents(whole)
    assert not [path for path in (tmp_path / "four").rglob("*") if path.is_file()]
    assert call("verify", shown) == 0
    far = load_dataset("packed", target, image_size=16, options=source_options(tmp_path / "five"))
    near = load_dataset("packed", whole, image_size=16)
    assert far.digests == near.digests
    assert np.array_equal(far.train_images[:], near.train_images[:])
    assert np.array_equal(far.test_images[:], near.test_images[:])
    bucket.heal()
    again = options(tmp_path / "six", Part(0, 2))
    assert pack(tree, target, again) == merge(target, again.source) == Manifest.load(whole)
    assert not bucket.writes()


@pytest.fixture
def packed(tree: Path, target: Path, tmp_path: Path) -> Path:
    """Both parts of a pack, not joined yet."""
    for number in range(2):
        pack(tree, target, options(tmp_path / "cache", Part(number, 2)))
    return target


def test_nothing_is_joined_before_all_tars_are_there(
    bucket: Proxy, tree: Path, whole: Path, target: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """One line tells what is missing: parts, a tar, or records that do not match their checksum."""
    shown, cache = objects.shown(target), tmp_path / "cache"

    def refused_merge() -> str:
        bucket.requests.clear()
        line = refused("pack", "merge", shown, "--cache-dir", cache)
        assert not bucket.writes()
        return line

    assert f"{shown}/manifest.json: {Reason.MISSING.value}" in refused_merge()
    pack(tree, target, options(cache, Part(0, 2)))
    assert refused_merge() == (
        f"pic pack merge: 1 of 2 tars of {shown}/test missing, first that of row 11 of 20: repeat 'pic pack SOURCE "
        f"{shown}', with --part I/N for the parts that did not end"
    )
    pack(tree, target, options(cache, Part(1, 2)))
    tar, note = target / "rows-000000000000.tar", min(objects.below(target / "parts"))
    for path in (tar, note):
        content = objects.read(path)
        for damaged in (content[:-1], content[:-1] + b"x"):
            objects.write(path, damaged)
            assert f"{objects.shown(path)} does not match its checksum: remove it, and repeat" in refused_merge()
        objects.write(path, content)
    objects.remove([tar])
    number = Manifest.load(target).ranges[-1].num_tars
    assert f"1 of {number} tars of {shown} missing, first that of row 0 of 53" in refused_merge()
    pack(tree, target, options(cache, Part(0, 3)))
    merge(target, source_options(cache))
    assert stored(target) == contents(whole)


def test_a_merge_that_is_interrupted_at_its_end_is_repeated(
    packed: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine: when the pack is complete, what parts noted is removed."""
    with monkeypatch.context() as patched:
        patched.setattr(finished_tars, "remove", die)
        with pytest.raises(Killed):
            merge(packed, source_options(tmp_path / "one"))
    assert Manifest.load(packed).complete
    assert merge(packed, source_options(tmp_path / "two")) == Manifest.load(whole)
    assert stored(packed) == contents(whole)


@pytest.mark.parametrize("then", ["__init__", "joined"])
def test_of_two_merges_at_the_same_time_one_says_to_repeat_it(
    then: str, packed: Path, whole: Path, tmp_path: Path, meanwhile: Callable[..., None]
) -> None:
    """Where the other one joins before its tars are listed, or before what parts noted is read."""
    meanwhile(FinishedTars, then, lambda: merge(packed, source_options(tmp_path / "two")))
    with pytest.raises(ValueError, match=r"^another command has joined the tars of s3://\S+ meanwhile: repeat"):
        merge(packed, source_options(tmp_path / "one"))
    assert merge(packed, source_options(tmp_path / "one")) == Manifest.load(whole)
    assert stored(packed) == contents(whole)


def test_a_merge_that_was_given_up_leaves_what_an_extension_has_packed(
    packed: Path, whole: Path, tmp_path: Path, meanwhile: Callable[..., None]
) -> None:
    """It goes on after another one has joined the tars, and images were added and packed."""
    more, cache = plain_tree(tmp_path / "more", 9), tmp_path / "two"

    def extend() -> None:
        merge(packed, source_options(cache))
        plan_in_bucket(more, packed, options(cache, extend=True))
        pack(more, packed, options(cache, Part(0, 1)))

    meanwhile(finished_tars, "send", extend)
    assert merge(packed, source_options(tmp_path / "one")) == Manifest.load(whole)
    assert merge(packed, source_options(cache)).sizes == (*Manifest.load(whole).sizes, 9)


@pytest.mark.parametrize(("joined", "changed"), [(False, True), (True, False)])
def test_a_part_that_was_given_up_changes_no_tar_that_was_packed_meanwhile(
    joined: bool, changed: bool, bucket: Proxy, tree: Path, target: Path, tmp_path: Path, meanwhile: Callable[..., None]
) -> None:
    """It goes on after others have packed its tars, and joined them: quietly, or in one line if it has other images."""
    images, part = shutil.copytree(tree, tmp_path / "tree"), Part(0, 1)
    other = next(images.rglob("*.jpg")).read_bytes()

    def pack_all() -> None:
        pack(images, target, options(tmp_path / "two", None if joined else part))
        for path in images.rglob("*.jpg") if changed else ():
            path.write_bytes(other)
        bucket.requests.clear()

    meanwhile(Packer, "run", pack_all)
    refused = pytest.raises(ValueError, match=r"\.tar was packed by another command meanwhile, with other content")
    with refused if changed else nullcontext():
        pack(images, target, options(tmp_path / "one", part))
    assert not bucket.writes()


def test_tars_that_a_finished_pack_has_lost_are_named(
    bucket: Proxy, tree: Path, packed: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    cache, shown = tmp_path / "cache", objects.shown(packed)
    merge(packed, source_options(cache))
    tars = sorted(path for path in objects.below(packed / "test") if path.suffix == ".tar")
    objects.write(tars[0], b"cut off")
    objects.remove(tars[1:])
    for command in (["pack", tree, shown], ["pack", "merge", shown]):
        bucket.requests.clear()
        line = refused(*command, "--cache-dir", cache)
        assert f"{len(tars)} tars of {shown}/test missing or cut off, first {tars[0].name}: pack the images on" in line
        assert not [one for one in bucket.requests if one.path.endswith(".tar")], "a list tells it"


def die(_: object) -> None:
    raise Killed


def test_a_write_that_is_refused_is_one_line_and_repeated(
    bucket: Proxy, tree: Path, whole: Path, target: Path, tmp_path: Path
) -> None:
    """Of each kind of object."""

    def pack_all() -> None:
        for number in range(2):
            pack(tree, target, options(tmp_path / "cache", Part(number, 2)))
        merge(target, source_options(tmp_path / "cache"))

    for place in ("images-", "manifest", "rows-", "parts/", "test/index-", "shards-"):
        bucket.refused = f"/images/{target.name}/{place}"
        with pytest.raises(ObjectStoreError) as ended:
            pack_all()
        assert ended.value.reason is Reason.DENIED
        assert f"{objects.shown(target)}/{place}" in str(ended.value)
    assert not Manifest.load(target).complete
    bucket.heal()
    pack_all()
    assert stored(target) == contents(whole)


def test_one_command_packs_and_extends_on_any_machine(
    bucket: Proxy, target: Path, tmp_path: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without parts; no tar is copied there. What was interrupted is continued, and not changed by another command."""
    tree, whole, shown = plain_tree(tmp_path / "tree/train", 12).parent, tmp_path / "whole", objects.shown(target)
    plain_tree(tree / "test", 5)
    place, command = f"/images/{target.name}", ["pack", tree, shown, "--cache-dir"]

    assert f"{shown} holds no packed images to extend: omit --extend" in refused(*command, tmp_path / "one", "--extend")
    bucket.refused = f"{place}/test/rows-"
    assert Reason.DENIED.value in refused(*command, tmp_path / "one")
    bucket.heal()
    assert call(*command, tmp_path / "two") == 0
    assert capsys.readouterr().out.startswith(f"{shown}: 12 images in 1 range(s), 3 named classes, 1 tar, ")
    assert bucket.writes(".tar") == [f"{place}/test/rows-000000000000.tar"], "the other was sent before"
    pack(tree, whole, PackOptions())
    assert stored(target) == contents(whole)
    bucket.heal()
    assert call(*command, tmp_path / "two") == 0
    assert not bucket.writes()
    for number, (cache, write) in enumerate([("two", "manifest.json"), ("three", "rows-")]):
        plain_tree(tree / "train", 3, first=12 + 3 * number)
        plain_tree(tree / "test", 1, first=20 + number)
        bucket.refused = f"{place}/{write}"
        assert Reason.DENIED.value in refused(*command, tmp_path / cache, "--extend")
        assert len(PackedImages(target, source_options(tmp_path / "reader"))) == 12 + 3 * number
        if write == "rows-":
            other = ["pack", tree / "test", shown, "--extend", "--cache-dir", tmp_path / cache]
            message = f"{shown} holds images of {tree}/train: finish packing those first, or give another"
            assert message in refused(*other)
        bucket.heal()
        assert call(*command, tmp_path / "four", "--extend") == 0
        said = f"{tree}/train: packing what was listed before; repeat --extend to add newer images"
        assert (said in capsys.readouterr().err) == (write != "manifest.json")
        pack(tree, whole, PackOptions(extend=True))
        assert stored(target) == contents(whole)
    assert not [path for path in tmp_path.rglob("rows-*") if not path.is_relative_to(whole)]
    assert "holds images of" in refused("pack", tree / "test", shown, "--cache-dir", tmp_path / "two")
    listing = target / "images-000000000012.tsv"
    objects.write(listing, objects.read(listing)[:-1] + b"x")
    assert f"{objects.shown(listing)}: {Reason.DAMAGED.value}" in refused(*command, tmp_path / "five", "--extend")


def test_a_mistake_is_told_before_a_bucket_is_asked(
    bucket: Proxy, tree: Path, target: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    for path in sorted(tree.rglob("*.jpg"))[:3]:
        objects.upload(path, target / path.name)
    bucket.requests.clear()
    source, shown = str(tree), objects.shown(target)
    for arguments, message in (
        ([f"{source}/absent"], f"no such folder or list of images: {source}/absent"),
        ([source, "--extend", "--part=0/2"], "--extend adds images to a pack in a bucket by one process: omit --"),
        ([shown], f"{shown} is the source itself: give another place"),
    ):
        line = refused("pack", arguments[0], shown, "--cache-dir", tmp_path / "cache", *arguments[1:])
        assert line.startswith(f"pic pack: {message}")
        assert not bucket.requests


def test_what_others_have_at_the_place_stays_and_is_no_part_of_a_pack(
    bucket: Proxy, tree: Path, target: Path, tmp_path: Path
) -> None:
    """Another program's objects, and a plan that was given up."""
    images, others = plain_tree(tmp_path / "images", 6), ("00000.tar", "note", "0123456789ab-000000000000/more")
    for name in others:
        objects.write(target / "parts" / name, b"another's")
    bucket.refused = f"/images/{target.name}/manifest"
    with pytest.raises(ObjectStoreError):
        pack(tree, target, options(tmp_path / "cache"))
    bucket.heal()
    pack(images, target, options(tmp_path / "cache"))
    assert not objects.find(target / "test/manifest.json"), "the plan of other test images"
    assert sorted(objects.below(target / "parts")) == sorted(target / "parts" / name for name in others)
    assert {objects.read(target / "parts" / name) for name in others} == {b"another's"}


def test_a_pack_that_another_command_planned_meanwhile_is_not_lost(
    bucket: Proxy, target: Path, tmp_path: Path, meanwhile: Callable[..., None]
) -> None:
    images, other = plain_tree(tmp_path / "images", 6), plain_tree(tmp_path / "other", 9)
    meanwhile(planning, "claimed", lambda: pack(other, target, options(tmp_path / "two")))
    with pytest.raises(ValueError, match="holds images of "):
        pack(images, target, options(tmp_path / "one"))
    plain_tree(other, 3, first=9)
    meanwhile(planning, "claimed", lambda: pack(other, target, options(tmp_path / "two", extend=True)))
    assert pack(images, target, options(tmp_path / "one", extend=True)).num_images == 18


def test_neither_source_nor_pack_needs_a_disk(bucket: Proxy, target: Path, tmp_path: Path) -> None:
    """Numbered tars in a bucket, larger than the cache, are packed into one; the cache has the list of images."""
    for number in range(2):
        images = plain_tree(tmp_path / f"tree-{number}", 20).rglob("*.jpg")
        members = {f"{number}{image.name}": image.read_bytes() for image in sorted(images)}
        objects.upload(write_tar(tmp_path / "source.tar", members), target / f"source/{number:05d}.tar")
    source, cache = target / "source/{00000..00001}.tar", tmp_path / "cache"
    small = SourceOptions(cache_dir=cache, cache_gib=8 / 2**20)
    pack(source, tmp_path / "whole", options(tmp_path / "other"))
    for number in range(3):
        pack(source, target / "packed", options(cache, Part(number, 3), source=small))
    merge(target / "packed", small)
    assert stored(target / "packed") == contents(tmp_path / "whole")
    assert sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) < 8_192


def test_a_tar_that_the_store_does_not_keep_is_not_finished(
    bucket: Proxy, tree: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(path: Path, to: Path, **noted: Any) -> None:
        if path.suffix != ".tar":
            objects.upload(path, to, **noted)

    monkeypatch.setattr(bucket_packs, "upload", lose)
    with pytest.raises(ObjectStoreError, match=r"rows-000000000000\.tar: it does not match its checksum"):
        pack(tree, target, options(tmp_path / "cache", Part(0, 1)))
    assert not objects.below(target / "parts")


def test_a_bucket_holds_one_pack_and_it_is_made_in_one_way(
    bucket: Proxy,
    tree: Path,
    whole: Path,
    packed: Path,
    tmp_path: Path,
    done: Callable[..., str],
    refused: Callable[..., str],
) -> None:
    cache, shown, other = tmp_path / "cache", objects.shown(packed), packed.with_name(f"{packed.name}-other")
    bucket.requests.clear()
    wrong = refused("pack", tree, shown, "--cache-dir", cache, "--order-seed", "6")
    assert "is packed in the order of seed 0, not 6: give --order-seed 0" in wrong
    wrong = refused("pack", tree / "test", shown, "--cache-dir", cache, "--part", "1/2")
    assert f"holds images of {tree}/train: finish packing those first, or give" in wrong
    assert not bucket.writes()
    pack(tree, packed, options(cache))
    assert stored(packed) == contents(whole), "without --part, all that parts have not packed is packed and joined"
    for source in (packed, whole):
        with pytest.raises(ValueError, match=rf"^{objects.shown(source)} holds packed images: give the folder or list"):
            pack(source, other, options(cache))
    in_parts = ["pack", tree, objects.shown(other), "--cache-dir", cache, "--part", "0/2"]
    for left in (other / "rows-000000000000.tar", other / "test/shards-000000000000.jsonl"):
        objects.write(left, b"another")
        for command in (in_parts, in_parts[:-2]):
            wrong = refused(*command)
            assert f"{objects.shown(other)} holds other files: give another place, or remove them" in wrong
        assert objects.below(other) == [left]
        objects.remove([left])
    for part in ("0/2", "1/2"):  # which would wait for the first
        assert "give --cache-dir" in refused("pack", tree, objects.shown(other), "--part", part)
    assert Reason.MISSING.value in refused("pack", tree, "s3://nowhere/new", "--cache-dir", cache)
    joins = f"'pic pack merge {objects.shown(other)} --cache-dir DIR' joins all parts"
    assert done(*in_parts) == f"{objects.shown(other)}: part 0/2 of 53 images; {joins}\n"


def test_one_command_lists_the_images(
    bucket: Proxy, tree: Path, whole: Path, target: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """Others are refused meanwhile, in parts or not. After it was killed, it is repeated on any machine."""
    bucket.silent, shown = f"/images/{target.name}/images-", objects.shown(target)
    with process(tree, target, "0/2", tmp_path / "one"):
        wait_until(lambda: any(one.path.startswith(bucket.silent) for one in bucket.requests))
        for source, *how in ((tree / "test", "--part", "0/2"), (tree, "--alpha", "ignore"), (tree, "--order-seed", 6)):
            line = refused("pack", source, shown, "--cache-dir", tmp_path / "two", *how)
            assert f"another command packs to {shown}, or was killed: wait for it or repeat it, or " in line
    bucket.heal()
    pack(tree, target, options(tmp_path / "three"))
    assert stored(target) == contents(whole)


def test_a_claim_that_extending_left_is_removed_by_packing(
    bucket: Proxy, tree: Path, whole: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of another command stays."""
    pack(tree, target, options(tmp_path / "one"))
    with monkeypatch.context() as patched:
        patched.setattr(planning, "manifests_in", die)
        patched.setattr(bucket_packs, "remove", die)  # as if it was killed
        with pytest.raises(Killed):
            pack(tree, target, options(tmp_path / "one", extend=True))
    assert objects.find(target / ".claim")
    pack(tree, target, options(tmp_path / "two"))
    assert stored(target) == contents(whole)
    objects.write(target / ".claim", b"another")
    pack(tree, target, options(tmp_path / "two"))
    assert objects.read(target / ".claim") == b"another"


@pytest.mark.parametrize("extend", [False, True])
def test_the_first_list_of_images_stays(
    extend: bool, bucket: Proxy, tree: Path, target: Path, tmp_path: Path, meanwhile: Callable[..., None]
) -> None:
    """If the same command finds more images elsewhere."""
    other = shutil.copytree(tree, tmp_path / "tree")
    if extend:
        pack(other, target, options(tmp_path / "one"))
        plain_tree(other / "test", 1, first=998)

    def find_more() -> None:
        plain_tree(other / "test", 1, first=999)
        pack(other, target, options(tmp_path / "two", extend=extend))

    meanwhile(planning, "_planned", find_more, after=True)
    pack(other, target, options(tmp_path / "one", extend=extend))
    assert call("verify", objects.shown(target)) == 0
    assert Manifest.load(target / "test").num_images == 21 + extend


def test_images_that_are_not_added_since_others_were_are_not_passed_over(
    bucket: Proxy, tree: Path, target: Path, tmp_path: Path, meanwhile: Callable[..., None]
) -> None:
    """By a command that has lost its claim to a plain one for the same images."""
    images, more = shutil.copytree(tree, tmp_path / "tree"), plain_tree(tmp_path / "more", 9)
    size = pack(images, target, options(tmp_path / "one")).num_images
    plain_tree(images / "train", 1, first=999)

    def add_others() -> None:
        pack(images, target, options(tmp_path / "two"))
        pack(more, target, options(tmp_path / "two", extend=True))

    meanwhile(planning, "_planned", add_others, after=True)
    with pytest.raises(ValueError, match=r"^another command has packed other images to s3://\S+ meanwhile: repeat"):
        pack(images, target, options(tmp_path / "one", extend=True))
    assert pack(images, target, options(tmp_path / "one", extend=True)).sizes == (size, 9, 1)


def test_records_of_another_plan_do_not_count(bucket: Proxy, tree: Path, target: Path, tmp_path: Path) -> None:
    """Which a user has left when the rest was removed, also beside a tar whose own records are not there yet."""
    cache, other = tmp_path / "cache", tmp_path / "other"
    pack(tree, target, options(cache, Part(0, 1)))
    objects.remove([path for path in objects.below(target) if path.parent.name != "parts"])
    changed = options(cache, Part(0, 1), order_seed=5)
    bucket.refused = f"/images/{target.name}/parts/"
    with pytest.raises(ObjectStoreError):
        pack(tree, target, changed)
    bucket.heal()
    pack(tree, target, changed)
    merge(target, changed.source)
    pack(tree, other, replace(changed, part=None))
    assert stored(target) == contents(other)


@pytest.mark.parametrize(("part", "silent"), [("1/2", "?"), ("0/2", "rows-")])
def test_a_part_that_waits_is_ended_by_a_signal(
    part: str, silent: str, bucket: Proxy, tree: Path, target: Path, tmp_path: Path
) -> None:
    """For the list of images, or for a store that does not answer."""
    bucket.silent = f"/images/{target.name}/{silent}"
    with process(tree, target, part, tmp_path / "cache") as waiting:
        if silent == "?":
            assert first_line(waiting).startswith("waiting for part 0/2")
        else:
            wait_until(lambda: any(one.path.startswith(bucket.silent) for one in bucket.requests))
        waiting.send_signal(signal.SIGINT)
        _, errors = waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    assert errors.splitlines()[-1] == "part: interrupted"
