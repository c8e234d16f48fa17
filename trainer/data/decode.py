"""Decodes images that Pillow can read into colour squares, each cropped and resized in one antialiased step.

The centre square equals "shorter side to `side`, then centre crop", without a long side that could fill the memory.
Unlike torchvision's resized_crop, resizing also uses the pixels around a box, like resizing the whole image first.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageColor, ImageOps, UnidentifiedImageError

_SUFFIX_OF_FORMAT = {
    "JPEG": "jpg",
    "MPO": "jpg",  # a JPEG followed by further pictures
    "PNG": "png",
    "WEBP": "webp",
    "GIF": "gif",
    "BMP": "bmp",
    "TIFF": "tif",
    "PPM": "ppm",
    "AVIF": "avif",
    "JPEG2000": "jp2",
    "QOI": "qoi",
    "DDS": "dds",
    "ICO": "ico",
    "ICNS": "icns",
    "PSD": "psd",
    "SGI": "sgi",
    "SUN": "ras",
    "PCX": "pcx",
    "TGA": "tga",
    "HEIF": "heic",  # with the extra `heic`
}
"""The supported formats, with the suffixes by which webdataset's decoders know them; no other format is opened."""
_ICONS = (b"\0\0\1\0", b"icns")
"""How ICO and ICNS begin."""
_PICTURE_IN_ICON = re.compile(rb"(?:IHDR|\xff\x4f\xff\x51.{4})(.{4})(.{4})", re.DOTALL)
"""Where a PNG, or a JPEG 2000, has its width and height."""
_TILE_WIDTH, _TILE_LENGTH = 322, 323
"""TIFF's tags of a tile's sides. Source: TIFF 6.0, page 67."""
_EXTRA_SAMPLES = 338
"""TIFF's tag that says what further bands are: 1 or 2 for alpha. Source: TIFF 6.0, page 31."""
IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".tga")
)
"""Lower-case suffixes of the files that count as images without a look at their content."""
Colour = tuple[int, int, int]
"""Red, green and blue, 0..255 each."""
DEFAULT_BACKGROUND: Colour = (255, 255, 255)


class Rendering(NamedTuple):
    """How the pixels of an image become colours."""

    background: Colour | None = DEFAULT_BACKGROUND
    """What transparent pixels show; None for the colours that they hide."""
    pixel_range: tuple[float, float] | None = None
    """Values that are black and white, of images with more than 8 bits; None for the range of 16 bits."""
    max_megapixels: float = 179.0
    """Largest image that is decoded; larger JPEGs are decoded at a half, a quarter or an eighth of their size, unless
    they are progressive."""

    def reduction(self, image: Image.Image) -> int:
        """The factor by which an opened image must be reduced. Raises BrokenImageError if it cannot."""
        pixels = image.width * image.height
        if image.format == "TIFF":  # whose tiles are decoded whole
            tags = image.tag_v2  # type: ignore[attr-defined]
            pixels = max(pixels, tags.get(_TILE_WIDTH, 0) * tags.get(_TILE_LENGTH, 0))
        is_progressive = "progressive" in image.info  # libjpeg holds as much of it as of a whole image
        is_reducible = image.format in ("JPEG", "MPO") and not is_progressive
        return self._factor(pixels, (1, 2, 4, 8) if is_reducible else (1,))

    def check_icon(self, file: BinaryIO) -> None:
        """Raises BrokenImageError if a file is an icon with too large a picture, which Pillow decodes when it opens it,
        whatever its size is in the icon's list."""
        file.seek(0)
        if file.read(4) in _ICONS:
            for width, height in _PICTURE_IN_ICON.findall(file.read()):
                self._factor(int.from_bytes(width) * int.from_bytes(height))

    def _factor(self, pixels: int, factors: Sequence[int] = (1,)) -> int:
        for factor in factors:
            if pixels / factor**2 <= 1e6 * self.max_megapixels:
                return factor
        raise BrokenImageError(f"{pixels / 1e6:,.4g} megapixels, more than --max-megapixels {self.max_megapixels:g}")


DEFAULT_RENDERING = Rendering()


class BrokenImageError(ValueError):
    """Bytes that are not an image, not a complete one, or whose pixels have an unknown range; one line says why."""


def why(error: Exception) -> str:
    """The reason why an image cannot be read, without its path."""
    if isinstance(error, FileNotFoundError) and error.filename and Path(error.filename).is_symlink():
        return "link to a missing file"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def background_colour(name: str) -> Colour | None:
    """The colour of a name, as white, or of #rrggbb; None for "none".

    Raises:
        ValueError: another text.
    """
    if name == "none":
        return None
    try:
        return ImageColor.getcolor(name, "RGB")  # type: ignore[return-value]  # three numbers in this mode
    except ValueError:
        raise ValueError(f"{name!r} is not a colour: give a name, as white, #rrggbb, or none") from None


