"""Simulates how the rows of a window are dealt to ranks: who writes to which shard when all rows are flushed.

python -m benchmarks.dealing

Prints the table of docs/scale.md.
"""

from __future__ import annotations

import numpy as np

from weightserver.core.sharding import Sharding
from weightserver.torch.ranks import RowOwners

ROWS_PER_BLOCK = 63
CLUSTERS = ((63, 1_024, 2_621_440), (63, 8, 131_072), (16, 64, 131_072), (32, 128, 131_072), (128, 1_024, 131_072))
"""Shards, ranks, and rows of the window."""


def flush(num_shards: int, num_ranks: int, num_rows: int) -> tuple[int, int, float]:
    """Calls of all ranks that write a window's rows, most ranks that write to one shard, and the largest part of the
    rows that a rank has, as a multiple of the mean."""
    rows = np.arange(num_rows)
    owners = RowOwners(ROWS_PER_BLOCK, num_shards, num_ranks).rank_of(rows)
    pairs = np.unique(owners * num_shards + Sharding(ROWS_PER_BLOCK, num_shards).shard_of(rows))
    return len(pairs), int(np.bincount(pairs % num_shards).max()), np.bincount(owners).max() * num_ranks / num_rows


def table_of_flushes() -> list[str]:
    lines = ["| shards | ranks | rows of the window | calls of a flush | most writers of a shard | largest load |"]
    lines.append("|---|---|---|---|---|---|")
    for num_shards, num_ranks, num_rows in CLUSTERS:
        calls, writers, load = flush(num_shards, num_ranks, num_rows)
        lines.append(f"| {num_shards:,} | {num_ranks:,} | {num_rows:,} | {calls:,} | {writers:,} | {load:.3f} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table_of_flushes()))
