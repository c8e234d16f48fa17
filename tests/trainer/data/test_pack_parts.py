"""Packs in parts: several processes, killed and repeated, make the bytes of one; parts that do not fit are refused."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.commands import data_command as call
from tests.helpers.dying_pack import Killed, contents, die_at
from tests.helpers.image_tree import plain_tree, split_tree
from tests.helpers.operations import no_room
from tests.helpers.watching import wait_until
from tests.trainer.data.written import write_table, write_tar
from trainer.data.config import SourceOptions
from trainer.data.manifest import LOCK, Manifest
from trainer.data.pack import PackOptions, merge, pack, verify
from trainer.data.packed import PackedImages
from trainer.data.parts import WHOLE, Part
from trainer.data.planning import PLANNING, planned_pack
from weightserver.common.atomic_files import directory_lock, locked

ROOT = Path(__file__).parents[3]
PACK = """
import sys
from pathlib import Path
from trainer.data.pack import PackOptions, pack
from trainer.data.parts import to_part

source, output, part = sys.argv[1:]
pack(Path(source), Path(output), PackOptions(order_seed=5, tar_bytes=20_000, threads=2, part=to_part(part)))
"""


def options(part: Part | None = None, **changes: Any) -> PackOptions:
    return PackOptions(**{"order_seed": 5, "tar_bytes": 20_000, "threads": 2, "part": part} | changes)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_tree(tmp_path_factory.mktemp("images") / "tree")


@pytest.fixture(scope="module")
def packed(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack of one process."""
    directory = tmp_path_factory.mktemp("packed")
    pack(tree, directory, options())
    return directory


@contextmanager
def processes(*commands: list[object]) -> Iterator[list[subprocess.Popen[str]]]:
    """Runs Python at the same time with these arguments; kills what is left of it."""
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def part_command(tree: Path, output: Path, part: str) -> list[object]:
    return ["-c", PACK, tree, output, part]


def waits_for_a_lock(process: int) -> bool:
    return re.search(rf"-> FLOCK .* {process} ", Path("/proc/locks").read_text()) is not None


@pytest.mark.guard
def test_parts_packed_at_the_same_time_are_the_pack_of_one_process(tree: Path, packed: Path, tmp_path: Path) -> None:
    """One of them lists the images, while the others wait; they do not wait for one that packs."""
    output = tmp_path / "packed"
    output.mkdir()
    with (
        locked(output / LOCK, shared=True),
        locked(output / PLANNING) as lock,
        processes(*(part_command(tree, output, f"{number}/2") for number in range(2))) as started,
    ):
        wait_until(lambda: all(waits_for_a_lock(process.pid) for process in started), seconds=200)
        fcntl.flock(lock, fcntl.LOCK_UN)
        errors = [process.communicate(timeout=300)[1] for process in started]
        assert [process.returncode for process in started] == [0, 0], errors
    assert "".join(errors).count("left out of") == 1
    with pytest.raises(ValueError, match=r"is not completely packed: .*; 'pic pack merge' joins parts"):
        PackedImages(output)
    merge(output)
    assert contents(output) == contents(packed)
    assert verify(output) == verify(output / "test") == []


@pytest.mark.guard
def test_a_part_that_was_killed_is_repeated_to_the_same_bytes(tree: Path, packed: Path, tmp_path: Path) -> None:
    images, output = tmp_path / "images", tmp_path / "packed"
    shutil.copytree(tree, images)
    pack(images, tmp_path / "whole", options())
    pack(images, output, options(Part(1, 2)))
    finished = list(output.glob("parts/[!.]*"))
    whole, tars = PackedImages(tmp_path / "whole"), Manifest.load(output).ranges[-1].tars(Part(0, 2))
    stuck = Path(whole.path(int(whole.order.images(np.array(tars))[-1])))
    content = stuck.read_bytes()
    stuck.unlink()
    os.mkfifo(stuck)  # whoever opens it waits
    with processes(part_command(images, output, "0/2")) as (process,):
        wait_until(lambda: len(list(output.glob("parts/[!.]*"))) > len(finished))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list(output.glob("parts/.packing-*/*")), "what it was packing"
    stuck.unlink()
    stuck.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"^\d of \d tars of .*packed/test missing, first that of row 0 of 20: repeat 'pic pack SOURCE"
    ):
        merge(output)
    pack(images, output, options(Part(0, 2)))
    assert not list(output.glob("parts/.packing-*/*"))
    merge(output)
    assert contents(output) == contents(tmp_path / "whole")
    assert not (output / "parts").exists()


