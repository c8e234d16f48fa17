"""The command line `python -m trainer.data`, and its one line for bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.commands import data_command as call
from tests.helpers.image_tree import deep_png, encoded, odd_tree, piece, plain_tree
from trainer.data.packed import PackedImages
from trainer.pic import main as pic


def test_pack_extend_verify(
    tmp_path: Path, done: Callable[..., str], refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    tree, packed = odd_tree(tmp_path / "tree", 10), tmp_path / "packed"
    assert call("pack", tree, packed, "--order-seed", 7, "--threads", 1) == 0
    printed = capsys.readouterr()
    assert "23 images in 1 range(s), 3 named classes" in printed.out
    assert "4 broken and substituted" in printed.out
    assert f"broken: {tree}/a/cut.jpg (not an image of a known format), replaced by {tree}/a/grey.jpg" in printed.err
    assert printed.err.count("broken: ") == 4
    plain_tree(tree, 5, first=10)
    assert "23 images" in done("pack", tree, packed), "packed to its end"
    next(packed.glob("shards-*.jsonl")).unlink()  # as when the command was killed
    assert f"{packed} is not finished: repeat the command that packs it" in refused("verify", packed)
    assert "23 images in 1 range(s)" in done("pack", tree, packed, "--extend"), "packed to its end first"
    assert "28 images in 2 range(s)" in done("pack", tree, packed, "--extend")
    done("verify", packed)
    next(packed.glob("*.tar")).unlink()
    assert "is missing" in refused("verify", packed)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("s3://images/x/../packed", "s3://images/x/../packed has .., and a bucket has no folder above: give the place"),
        ("s3://", "s3:// is a URL: copy or mount what is there, or give s3://BUCKET/KEY"),
        ("s3://images/\udcff", r"'s3://images/\udcff' is not UTF-8, as names in a bucket are: give another"),
    ],
)
def test_a_place_that_no_bucket_has_is_refused(
    place: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("pack", tmp_path, place) == 2
    assert wrong in capsys.readouterr().err.splitlines()[-1]


def test_verify_reads_the_test_images_too(
    tmp_path: Path, done: Callable[..., str], refused: Callable[..., str]
) -> None:
    for split, number in (("train", 6), ("test", 3)):
        plain_tree(tmp_path / "tree" / split, number)
    packed = tmp_path / "packed"
    done("pack", tmp_path / "tree", packed)
    done("verify", packed)
    (damaged,) = (packed / "test").glob("*.tar")
    damaged.write_bytes(damaged.read_bytes()[::-1])
    assert f"{damaged} is damaged" in refused("verify", packed)


def test_inspect_says_what_a_source_is_and_what_its_images_are(
    tmp_path: Path, done: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    tree = odd_tree(tmp_path / "tree", 12)
    (tree / "a/again.jpg").write_bytes((tree / "b/0001.jpg").read_bytes())
    deep = np.random.default_rng(0).integers(0, 4_096, (32, 32), dtype=np.uint16)
    deep[0, 0] = 4_095
    (tree / "b/deep.png").write_bytes(encoded(Image.fromarray(deep), "PNG"))
    bands = encoded(Image.fromarray(np.zeros((32, 32, 4), np.uint8)), "TIFF")
    bands = bands.replace(b"\x52\x01\x03\0", b"\x51\x01\x03\0")  # says not what the fourth is
    (tree / "c/bands.tif").write_bytes(bands)
    assert call("inspect", tree) == 0
    printed, said = capsys.readouterr()
    assert "left out" not in said, "it is printed"
    for line in (
        "images in class folders: 27 images, 3 classes (a, b, c)",
        "29 files: 27 images, 2 left out",
        "1 hidden file (c/.hidden.jpg), 1 file that is no image (c/notes.txt)",
        "classes, largest first: a 9, b 9, c 9",
        "shorter side 1 to 48 px, median 48 (of 27 images that were decoded)",
        "JPEG RGB 14",
        "values: 0 to 255 of 255 in 22 of 22 sampled images of 8 bits\n",
        "values: 0 to 4,095 of 65,535 in 1 of 1 sampled images of 16 bits or more, which are shown dark: --pixel-",
        "1 sampled TIFFs have a fourth band",
        "broken: 4 of 27 images that were decoded, about 4 in all; runs and packs end at more than 100: --max-broken",
        f"duplicates by bytes: 1, first {tree}/b/0001.jpg of {tree}/a/again.jpg",
    ):
        assert line in printed
    printed = done("inspect", tree, "--pixel-range", 0, 4095, "--alpha", "ignore")
    assert "pixel-range" not in printed
    assert "fourth band" not in printed
    printed = done("inspect", tree, "--max-megapixels", 0.0005)
    assert "broken: 4 of" not in printed, "files of other formats than JPEG are too large"
    done("pack", tree, tmp_path / "packed")
    printed = done("inspect", tmp_path / "packed")
    for line in (
        "packed: a pack of 27 images, labels by name, in the order of seed 0:",
        f"27 images of {tree}",
        "read with no options; 4 broken, others stand for them",
        "classes, largest first: a 9, b 9, c 9",
        "shorter side 1 to 48 px",
        f"duplicates by bytes: 1, first {tree}/b/0001.jpg of {tree}/a/again.jpg",
    ):
        assert line in printed


@pytest.mark.parametrize(("channels", "bits"), [(1, "16 bits or more"), (3, "16 bits of colour")])
def test_few_bright_pixels_hide_no_range_of_12_bits(
    channels: int, bits: str, tmp_path: Path, done: Callable[..., str]
) -> None:
    for number in range(50):
        deep = np.full((8, 8, channels), 4_071 - number, np.uint16)
        deep[0, 0] = 65_535 if number in (3, 7) else 0
        (tmp_path / f"{number}.png").write_bytes(deep_png(deep))
    printed, high = done("inspect", tmp_path), "4,095" if channels == 3 else "4,071"
    assert f"values: 0 to {high} of 65,535 in 48 of 50 sampled images of {bits}, which are shown dark: " in printed
    assert ("--pixel-range 0 4095 uses" in printed) == (channels == 1)
    for number in range(0, 50, 3):
        (tmp_path / f"{number}.png").write_bytes(deep_png(np.full((8, 8, channels), 65_535, np.uint16)))
    assert f"values: 0 to 65,535 of 65,535 in 50 of 50 sampled images of {bits}\n" in done("inspect", tmp_path)


@pytest.mark.parametrize(
    ("mode", "kind"), [("L", "PNG"), ("RGB", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("1", "PNG"), ("L", "JPEG")]
)
def test_labels_stored_as_images_are_warned_of(mode: str, kind: str, tmp_path: Path, done: Callable[..., str]) -> None:
    """An image in ten may be another; the values of a palette are its colours."""
    labels = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) // 16).resize((320, 320), 0)
    if mode == "P":
        labels.putpalette([0, 0, 0, 1, 2, 3, 1, 0, 0, 0, 3, 0])
    elif mode == "1":
        labels = labels.point(lambda value: 255 * value).convert("1")
    else:
        labels = labels.convert(mode)
    for number in range(18):
        (tmp_path / f"{number}.x").write_bytes(encoded(labels, kind, quality=95))
    for number in range(2):
        (tmp_path / f"photo{number}.png").write_bytes(encoded(piece(number), "PNG"))
    bilevel = "0 to 255 of 255 in 20 of 20 sampled images of 8 bits\n"
    black = "0 to 3 of 255 in 18 of 20 sampled images of 8 bits, which are shown nearly black: name the images' folder "
    assert f"  values: {bilevel if mode == '1' else black}" in done("inspect", tmp_path)


@pytest.mark.parametrize(("background", "said"), [("white", "\n"), ("none", ", which are shown nearly black: ")])
def test_black_symbols_are_not_taken_for_labels_unless_they_are_shown_so(
    background: str, said: str, tmp_path: Path, done: Callable[..., str]
) -> None:
    """Symbols on a transparent ground often have no colour but black."""
    for number in range(9):
        symbol = Image.new("LA", (48, 48))
        symbol.putalpha(piece(number).convert("L").resize((48, 48)))
        (tmp_path / f"{number}.png").write_bytes(encoded(symbol, "PNG"))
    printed = done("inspect", tmp_path, "--background", background)
    assert f"9 of 9 sampled images of 8 bits{said}" in printed


def test_names_of_images_do_not_control_the_terminal(tmp_path: Path, done: Callable[..., str]) -> None:
    name = "\x1b]0;title\x07\x9b31m"
    tree = plain_tree(tmp_path / "tree", 3)
    (tree / name).mkdir()
    (tree / name / f"{name}.jpg").write_bytes(b"broken")
    assert not set(done("inspect", tree)) & set("\x1b\x07\x9b")


def test_dark_photographs_are_not_taken_for_labels(tmp_path: Path, done: Callable[..., str]) -> None:
    """A sixth of their light, and in every fifth one nothing."""
    for number in range(20):
        dark = piece(number).point(lambda value, part=0.16 if number % 5 else 0.0: int(value * part))
        (tmp_path / f"{number}.png").write_bytes(encoded(dark, "PNG"))
    assert "images of 8 bits\n" in done("inspect", tmp_path)


def test_pack_names_the_splits_that_it_leaves(
    tmp_path: Path, done: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "test", "val"):
        plain_tree(tmp_path / "set" / name, 3)
    assert call("pack", tmp_path / "set", tmp_path / "packed") == 0
    assert "val/ is not used to train or evaluate: --split train:val evaluates on it" in capsys.readouterr().err
    done("pack", tmp_path / "set/val", tmp_path / "ranged", "--pixel-range", 0, 4095, "--stray", "use")
    assert "  read with --stray use, --pixel-range 0 4095\n" in done("inspect", tmp_path / "ranged")


@pytest.mark.parametrize("arguments", ["inspect absent", "pack absent out", "pack . out --threads 0", "verify absent"])
def test_bad_input_is_one_line(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plain_tree(tmp_path / "tree", 3)
    assert call(*arguments.split()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pic {arguments.partition(' ')[0]}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["tree"], "it leaves files"


@pytest.mark.parametrize("output", ["packed", "new/folder"])
def test_a_failed_pack_leaves_only_directories_that_existed(output: str, tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "no images").mkdir()
    for source in ("absent", "no images"):
        assert call("pack", tmp_path / source, tmp_path / output) == 1
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["no images", "packed"]


@pytest.mark.parametrize(
    "command",
    [
        "inspect ?",
        "pack . ?",
        "pack ? packed",
        "pack . packed --broken-list ?",
        "verify ?",
        "train images --data-dir ?",
        "train fashion-mnist --output=?",
        "evaluate knn --run . --data-dir ?",
        "evaluate linear --data_dir=?",
        "embed . ? --output a.csv",
        "embed . . --output ?",
        "report ?",
        "export encoder . --output ?",
    ],
)
@pytest.mark.parametrize("path", ["gs://bucket/{00000..00003}.tar", ""])
def test_a_path_is_no_url_and_not_empty(
    path: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        pic([argument.replace("?", path) for argument in command.split()])
    *_, line = capsys.readouterr().err.splitlines()
    assert (f"{path} is a URL: copy or mount what is there" if path else "the path is empty") in line
    assert not list(tmp_path.iterdir())


def test_an_extension_adds_the_images_whose_paths_are_new(tmp_path: Path, done: Callable[..., str]) -> None:
    """A renamed one too; one that is gone stays packed."""
    tree, packed = plain_tree(tmp_path / "tree", 9), tmp_path / "packed"
    (tree / "a/tab\t.jpg").write_bytes((tree / "a/0000.jpg").read_bytes())  # never packed
    done("pack", tree, packed)
    (tree / "a/0000.jpg").rename(tree / "a/renamed.jpg")
    (tree / "b/0001.jpg").unlink()
    plain_tree(tree, 2, first=20)
    assert "9 images in 1 range(s)" in done("pack", tree, packed)
    assert "12 images in 2 range(s)" in done("pack", tree, packed, "--extend")
    added = PackedImages(packed)
    assert [Path(added.path(image)).name for image in range(9, 12)] == ["0021.jpg", "renamed.jpg", "0020.jpg"]


def test_packing_again_reads_the_source_as_before(tmp_path: Path, done: Callable[..., str]) -> None:
    tree, packed = plain_tree(tmp_path / "tree", 9), tmp_path / "packed"
    (tree / "stray.jpg").write_bytes((tree / "a/0000.jpg").read_bytes())
    done("pack", tree, packed, "--stray", "use")
    assert "10 images in 1 range(s)" in done("pack", tree, packed, "--extend")
