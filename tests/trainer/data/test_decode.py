"""Decoding compared with plain Pillow, for every kind of file in a crawl."""

from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageDraw, ImageOps

from tests.helpers.image_tree import BROKEN, ORIENTATION, deep_png, encoded, odd_tree, piece
from trainer.data import decode as decoding
from trainer.data.decode import (
    Box,
    BrokenImageError,
    Crop,
    Rendering,
    background_colour,
    centre,
    decode,
    decoded_side,
    facts,
    is_picture,
    suffix_of,
)
from trainer.loading import loading_libraries
from trainer.torchvision_schemas import import_module


def square(content: bytes, side: int) -> NDArray[np.uint8]:
    """The centre square, uint8 [3, side, side]."""
    (pixels,) = decode(content, [Crop(side, centre)])
    return pixels


def resized_and_cropped(image: Image.Image, side: int) -> Image.Image:
    """Shorter side to `side`, then the centre: what torchvision's Resize and CenterCrop do."""
    width, height = (length * side // min(image.size) for length in image.size)
    left, top = (width - side) // 2, (height - side) // 2
    return image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + side, top + side))


@pytest.mark.parametrize("size", [(60, 48), (48, 60), (50, 50)])
def test_the_centre_square_is_resized(size: tuple[int, int]) -> None:
    image = piece(1, width=size[0], height=size[1])
    pixels = square(encoded(image, "PNG"), 32)
    assert pixels.shape == (3, 32, 32)
    assert pixels.dtype == np.uint8
    expected = np.asarray(resized_and_cropped(image, 32)).transpose(2, 0, 1)
    assert np.array_equal(pixels, expected)


@pytest.mark.parametrize(
    ("box", "tolerance"),
    [
        pytest.param(Box(500, 300, 600, 400), 1, id="all of the JPEG"),
        pytest.param(Box(13, 20, 313, 260), 30, id="half of it"),
        pytest.param(Box(0, 0, 600, 400), 30, id="a quarter of it"),
    ],
)
def test_a_crop_is_torchvisions(box: Box, tolerance: int) -> None:
    """Except for a JPEG's own scaling, and along the edge, where resizing uses pixels around the box."""
    content = encoded(piece(8, width=600, height=400), quality=95)
    plain, flipped = decode(content, [Crop(96, lambda *_: box), Crop(96, lambda *_: box._replace(flipped=True))])
    assert np.array_equal(flipped, plain[:, :, ::-1])
    left, top, right, bottom, _ = (int(edge) for edge in box)
    image = torch.from_numpy(np.asarray(Image.open(io.BytesIO(content))).transpose(2, 0, 1).copy())
    resized_crop = import_module("torchvision.transforms.v2.functional").resized_crop
    expected = resized_crop(image, top, left, bottom - top, right - left, [96, 96], antialias=True).numpy()
    difference = np.abs(plain.astype(int) - expected)[:, 1:-1, 1:-1]
    assert difference.max() <= tolerance
    assert difference.mean() < 2


