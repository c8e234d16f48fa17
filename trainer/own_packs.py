"""Packs a folder of images beside its runs, and finds the pack of exactly these images again."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

from trainer.data.bucket_sources import local_source
from trainer.data.changes import changes_since
from trainer.data.config import SourceOptions
from trainer.data.listing import Entry
from trainer.data.manifest import Manifest, is_packed
from trainer.data.pack import PackOptions, pack
from trainer.data.pack_plan import contradictions
from trainer.data.reading import Reading, read_source, source_exists
from trainer.display import shown, stage
from weightserver.common.logs import Remark, say


def packed_beside(source: Path, output: Path, order_seed: int, options: SourceOptions) -> Path:
    """Packs `source`, with its test images if it has any, beside a run's `output`; returns the packed directory.

    An interrupted pack of the same folder is continued, and images added since are added to it. Another pack, or one
    with images that were removed, overwritten or labelled anew since, is left as it is: the next number is packed.
    """
    wanted = PackOptions(order_seed=order_seed, source=options)
    source = local_source(source, options)
    reading = read_source(source.resolve(), options)
    for number in count(1):
        directory = output.with_name(f"{folder_name(source)}-packed" + (f"-{number}" if number > 1 else ""))
        reason = _contradiction(reading, directory, wanted)
        if not reason:
            _complete(reading, source, directory, wanted)
            with shown(), stage("comparing the images with their pack"):
                changes = changes_since(reading, directory)
            reason = changes.outdated()
        if not reason:
            if changes.added:
                _extend(changes.added, source, directory, wanted)
            for line in replace(changes, added=[]).lines():
                say(Remark(f"{directory}: {line}", directory=str(directory), reason=line))
            return directory
        say(Remark(f"{directory} is not used: {reason}", directory=str(directory), reason=reason))
    raise AssertionError("unreachable: numbers do not end")


def folder_name(source: Path) -> str:
    """Name of a folder, with its dots, or of a list without its suffix."""
    real = source.resolve()
    return real.stem if real.is_file() else real.name


def check_same_source(source: Path, packed: Path) -> None:
    """Raises ValueError if a pack was made of other folders than `source`."""
    known = is_packed(packed) and source_exists(source)
    sources = [part.source for part in Manifest.load(packed).ranges] if known else []
    if sources and not any(Path(one).is_relative_to(source.resolve()) for one in sources):
        raise ValueError(
            f"--data-dir {source}: the run's images are packed from {', '.join(dict.fromkeys(sources))} in {packed}: "
            "omit it to resume the run, or start another"
        )


def _contradiction(reading: Reading, directory: Path, options: PackOptions) -> str:
    """The reason why a directory cannot become the pack of these images; empty if it can."""
    for split, part in reading.to_pack(directory):
        if is_packed(part):
            try:
                manifest = Manifest.load(part)
            except ValueError as error:
                return str(error)
            for wrong, _ in contradictions(manifest, split, options):
                return f"it {wrong}"
            if others := [one.source for one in manifest.ranges if one.source != split.source]:
                return f"it holds images of {others[0]}"
    return ""


def _complete(reading: Reading, source: Path, directory: Path, options: PackOptions) -> None:
    if not all(is_packed(part) and Manifest.load(part).complete for _, part in reading.to_pack(directory)):
        places = {"source": str(source), "directory": str(directory)}
        say(Remark(f"packing {source} into {directory}: this may be interrupted and repeated", **places))
        with shown():
            pack(source, directory, options)


def _extend(added: list[Entry], source: Path, directory: Path, options: PackOptions) -> None:
    first = added[0].name
    line = f"adding to {directory} what was added to {source} since: {len(added):,}, first {first}"
    say(Remark(line, directory=str(directory), source=str(source), added=len(added), first=first))
    with shown():
        pack(source, directory, replace(options, extend=True))
