"""Renders the Han characters of Debian's fonts: labelled images of any number of classes, as tars of samples."""

from __future__ import annotations

import io
import multiprocessing
import tarfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

from weightserver.common.atomic_files import atomic_write

SIDE = 32
"""Side of an image in pixels."""
HAN = frozenset(range(0x4E00, 0xA000))
"""CJK Unified Ideographs: the characters that are rendered."""
SHARD = 10_000
"""Images of a tar."""
_NOTO = tuple(
    f"Noto{family}CJK-{weight}.ttc"
    for family, weights in (
        ("Sans", ("Thin", "Light", "DemiLight", "Regular", "Medium", "Bold", "Black")),
        ("Serif", ("ExtraLight", "Light", "Regular", "Medium", "SemiBold", "Bold", "Black")),
    )
    for weight in weights
)
_NOTO_FACES = (0, 2, 3)
"""Faces of each collection that are used: Japan's forms, mainland China's, Taiwan's."""
PACKAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "fonts-noto-cjk": (*(name for name in _NOTO if "-Regular" in name or "-Bold" in name),),
        "fonts-noto-cjk-extra": (*(name for name in _NOTO if "-Regular" not in name and "-Bold" not in name),),
        "fonts-arphic-bsmi00lp": ("bsmi00lp.ttf",),
        "fonts-arphic-uming": ("uming.ttc",),
        "fonts-cns11643-sung": ("TW-Sung-98_1.ttf",),
        "fonts-cwtex-heib": ("cwheib.ttf",),
        "fonts-cwtex-ming": ("cwming.ttf",),
        "fonts-cwtex-yen": ("cwyen.ttf",),
        "fonts-hanazono": ("HanaMinA.ttf",),
        "fonts-horai-umefont": ("ume-hgo4.ttf", "ume-tgo4.ttf", "ume-tmo3.ttf", "ume-ugo5.ttf"),
        "fonts-ipaexfont-mincho": ("ipaexm.ttf",),
        "fonts-ipamj-mincho": ("ipamjm.ttf",),
        "fonts-migmix": ("migmix-1p-regular.ttf", "migmix-2p-bold.ttf"),
        "fonts-vlgothic": ("VL-Gothic-Regular.ttf",),
    },
    "test": {
        "fonts-arphic-ukai": ("ukai.ttc",),
        "fonts-babelstone-han": ("BabelStoneHan.ttf",),
        "fonts-cns11643-kai": ("TW-Kai-98_1.ttf",),
        "fonts-droid-fallback": ("DroidSansFallbackFull.ttf",),
        "fonts-klee": ("KleeOne-Regular.ttf",),
        "fonts-wqy-zenhei": ("wqy-zenhei.ttc",),
    },
}
"""Split -> package -> its files that are used."""

Face = tuple[Path, int]
"""A font's file, and the face in it."""
Glyph = tuple[Face, str, int]
"""A face, a character, and the seed of size, place and greys."""


def load_faces(split: str, folder: Path) -> list[Face]:
    """The faces of a split, in `folder` below the names of their packages. Raises ValueError if one is missing."""
    faces = []
    for package, names in PACKAGES[split].items():
        for name in names:
            found = next((folder / package).rglob(name), None)
            if found is None:
                raise ValueError(f"{folder / package} has no {name}: unpack Debian 12's {package} into it")
            faces += [(found, face) for face in (_NOTO_FACES if name in _NOTO else (0,))]
    return faces


def choose_glyphs(faces: Sequence[Face], number: int, seed: int) -> list[Glyph]:
    """`number` pairs of a face and a Han character that it has, in random order; all of them if there are fewer."""
    pairs: list[tuple[Face, str]] = []
    for path, face in faces:
        with TTFont(path, fontNumber=face, lazy=True) as font:
            pairs += [((path, face), chr(character)) for character in sorted(HAN & font.getBestCmap().keys())]
    order = np.random.default_rng(seed).permutation(len(pairs))[:number]
    return [(*pairs[index], seed << 32 | place) for place, index in enumerate(order.tolist())]


@cache
def _font(path: Path, face: int, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), size, index=face, layout_engine=ImageFont.Layout.BASIC)


def render(glyph: Glyph) -> Image.Image:
    """A grey image, SIDE × SIDE. Raises ValueError if the font shows nothing for the character."""
    (path, face), character, seed = glyph
    random = np.random.default_rng(seed)
    font = _font(path, face, int(random.integers(20, 29)))
    middle = SIDE / 2 + random.uniform(-2, 2, 2)
    paper, ink = int(random.integers(160, 256)), int(random.integers(0, 96))
    image = Image.new("L", (SIDE, SIDE), paper)
    ImageDraw.Draw(image).text(tuple(middle), character, fill=ink, font=font, anchor="mm")
    if image.getextrema()[0] == paper:
        raise ValueError(f"{path} shows nothing for U+{ord(character):X}: install Debian 12's fonts")
    return image


def _write_shard(task: tuple[Path, int, Sequence[Glyph]]) -> None:
    """A tar of samples, each an image and its character."""
    path, first, glyphs = task

    def write(partial: Path) -> None:
        with tarfile.open(partial, "w") as archive:
            for number, glyph in enumerate(glyphs, first):
                content = io.BytesIO()
                render(glyph).save(content, "PNG")
                for suffix, data in (("png", content.getvalue()), ("cls", glyph[1].encode())):
                    member = tarfile.TarInfo(f"{number:07d}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))

    if not path.exists():
        atomic_write(path, write)


def write_images(output: Path, fonts: Path, sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Renders `sizes` images of each split as tars in `output`, on all cores; leaves tars that are there. Returns the
    number of images of each font's file, by split.

    Raises:
        ValueError: a font is missing, or shows nothing for a character that it claims to have.
    """
    tasks, by_font = [], dict[str, dict[str, int]]()
    for seed, (split, number) in enumerate(sizes.items()):
        (output / split).mkdir(parents=True, exist_ok=True)
        glyphs = choose_glyphs(load_faces(split, fonts), number, seed)
        by_font[split] = dict(Counter(path.name for (path, _), *_ in glyphs))
        tasks += [
            (output / split / f"{first // SHARD:05d}.tar", first, glyphs[first : first + SHARD])
            for first in range(0, len(glyphs), SHARD)
        ]
    with multiprocessing.get_context("spawn").Pool() as pool:
        for _ in pool.imap_unordered(_write_shard, tasks):
            pass
    return by_font