@pytest.mark.parametrize(("orientation", "turned"), [(6, Image.Transpose.ROTATE_270), (3, Image.Transpose.ROTATE_180)])
def test_a_box_is_one_of_the_upright_image_at_any_scale(orientation: int, turned: Image.Transpose) -> None:
    """The top left quarter, large and small: only for the small one is a JPEG decoded at a quarter of its size."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    lying = piece(9, width=608, height=400)
    upright = lying.transpose(turned)
    sizes = []

    def quarter(width: int, height: int) -> Box:
        sizes.append((width, height))
        return Box(0, 0, width / 2, height / 2)

    expected = upright.resize((48, 48), Image.Resampling.BILINEAR, box=(0, 0, upright.width / 2, upright.height / 2))
    for file_format in ("JPEG", "PNG", "TIFF", "WEBP"):
        content = encoded(lying, file_format, exif=exif, **({"quality": 95} if file_format in ("JPEG", "WEBP") else {}))
        (small,) = decode(content, [Crop(48, quarter)])
        large, also_small = decode(content, [Crop(240, quarter), Crop(48, quarter)])
        for pixels in (small, also_small):
            assert np.abs(pixels.transpose(1, 2, 0).astype(int) - np.asarray(expected)).mean() < 2, file_format
        assert large.shape == (3, 240, 240)
        assert (file_format == "JPEG") == (not np.array_equal(small, also_small))
    assert set(sizes) == {upright.size}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_jpeg_is_in_place_where_its_last_pixels_are_cut_off(orientation: int) -> None:
    """Decoded at an eighth, 161 x 121 pixels are 21 x 16, the last of which stand for one pixel each."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    ramps = np.stack(np.broadcast_arrays(np.arange(161), np.arange(121)[:, None], 0), axis=2).astype(np.uint8)
    content = encoded(Image.fromarray(ramps), exif=exif, quality=100)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    found = square(content, 15)
    whole = np.asarray(upright.resize((15, 15), Image.Resampling.BILINEAR, box=centre(*upright.size)[:4]))
    assert np.abs(found.transpose(1, 2, 0) - whole.astype(float)).mean() < 1


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_turned_whatever_else_its_exif_has(file_format: str) -> None:
    """Here a unit of resolution that is a text: Pillow reads it, and cannot write it."""
    exif = Image.Exif()
    exif[ORIENTATION], exif[ExifTags.Base.ResolutionUnit] = 6, 2
    odd = exif.tobytes().replace(struct.pack(">HH", 296, 3), struct.pack(">HH", 296, 2))
    lying = piece(9, width=64, height=48)
    content, plain = (encoded(lying, file_format, exif=one) for one in (odd, exif))
    assert np.array_equal(square(content, 48), square(plain, 48))
    assert suffix_of(content) == file_format.lower().replace("jpeg", "jpg")


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "I;16"])
def test_every_mode_becomes_colour(mode: str) -> None:
    image = piece(5, width=48, height=48)
    grey = image.convert("L")
    match mode:
        case "CMYK":
            content, expected = encoded(image.convert(mode), "JPEG", quality=100), image
        case "I;16":
            content, expected = encoded(Image.fromarray(np.asarray(grey).astype(np.uint16) * 256), "PNG"), grey
        case _:
            content, expected = encoded(image.convert(mode), "PNG"), image.convert(mode)
    difference = square(content, 48).transpose(1, 2, 0) - np.asarray(expected.convert("RGB")).astype(int)
    assert np.abs(difference).mean() < (3 if mode == "CMYK" else 1e-9)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_without_a_range_are_refused(mode: str) -> None:
    """They would all be black."""
    content = encoded(piece(5).convert("L").convert(mode), "TIFF")
    for call in (facts, lambda content: square(content, 16)):
        with pytest.raises(
            BrokenImageError,
            match=f"pixels of mode {mode} .* unknown range: store 8 or 16 bits per channel, or give --pix",
        ):
            call(content)


def test_a_pgm_of_16_bits_is_grey() -> None:
    """Although Pillow reports 32 bits."""
    grey = np.asarray(piece(5, width=48, height=48).convert("L"))
    content = b"P5 48 48 65535 " + (grey.astype(np.uint16) * 256).astype(">u2").tobytes()
    assert np.abs(square(content, 48) - grey.astype(int)).max() <= 1


def test_a_large_image_gives_no_warning_in_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(piece(1), "PNG")
    decoding._formats.cache_clear()  # as in a new process
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60 * 48 - 1)
    with pytest.warns(Image.DecompressionBombWarning):
        Image.open(io.BytesIO(content))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with loading_libraries("trainer.data"):
            pass
        assert suffix_of(content) == "png"
    assert not warned


def test_only_broken_files_are_refused(tmp_path: Path) -> None:
    odd_tree(tmp_path, num_images=3)
    for path in sorted(tmp_path.rglob("[!.]*.[jpw][pne]*g*")) + sorted(tmp_path.rglob("*.webp")):
        if str(path.relative_to(tmp_path)) in BROKEN:
            for call in (facts, suffix_of, lambda content: square(content, 16)):
                with pytest.raises(BrokenImageError) as caught:
                    call(path.read_bytes())
                assert "\n" not in str(caught.value)
                assert "0x" not in str(caught.value)
        else:
            facts(path.read_bytes())
            assert square(path.read_bytes(), 16).shape == (3, 16, 16)


