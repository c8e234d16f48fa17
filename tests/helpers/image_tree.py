"""Small trees of real pictures (scikit-learn's two photographs, cut into pieces) including odd and broken ones."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

ORIENTATION = 0x0112
BROKEN = ("a/cut.jpg", "b/text.jpg", "c/truncated.jpg", "c/truncated.png")
"""Of `odd_tree`."""


@functools.cache
def _photographs() -> list[NDArray[np.uint8]]:
    return list(load_sample_images().images)  # uint8 (427, 640, 3)


def piece(number: int, *, width: int = 60, height: int = 48) -> Image.Image:
    """A piece of a photograph, RGB, different for each number."""
    photograph = _photographs()[number % 2]
    place = np.random.default_rng(number)
    top, left = place.integers(0, 427 - height), place.integers(0, 640 - width)
    return Image.fromarray(np.ascontiguousarray(photograph[top : top + height, left : left + width]))


def encoded(image: Image.Image, file_format: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def plain_tree(root: Path, num_images: int, *, first: int = 0) -> Path:
    """Writes numbered JPEGs into class folders a, b and c in turn."""
    for number in range(first, first + num_images):
        folder = root / "abc"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:04d}.jpg").write_bytes(encoded(piece(number), quality=85))
    return root


def odd_tree(root: Path, num_images: int = 20) -> Path:
    """A `plain_tree` with additional broken and unusual files, and files that are not images."""
    plain_tree(root, num_images)
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    files = {
        "a/cut.jpg": b"\xff\xd8",
        "b/text.jpg": b"this is no picture",
        "c/truncated.jpg": encoded(piece(100))[:700],
        "c/truncated.png": encoded(piece(101), "PNG")[:700],
        "a/cmyk.jpg": encoded(piece(102).convert("CMYK")),
        "a/grey.jpg": encoded(piece(103).convert("L")),
        "a/palette.png": encoded(piece(104).convert("P"), "PNG", transparency=b"\x00\x80"),
        "b/pixel.png": encoded(piece(105).resize((1, 1)), "PNG"),
        "b/turned.jpg": encoded(piece(106), exif=turned),
        "b/deep.png": encoded(Image.fromarray(np.asarray(piece(107).convert("L")).astype(np.uint16) * 256), "PNG"),
        "b/alpha.webp": encoded(piece(108).convert("RGBA"), "WEBP"),
        "c/really a png.jpg": encoded(piece(109), "PNG"),
        "c/line.png": encoded(piece(110, width=600, height=1), "PNG"),
        "c/notes.txt": b"no image, and not taken for one",
        "c/.hidden.jpg": b"",
    }
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


def split_tree(root: Path) -> Path:
    """53 training images, some of them broken, and 20 test images."""
    odd_tree(root / "train", 40)
    plain_tree(root / "test", 20)
    return root


def deep_png(values: NDArray[np.uint16]) -> bytes:
    """A PNG of 16 bits a channel, which Pillow does not write: L, LA, RGB or RGBA, uint16 [h, w, c]."""
    height, width, channels = values.shape
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    chunks = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
