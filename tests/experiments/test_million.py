"""A million images in short form: real fonts, tars, packs, shards, training, neighbours, and the page's section."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

from experiments import han, million
from tests.helpers.image_tree import plain_tree
from trainer.data.pack import PackOptions, pack

FONTS = Path(mpl.get_data_path()) / "fonts" / "ttf"


@pytest.fixture
def fonts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Matplotlib's fonts in the places of Debian's, and letters instead of Han characters."""
    folder = tmp_path / "fonts"
    packages: dict[str, dict[str, tuple[str, ...]]] = {
        "train": {"a": ("DejaVuSans.ttf", "DejaVuSerif.ttf"), "b": ("DejaVuSansMono.ttf",)},
        "test": {"c": ("DejaVuSansMono-Bold.ttf",)},
    }
    for package, names in (packages["train"] | packages["test"]).items():
        (folder / package).mkdir(parents=True)
        for name in names:
            (folder / package / name).symlink_to(FONTS / name)
    monkeypatch.setattr(han, "PACKAGES", packages)
    monkeypatch.setattr(
        han,
        "HAN",
        frozenset({*range(0x100, 0x250), *range(0x388, 0x482), *range(0x4A0, 0x530), *range(0x1E00, 0x1EFA)}),
    )
    return folder


def test_images_are_the_same_each_time_and_named_by_their_character(fonts: Path, tmp_path: Path) -> None:
    for output in ("a", "b"):
        by_font = han.write_images(tmp_path / output, fonts, {"train": 60, "test": 5})
    first, second = (tmp_path / output / "train" / "00000.tar" for output in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:
        names = archive.getnames()
        labels = [archive.extractfile(name).read().decode() for name in names if name.endswith(".cls")]  # type: ignore[union-attr]
    assert names[:3] == ["0000000.png", "0000000.cls", "0000001.png"]
    glyphs = han.choose_glyphs(han.load_faces("train", fonts), 60, 0)
    assert labels == [character for _, character, _ in glyphs]
    assert by_font["train"] == Counter(path.name for (path, _), *_ in glyphs)
    assert len({(face, character) for face, character, _ in glyphs}) == 60


def test_no_font_is_in_both_splits_and_no_two_images_of_a_split_share_a_seed(fonts: Path) -> None:
    train, test = ({path.name for path, _ in han.load_faces(split, fonts)} for split in ("train", "test"))
    assert not train & test
    seeds = [
        seed
        for number, split in enumerate(("train", "test"))
        for *_, seed in han.choose_glyphs(han.load_faces(split, fonts), 500, number)
    ]
    assert len(set(seeds)) == len(seeds)


def test_refuses_a_missing_font_and_a_glyph_that_shows_nothing(fonts: Path) -> None:
    face = han.load_faces("test", fonts)[0]
    assert np.ptp(np.asarray(han.render((face, "\u0141", 0)))) > 64
    with pytest.raises(ValueError, match=r"shows nothing for U\+20: install"):
        han.render((face, " ", 0))
    (fonts / "c" / "DejaVuSansMono-Bold.ttf").unlink()
    with pytest.raises(ValueError, match=r"has no DejaVuSansMono-Bold\.ttf: unpack Debian 12's c into it"):
        han.load_faces("test", fonts)


@pytest.mark.slow
def test_end_to_end_and_what_is_there_is_not_made_again(
    fonts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install -c constraints.txt '.[ray]'")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # its processes listen on all addresses
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    sizes = {"train": 2_000, "test": 100}
    found = million.make(tmp_path / "out", fonts, sizes, 4.0)
    assert found["summary"]["fetched_rows"] >= 2_000
    assert 0 <= found["row_wait_share"] < 1
    capfd.readouterr()
    assert million.make(tmp_path / "out", fonts, sizes, 4.0) == found
    assert "trainer imagenet" not in capfd.readouterr().err
    results = tmp_path / "million.json"
    results.write_text(json.dumps(found))
    text = "\n".join(million.section(results, tmp_path / "million.svg", "million.svg"))
    assert found["summary"]["epochs"] == pytest.approx(4, rel=0.05)
    assert f"| visits to each image | {found['summary']['epochs']:.3g} |" in text
    assert "<svg" in (tmp_path / "million.svg").read_text()
    assert not list(million.section(tmp_path / "none.json", tmp_path / "none.svg", "none.svg"))


def test_images_of_an_earlier_call_are_not_taken_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page would name a number of images that no run had."""
    (tmp_path / "images").mkdir()
    for name, number in (("packed", 6), ("packed/test", 3)):
        pack(plain_tree(tmp_path / "trees" / name, number), tmp_path / name, PackOptions())
    monkeypatch.setattr(million, "_run", lambda *_: None)
    for sizes, message in (
        ({"train": 2_000, "test": 3}, "packed has 6 images, not 2,000: give another --output"),
        ({"train": 6, "test": 4}, "packed/test has 3 images, not 4: give another --output"),
    ):
        with pytest.raises(ValueError, match=message):
            million.make(tmp_path, None, sizes, 1.0)
