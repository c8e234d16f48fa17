"""Packs a folder of images beside its runs, and finds the pack of exactly these images again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

from trainer.data.changes import changes_since
from trainer.data.manifest import Manifest, is_packed
from trainer.data.pack import PackOptions
from trainer.data.pack_progress import pack_with_progress
from trainer.display import shown, stage
from weightserver.common.logs import Remark, say


def packed_beside(source: Path, output: Path, order_seed: int) -> Path:
    """Packs `source`, with its test images if it has any, beside a run's `output`; returns the packed directory.

    An interrupted pack of the same folder is continued, and images added since are added to it. A pack of another
    folder, of another order or with images that were removed or overwritten since is left as it is: the next number is
    packed.
    """
    for number in count(1):
        directory = output.with_name(f"{folder_name(source)}-packed" + (f"-{number}" if number > 1 else ""))
        parts = list(_parts(source, directory))
        reason = next(filter(None, (_conflict(images, part, order_seed) for images, part in parts)), "")
        if reason:
            say(Remark(f"{directory} is not used: {reason}", directory=str(directory), reason=reason))
            continue
        for images, part in parts:
            _pack(images, part, order_seed)
        return directory
    raise AssertionError("unreachable: numbers do not end")


def folder_name(source: Path) -> str:
    """Name of a folder, with its dots, or of a list without its suffix."""
    real = source.resolve()
    return real.stem if real.is_file() else real.name


def check_same_source(source: Path, packed: Path) -> None:
    """Raises ValueError if a pack was made of other folders than `source`."""
    if not is_packed(packed):
        return
    sources = {part.source for part in Manifest.load(packed, substitutes=False).ranges}
    own = {str(images.resolve()) for images, _ in _parts(source, packed)}
    if not sources & own:
        raise ValueError(
            f"--data-dir {source}: the run's images are packed from {', '.join(sorted(sources))} in {packed}: "
            "omit it to resume the run, or start another"
        )


def _parts(source: Path, directory: Path) -> Iterator[tuple[Path, Path]]:
    """Folders to pack, each with its packed directory: training images, then test images if there are any."""
    train = source / "train" if (source / "train").is_dir() else source
    yield train, directory
    if train != source:
        tests = [path for name in ("test", "val") if (path := source / name).is_dir()]
        yield from ((path, directory / "test") for path in tests[:1])


def _conflict(images: Path, directory: Path, order_seed: int) -> str:
    """The reason why a pack cannot be one of these images; empty if it is, or can become one."""
    if not is_packed(directory):
        return ""
    manifest = Manifest.load(directory, substitutes=False)
    other = [part.source for part in manifest.ranges if part.source != str(images.resolve())]
    if other:
        return f"it holds images of {other[0]}"
    if manifest.order_seed != order_seed:
        return f"it is packed in the order of seed {manifest.order_seed}"
    if not manifest.complete:
        return ""
    with shown(), stage("comparing the images with their pack"):
        changes = changes_since(images, directory)
    gone = len(changes.removed) + len(changes.renamed) + len(changes.changed)
    return f"{gone:,} of its images were removed from {images}, renamed or overwritten since" if gone else ""


def _pack(images: Path, directory: Path, order_seed: int) -> None:
    if not (is_packed(directory) and Manifest.load(directory).complete):
        places = {"source": str(images), "directory": str(directory)}
        say(Remark(f"packing {images} into {directory}: this may be interrupted and repeated", **places))
        pack_with_progress(images, directory, PackOptions(order_seed=order_seed))
    with shown(), stage("comparing the images with their pack"):
        added = changes_since(images, directory).added
    if added:
        line = f"adding to {directory} what was added to {images} since: {len(added):,}, first {added[0]}"
        say(Remark(line, directory=str(directory), source=str(images), added=len(added), first=added[0]))
        pack_with_progress(images, directory, PackOptions(order_seed=order_seed, extend=True))