def test_the_suffix_is_of_the_format_and_not_of_the_name() -> None:
    assert [suffix_of(encoded(piece(6), name)) for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")] == [
        "jpg", "png", "webp", "gif", "bmp", "tif", "ppm",
    ]  # fmt: skip


def test_every_cut_of_a_file_is_refused_or_whole() -> None:
    """A decoder's error is never another exception."""
    whole = encoded(piece(7), "PNG")
    damaged = np.frombuffer(whole, np.uint8).copy()
    for length in range(0, len(whole) - 20, 97):
        with pytest.raises(BrokenImageError):
            facts(whole[:length])
    random = np.random.default_rng(0)
    for _ in range(60):
        flipped = damaged.copy()
        flipped[random.integers(0, len(whole), 4)] ^= 0x5A
        try:
            square(flipped.tobytes(), 16)
        except BrokenImageError:
            continue


def test_the_papers_ratio() -> None:
    assert decoded_side(224) == 256
    assert decoded_side(32) == 37


def transparent_pictures() -> dict[str, bytes]:
    """A red disc on transparent pixels that hide black, in each form that has transparency."""
    mask = Image.new("L", (64, 64), 0)
    ImageDraw.Draw(mask).ellipse((8, 8, 55, 55), fill=255)
    disc = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    disc.paste((255, 0, 0, 255), mask=mask)
    grey = Image.merge("LA", (mask.point(lambda value: value // 2), mask))
    palette = Image.new("P", (64, 64), 0)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.paste(1, mask=mask)
    key = Image.new("RGB", (64, 64), (0, 0, 0))
    key.paste((255, 0, 0), mask=mask)
    return {
        "png": encoded(disc, "PNG"),
        "webp": encoded(disc, "WEBP", lossless=True),
        "grey": encoded(grey, "PNG"),
        "palette": encoded(palette, "PNG", transparency=0),
        "gif": encoded(palette, "GIF", transparency=0),
        "key": encoded(key, "PNG", transparency=(0, 0, 0)),
    }


@pytest.mark.parametrize("form", transparent_pictures())
@pytest.mark.parametrize("name", ["white", "#8090a0"])
def test_transparent_pixels_show_the_background_without_halos(form: str, name: str) -> None:
    colour = background_colour(name)
    assert colour is not None
    (pixels,) = decode(transparent_pictures()[form], [Crop(24, centre)], Rendering(colour))
    assert tuple(pixels[:, 0, 0]) == colour
    assert pixels[0, 12, 12] >= 127, "the disc is opaque"
    # every pixel, also on the edge, lies between the disc's colour and the background's: no black shines through
    assert (pixels.min(axis=(1, 2)) >= np.minimum(pixels[:, 12, 12], colour) - 1).all()


def test_hidden_colours_are_kept_without_a_background() -> None:
    (pixels,) = decode(transparent_pictures()["png"], [Crop(24, centre)], Rendering(background_colour("none")))
    assert tuple(pixels[:, 0, 0]) == (0, 0, 0)
    with pytest.raises(ValueError, match="'transparent-ish' is not a colour: give a name, as white, #rrggbb, or none"):
        background_colour("transparent-ish")


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_colour_of_16_bits_takes_no_range(channels: int) -> None:
    """Pillow reads the higher 8 bits."""
    content = deep_png(np.full((8, 8, channels), 3_000, np.uint16))
    assert facts(content).values == (11 * 256, 11 * 256 + 255)
    for call in (facts, lambda *rest: decode(rest[0], [Crop(4, centre)], rest[1])):
        with pytest.raises(
            BrokenImageError, match=r"--pixel-range is for grey images: of 16 bits of colour 8 are read"
        ):
            call(content, Rendering(pixel_range=(0, 4_095)))


def test_values_of_12_bits_and_a_fourth_band_are_what_one_says_they_are() -> None:
    twelve = np.linspace(0, 4_095, 48 * 48).astype(np.uint16).reshape(48, 48)
    content = encoded(Image.fromarray(twelve), "PNG")
    crops, own = [Crop(48, centre)], Rendering(pixel_range=(0, 4_095))
    (dark,), (full,) = decode(content, crops), decode(content, crops, own)
    assert (int(dark.max()), int(full.max())) == (15, 255)
    np.testing.assert_allclose(full[0], twelve * (255 / 4_095), atol=1)
    floats = encoded(Image.fromarray(twelve.astype(np.float32)), "TIFF")
    np.testing.assert_array_equal(decode(floats, crops, own)[0], full)
    bands = np.full((24, 24, 4), (10, 200, 30, 0), np.uint8)
    (pixels,) = decode(encoded(Image.fromarray(bands), "TIFF"), [Crop(24, centre)], Rendering(background=None))
    assert pixels[:, 5, 5].tolist() == [10, 200, 30]


def test_the_values_of_a_large_jpeg_are_those_of_256_pixels() -> None:
    """An eighth of its size would show the means of these squares of 4 pixels."""
    board = np.kron(np.indices((128, 128)).sum(0) % 2 * 255, np.ones((4, 4))).astype(np.uint8)
    low, high = facts(encoded(Image.fromarray(board))).values
    assert low < 32
    assert high > 223


def test_images_of_many_megapixels() -> None:
    large = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 30, 3), np.uint8)).resize((600, 800))
    whole, reduced = (
        decode(encoded(large), [Crop(150, centre)], Rendering(max_megapixels=most))[0] for most in (179, 0.025)
    )
    assert np.abs(whole.astype(int) - reduced).mean() < 20, "decoded at a quarter"
    assert facts(encoded(large), Rendering(max_megapixels=0.025)).format == "JPEG"
    progressive = encoded(large, progressive=True)  # whose memory a reduction would not reduce
    for content, most in ((encoded(large), 0.0025), (encoded(large, "PNG"), 0.25), (progressive, 0.25)):
        with pytest.raises(BrokenImageError, match=f"0.48 megapixels, more than --max-megapixels {most}"):
            decode(content, [Crop(150, centre)], Rendering(max_megapixels=most))
    for read in (facts, suffix_of, lambda content, how: decode(content, [Crop(150, centre)], how)):
        with pytest.raises(BrokenImageError, match=r"0\.48 megapixels"):  # told by the head alone
            read(encoded(large, "PNG")[:100], Rendering(max_megapixels=0.25))


