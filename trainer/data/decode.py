"""Encoded images as pixels: whatever Pillow reads, as colour squares of one size.

The centre square of the upright image is resized in one step, which is "shorter side to `side`, then centre crop"
without a long side that could fill the memory.
"""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

_SUFFIX_OF_FORMAT = {
    "JPEG": "jpg",
    "MPO": "jpg",  # a JPEG with further pictures behind it
    "PNG": "png",
    "WEBP": "webp",
    "GIF": "gif",
    "BMP": "bmp",
    "TIFF": "tif",
    "PPM": "ppm",
}
"""The formats that are read, and how webdataset's decoders call each; Pillow is asked for no other."""
_OPENED = [name for name in _SUFFIX_OF_FORMAT if name != "MPO"]
IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
)
"""Endings, in lower case, of the files that are taken for images."""


class BrokenImageError(ValueError):
    """Bytes that are no image, or not a whole one; the message says why, in one line."""


def decoded_side(image_size: int) -> int:
    """Side of the squares from which crops of `image_size` are taken: 256 for 224, and so in proportion."""
    return round(image_size * 256 / 224)


def check(content: bytes) -> str:
    """Decodes all of an encoded image and returns its format's suffix, such as 'jpg'; BrokenImageError otherwise."""
    image = _load(content, None)
    return _SUFFIX_OF_FORMAT[image.format or ""]


def decode(content: bytes, side: int) -> NDArray[np.uint8]:
    """The centre square of an encoded image as uint8 [3, side, side].

    Turned upright by its EXIF orientation; grey, palette, CMYK and 16-bit images become RGB, transparency is dropped. A
    JPEG is decoded at the smallest eighth of its size whose shorter side is not below `side`.

    Raises:
        BrokenImageError: no image, or not a whole one.
    """
    image = _rgb(_load(content, side))
    width, height = image.size
    shorter = min(width, height)
    left, top = (width - shorter) / 2, (height - shorter) / 2
    square = image.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, left + shorter, top + shorter))
    return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))


def _load(content: bytes, side: int | None) -> Image.Image:
    if not content:
        raise BrokenImageError("the file is empty")
    try:
        image = Image.open(io.BytesIO(content), formats=_OPENED)
        if side is not None:
            image.draft(None, (side, side))
        image.load()
        upright = ImageOps.exif_transpose(image)
        upright.format = image.format
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise BrokenImageError("no image of a known format") from None
    except Exception as error:  # noqa: BLE001 - foreign bytes can make a decoder raise anything
        raise BrokenImageError(" ".join(str(error).split()) or type(error).__name__) from None
    return upright


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits a pixel
        return Image.fromarray((np.asarray(image) / 256).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
