"""Versions of blocks: which write made each, and which are needed by the newest state and the retained checkpoints."""

from __future__ import annotations

import itertools
import os
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import xxhash

from weightserver.core.checkpoints import ShardCheckpoint

NEWEST = 2**32 - 1
"""The highest generation."""
_NAMED = struct.Struct("<QQ")


class Version(NamedTuple):
    """One stored state of a block."""

    block: int
    generation: int
    write_id: int
    """Names the write that stored it, u64; see `new_write_id`."""


def new_write_id() -> int:
    """A random u64 that names one attempt of a write: what an attempt left behind never passes for another's."""
    return int.from_bytes(os.urandom(8))


def by_block(versions: Iterable[Version]) -> Iterator[tuple[int, list[Version]]]:
    """(block, its versions) of versions in the order of blocks."""
    for block, found in itertools.groupby(versions, attrgetter("block")):
        yield block, list(found)


def newest(versions: Iterable[Version], up_to: int = NEWEST) -> Iterator[Version]:
    """Each block's newest version of a generation ≤ `up_to`, among versions in the order of blocks, newest first."""
    last = -1
    for version in versions:
        if version.block != last and version.generation <= up_to:
            last = version.block
            yield version


def unneeded(versions: Sequence[Version], checkpoints: Sequence[ShardCheckpoint]) -> list[Version]:
    """The ones of a block's versions, newest first, that neither the newest state nor a checkpoint needs, of those that
    are retained, oldest first."""
    kept = [*(checkpoint.generation for checkpoint in checkpoints), NEWEST]
    return [
        older
        for newer, older in itertools.pairwise(versions)
        if kept[bisect_left(kept, older.generation)] >= newer.generation
    ]


def digest(named: Iterable[tuple[int, int]], others: bytes = bytes(16)) -> bytes:
    """16 bytes that identify a set of (block, write id), in any order: the sum of their hashes. `others` is a digest of
    further members."""
    total = sum(xxhash.xxh3_128_intdigest(_NAMED.pack(block, write_id)) for block, write_id in named)
    return ((total + int.from_bytes(others)) % 2**128).to_bytes(16)