@pytest.mark.parametrize("of", [1, 3, 15])
def test_any_number_of_parts_in_any_order(of: int, tree: Path, packed: Path, tmp_path: Path) -> None:
    """Also more than there are tars; parts may be repeated, and be joined twice."""
    output = tmp_path / "packed"
    for number in (*reversed(range(of)), of // 2):
        assert not pack(tree, output, options(Part(number, of))).complete
    before = contents(output)
    assert merge(output).complete
    assert contents(output) == contents(packed)
    assert {(name, digest) for name, digest in before.items() if name.endswith(".tar")} <= contents(output).items()
    assert merge(output) == pack(tree, output, options(Part(0, of))) == pack(tree, output, options())
    assert contents(output) == contents(packed)


@pytest.mark.parametrize(("fatal", "moment"), [*((fatal, "before") for fatal in range(1, 9)), (8, "after")])
def test_an_interrupted_merge_is_repeated(
    fatal: int, moment: str, tree: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Index and list of tars, of the test images and of the training images: each written, then moved to its place."""
    output = tmp_path / "packed"
    for number in range(2):
        pack(tree, output, options(Part(number, 2)))
    with no_room(100), pytest.raises(OSError, match=r"test/index-0+\.bin cannot be written \(.*File too large"):
        merge(output)
    die_at(fatal, moment, monkeypatch)
    with pytest.raises(Killed):
        merge(output)
    monkeypatch.undo()
    merge(output)
    assert contents(output) == contents(packed)


def test_images_are_added_in_parts(tmp_path: Path) -> None:
    tree, whole, output = plain_tree(tmp_path / "tree", 20), tmp_path / "whole", tmp_path / "packed"
    for directory in (whole, output):
        pack(tree, directory, options())
    plain_tree(tree, 30, first=20)
    pack(tree, whole, options(extend=True))
    for number in range(3):
        pack(tree, output, options(Part(number, 3), extend=True))
        assert len(PackedImages(output)) == 20
    merge(output)
    assert contents(output) == contents(whole)
    pack(tree, output, options(Part(0, 3), extend=True))
    assert contents(output) == contents(whole), "nothing is new any more"


def test_only_test_images_are_added_in_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first part lists them, and no other lists them anew, or removes what others are packing."""
    tree, output = split_tree(tmp_path / "tree"), tmp_path / "packed"
    pack(tree, output, options())
    plain_tree(tree / "test", 9, first=20)
    pack(tree, output, options(Part(0, 2), extend=True))
    with planned_pack(tree, output, options(WHOLE, extend=True)):  # as for Ray
        assert "packing what was listed before; repeat --extend to add newer images" in capsys.readouterr().err
    packing = output / "parts/.packing-2-of-3/files"
    packing.mkdir(parents=True)
    plain_tree(tree / "train", 3, first=200)
    pack(tree, output, options(Part(1, 2), extend=True))
    assert packing.is_dir()
    assert merge(output).sizes == (53,)
    assert Manifest.load(output / "test").sizes == (20, 9)
    packing.mkdir(parents=True)
    pack(tree, output, options(Part(0, 2), extend=True))
    assert packing.is_dir()
    assert pack(tree, output, options()).sizes == (53, 3)
    assert not packing.exists()


def test_parts_that_were_packed_in_places_of_their_own_are_copied_together(
    tree: Path, packed: Path, tmp_path: Path
) -> None:
    for number in range(2):
        pack(tree, tmp_path / str(number), options(Part(number, 2)))
        shutil.copytree(tmp_path / str(number), tmp_path / "packed", dirs_exist_ok=True)
    merge(tmp_path / "packed")
    assert contents(tmp_path / "packed") == contents(packed)


@pytest.mark.parametrize(
    ("name", "replaced_by"),
    [
        ("images.tar", slice(None, None, -1)),
        ("images.tar", slice(1, None)),
        ("images.tar", slice(0, 0)),
        ("images.parquet", slice(None, None, -1)),
        ("images.arrow", slice(1, None)),
    ],
)
def test_a_file_that_is_replaced_after_it_was_listed_ends_the_pack(
    name: str, replaced_by: slice, tmp_path: Path
) -> None:
    """None of its images is packed under another one's label, and none counts as broken."""
    images = [path.read_bytes() for path in sorted(plain_tree(tmp_path / "tree", 12).rglob("*.jpg"))]
    source, packed, how = tmp_path / name, tmp_path / "packed", dict[str, Any](tar_bytes=5_000)

    def write(rows: slice) -> None:
        if name.endswith(".tar"):
            write_tar(source, {f"{row:02d}.jpg": image for row, image in enumerate(images[rows])})
        else:
            write_table(source, image=images[rows], label=[*range(12)][rows])

    write(slice(None))
    pack(source, packed, options(Part(0, 2), **how))
    write(replaced_by)
    what = (
        "tar than was listed, without "
        if name.endswith(".tar")
        else "table than was listed: put the earlier one back, or"
    )
    with pytest.raises(ValueError, match=f"^{source} is another {what}"):
        pack(source, packed, options(Part(1, 2), **how))
    write(slice(None))
    pack(source, packed, options(Part(1, 2), **how))
    assert merge(packed).shards == pack(source, tmp_path / "whole", options(**how)).shards
    assert [PackedImages(packed).read(image) for image in range(12)] == images


def test_what_does_not_belong_together_is_not_joined(tree: Path, tmp_path: Path) -> None:
    """Parts that were packed elsewhere and copied: some are missing, or are of another pack."""
    halves, seeds = tmp_path / "halves", tmp_path / "seeds"
    pack(tree, halves, options(Part(0, 2)))
    pack(tree, seeds, options(Part(0, 2), order_seed=6))
    others = shutil.copytree(tree, tmp_path / "more/tree")
    (others / "train/b/more.jpg").write_bytes((tree / "train/a/0000.jpg").read_bytes())
    changed = tmp_path / "changed"
    stranger = r"parts/\w+-\d+ is of other images, or of another order, than .*halves has: remove it, or pack all"
    pack(others, changed, options(Part(1, 2)))
    for other, message in (
        (None, r"\d of \d tars of .*halves/test missing, first that of row \d+ of 20: repeat 'pic pack SOURCE"),
        (seeds, stranger),
        (changed, stranger),
    ):
        gathered = shutil.copytree(halves, tmp_path / f"gathered {other and other.name}" / "halves")
        for path in (other / "parts").iterdir() if other else ():
            shutil.copy(path, gathered / "parts")
        before = contents(gathered)
        for act in (merge, lambda place: pack(tree, place, options())) if other else (merge,):
            with pytest.raises(ValueError, match=message) as caught:
                act(gathered)
            assert "\n" not in str(caught.value)
            assert contents(gathered) == before


def test_a_pack_is_of_one_source_by_the_same_options(tree: Path, packed: Path, tmp_path: Path) -> None:
    """By so many parts, and by one process, which packs what is left and joins all."""
    output = tmp_path / "packed"
    pack(tree, output, options(Part(0, 4)))
    for source, changes, message in (
        (tree, {"part": Part(1, 4), "order_seed": 6}, "is packed in the order of seed 5, not 6"),
        (tree, {"part": Part(1, 4), "source": SourceOptions(alpha="ignore")}, "was packed with"),
        (tree / "test", {"part": Part(1, 4)}, f"holds images of {tree}/train: finish packing those first"),
    ):
        before = contents(output)
        with pytest.raises(ValueError, match=message):
            pack(source, output, options(**changes))
        assert contents(output) == before
    pack(tree, output, options(Part(2, 3)))
    assert pack(tree, output, options()).complete
    assert contents(output) == contents(packed)


@pytest.mark.parametrize("changed", [False, True])
def test_a_tar_that_two_parts_pack_at_the_same_time_is_that_of_one(changed: bool, tree: Path, tmp_path: Path) -> None:
    """With its own note: the other part waits until both are in place, and says in one line if it has other images."""
    first, output, whole = tmp_path / "first", tmp_path / "packed", Part(0, 1)
    pack(tree, first, options(whole))
    shutil.copytree(first, output)
    tar, note = min(output.glob("*.tar")), min(output.glob("parts/[!.]*"))
    for path in (tar, note):
        path.unlink()
    with locked(output / "parts/.adding") as lock, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pack, tree, output, options(whole))
        wait_until(lambda: waits_for_a_lock(os.getpid()) or waiting.done())
        assert not tar.exists()
        tar.write_bytes(content := (first / tar.name).read_bytes()[:: -1 if changed else 1])
        shutil.copy(first / "parts" / note.name, note)
        fcntl.flock(lock, fcntl.LOCK_UN)
        wrong = r"\.tar was packed by another command meanwhile, with other content"
        with pytest.raises(ValueError, match=wrong) if changed else nullcontext():
            waiting.result(60)
    assert tar.read_bytes() == content
    assert (output / "parts" / note.name).read_bytes() == (first / "parts" / note.name).read_bytes()


def test_nobody_joins_while_a_part_is_packed_and_parts_wait_for_others(tree: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed"
    for number in range(2):
        pack(tree, output, options(Part(number, 2)))
    before = contents(output)
    with (
        locked(output / LOCK, shared=True),
        pytest.raises(BlockingIOError, match="is being written by another process"),
    ):
        merge(output)
    with (
        directory_lock(output / "parts/.packing-0-of-1"),
        pytest.raises(BlockingIOError, match="is being written by another process"),
    ):
        pack(tree, output, options(Part(0, 1)))
    assert contents(output) == before
    with locked(output / LOCK) as lock, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pack, tree, output, options(Part(0, 2)))
        wait_until(lambda: waits_for_a_lock(os.getpid()) or waiting.done())
        assert not waiting.done()
        with pytest.raises(BlockingIOError, match="written by another process"):
            merge(output)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert not waiting.result(60).complete


def test_the_commands(tmp_path: Path, done: Callable[..., str], refused: Callable[..., str]) -> None:
    tree, packed, absent = plain_tree(tmp_path / "tree", 9), tmp_path / "packed", tmp_path / "absent"
    for number in range(2):
        line = f"{packed}: part {number}/2 of 9 images; 'pic pack merge {packed}' joins all parts\n"
        assert done("pack", tree, packed, "--part", f"{number}/2") == line
    for _ in range(2):
        assert f"{packed}: 9 images in 1 range(s), 3 named classes, 1 tar" in done("pack", "merge", packed)
    nothing = f"pic pack merge: {absent} holds no packed images: pack them by pic pack"
    assert refused("pack", "merge", absent) == nothing
    assert not absent.exists()
    with_cache = refused("pack", "merge", packed, "--cache-dir", tmp_path)
    assert with_cache == "pic pack merge: --cache-dir is for a pack in a bucket: omit it"


@pytest.mark.parametrize("part", ["0/0", "5/4", "4/4", "-1/4", "1", "a/b", ""])
def test_there_is_no_such_part(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("pack", plain_tree(tmp_path / "tree", 3), tmp_path / "packed", f"--part={part}") == 2
    assert f"there is no part {part}: give I/N, with I from 0 to N − 1" in capsys.readouterr().err
    assert not (tmp_path / "packed").exists()
