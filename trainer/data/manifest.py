"""What a packed directory holds, as its manifest.json says; the names of its files and the form of its indexes.

    manifest.json                   ranges, shards with their checksums, order_seed, classes
    images-FIRST.tsv                a range's images by id: label, offset and length in a tar, path, member
    rows-FIRST.tar                  a shard: rows FIRST ... in webdataset's form, KEY.jpg (or png, ...) and KEY.cls
    rows-FIRST.npy                  its index, one record a row (`INDEX`)

What is not in the manifest is not there: files are put in place first, then named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weightserver.files import write_whole

FORMAT = 1
INDEX = np.dtype([("offset", "<i8"), ("length", "<i8"), ("image", "<i8"), ("shown", "<i8"), ("label", "<i8")])
"""Of a row: where its image's bytes are in the tar, the image's id, the id of the image that they are (another one
where the image is broken), and the class of that one (−1 without)."""


@dataclass(frozen=True, kw_only=True)
class Substitute:
    """A broken image, and which one is in its place."""

    image: int
    shown: int
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One tar and its index."""

    first: int
    """Its first row."""
    count: int
    bytes: int
    sha256: str
    index_sha256: str
    substitutes: tuple[Substitute, ...]


@dataclass(frozen=True, kw_only=True)
class Range:
    """Images that were packed together: ids and rows first … first+count−1."""

    first: int
    count: int
    source: str
    """The folder or list they came from."""
    root: str
    """The folder to which the listing's paths are relative."""
    labelled: bool
    shards: tuple[Shard, ...]
    """Of these rows, from the first on; a range that is whole has them all."""

    @property
    def rows_packed(self) -> int:
        return sum(shard.count for shard in self.shards)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A packed directory."""

    order_seed: int
    shard_bytes: int
    classes: tuple[str, ...]
    """Names by number; empty where labels are numbers alone, or there are none."""
    ranges: tuple[Range, ...]

    @property
    def num_images(self) -> int:
        return sum(part.count for part in self.ranges)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the ranges, for `RangesOrder`."""
        return tuple(part.count for part in self.ranges)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(shard for part in self.ranges for shard in part.shards)

    @property
    def labelled(self) -> bool:
        return all(part.labelled for part in self.ranges)

    @property
    def complete(self) -> bool:
        return self.finished == self

    @property
    def finished(self) -> Manifest:
        """That of the ranges that are packed to their end: all but the one that is being added."""
        return replace(self, ranges=tuple(part for part in self.ranges if part.rows_packed == part.count))

    def save(self, directory: Path) -> None:
        """Writes manifest.json, whole or not at all."""
        text = json.dumps({"format": FORMAT} | asdict(self), indent=1, ensure_ascii=True) + "\n"
        write_whole(directory / "manifest.json", lambda path: path.write_text(text))

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Reads manifest.json. Raises ValueError where there is none, or not one of this version."""
        path = directory / "manifest.json"
        try:
            content = json.loads(path.read_text())
            if content.pop("format") != FORMAT:
                raise ValueError(f"{path} is of another version of this program: pack the images again")
            ranges = tuple(_range(part) for part in content.pop("ranges"))
            return cls(classes=tuple(content.pop("classes")), ranges=ranges, **content)
        except OSError:
            raise ValueError(f"{directory} holds no packed images: python -m trainer.data pack makes them") from None
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged ({error}): pack the images again") from None


def is_packed(directory: Path) -> bool:
    """Whether packed images are there, all or some."""
    return (directory / "manifest.json").is_file()


def listing_path(directory: Path, first: int) -> Path:
    return directory / f"images-{first:012d}.tsv"


def tar_path(directory: Path, first: int) -> Path:
    return directory / f"rows-{first:012d}.tar"


def index_path(directory: Path, first: int) -> Path:
    return directory / f"rows-{first:012d}.npy"


def _range(content: Mapping[str, Any]) -> Range:
    shards = tuple(
        Shard(**dict(shard) | {"substitutes": tuple(Substitute(**one) for one in shard["substitutes"])})
        for shard in content["shards"]
    )
    return Range(**dict(content) | {"shards": shards})
