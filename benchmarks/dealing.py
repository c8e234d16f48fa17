"""Simulates who writes to which shard when the rows of a window are flushed, and which machine reads which images.

python -m benchmarks.dealing

Prints the tables of docs/scale.md.
"""

from __future__ import annotations

import numpy as np

from weightserver.core.sharding import Sharding
from weightserver.torch.ranks import RowOwners
from weightserver.torch.windows import VisitSchedule, dealt_to_nodes

ROWS_PER_BLOCK = 63
CLUSTERS = ((63, 1_024, 2_621_440), (63, 8, 131_072), (16, 64, 131_072), (32, 128, 131_072), (128, 1_024, 131_072))
"""Shards, ranks, and rows of the window."""

MACHINES = ((8, 4_096), (16, 8_192), (128, 32_768))
"""Machines, and images of a batch: those of `weightserver plan` in docs/scale.md."""
WINDOW_SIZE, WINDOW_STRIDE = 131_072, 16_384
SEGMENT_IMAGES = (8 << 20) // 110_000
"""Images of 110,000 bytes in a segment, the unit of reading."""


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


def reads(num_nodes: int, batch_size: int, *, by_place: bool) -> tuple[float, float]:
    """How many machines read an image, and a segment, on average, while the window passes over them."""
    schedule = VisitSchedule(num_rows=10**7, window_size=WINDOW_SIZE, window_stride=WINDOW_STRIDE, seed=0)
    windows = WINDOW_SIZE // WINDOW_STRIDE + 2
    batches = schedule.visits(0, windows * WINDOW_SIZE).reshape(-1, batch_size)
    if by_place:
        batches = np.stack([rows[dealt_to_nodes(rows, num_nodes, window_size=WINDOW_SIZE)] for rows in batches])
    nodes = np.broadcast_to(np.arange(batch_size) * num_nodes // batch_size, batches.shape)
    first = -(-(WINDOW_SIZE - WINDOW_STRIDE) // SEGMENT_IMAGES)
    segments = np.arange(first, (WINDOW_SIZE + 2 * WINDOW_STRIDE) // SEGMENT_IMAGES)  # all their visits are among these
    passed = np.isin(batches // SEGMENT_IMAGES, segments)
    images = np.unique(batches[passed] * num_nodes + nodes[passed])
    of_segments = np.unique(images // num_nodes // SEGMENT_IMAGES * num_nodes + images % num_nodes)
    return len(images) / len(segments) / SEGMENT_IMAGES, len(of_segments) / len(segments)


def table_of_reads() -> list[str]:
    lines = [
        "| machines | images of a batch | an image is read by | by position | a segment is read by | by position |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for num_nodes, batch_size in MACHINES:
        images, segments = reads(num_nodes, batch_size, by_place=True)
        all_images, all_segments = reads(num_nodes, batch_size, by_place=False)
        cells = f"{images:.2f} | {all_images:.2f} | {segments:.2f} | {all_segments:.1f}"
        lines.append(f"| {num_nodes} | {batch_size:,} | {cells} |")
    return lines


if __name__ == "__main__":
    print("\n".join([*table_of_flushes(), "", *table_of_reads()]))
