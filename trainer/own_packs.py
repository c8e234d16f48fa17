"""Packs a folder of images beside its runs, and finds the pack of exactly these images again."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

from trainer.data.changes import changes_since
from trainer.data.config import SourceOptions
from trainer.data.manifest import Manifest, is_packed
from trainer.data.pack import PackOptions, pack
from trainer.data.reading import Reading, Split, read_source
from trainer.display import shown, stage
from weightserver.common.logs import Remark, say


def packed_beside(source: Path, output: Path, order_seed: int, options: SourceOptions) -> Path:
    """Packs `source`, with its test images if it has any, beside a run's `output`; returns the packed directory.

    An interrupted pack of the same folder is continued, and images added since are added to it. A pack of another
    folder, of another order or with images that were removed or overwritten since is left as it is: the next number is
    packed.
    """
    reading = read_source(source.resolve(), options)
    for number in count(1):
        directory = output.with_name(f"{folder_name(source)}-packed" + (f"-{number}" if number > 1 else ""))
        reasons = (_conflict(split, part, order_seed, options) for split, part in reading.to_pack(directory))
        if reason := next(filter(None, reasons), ""):
            say(Remark(f"{directory} is not used: {reason}", directory=str(directory), reason=reason))
            continue
        _pack(reading, source, directory, PackOptions(order_seed=order_seed, source=options))
        return directory
    raise AssertionError("unreachable: numbers do not end")


def folder_name(source: Path) -> str:
    """Name of a folder, with its dots, or of a list without its suffix."""
    real = source.resolve()
    return real.stem if real.is_file() else real.name


def check_same_source(source: Path, packed: Path, options: SourceOptions) -> None:
    """Raises ValueError if a pack was made of other folders than `source`."""
    if not is_packed(packed) or not source.exists():
        return
    sources = {part.source for part in Manifest.load(packed).ranges}
    own = {split.source for split in read_source(source.resolve(), options).splits}
    if not sources & own:
        raise ValueError(
            f"--data-dir {source}: the run's images are packed from {', '.join(sorted(sources))} in {packed}: "
            "omit it to resume the run, or start another"
        )


def _conflict(split: Split, directory: Path, order_seed: int, options: SourceOptions) -> str:
    """The reason why a pack cannot be one of these images; empty if it is, or can become one."""
    if not is_packed(directory):
        return ""
    manifest = Manifest.load(directory)
    other = [part.source for part in manifest.ranges if part.source != split.source]
    if other:
        return f"it holds images of {other[0]}"
    if manifest.order_seed != order_seed:
        return f"it is packed in the order of seed {manifest.order_seed}"
    if manifest.options.given != options.given:
        return "its images were read by other options"
    if not manifest.complete:
        return ""
    with shown(), stage("comparing the images with their pack"):
        changes = changes_since(split, directory)
    gone = len(changes.removed) + len(changes.changed)
    return f"{gone:,} of its images were removed from {split.source} or overwritten since" if gone else ""


def _pack(reading: Reading, source: Path, directory: Path, options: PackOptions) -> None:
    if not all(is_packed(part) and Manifest.load(part).complete for _, part in reading.to_pack(directory)):
        places = {"source": str(source), "directory": str(directory)}
        say(Remark(f"packing {source} into {directory}: this may be interrupted and repeated", **places))
        with shown():
            pack(source, directory, options)
    with shown(), stage("comparing the images with their pack"):
        added = [name for split, part in reading.to_pack(directory) for name in changes_since(split, part).added]
    if added:
        line = f"adding to {directory} what was added to {source} since: {len(added):,}, first {added[0]}"
        say(Remark(line, directory=str(directory), source=str(source), added=len(added), first=added[0]))
        with shown():
            pack(source, directory, replace(options, extend=True))