@pytest.mark.parametrize("kind", ["ICO", "ICNS", "ICNS of JPEG 2000", "TIFF"])
def test_pictures_and_tiles_larger_than_their_image_are_measured(kind: str) -> None:
    """Pillow decodes them whole, whatever size the image itself names: a small file could fill the memory."""
    picture = encoded(Image.new("L", (800, 600)), "JPEG2000" if "2000" in kind else "PNG")
    contents = {
        "ICO": struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(picture), 22) + picture,
        "TIFF": _tiled_tiff(16, 784),
    }
    icon = b"icns" + struct.pack(">I4sI", 16 + len(picture), b"ic07", 8 + len(picture)) + picture
    content = contents.get(kind, icon)
    for read in (facts, suffix_of, lambda content, how: decode(content, [Crop(8, centre)], how)):
        with pytest.raises(BrokenImageError, match=r"0\.\d+ megapixels, more than --max-megapixels 0.25"):
            read(content, Rendering(max_megapixels=0.25))


def _tiled_tiff(side: int, tile: int) -> bytes:
    """A grey image in a single tile."""
    values = {256: side, 257: side, 258: 8, 259: 1, 262: 1, 277: 1, 322: tile, 323: tile, 324: 200, 325: tile**2}
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    head = b"II*\0" + struct.pack("<IH", 8, len(values)) + tags
    return head.ljust(200, b"\0") + bytes(tile**2)


def test_no_icon_with_a_huge_picture_is_decoded_to_learn_what_it_is() -> None:
    huge = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 60_000, 60_000, 1, 0, 0, 0, 0) + bytes(99)
    icon = struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(huge), 22) + huge
    with pytest.raises(BrokenImageError, match="3,600 megapixels"):
        suffix_of(icon)
    assert not is_picture(io.BytesIO(icon))
    assert is_picture(io.BytesIO(encoded(piece(0), "ICO")))
