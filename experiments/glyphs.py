"""Renders glyphs in colour: a labelled data set from Debian's fonts, the same pixels on every machine.

    python -m experiments.glyphs --output data/glyphs
    python -m trainer fashion-mnist --dataset folder --data-dir data/glyphs \\
      --encoder.in-channels 3 --encoder.image-size 32

The label is the character: the 47 classes of EMNIST's "balanced" split (Cohen et al., 1702.05373), in which letters
whose capitals look the same share a class. Colours, gradient, place, size and slant are random and say nothing about
it. The fonts of 20 of 98 packages are held out: test images have no font of the training images. Fonts whose small
letters are capitals are left out.

The fonts are those of Debian 12, as listed with their SHA-256 in glyph_fonts.json; apt-get downloads them without
installing them. OUTPUT/glyphs.json has the SHA-256 of all pixels, which for the default settings is compared with
`DIGEST`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from experiments.debian import download_packages
from trainer.schedule import visit_uniforms
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import atomic_directory, to_path
from weightserver.core.arrays import Float32Array

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"
SIDE = 32
"""Side of an image in pixels."""
SPLITS = {"train": 500, "test": 100}
"""Images of each character."""
DIGEST = "a206b5518cd7cc2f1d9110d3637f1db4b91136f3e604bc9d718476547feb2fc3"
"""SHA-256 of the pixels of all images with the default settings, in order of split, character and number."""
FONTS: dict[str, dict[str, dict[str, str]]] = json.loads(
    Path(__file__).with_name("glyph_fonts.json").read_text(encoding="utf-8")
)
"""Split -> package -> file in the package -> its SHA-256. Up to four styles of each package that has all characters."""
MANIFEST = "glyphs.json"

_SCALE = 4
"""Glyphs are drawn so many times larger, and averaged."""
_COLUMNS = 24
"""Uniform numbers of an image."""
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
_CANDIDATES = 3
"""Colours of which the one that contrasts most with the background is the glyph's."""


@dataclass(frozen=True)
class Font:
    """A font, at the size at which its capitals are half as high as an image that is drawn larger."""

    face: ImageFont.FreeTypeFont
    """At `_SCALE` times that size."""

    @classmethod
    def load(cls, path: Path) -> Font:
        whole, wanted = 256, SIDE * _SCALE // 2
        _, top, _, bottom = _open(path, whole).getbbox("H")
        return cls(_open(path, max(1, round(whole * wanted / max(1, bottom - top)))))


