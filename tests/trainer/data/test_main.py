"""The command line `python -m trainer.data`, and its one line for bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.image_tree import odd_tree, plain_tree
from trainer.data.__main__ import main


def call(*arguments: object) -> object:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code


def test_pack_extend_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, packed = odd_tree(tmp_path / "tree", 10), tmp_path / "packed"
    assert call("pack", tree, packed, "--order-seed", 7, "--shard-mib", 0.02, "--threads", 1) == 0
    printed = capsys.readouterr()
    assert "23 images in 1 range(s), 3 named classes" in printed.out
    assert "4 broken and substituted" in printed.out
    assert f"broken: {tree}/a/empty.jpg (the file is empty), replaced by {tree}/a/grey.jpg" in printed.err
    plain_tree(tree, 5, first=10)
    assert call("pack", tree, packed) == 0  # packed to its end
    assert "23 images" in capsys.readouterr().out
    assert call("pack", tree, packed, "--extend") == 0
    assert "28 images in 2 range(s)" in capsys.readouterr().out
    assert call("verify", packed) == 0
    next(packed.glob("*.tar")).unlink()
    assert call("verify", packed) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("pack", "absent", "out"),
        ("pack", ".", "out", "--threads", "0"),
        ("verify", "absent"),
        ("preview", "absent"),
        ("preview", "tree", "--output", "absent/preview.png"),
        ("preview", "tree", "--output", "preview.jpg"),
        ("preview", "tree", "--views", "0"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plain_tree(tmp_path / "tree", 3)
    assert call(*arguments) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("trainer.data: ")
    assert [path.name for path in tmp_path.iterdir()] == ["tree"], "it leaves files"


@pytest.mark.parametrize("output", ["packed", "new/folder"])
def test_a_failed_pack_leaves_only_directories_that_existed(output: str, tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "no images").mkdir()
    for source in ("absent", "no images"):
        assert call("pack", tmp_path / source, tmp_path / output) == 1
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["no images", "packed"]


@pytest.mark.parametrize("size", ["nan", "inf", "big"])
def test_a_tars_size_is_a_number(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("pack", plain_tree(tmp_path / "tree", 3), tmp_path / "packed", "--shard-mib", size) == 2
    assert f"argument --shard-mib: {size} is not a number of MiB" in capsys.readouterr().err


def test_preview(tmp_path: Path) -> None:
    tree, picture = plain_tree(tmp_path / "tree", 6), tmp_path / "preview.png"
    assert call("preview", tree, "--output", picture, "--image-size", 28, "--images", 2, "--views", 3) == 0
    pixels = np.asarray(Image.open(picture))
    cell, heading, gap = 32 + 4, 18, 4
    assert pixels.shape == (2 * (heading + 2 * cell) + gap, gap + 4 * cell, 3)
    paper, plain = pixels[heading : heading + 2 * cell], pixels[2 * heading + 2 * cell :][: 2 * cell]
    assert np.array_equal(paper[:, :cell], plain[:, :cell])  # the images themselves
    assert not np.array_equal(paper[:, cell:], plain[:, cell:])