class Box(NamedTuple):
    """A part of an image, in pixels of the upright image, and whether it is flipped horizontally."""

    left: float
    top: float
    right: float
    bottom: float
    flipped: bool = False


ChosenBox = Callable[[int, int], Box]
"""The part of an image that is seen, as a function of the image's width and height."""


@dataclass(frozen=True)
class Crop:
    """A square to cut out of an image."""

    side: int
    """Side of the result in pixels."""
    box: ChosenBox


def centre(width: int, height: int) -> Box:
    """The largest square in the middle of an image."""
    shorter = min(width, height)
    left, top = (width - shorter) / 2, (height - shorter) / 2
    return Box(left, top, left + shorter, top + shorter)


def decoded_side(image_size: int) -> int:
    """Side of the decoded squares whose centres of `image_size` evaluation uses: 256 for 224, and in proportion."""
    return round(image_size * 256 / 224)


def decode(content: bytes, crops: Sequence[Crop], rendering: Rendering = DEFAULT_RENDERING) -> list[NDArray[np.uint8]]:
    """Decodes an image once and cuts squares out of it: uint8 [3, side, side] each.

    The image is rotated by its EXIF orientation; grey, palette, CMYK and 16-bit images become RGB. A JPEG is decoded at
    an eighth, a quarter or half of its size if no crop needs more pixels.

    Raises:
        BrokenImageError: not an image, or an incomplete one.
    """
    with _foreign():
        image = _open(content, rendering)
        size, least = _upright_size(image), rendering.reduction(image)
    boxes = [crop.box(*size) for crop in crops]
    spare = min(min(b.right - b.left, b.bottom - b.top) / crop.side for crop, b in zip(crops, boxes, strict=True))
    reduction = max(least, next((factor for factor in (8, 4, 2) if factor <= spare), 1))
    with _foreign():
        if image.draft(None, (image.width // reduction, image.height // reduction)) is None:
            reduction = 1  # not a JPEG
        turn = image.getexif().get(ExifTags.Base.Orientation)
        _turn_upright(image)
        pixels = _rgb(image, rendering)
        # a reduced JPEG has a part of a pixel at its right and bottom, which turning may bring to the left and top
        x = (pixels.width - size[0] / reduction) * (turn in (2, 3, 6, 7))
        y = (pixels.height - size[1] / reduction) * (turn in (3, 4, 7, 8))
        return [_cut(pixels, box, crop.side, reduction, x, y) for crop, box in zip(crops, boxes, strict=True)]


@functools.cache
def _formats() -> dict[str, Callable[[bytes], Any] | None]:
    """Readies Pillow in this process. Returns the formats that it can open, each with the test of a file's first bytes;
    None where files have no mark."""
    Image.MAX_IMAGE_PIXELS = None  # `Rendering.reduction` limits them, and has larger JPEGs read at part of their size
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    Image.init()
    return {name: Image.OPEN[name][1] for name in _SUFFIX_OF_FORMAT if name in Image.OPEN}


def is_picture(file: BinaryIO) -> bool:
    """Whether a file begins as an image of a supported format, whatever its name."""
    try:
        DEFAULT_RENDERING.check_icon(file)
        with Image.open(file, formats=[name for name, accepts in _formats().items() if accepts]):
            return True
    except Exception:  # noqa: BLE001 - foreign bytes can make a decoder raise anything
        return False


def may_begin_picture(start: bytes) -> bool:
    """Whether the first 16 bytes of a file, or all of a shorter one, have the mark of a supported format."""
    return any(accepts(start.ljust(16, b"\0")) for accepts in _formats().values() if accepts)


SHALLOW, GREY, COLOUR = "8 bits", "16 bits or more", "16 bits of colour"
"""Depths of pixels. Of 16 bits of colour, only the higher 8 are known."""


class ImageFacts(NamedTuple):
    """What an intact image is."""

    format: str
    mode: str
    """Pillow's name of its pixels."""
    width: int
    """Pixels once it is upright; `height` likewise."""
    height: int
    num_bytes: int
    """Size of the encoded image."""
    depth: str
    """`SHALLOW`, `GREY`, `COLOUR`, or another text for floats."""
    values: tuple[int, int]
    """Smallest and largest value: of 8 bits and of floats as they are shown, of more bits as they are stored."""
    fourth_band: bool
    """Whether it is a TIFF with a band beside red, green and blue that it does not call alpha."""


def suffix_of(content: bytes, rendering: Rendering = DEFAULT_RENDERING) -> str:
    """Decodes a whole image, a JPEG small, and returns its format's suffix, such as jpg. Raises BrokenImageError if it
    cannot."""
    with _foreign():
        image = _open(content, rendering)
        _load(image, 1)
        return _SUFFIX_OF_FORMAT[image.format or ""]


def facts(content: bytes, rendering: Rendering = DEFAULT_RENDERING) -> ImageFacts:
    """Decodes a whole image, a large JPEG small, and says what it is. Raises BrokenImageError if it cannot."""
    with _foreign():
        image = _open(content, rendering)
        only_8_bits, size = _only_8_bits(image), _upright_size(image)  # which loads a PNG
        _load(image, 256)
        depth = COLOUR if only_8_bits else GREY if image.mode.startswith("I") else SHALLOW
        depth = "floats" if image.mode == "F" else depth
        if only_8_bits:  # whose transparent pixels have as many bits, other than the background
            rendering = rendering._replace(background=None)
        pixels = np.asarray(image if depth == GREY else _rgb(image, rendering))
        low, high = int(pixels.min()), int(pixels.max())
        values = (256 * low, 256 * high + 255) if only_8_bits else (low, high)
        is_alpha = image.format != "TIFF" or image.tag_v2.get(_EXTRA_SAMPLES) in ((1,), (2,))  # type: ignore[attr-defined]
        fourth_band = not is_alpha and image.mode == "RGBA"
        return ImageFacts(image.format or "", image.mode, *size, len(content), depth, values, fourth_band)


def _load(image: Image.Image, least_side: int) -> None:
    """Decodes an opened image to upright pixels; a JPEG as small as can be with sides of at least `least_side`."""
    image.draft(None, (least_side, least_side))  # reads all of the file
    _turn_upright(image)


def _turn_upright(image: Image.Image) -> None:
    """Decodes an opened image and turns it by its EXIF orientation, whatever else its EXIF has."""
    image.load()
    image.getexif()  # is kept
    for name in ("exif", "Raw profile type exif"):  # which Pillow would write anew, and could not always
        image.info.pop(name, None)
    ImageOps.exif_transpose(image, in_place=True)


def _cut(image: Image.Image, box: Box, side: int, reduction: int, x: float, y: float) -> NDArray[np.uint8]:
    """A box of an image that is reduced, and begins at x and y."""
    left, top, right, bottom = (edge / reduction for edge in box[:4])
    edges = (left + x, top + y, right + x, bottom + y)
    square = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR, box=edges))
    return (square[:, ::-1] if box.flipped else square).transpose(2, 0, 1)


