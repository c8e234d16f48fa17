"""How much disk, memory and bandwidth a run needs: arithmetic alone, every figure with its formula.

Symbols are the paper's: N rows of D values, K active ones, batches of B, a window of W that moves by S. A test compares
the figures with what benchmarks/results has measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightserver.core.blocks import BlockCodec
from weightserver.core.spec import TableSpec

_PAGE_BYTES, _PAGE_HEADER_BYTES = 4096, 16
"""LMDB's: a block takes whole pages, the first of them with a header."""
_MAX_WRITE_BACK_ROWS = 1 << 14
"""Rows that leave are written S at a time, and at most so many (trainer/rows/opening.py)."""
_SLOT_BYTES = 41
"""Of a resident row beside its values: last step, whether it changed, and where it is (trainer/rows/slots.py)."""
_LARGEST, _MOST_STEPS_PER_SECOND = 1 << 48, 1e9
"""What any number of a workload may be: beyond every run, and within every float."""
_PREFIXES = (("", 1), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A run as it is planned; its fields are those of the trainer's settings.

    Raises:
        ValueError: numbers that no run can have.
    """

    num_rows: int
    """N."""
    dim: int = 128
    """D."""
    num_negatives: int = 65_536
    """K."""
    batch_size: int = 512
    """B, on all ranks together."""
    window_size: int = 131_072
    """W."""
    window_stride: int = 16_384
    """S."""
    steps_per_second: float = 1.0
    steps: int | None = None
    """Of the whole run; without it those of one pass."""
    rows_per_block: int = 63
    num_shards: int = 1
    num_ranks: int = 1
    checkpoint_every: int = 1_000
    """Steps between checkpoints; 0 for none."""
    keep_checkpoints: int = 3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            self._require(name, not isinstance(value, int) or value <= _LARGEST, f"at most {_LARGEST}")
        for name in ("num_rows", "dim", "num_negatives", "batch_size", "window_stride", "num_shards", "num_ranks"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("window_size", self.window_stride <= self.window_size <= self.num_rows, "in S..N")
        self._require("num_negatives", self.num_negatives <= self.num_rows, "at most N")
        rate = self.steps_per_second
        self._require("steps_per_second", 1 / _MOST_STEPS_PER_SECOND <= rate <= _MOST_STEPS_PER_SECOND, "in 1e-9..1e9")
        self._require("steps", self.steps is None or self.steps >= 1, "at least 1")
        self._require("checkpoint_every", self.checkpoint_every >= 0, "0 or more")
        self._require("keep_checkpoints", self.keep_checkpoints >= 0, "0 or more")

    def _require(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise ValueError(f"--{name.replace('_', '-')} must be {allowed}, got {getattr(self, name)}")

    @property
    def spec(self) -> TableSpec:
        return TableSpec(num_rows=self.num_rows, dim=self.dim, rows_per_block=self.rows_per_block)


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
    n, d, k, b = load.num_rows, load.dim, load.num_negatives, load.batch_size
    w, s, rate = load.window_size, load.window_stride, load.steps_per_second
    spec = load.spec
    r = spec.rows_per_block

    block_bytes = BlockCodec(spec).num_bytes
    stored_bytes = _PAGE_BYTES * -(-(_PAGE_HEADER_BYTES + block_bytes) // _PAGE_BYTES)
    rows_bytes = spec.num_blocks * stored_bytes
    pass_steps = n / s * w / b
    steps = load.steps or round(pass_steps)

    stay_steps = max(w, k) / s * w / b
    flushes = stay_steps / load.checkpoint_every if load.checkpoint_every else 0.0
    more_versions = min(load.keep_checkpoints, 1 + flushes) if load.checkpoint_every else 0.0
    write_rows = min(s, _MAX_WRITE_BACK_ROWS)
    held_rows = min(n, max(w, k))
    freed_bytes = (write_rows + (held_rows if load.checkpoint_every else write_rows)) / r * stored_bytes
    most_versions = 1 + load.keep_checkpoints if load.checkpoint_every else 1
    largest = most_versions * rows_bytes + freed_bytes

    row_bytes = 8 * d + 8
    moved_rows = b * s / w
    capacity = min(n, max(w, k) + 2 * s)
    touched = w / r * (1 - (1 - min(1.0, k / w)) ** r) if k < w else k / r
    left_bytes = moved_rows / r * stored_bytes
    flushed_bytes = held_rows / r * stored_bytes / load.checkpoint_every if load.checkpoint_every else 0.0
    return {
        "rows on disk, all shards": [
            Figure("a block", block_bytes, "B", f"header + r·(8 + 8·D), r = {r} rows"),
            Figure("- in LMDB", stored_bytes, "B", "whole pages of 4,096 B, 16 of them LMDB's"),
            Figure("all N rows, without checkpoints", rows_bytes, "B", "ceil(N/r) · pages"),
            Figure(
                "a backup of all N rows",
                spec.num_blocks * block_bytes,
                "B",
                "ceil(N/r) · block; only rows ever written",
            ),
            Figure("steps for which a row stays with the trainer", stay_steps, "steps", "max(W, K)/S · W/B"),
            Figure(
                "versions of a block",
                1 + more_versions,
                "",
                "1 + min(c, 1 + stay/E): c checkpoints kept, one every E steps",
            ),
            Figure(
                "all N rows, expected",
                (1 + more_versions) * rows_bytes + freed_bytes,
                "B",
                "versions · all rows + what the last two writes replaced",
            ),
            Figure("all N rows, at most", largest, "B", "(1 + c) · all rows + the same"),
            Figure("- per shard", largest / load.num_shards, "B", f"{load.num_shards} shards"),
        ],
        "on the wire": [
            Figure("resident: rows fetched, and as many written", moved_rows, "rows/step", "B·S/W"),
            Figure("resident: bytes both ways", 2 * moved_rows * row_bytes, "B/step", "2 · B·S/W · (8·D + 8)"),
            Figure("resident: in a second", 2 * moved_rows * row_bytes * rate, "B/s", f"· {rate:g} steps/s"),
            Figure("remote: bytes both ways", 2 * k * (4 * d + 8), "B/step", "2 · K · (4·D + 8)"),
            Figure("remote: in a second", 2 * k * (4 * d + 8) * rate, "B/s", f"· {rate:g} steps/s"),
        ],
        "a shard's work": [
            Figure(
                "resident: rows fetched, and as many written",
                moved_rows * rate / load.num_shards,
                "rows/s",
                "B·S/W · steps/s / shards",
            ),
            Figure(
                "resident: bytes written to disk",
                (left_bytes + flushed_bytes) * rate / load.num_shards,
                "B/s",
                "(B·S/W + max(W, K)/E) / r · pages · steps/s / shards",
            ),
            Figure(
                "remote: rows fetched, and as many pushed to",
                k * rate / load.num_shards,
                "rows/s",
                "K · steps/s / shards",
            ),
            Figure(
                "remote: bytes written to disk",
                touched * stored_bytes * rate / load.num_shards,
                "B/s",
                "W/r · (1 − (1 − K/W)^r) blocks · pages · steps/s / shards",
            ),
            Figure(
                "memory: page cache for the window",
                held_rows / r * stored_bytes / load.num_shards,
                "B",
                "max(W, K)/r · pages / shards; less only costs reads",
            ),
            Figure("memory: tables of the schedule", 12 * steps, "B", "12 B · steps"),
        ],
        "a trainer's memory, per rank": [
            Figure("resident rows", capacity, "rows", "min(N, max(W, K) + 2·S), on all ranks"),
            Figure(
                "- their bytes",
                capacity * (8 * d + _SLOT_BYTES) / load.num_ranks,
                "B",
                f"rows · (2·4·D + {_SLOT_BYTES}) / ranks",
            ),
            Figure(
                "the head's tensors",
                4 * (4 * k * d + 2 * b * k) / load.num_ranks,
                "B",
                "4 · (4·K·D + 2·B·K) / ranks",
            ),
        ],
        "time": [
            Figure("steps of a pass over all rows", pass_steps, "steps", "N/S · W/B: each row W/S times"),
            Figure("a pass", pass_steps / rate, "s", f"/ {rate:g} steps/s"),
        ],
    }
