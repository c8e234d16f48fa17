"""Makes a folder of images as people have them, of Debian's icon themes: labelled, and in every odd format.

    python -m experiments.icons --output pictures
    python -m trainer images --data-dir pictures

The label is the icon's context: actions, apps, devices, … Each icon is taken once from each theme, in its largest form
of at most 256 pixels. A fifth of the icons' names are test images; one in twenty of these is drawn as a training image
of another name. Every second image is stored in another format or colour model than its PNG, and two training images
are cut off.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import atomic_directory, to_path

PACKAGES = ("gnome-icon-theme", "mate-icon-theme", "oxygen-icon-theme", "tango-icon-theme")
_LARGEST, _SMALLEST_CLASS = 256, 40
_ICON = re.compile(r"/(?:base/)?(\d+)x\d+/(?:.*/)?([a-z]+)/([^/]+)\.png$")
_NUM_BROKEN = 2


class Icon(NamedTuple):
    """A drawing of one theme."""

    theme: str
    context: str
    name: str
    path: Path

    @property
    def is_test(self) -> bool:
        return hashlib.sha256(self.name.encode()).digest()[0] % 5 == 0


def _on_white(image: Image.Image) -> Image.Image:
    coloured = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), coloured).convert("RGB")


FORMATS: dict[str, Callable[[Image.Image], Image.Image]] = {
    ".jpg": _on_white,
    ".cmyk.jpg": lambda image: _on_white(image).convert("CMYK"),
    ".gif": lambda image: image.convert("RGBA"),
    ".webp": lambda image: image.convert("RGBA"),
    ".tif": lambda image: image.convert("RGBA"),
    ".bmp": _on_white,
    ".grey.png": lambda image: image.convert("LA"),
    ".palette.png": lambda image: image.convert("RGBA").quantize(64),
}
"""The end of a file's name, and how the icon is changed before it is saved."""


def download_packages(folder: Path, packages: Iterable[str]) -> None:
    """Downloads packages of Debian and unpacks each into a folder of its name in `folder`, without installing anything.

    Raises:
        ValueError: a package cannot be downloaded or unpacked.
    """
    try:
        _run(["apt-get", "download", "-q", *packages], folder)
        for archive in sorted(folder.glob("*.deb")):
            _run(["dpkg-deb", "-x", archive.name, archive.name.partition("_")[0]], folder)
            archive.unlink()
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.stderr.strip().splitlines()[-1:] if isinstance(error, subprocess.CalledProcessError) else [error]
        raise ValueError(
            f"packages cannot be downloaded ({''.join(map(str, reason))}): run it on Debian 12, after apt-get update, "
            "or give --packages with the unpacked packages"
        ) from None


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=600)


def icons_in(folder: Path) -> list[Icon]:
    """One file of each drawing of the unpacked packages, those of rare contexts left out, in a fixed order."""
    found: dict[tuple[str, str, str], tuple[int, Path]] = {}
    for theme in PACKAGES:
        for path in sorted((folder / theme).rglob("*.png")):
            parts = _ICON.search(path.as_posix())
            if parts is None or path.is_symlink() or int(parts[1]) > _LARGEST:
                continue
            key, form = (theme, parts[2], parts[3]), (int(parts[1]), path)
            found[key] = max(form, found.get(key, form))
    numbers = Counter(context for _, context, _ in found)
    return [Icon(*key, path) for key, (_, path) in sorted(found.items()) if numbers[key[1]] >= _SMALLEST_CLASS]


def write_images(icons: list[Icon], output: Path) -> Iterator[Path]:
    """Writes each icon to output/SPLIT/CONTEXT; yields the files."""
    endings = list(FORMATS)
    for number, icon in enumerate(icons):
        folder = output / ("test" if icon.is_test else "train") / icon.context
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{icon.theme.partition('-')[0]}-{icon.name}"
        if number % 2:
            ending = endings[number // 2 % len(endings)]
            path = folder / f"{stem}{ending}"
            FORMATS[ending](Image.open(icon.path)).save(path)
        else:
            path = folder / f"{stem}.png"
            path.write_bytes(icon.path.read_bytes())
        yield path


def break_images(paths: list[Path]) -> None:
    """Cuts files off in their middle."""
    for path in paths:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 0, or exits as `exit_on_error` does."""
    parser = argparse.ArgumentParser(prog="python -m experiments.icons", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=to_path, required=True, help="folder to create, with train/ and test/")
    parser.add_argument("--packages", type=to_path, help="folder with the unpacked packages (default: download them)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth icon (default 1)")
    options = parser.parse_args(arguments)
    with exit_on_error("icons"), tempfile.TemporaryDirectory() as downloads:
        if options.packages is None:
            download_packages(Path(downloads), PACKAGES)
        icons = icons_in(options.packages or Path(downloads))[:: options.every]
        if not icons:
            raise ValueError(f"{options.packages} has none of {', '.join(PACKAGES)}: give the unpacked packages")
        with atomic_directory(options.output) as partial:
            written = list(write_images(icons, partial))
            break_images([path for path in written if "train" in path.relative_to(partial).parts][-_NUM_BROKEN:])
    contexts = len({icon.context for icon in icons})
    print(f"{len(icons):,} images of {contexts} kinds, {_NUM_BROKEN} of them broken, in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
