"""Simulates who writes to which shard when the rows of a window are flushed, and which machine reads which images.

python -m benchmarks.dealing

Prints the tables of docs/scale.md, which compare `weightserver plan` with the simulation.
"""

from __future__ import annotations

import argparse

import numpy as np

from trainer.data.pack_files import SEGMENT_BYTES
from weightserver.core.sharding import Sharding
from weightserver.operations.plan import Workload, plan
from weightserver.torch.ranks import RowOwners
from weightserver.torch.windows import VisitSchedule, dealt_to_nodes

ROWS_PER_BLOCK = 63
CLUSTERS = ((63, 1_024, 2_621_440), (63, 8, 131_072), (16, 64, 131_072), (32, 128, 131_072), (128, 1_024, 131_072))
"""Shards, ranks, and rows of the window."""

READERS = (
    (8, 4_096, 131_072, 16_384, 110_000),
    (16, 8_192, 131_072, 16_384, 110_000),
    (128, 32_768, 131_072, 16_384, 110_000),
    (128, 32_768, 262_144, 32_768, 110_000),
    (4, 1_024, 131_072, 16_384, 110_000),
    (32, 16_384, 131_072, 16_384, 110_000),
    (64, 16_384, 131_072, 16_384, 30_000),
    (256, 32_768, 131_072, 16_384, 400_000),
    (16, 8_192, 131_072, 65_536, 110_000),
    (16, 8_192, 131_072, 4_096, 110_000),
)
"""Machines, images of a batch, of the window and of its move, and bytes of an image; the first three are those of
`weightserver plan` in docs/scale.md."""


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


def planned_run(num_nodes: int, batch_size: int, window_size: int, window_stride: int, image_bytes: int) -> Workload:
    return Workload(
        num_rows=10**7,
        batch_size=batch_size,
        window_size=window_size,
        window_stride=window_stride,
        num_ranks=num_nodes,
        num_nodes=num_nodes,
        image_bytes=image_bytes,
    )


def planned_reads(load: Workload) -> tuple[float, float]:
    """How many machines read an image, and a segment, by the formulas of `plan`."""
    figures = {figure.name: figure.value * load.num_nodes for figure in plan(load)["images"]}
    return figures["share of the images that a node reads"], figures["share of the segments that a node reads"]


def reads(load: Workload) -> list[tuple[float, float]]:
    """How many machines read an image, and a segment of 2 MiB, on average, while the window passes over them: if images
    are dealt by place, and by position."""
    size, stride, in_segment = load.window_size, load.window_stride, SEGMENT_BYTES // load.image_bytes
    schedule = VisitSchedule(num_rows=load.num_rows, window_size=size, window_stride=stride, seed=0)
    batches = schedule.visits(0, (size // stride + 2) * size).reshape(-1, load.batch_size)
    first = -(-(size - stride) // in_segment)
    last = (size + 2 * stride) // in_segment  # all visits to these segments are among those
    nodes = np.arange(load.batch_size) * load.num_nodes // load.batch_size
    by_place = np.stack([rows[dealt_to_nodes(rows, load.num_nodes, window_size=size)] for rows in batches])
    found = list[tuple[float, float]]()
    for dealt in (by_place, batches):
        is_read = np.zeros(((last - first) * in_segment, load.num_nodes), bool)
        images = dealt - first * in_segment
        passed = (images >= 0) & (images < len(is_read))
        is_read[images[passed], np.broadcast_to(nodes, dealt.shape)[passed]] = True
        of_segments = is_read.reshape(-1, in_segment, load.num_nodes).any(axis=1)
        found.append((load.num_nodes * float(is_read.mean()), load.num_nodes * float(np.mean(of_segments))))
    return found


def table_of_reads() -> list[str]:
    lines = [
        "| machines | batch | window | its move | bytes of an image | an image is read by | by `plan` | by position "
        "| a segment is read by | by `plan` | by position |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for numbers in READERS:
        load = planned_run(*numbers)
        planned, (dealt, position) = planned_reads(load), reads(load)
        images, segments = (" | ".join(f"{each[i]:.2f}" for each in (dealt, planned, position)) for i in range(2))
        lines.append(f"| {' | '.join(f'{number:,}' for number in numbers)} | {images} | {segments} |")
    return lines


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("\n".join([*table_of_flushes(), "", *table_of_reads()]))
