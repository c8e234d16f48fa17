"""Glyphs in colour: the pixels are a function of the numbers, and the data set is written whole or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from experiments import data, glyphs
from experiments.quick import quick
from experiments.tables import TABLES
from trainer.data import load_dataset
from trainer.schedule import visit_uniforms

FONT = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
"""A font that the trainer's packages include."""


@pytest.fixture
def fonts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of unpacked packages, each with the same font."""
    digest = hashlib.sha256(FONT.read_bytes()).hexdigest()
    for package in ("ours", "held-out"):
        (tmp_path / "fonts" / package).mkdir(parents=True)
        (tmp_path / "fonts" / package / "a.ttf").write_bytes(FONT.read_bytes())
    listed = {"train": {"ours": {"a.ttf": digest}}, "test": {"held-out": {"a.ttf": digest}}}
    monkeypatch.setattr(glyphs, "FONTS", listed)
    return tmp_path / "fonts"


def test_no_font_is_in_both_splits() -> None:
    train, test = glyphs.FONTS["train"], glyphs.FONTS["test"]
    assert not train.keys() & test.keys()
    digests = [[digest for files in split.values() for digest in files.values()] for split in (train, test)]
    assert not set(digests[0]) & set(digests[1])
    assert [len(split) for split in digests] == [235, 65]
    assert len(set(glyphs.CHARACTERS)) == 47


def test_the_trainer_reads_what_is_written(fonts: Path, tmp_path: Path) -> None:
    """The labels are the characters; the pixels are the same each time, others for another seed."""
    digest = glyphs.write_glyphs(tmp_path / "a", fonts, {"train": 1, "test": 1}, 0)
    assert glyphs.write_glyphs(tmp_path / "b", fonts, {"train": 1, "test": 1}, 0) == digest
    assert glyphs.write_glyphs(tmp_path / "c", fonts, {"train": 1, "test": 1}, 1) != digest
    assert json.loads((tmp_path / "a/glyphs.json").read_text())["sha256"] == digest
    dataset = load_dataset("folder", tmp_path / "a", image_size=glyphs.SIDE)
    assert dataset.train_labels.bincount().tolist() == [1] * 47
    assert dataset.test_labels.bincount().tolist() == [1] * 47
    assert dataset.train_images.shape[1] == 3
    classes = sorted(path.name for path in (tmp_path / "a/train").iterdir())
    assert [path.name for path in sorted((tmp_path / "a/test").iterdir())] == classes
    assert sorted(name[-1] for name in classes) == sorted(glyphs.CHARACTERS)
    written = hashlib.sha256()
    for character in glyphs.CHARACTERS:
        for path in sorted((tmp_path / "a/train").glob(f"*-{character}/*.png")):
            written.update(Image.open(path).tobytes())
    other = hashlib.sha256()
    for character in glyphs.CHARACTERS:
        for path in sorted((tmp_path / "a/test").glob(f"*-{character}/*.png")):
            other.update(Image.open(path).tobytes())
    assert hashlib.sha256(written.digest() + other.digest()).hexdigest() == digest


def test_a_glyph_is_whole_and_in_colour(fonts: Path) -> None:
    """The glyph is nowhere cut off, covers a part of the image, and is of another colour than what is around it."""
    (font,) = glyphs.load_fonts("train", fonts)
    for uniforms in visit_uniforms(0, np.arange(60), 24):
        for character in "MQgf1":
            cover = glyphs._mask(
                font, character, 0.9 + 0.6 * uniforms[0], 30 * uniforms[1] - 15, 0.4 * uniforms[2] - 0.2, (0.5, 0.5)
            )
            assert 0.02 < cover.mean() < 0.5
            assert max(cover[0].max(), cover[-1].max(), cover[:, 0].max(), cover[:, -1].max()) < 0.2
    image = np.asarray(glyphs.render(font, "A", visit_uniforms(0, np.arange(1), 24)[0]), np.int64)
    assert image.shape == (32, 32, 3)
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 100
    assert np.abs(image[..., 0] - image[..., 1]).max() > 20


def test_other_fonts_are_refused(fonts: Path, tmp_path: Path) -> None:
    (fonts / "held-out/a.ttf").write_bytes(FONT.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"a\.ttf is another version: unpack Debian 12's held-out into"):
        glyphs.write_glyphs(tmp_path / "new", fonts, {"train": 1, "test": 1}, 0)
    (fonts / "ours/a.ttf").unlink()
    with pytest.raises(ValueError, match=r"a\.ttf is missing: unpack Debian 12's ours into"):
        glyphs.write_glyphs(tmp_path / "new", fonts, {"train": 1, "test": 1}, 0)
    assert not (tmp_path / "new").exists()


def test_other_pixels_are_refused(fonts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default settings have a known digest, which these fonts do not give."""
    monkeypatch.setattr(glyphs, "SPLITS", {"train": 1, "test": 1})
    with pytest.raises(ValueError, match=f"not {glyphs.DIGEST}: install the Pillow of"):
        glyphs.write_glyphs(tmp_path / "new", fonts, {"train": 1, "test": 1}, 0)
    assert not (tmp_path / "new").exists()


def test_cells_name_no_place_and_find_what_was_rendered(
    fonts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rendered once; other glyphs in the same place are refused."""
    monkeypatch.setattr(data, "make_glyphs", lambda output, sizes: glyphs.write_glyphs(output, fonts, sizes, 0))
    monkeypatch.setitem(data._SIZES, data.FEW_GLYPHS, {"train": 1, "test": 1})
    (cell, *_) = quick(TABLES["glyphs"]).cells
    found = data.with_data(cell.config(0), tmp_path / "data")
    assert cell.settings["data_dir"] == data.FEW_GLYPHS
    assert found.data.data_dir == tmp_path / "data/few-glyphs"
    assert data.num_images(cell.config(0)) == len(load_dataset("folder", found.data.data_dir).train_images) == 47
    written = (found.data.data_dir / "glyphs.json").stat().st_mtime_ns
    assert data.with_data(cell.config(1), tmp_path / "data").data.data_dir == found.data.data_dir
    assert (found.data.data_dir / "glyphs.json").stat().st_mtime_ns == written
    monkeypatch.setitem(data._SIZES, data.FEW_GLYPHS, {"train": 2, "test": 1})
    with pytest.raises(ValueError, match="few-glyphs has other glyphs than the tables': move it elsewhere"):
        data.with_data(cell.config(0), tmp_path / "data")
    fashion = TABLES["trials"].cells[0].config(0)
    assert data.with_data(fashion, tmp_path / "none") is fashion
    assert not (tmp_path / "none").exists()


def test_the_table_is_of_all_glyphs() -> None:
    assert {data.num_images(cell.config(0)) for cell in TABLES["glyphs"].cells} == {23_500}
    orders = [
        cell.config(0).sampling.window_size for cell in TABLES["glyphs"].cells if cell.row.startswith("epoch order")
    ]
    assert orders == [23_500] * 4
