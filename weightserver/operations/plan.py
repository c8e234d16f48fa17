"""Estimates the disk, memory, bandwidth, time and money that a run needs, each figure with its formula.

Symbols are the paper's: N rows of D values, K active rows, batches of B, a window of W that moves by S. A test compares
the figures with measurements in benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Literal

from weightserver.common.options import add_options, given_options, option
from weightserver.core.blocks import BlockCodec
from weightserver.core.correction import MAX_STEPS
from weightserver.core.spec import TableSpec

_MAX_WRITE_BACK_ROWS = 1 << 14
"""Rows that leave the window are written S at a time, at most this many (weightserver/torch/store_sizes.py)."""
_SLOT_BYTES = 41
"""Bookkeeping per resident row: last step, whether it changed, and its position (weightserver/torch/rows/slots.py)."""
_SHARDS_AT_ONCE = 8
"""Shards that one machine backs up at once (weightserver/operations/backup.py)."""
_START_SECONDS, _START_BLOCK_SECONDS = 1.0, 4.5e-6
"""Time from the start of a shard's process to its first answer, and what each block adds, which is looked at: 3.3 s
with 32 million rows (benchmarks/results/large_shard.md)."""
_SEGMENT_BYTES, _LARGEST_GROUP, _GROUPS_OF_NODE = 1 << 21, 1 << 10, 8
"""What a machine reads from a bucket at once, and the neighbours that it is dealt (trainer/data/pack_files.py,
weightserver/torch/windows.py)."""
_LISTED_MORE = 16
"""Bytes of an image beside its line while it is listed (python -m benchmarks.listing)."""
_HOURS_OF_A_MONTH = 730
_LARGEST, _MOST_A_SECOND = 1 << 48, 1e9
"""Bounds of a workload's numbers: larger than in any run, and exact as floats."""
_PREFIXES = (("", 1), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A planned run; the fields are named as the trainer's settings, and are the command's options.

    Raises:
        ValueError: a field is outside its range.
    """

    num_rows: int = option("N, the number of images")
    dim: int = option("D, values per row", 128)
    num_negatives: int = option("K, active rows", 65_536)
    batch_size: int = option("B, on all ranks together", 512)
    window_size: int = option("W, rows in the window", 131_072)
    window_stride: int = option("S, rows by which the window moves", 16_384)
    steps_per_second: float = option("speed of the trainer", 1.0)
    steps: int | None = option("steps of the run (default one pass over all rows)", None)
    rows_per_block: int = option("rows stored together", 63)
    dtype: Literal["float32", "bfloat16"] = option("stored numbers", "float32")
    num_shards: int = option("weight servers", 1)
    num_ranks: int = option("trainers", 1)
    num_nodes: int = option("machines of the trainers", 1)
    image_bytes: int = option("bytes of a packed image (those of ImageNet: 110,000)", 110_000)
    listed_per_second: float = option("images of tars that one process lists (measured: 47 µs each)", 20_000.0)
    listing_cores: int = option("cores of the machine that lists numbered tars", 16)
    listing_mb_per_second: float = option("what that machine reads of a bucket (default: 10 Gbit/s)", 1_250.0)
    listed_bytes: int = option("bytes of an image in the list: path, name in its tar, place, label", 80)
    pack_images_per_second: float = option("images that all packing processes read and write", 1_000.0)
    copy_mb_per_second: float = option("what a disk or the network copies of one shard (measured: 1 GB in 7 s)", 140.0)
    node_price: float = option("of a machine of the trainers, an hour", 0.0)
    shard_price: float = option("of a weight server's machine without its disk, an hour", 0.0)
    disk_price: float = option("of a GB of disk, a month", 0.0)
    checkpoint_every: int = option("E, steps between checkpoints, 0 for none", 1_000)
    keep_checkpoints: int = option("c, checkpoints kept", 3)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            self._require(name, not isinstance(value, int) or value <= _LARGEST, f"at most {_LARGEST}")
        sizes = ("num_rows", "dim", "num_negatives", "batch_size", "window_stride", "image_bytes", "listed_bytes")
        for name in (*sizes, "num_shards", "listing_cores"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("batch_size", self.batch_size <= self.num_rows, "at most N")
        self._require("num_ranks", 1 <= self.num_ranks <= self.batch_size, "in 1..B")
        self._require("num_nodes", 1 <= self.num_nodes <= self.num_ranks, "in 1..ranks")
        self._require("window_size", self.window_stride <= self.window_size <= self.num_rows, "in S..N")
        self._require("num_negatives", self.batch_size <= self.num_negatives <= self.num_rows, "in B..N")
        rates = ("steps_per_second", "listed_per_second", "pack_images_per_second")
        for name in (*rates, "listing_mb_per_second", "copy_mb_per_second"):
            self._require(name, 1 / _MOST_A_SECOND <= getattr(self, name) <= _MOST_A_SECOND, "in 1e-9..1e9")
        for name in ("node_price", "shard_price", "disk_price"):
            self._require(name, 0 <= getattr(self, name) <= _MOST_A_SECOND, "in 0..1e9")
        self._require("steps", self.steps is None or 1 <= self.steps <= MAX_STEPS, f"in 1..{MAX_STEPS}")
        if self.steps is None and self.pass_steps > MAX_STEPS:
            raise ValueError(
                f"one pass takes {self.pass_steps:,.0f} steps, a run at most {MAX_STEPS:,}: give --batch-size of at "
                f"least {math.ceil(self.batch_size * self.pass_steps / MAX_STEPS)}, or --steps for part of a pass"
            )
        self._require("checkpoint_every", self.checkpoint_every >= 0, "0 or more")
        self._require("keep_checkpoints", self.keep_checkpoints >= 0, "0 or more")

    def _require(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise ValueError(f"--{name.replace('_', '-')} must be {allowed}, got {getattr(self, name)}")

    @property
    def spec(self) -> TableSpec:
        return TableSpec(num_rows=self.num_rows, dim=self.dim, rows_per_block=self.rows_per_block, dtype=self.dtype)

    @property
    def block_bytes(self) -> int:
        return BlockCodec(self.spec).num_bytes

    @property
    def stored_block_bytes(self) -> int:
        return BlockCodec(self.spec).stored_bytes

    @property
    def pass_steps(self) -> float:
        """Steps of one pass over all rows."""
        return self.num_rows / self.window_stride * self.window_size / self.batch_size

    @property
    def run_steps(self) -> float:
        return self.pass_steps if self.steps is None else self.steps

    @property
    def most_active_rows(self) -> int:
        """max(W, K)."""
        return max(self.window_size, self.num_negatives)

    @property
    def held_rows(self) -> int:
        """Rows that the trainer holds between two moves of the window."""
        return min(self.num_rows, self.most_active_rows)

    @property
    def moved_rows(self) -> float:
        """Rows that enter the window per step, and as many that leave it."""
        return self.batch_size * self.window_stride / self.window_size


@dataclass(frozen=True)
class Figure:
    """One line of a plan."""

    name: str
    value: float
    unit: str
    formula: str

    def __str__(self) -> str:
        return f"{self.name:<46}{_readable(self.value, self.unit):>18}   {self.formula}"


def _readable(value: float, unit: str) -> str:
    if unit.startswith("B"):
        prefix, factor = max((known for known in _PREFIXES if known[1] <= max(1.0, value)), key=lambda known: known[1])
        value, unit = value / factor, prefix + unit
    elif unit == "s" and value >= 3600:
        value, unit = value / 3600, "h"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def plan(load: Workload) -> dict[str, list[Figure]]:
    """The figures of each part of the system."""
    return {
        "rows on disk, all shards": _disk(load),
        "on the wire": _wire(load),
        "a shard's work": _shard(load),
        "a trainer's memory, per rank": _trainer(load),
        "images": _images(load),
        "time": _time(load),
    } | ({"money": _money(load)} if load.node_price or load.shard_price or load.disk_price else {})


def _disk(load: Workload) -> list[Figure]:
    num_blocks, block_bytes, stored_bytes = load.spec.num_blocks, load.block_bytes, load.stored_block_bytes
    r, every, kept = load.rows_per_block, load.checkpoint_every, load.keep_checkpoints
    rows_bytes = num_blocks * stored_bytes
    stay_steps = load.most_active_rows / load.window_stride * load.window_size / load.batch_size
    more_versions = min(kept, 1 + stay_steps / every) if every else 0.0
    write_rows = min(load.window_stride, _MAX_WRITE_BACK_ROWS)
    freed_bytes = (write_rows + (load.held_rows if every else write_rows)) / r * stored_bytes
    largest = (1 + kept if every else 1) * rows_bytes + freed_bytes
    expected = (1 + more_versions) * rows_bytes + freed_bytes
    versions_formula = "1 + min(c, 1 + stay/E): c checkpoints kept, one every E steps"
    return [
        Figure("a block", block_bytes, "B", f"header + r·(8 + 2·{load.spec.value_bytes}·D), r = {r} rows"),
        Figure("- in LMDB", stored_bytes, "B", "whole pages of 4,096 B, 16 of them LMDB's"),
        Figure("all N rows, without checkpoints", rows_bytes, "B", "ceil(N/r) · pages"),
        Figure("a backup of all N rows", num_blocks * block_bytes, "B", "ceil(N/r) · block; only rows ever written"),
        Figure("steps for which a row stays with the trainer", stay_steps, "steps", "max(W, K)/S · W/B"),
        Figure("versions of a block", 1 + more_versions, "", versions_formula),
        Figure("all N rows, expected", expected, "B", "versions · all rows + what the last two writes replaced"),
        Figure("all N rows, at most", largest, "B", "(1 + c) · all rows + the same"),
        Figure("- per shard", largest / load.num_shards, "B", f"{load.num_shards} shards"),
    ]


def _wire(load: Workload) -> list[Figure]:
    k, rate, value = load.num_negatives, load.steps_per_second, load.spec.value_bytes
    resident_bytes = 2 * load.moved_rows * (2 * value * load.dim + 8)
    remote_bytes = 2 * k * (value * load.dim + 8)
    return [
        Figure("resident: rows fetched, and as many written", load.moved_rows, "rows/step", "B·S/W"),
        Figure("resident: bytes both ways", resident_bytes, "B/step", f"2 · B·S/W · (2·{value}·D + 8)"),
        Figure("resident: in a second", resident_bytes * rate, "B/s", f"· {rate:g} steps/s"),
        Figure("remote: bytes both ways", remote_bytes, "B/step", f"2 · K · ({value}·D + 8)"),
        Figure("remote: in a second", remote_bytes * rate, "B/s", f"· {rate:g} steps/s"),
    ]


def _shard(load: Workload) -> list[Figure]:
    w, k, r, rate, shards = (
        load.window_size,
        load.num_negatives,
        load.rows_per_block,
        load.steps_per_second,
        load.num_shards,
    )
    stored_bytes, moved_rows, held_rows = load.stored_block_bytes, load.moved_rows, load.held_rows
    touched = w / r * (1 - (1 - min(1.0, k / w)) ** r) if k < w else k / r
    left_bytes = moved_rows / r * stored_bytes
    flushed_bytes = held_rows / r * stored_bytes / load.checkpoint_every if load.checkpoint_every else 0.0
    return [
        Figure(
            "resident: rows fetched, and as many written",
            moved_rows * rate / shards,
            "rows/s",
            "B·S/W · steps/s / shards",
        ),
        Figure(
            "resident: bytes written to disk",
            (left_bytes + flushed_bytes) * rate / shards,
            "B/s",
            "(B·S/W + max(W, K)/E) / r · pages · steps/s / shards",
        ),
        Figure("remote: rows fetched, and as many pushed to", k * rate / shards, "rows/s", "K · steps/s / shards"),
        Figure(
            "remote: bytes written to disk",
            touched * stored_bytes * rate / shards,
            "B/s",
            "W/r · (1 − (1 − K/W)^r) blocks · pages · steps/s / shards",
        ),
        Figure(
            "memory: page cache for the window",
            held_rows / r * stored_bytes / shards,
            "B",
            "max(W, K)/r · pages / shards; less only costs reads",
        ),
        Figure("memory: products of the schedule", 40 * round(load.run_steps), "B", "40 B · steps"),
    ]


def _trainer(load: Workload) -> list[Figure]:
    d, k, b, ranks = load.dim, load.num_negatives, load.batch_size, load.num_ranks
    capacity = min(load.num_rows, load.most_active_rows + 2 * load.window_stride)
    resident_bytes = capacity * (8 * d + _SLOT_BYTES) / ranks
    head_bytes = 4 * (4 * k * d + 3 * b * k) / ranks
    return [
        Figure("resident rows", capacity, "rows", "min(N, max(W, K) + 2·S), on all ranks"),
        Figure("- their bytes", resident_bytes, "B", f"rows · (2·4·D + {_SLOT_BYTES}) / ranks"),
        Figure(
            "the head's tensors",
            head_bytes,
            "B",
            "4 · (4·K·D + 3·B·K) / ranks: rows, and logits with their gradients",
        ),
    ]


def _images(load: Workload) -> list[Figure]:
    """A node is dealt visits to neighbouring images, and a few to those of others, so that batches are equal.

    A batch is cut between nodes at quantiles of its visits, B of the W in the window. By chance, quantile q is off by
    √(q(1 − q)(1/B − 1/W)), on average over q by π/8·√(1/B − 1/W). Of m batches, the largest and the smallest cut are
    2Φ⁻¹(1 − 5/(8m + 2)) times as far apart (Blom 1958), and what lies between them is read by both nodes. A group that
    enters or leaves the window also moves the cuts, by its own size. `benchmarks/dealing.py` simulates all this.
    """
    n, rate, size = load.num_nodes, load.steps_per_second, load.image_bytes
    window, passes, in_segment = load.window_size, load.window_size / load.window_stride, _SEGMENT_BYTES / size
    group = max(1.0, min(_LARGEST_GROUP, window / (_GROUPS_OF_NODE * n)))

    def readers(batches: float) -> float:
        """Nodes that read what that number of batches visits."""
        deviation = math.sqrt(max(0.0, 1 / load.batch_size - 1 / window))
        apart = -math.pi / 4 * NormalDist().inv_cdf(5 / (8 * batches + 2)) * deviation
        return 1 + (n - 1) * (apart + group / window)

    seen = min(readers(passes) / n, 1 - (1 - 1 / n) ** passes)
    of_segment = readers(passes * max(1.0, min(window / load.batch_size, in_segment)))
    segments = min(1.0, (1 + in_segment / group) * of_segment / n)
    visited, kept = load.batch_size * rate / n, load.moved_rows * rate * seen
    return [
        Figure("packed", load.num_rows * size, "B", f"N · {size:,} B"),
        Figure(
            "memory of the process that lists them",
            load.num_rows * (load.listed_bytes + _LISTED_MORE),
            "B",
            f"N · ({load.listed_bytes} + {_LISTED_MORE}) B; 2 to 9 times as much from other sources",
        ),
        Figure("images decoded, per node", visited, "images/s", "B / nodes · steps/s"),
        Figure(
            "share of the images that a node reads",
            seen,
            "",
            "r(W/S)/nodes, r(m) = 1 + (nodes − 1)·(π/4·Φ⁻¹(1 − 5/(8·m + 2))·√(1/B − 1/W) + g/W), "
            "g = min(1,024, W/8/nodes); at most 1 − (1 − 1/nodes)^(W/S)",
        ),
        Figure("page cache for the window, per node", load.window_size * seen * size, "B", "W · share · bytes"),
        Figure("read with that cache, per node", kept * size, "B/s", "B·S/W · steps/s · share · bytes"),
        Figure("read without it, per node", visited * size, "B/s", "B / nodes · steps/s · bytes"),
        Figure(
            "share of the segments that a node reads",
            segments,
            "",
            "(1 + 2 MiB/bytes/g)·r(W/S · min(W/B, 2 MiB/bytes))/nodes; at most 1",
        ),
        Figure(
            "read from a bucket, per node",
            load.moved_rows * rate * segments * size,
            "B/s",
            "B·S/W · steps/s · share of the segments · bytes: the cache has the window",
        ),
    ]


def _time(load: Workload) -> list[Figure]:
    rate, copied = load.steps_per_second, load.copy_mb_per_second * 1e6
    backup_bytes = load.spec.num_blocks * load.block_bytes
    first_bytes = load.held_rows * (2 * load.spec.value_bytes * load.dim + 8)
    per_shard, streams = load.num_shards * copied, min(_SHARDS_AT_ONCE, load.num_shards)
    return [
        Figure(
            "listing the images",
            load.num_rows / load.listed_per_second / load.listing_cores,
            "s",
            "N / images/s / cores",
        ),
        Figure(
            "listing them in a bucket, at the least",
            load.num_rows * load.image_bytes / (load.listing_mb_per_second * 1e6),
            "s",
            "N · bytes / MB/s: the tars pass through the machine that lists them",
        ),
        Figure("packing the images", load.num_rows / load.pack_images_per_second, "s", "N / images/s"),
        Figure(
            "starting a shard",
            _START_SECONDS + _START_BLOCK_SECONDS * load.spec.num_blocks / load.num_shards,
            "s",
            "1 s + 4.5 µs · ceil(N/r) / shards, as measured with 33 GB of rows; all start at once",
        ),
        Figure("fetching the rows of a resumed run", first_bytes / per_shard, "s", "max(W, K) rows / shards / MB/s"),
        Figure("steps of a pass over all rows", load.pass_steps, "steps", "N/S · W/B: each row W/S times"),
        Figure("a pass", load.pass_steps / rate, "s", f"/ {rate:g} steps/s"),
        Figure("the run", load.run_steps / rate, "s", "a pass, or --steps"),
        Figure(
            "a backup of all N rows",
            backup_bytes / copied / streams,
            "s",
            f"its bytes / min({_SHARDS_AT_ONCE}, shards) / MB/s, on one machine",
        ),
        Figure("restoring all shards", backup_bytes / per_shard, "s", "its bytes / shards / MB/s: all at once"),
    ]


def _money(load: Workload) -> list[Figure]:
    hours = load.run_steps / load.steps_per_second / 3600
    rows_bytes = next(figure.value for figure in _disk(load) if figure.name == "all N rows, expected")
    stored_gb = (rows_bytes + load.num_rows * load.image_bytes) / 1e9
    parts = {
        "the trainers' machines": (hours * load.num_nodes * load.node_price, "hours of the run · nodes · price"),
        "the weight servers' machines": (hours * load.num_shards * load.shard_price, "hours · shards · price"),
        "disk": (stored_gb * load.disk_price * hours / _HOURS_OF_A_MONTH, "rows and packed images · price · months"),
    }
    figures = [Figure(name, value, "", formula) for name, (value, formula) in parts.items()]
    return [*figures, Figure("the run", sum(figure.value for figure in figures), "", "in the prices' currency")]


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, Workload)
    parser.set_defaults(num_negatives=None, batch_size=None, window_size=None, window_stride=None)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _fit_defaults(arguments: argparse.Namespace) -> None:
    """Limits defaults, those of a run on ImageNet, to what few images or a small window allow."""
    for name in ("num_negatives", "batch_size", "window_size", "window_stride"):
        if getattr(arguments, name) is None:
            most = arguments.window_size // 8 if name == "window_stride" else arguments.num_rows
            setattr(arguments, name, max(1, min(getattr(Workload, name), most)))


def run(arguments: argparse.Namespace) -> None:
    _fit_defaults(arguments)
    parts = plan(given_options(arguments, Workload))
    if arguments.json:
        print(json.dumps({part: [asdict(figure) for figure in figures] for part, figures in parts.items()}, indent=2))
        return
    for part, figures in parts.items():
        print(part, *(f"  {figure}" for figure in figures), sep="\n")