def _open(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


def render(font: Font, character: str, uniforms: Float32Array) -> Image.Image:
    """An image of a character, SIDE × SIDE, RGB; all that is random in it is a function of float32 [24] in [0, 1)."""
    size, turn, slant, across, down, direction = (float(number) for number in uniforms[:6])
    colours = uniforms[6 : 6 + 3 * (2 + _CANDIDATES)].reshape(-1, 3)
    ground, candidates = colours[:2], colours[2:]
    contrast = np.abs(candidates @ _LUMA - (ground @ _LUMA)[:, None]).min(axis=0)  # to the nearer end of the gradient
    ink = candidates[contrast.argmax()]
    if contrast.max() < 0.25:  # black or white, whichever is further away
        ink = np.full(3, float((ground @ _LUMA).mean() < 0.5), np.float32)
    angle = 2 * math.pi * direction
    axis = (np.arange(SIDE, dtype=np.float32) + 0.5) / SIDE - 0.5
    along = np.clip(0.5 + axis * np.float32(math.cos(angle)) + axis[:, None] * np.float32(math.sin(angle)), 0, 1)
    background = ground[0] + along[..., None] * (ground[1] - ground[0])  # (SIDE, SIDE, 3)
    mask = _mask(font, character, 0.9 + 0.6 * size, 30 * turn - 15, 0.4 * slant - 0.2, (across, down))
    pixels = background + mask[..., None] * (ink - background)
    return Image.fromarray(np.floor(pixels * 255 + 0.5).astype(np.uint8))


def _mask(
    font: Font, character: str, zoom: float, degrees: float, slant: float, place: tuple[float, float]
) -> Float32Array:
    """The glyph's cover of each pixel, float32 [SIDE, SIDE] in 0..1.

    The glyph, `zoom` times as large, is turned, slanted and moved by up to a tenth of the side; it is made smaller if
    it would not fit.
    """
    side = SIDE * _SCALE
    left, top, right, bottom = font.face.getbbox(character)
    zoom = min(zoom, 0.85 * side / max(right - left, bottom - top, 1))
    whole = Image.new("L", (2 * side, 2 * side))
    middle = (left + right) / 2, (top + bottom) / 2
    ImageDraw.Draw(whole).text((side - middle[0], side - middle[1]), character, font=font.face, fill=255)
    radians = math.radians(degrees)
    cosine, sine = math.cos(radians) / zoom, math.sin(radians) / zoom
    x, y = ((0.5 + 0.2 * (share - 0.5)) * side for share in place)  # where the middle of the glyph goes
    a, b, d, e = cosine + slant * sine, sine, slant * cosine - sine, cosine
    turned = whole.transform(
        (side, side),
        Image.Transform.AFFINE,
        (a, b, side - a * x - b * y, d, e, side - d * x - e * y),
        resample=Image.Resampling.BILINEAR,
    )
    cover: Float32Array = np.asarray(turned.reduce(_SCALE), np.float32) / np.float32(255)
    return cover


def load_fonts(split: str, folder: Path) -> list[Font]:
    """The fonts of a split, in `folder` below the names of their packages. Raises ValueError if one is another."""
    fonts = []
    for package, files in FONTS[split].items():
        for name, digest in files.items():
            path = folder / package / name
            if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                problem = "is another version" if path.exists() else "is missing"
                raise ValueError(f"{path} {problem}: unpack Debian 12's {package} into {folder / package}")
            fonts.append(Font.load(path))
    return fonts


def write_split(folder: Path, fonts: list[Font], per_character: int, seed: int) -> bytes:
    """Writes a split's images as PNGs, a folder for each character; returns the SHA-256 of their pixels."""
    digest = hashlib.sha256()
    for number, character in enumerate(CHARACTERS):
        kind = "digit" if character.isdigit() else "capital" if character.isupper() else "small"
        of_character = folder / f"{kind}-{character}"
        of_character.mkdir(parents=True)
        ids = number * per_character + np.arange(per_character)
        for image, uniforms in enumerate(visit_uniforms(seed, ids, _COLUMNS)):
            font = fonts[int(uniforms[-1] * len(fonts))]
            rendered = render(font, character, uniforms)
            digest.update(rendered.tobytes())
            rendered.save(of_character / f"{image:05d}.png")
    return digest.digest()


def write_glyphs(output: Path, fonts: Path, sizes: dict[str, int], seed: int) -> str:
    """Writes the data set, completely or not at all; returns the SHA-256 of its pixels.

    Raises:
        ValueError: a font is missing, or `output` is not empty.
        ValueError: the default settings gave other pixels than they should.
    """
    with atomic_directory(output) as partial:
        parts = [  # a split's numbers have a seed of their own
            write_split(partial / split, load_fonts(split, fonts), size, 2 * seed + (split == "test"))
            for split, size in sizes.items()
        ]
        digest = hashlib.sha256(b"".join(parts)).hexdigest()
        if (sizes, seed) == (SPLITS, 0) and digest != DIGEST:
            raise ValueError(
                f"the pixels have the SHA-256 {digest}, not {DIGEST}: install the Pillow of constraints.txt"
            )
        content = {"sha256": digest, "seed": seed, "images_of_each_character": sizes}
        (partial / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")
    return digest


def make_glyphs(output: Path, sizes: dict[str, int], seed: int = 0, fonts: Path | None = None) -> str:
    """`write_glyphs`, with the fonts of `fonts`; without it they are downloaded first.

    Raises:
        ValueError: as `write_glyphs` and `download_packages` do.
    """
    with tempfile.TemporaryDirectory() as downloads:
        if fonts is None:
            packages = [package for files in FONTS.values() for package in files]
            download_packages(packages, Path(downloads), "give --fonts with the unpacked packages")
        return write_glyphs(output, fonts or Path(downloads), sizes, seed)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 0, or exits as `exit_on_error` does."""
    parser = argparse.ArgumentParser(prog="python -m experiments.glyphs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=to_path, required=True, help="folder to create, with train/ and test/")
    parser.add_argument("--fonts", type=to_path, help="folder with the unpacked packages (default: download them)")
    parser.add_argument("--train", type=int, default=SPLITS["train"], help="training images of each character (500)")
    parser.add_argument("--test", type=int, default=SPLITS["test"], help="test images of each character (100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (0)")
    options = parser.parse_args(arguments)
    sizes = {"train": options.train, "test": options.test}
    with exit_on_error("glyphs"):
        digest = make_glyphs(options.output, sizes, options.seed, options.fonts)
    number = len(CHARACTERS) * sum(sizes.values())
    print(f"{number:,} images of {SIDE} × {SIDE} pixels in {options.output}, SHA-256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