def _open(content: bytes, rendering: Rendering) -> Image.Image:
    """Opens an image without its pixels; refuses too many of them, and those that the rendering has no range for."""
    if not content:
        raise BrokenImageError("the file is empty")
    rendering.check_icon(file := io.BytesIO(content))
    image = Image.open(file, formats=list(_formats()))
    rendering.reduction(image)
    if not rendering.pixel_range and _unknown_range(image):
        raise BrokenImageError(
            f"pixels of mode {image.mode} have an unknown range: store 8 or 16 bits per channel, or give --pixel-range"
        )
    if rendering.pixel_range and _only_8_bits(image):
        raise BrokenImageError("--pixel-range is for grey images: of 16 bits of colour 8 are read; store it in 8 bits")
    return image


def _only_8_bits(image: Image.Image) -> bool:
    """Whether an image, opened but not loaded, has 16 bits a channel of which Pillow reads the higher 8."""
    return not image.mode.startswith("I") and any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height that an image, opened but not loaded, will have once it is upright."""
    width, height = image.size
    lies = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    return (height, width) if lies and image.format != "TIFF" else (width, height)  # Pillow rotates TIFFs itself


@contextmanager
def _foreign() -> Iterator[None]:
    """Turns any error of a decoder into a BrokenImageError: the bytes may be anything."""
    try:
        yield
    except (MemoryError, BrokenImageError):
        raise
    except UnidentifiedImageError:
        raise BrokenImageError("not an image of a known format") from None
    except Exception as error:  # noqa: BLE001 - foreign bytes can make a decoder raise anything
        raise BrokenImageError(" ".join(str(error).split()) or type(error).__name__) from None


def _unknown_range(image: Image.Image) -> bool:
    return image.mode == "F" or (image.mode == "I" and image.format == "TIFF")


def _rgb(image: Image.Image, rendering: Rendering) -> Image.Image:
    background = rendering.background
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits a pixel, or more
        low, high = rendering.pixel_range or (0, 65_280)
        pixels = (np.asarray(image, np.float32) - low) * (255 / (high - low))
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert("RGB")
    if background is not None and image.has_transparency_data:
        layer = image.convert("RGBA")
        opaque = Image.new("RGBA", layer.size, background)
        return Image.alpha_composite(opaque, layer).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")
