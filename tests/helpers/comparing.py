"""Whether rows are the same, to the last bit."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from tests.helpers.stored import decoded
from weightserver import RowState
from weightserver.core.precision import precision_of
from weightserver.core.sharding import Sharding
from weightserver.shard.shard import Shard
from weightserver.storage.lmdb_storage import LmdbStorage


def same(one: RowState, other: RowState) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in vars(one))


def rows_in(directories: list[Path], *, checkpoint: str | None = None) -> RowState:
    """All rows of the shards in these directories, which this process serves for the while, as clients get them."""
    arrays: dict[str, np.ndarray] = {}
    for number, directory in enumerate(directories):
        with closing(LmdbStorage(directory)) as storage:
            shard = Shard(storage, shard=number, num_shards=len(directories))
            spec = shard.require_table().spec
            rows = Sharding(spec.rows_per_block, len(directories)).rows_of_shard(number, spec.num_rows)
            part = decoded(shard.fetch(rows, step=None, state=True, checkpoint=checkpoint), spec)
        widened = precision_of(spec).widened
        found_of = vars(part) | {name: widened(vars(part)[name]) for name in ("weight", "momentum_buffer")}
        for name, found in found_of.items():
            arrays.setdefault(name, np.empty((spec.num_rows, *found.shape[1:]), found.dtype))[rows] = found
    return RowState(**arrays)
