"""The manifest of a packed directory, and the names of its files.

    manifest.json       order_seed, classes, how the source was read, and the ranges
    images-FIRST.tsv    a range's images by id: label, offset and length in a tar, path, member
    rows-FIRST.tar      a shard: rows FIRST ... in webdataset's form, KEY.jpg (or png, ...) and KEY.cls
    index-FIRST.bin     a range's index, one record per row (`index.py`)
    shards-FIRST.jsonl  a range's tars with their checksums, one per line: written last, when all are there

A range that is not complete has notes of its finished tars (`finished_tars.py`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from trainer.data.bucket_sources import numbered
from trainer.data.config import SourceOptions
from trainer.data.parts import WHOLE, Part
from trainer.settings import settings_of
from weightserver.common.atomic_files import atomic_write
from weightserver.common.object_store import (
    ObjectStoreError,
    Reason,
    absolute,
    find,
    is_remote,
    read,
    shown,
    unless_missing,
)

FORMAT = 5
LOCK = ".packing"
"""File in a pack on a disk that those who pack into it lock: parts together, others alone."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One tar and its index."""

    first: int
    """The number of its first row."""
    count: int
    bytes: int
    sha256: str
    index_sha256: str
    """SHA-256 of its records in the range's index."""
    num_broken: int
    """Number of its images that are broken, and for which others are shown."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Images that were packed together: ids and rows first … first+count−1."""

    first: int
    count: int
    source: str
    """The folder or list that they came from; of one in a bucket, its name there."""
    root: str
    """The folder to which the listing's paths are relative."""
    listing_sha256: str
    rows_per_tar: int
    """Number of rows of each tar but the last."""
    shards: tuple[Shard, ...]
    """All tars of these rows, in order; none of a range that is not complete."""

    @property
    def index_digest(self) -> str:
        """Identifies the content of the index of a complete range."""
        return hashlib.sha256("".join(shard.index_sha256 for shard in self.shards).encode()).hexdigest()

    @property
    def list_of_tars(self) -> bytes:
        """The content of the file of `shards_path`."""
        return b"".join(map(line_of, self.shards))

    def digests(self, directory: Path) -> dict[Path, str]:
        """SHA-256 of each file of a complete range; of its index, `index_digest`."""
        return {
            listing_path(directory, self.first): self.listing_sha256,
            **{tar_path(directory, shard.first): shard.sha256 for shard in self.shards},
            index_path(directory, self.first): self.index_digest,
            shards_path(directory, self.first): hashlib.sha256(self.list_of_tars).hexdigest(),
        }

    @property
    def num_tars(self) -> int:
        return -(-self.count // self.rows_per_tar)

    def tars(self, part: Part) -> range:
        """The first row of each tar of a part; it stops at the row after the last."""
        numbers, end = part.range(self.num_tars), self.first + self.count
        first, stop = (min(end, self.first + number * self.rows_per_tar) for number in (numbers.start, numbers.stop))
        return range(first, stop, self.rows_per_tar)

    def is_of(self, source: Path) -> bool:
        """Whether images of a source are packed: of a folder all of it, not a folder or file in it."""
        source, own = absolute(source), Path(self.source)
        if _is_file(source):
            return self.root == shown(source.parent) and own.is_relative_to(source)
        if self.root != shown(source) or not own.is_relative_to(source):
            return False
        return own == source or not _is_file(source / own.relative_to(source).parts[0])  # but a split


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A packed directory."""

    order_seed: int
    labelled: bool
    classes: tuple[str, ...]
    """Names by number; empty without labels, or if labels are only numbers."""
    options: SourceOptions = field(default_factory=SourceOptions)
    """How the source was read."""
    ranges: tuple[Range, ...]

    @property
    def num_images(self) -> int:
        return sum(part.count for part in self.ranges)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the ranges, for `RangesOrder`."""
        return tuple(part.count for part in self.ranges)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(shard for part in self.ranges for shard in part.shards)

    @property
    def complete(self) -> bool:
        return self.finished == self

    def is_of(self, source: Path) -> bool:
        """Whether images of a source are packed: of a folder all of it, not a folder or file in it."""
        return any(part.is_of(source) for part in self.ranges)

    @property
    def finished(self) -> Manifest:
        """The manifest without the range that is still being added, if any."""
        return replace(self, ranges=tuple(part for part in self.ranges if part.shards))

    @property
    def content(self) -> bytes:
        """The content of manifest.json."""
        content = {"format": FORMAT} | vars(self) | {"options": self.options.given}
        content["ranges"] = [{key: vars(part)[key] for key in vars(part) if key != "shards"} for part in self.ranges]
        return json.dumps(content, indent=1, ensure_ascii=True).encode() + b"\n"

    @property
    def plan(self) -> str:
        """Identifies which images are packed in which tars, however many of these there are yet."""
        return hashlib.sha256(self.content).hexdigest()[:12]

    def save(self, directory: Path) -> None:
        """Writes each file atomically: the lists of tars of complete ranges first, then manifest.json."""
        for part in self.finished.ranges:
            atomic_write(shards_path(directory, part.first), partial(Path.write_bytes, data=part.list_of_tars))
        atomic_write(directory / "manifest.json", partial(Path.write_bytes, data=self.content))

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Reads the files of `save`; notes of finished tars do not count.

        Raises:
            ValueError: no manifest, or one of an unknown format; a bucket that refuses or does not answer.
        """
        path = directory / "manifest.json"
        try:
            if (text := read_file(path)) is None:
                nothing = f"{directory} holds no packed images: pack them by pic pack"
                raise ObjectStoreError(path, Reason.MISSING) if is_remote(path) else ValueError(nothing)
            content = json.loads(text)
            if content.pop("format") != FORMAT:
                raise ValueError(
                    f"{shown(path)} is of another version of this program: pack the images again, into a new directory"
                )
            ranges = [Range(**part, shards=()) for part in content.pop("ranges")]
            ranges = [replace(part, shards=_shards_in(directory, part, is_last=part == ranges[-1])) for part in ranges]
            if not all(part.shards for part in ranges[:-1]):
                raise ValueError(
                    f"{shown(path)} names an incomplete range before its last: pack the images again, into a new "
                    "directory"
                )
            options = settings_of(SourceOptions, content.pop("options"))
            return cls(classes=tuple(content.pop("classes")), options=options, ranges=tuple(ranges), **content)
        except (TypeError, KeyError, AttributeError, ArithmeticError, UnicodeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{shown(path)} is damaged ({error}): pack the images again, into a new directory"
            ) from None


def is_packed(directory: Path) -> bool:
    """Whether the directory holds packed images, complete or not."""
    return is_file(directory / "manifest.json")


def is_file(path: Path) -> bool:
    """Whether there is such a file or object."""
    return find(path) is not None if is_remote(path) else path.is_file()


def read_file(path: Path) -> bytes | None:
    """The content of a small file or object; None if it is missing.

    Raises:
        ValueError: it cannot be read.
    """
    if is_remote(path):
        return unless_missing(lambda: read(path))
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): check its rights and its disk") from None


def _is_file(source: Path) -> bool:
    """Whether a source is a list, an archive or numbered archives, rather than a folder."""
    return bool(numbered(source)) or is_file(source)


def packs_in(directory: Path) -> list[Path]:
    """The directories of a pack that exist: its own, and that of its test images."""
    return list(filter(is_packed, (directory, directory / "test")))


def manifests_in(directory: Path) -> dict[Path, Manifest]:
    """The manifests of a pack by directory: its own, and that of its test images, if any; none before it is planned."""
    manifests = {each: Manifest.load(each) for each in packs_in(directory)}
    return manifests if directory in manifests else {}


def listing_path(directory: Path, first: int) -> Path:
    return directory / f"images-{first:012d}.tsv"


def tar_path(directory: Path, first: int) -> Path:
    return directory / f"rows-{first:012d}.tar"


def index_path(directory: Path, first: int) -> Path:
    return directory / f"index-{first:012d}.bin"


def shards_path(directory: Path, first: int) -> Path:
    return directory / f"shards-{first:012d}.jsonl"


def line_of(shard: Shard) -> bytes:
    """The line of a tar in a list of `shards_path`."""
    return json.dumps(asdict(shard), ensure_ascii=True).encode() + b"\n"


def _shards_in(directory: Path, part: Range, *, is_last: bool) -> tuple[Shard, ...]:
    """The tars in the list of a range; none if there is no list yet."""
    path, tars = shards_path(directory, part.first), part.tars(WHOLE)
    if (content := read_file(path)) is None:
        return ()
    try:
        shards = tuple(Shard(**json.loads(line)) for line in content.splitlines())
    except (ValueError, TypeError):
        shards = ()
    rows = [row for shard in shards for row in (shard.first, shard.first + shard.count)]
    if rows != [tars.start, *(row for row in tars[1:] for _ in range(2)), tars.stop]:
        again = "remove it, and repeat the command that packs these images"
        remedy = again if is_last else "pack the images again, into a new directory"
        raise ValueError(f"{shown(path)} is damaged, or an earlier version of this program began it: {remedy}")
    return shards
