"""Writes the tables of docs/figures.md from the benchmarks' results.

python -m benchmarks.figures
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
FILE = ROOT / "docs/figures.md"
_TABLE = re.compile(r"(<!-- figures: (\w+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
"""A table, between comments; its name is that of a function in `TABLES`."""
_PATTERNS = ("contiguous", "half of a window", "scattered")
_FLOOR = "bare stream"


@cache
def results(name: str) -> Any:
    """What benchmarks.NAME measured."""
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


class Row(NamedTuple):
    """A row of a table of figures."""

    what: str
    measured: str
    compared: str


# ---- numbers


def rounded(value: float) -> str:
    """Two significant digits, or all of a larger integer."""
    return f"{value:,.0f}" if value >= 100 else f"{float(f'{value:.2g}'):g}"


def ms(timing: Any) -> str:
    """The median of a timing, or seconds, in milliseconds."""
    return f"{rounded(1e3 * _median(timing))} ms"


def times(timing: Any, other: Any) -> str:
    """The ratio of two medians."""
    return f"{_median(timing) / _median(other):.2f} ×"


def more(ratio: float) -> str:
    """By how many percent a ratio is above one."""
    return f"{100 * (ratio - 1):+.1f} %"


def gib(num_bytes: float) -> str:
    return f"{rounded(num_bytes / 2**30)} GiB"


def _median(timing: Any) -> float:
    return float(timing["p50"] if isinstance(timing, dict) else timing)


def _commit(case: dict[str, Any]) -> tuple[str, Any]:
    """What LMDB commits for a case of pushes, and how long that takes."""
    return next((name, timing) for name, timing in case.items() if name.startswith("LMDB"))


# ---- tables


def servers() -> Iterator[Row]:
    """One shard's calls."""
    rows = results("rows")
    for pattern in _PATTERNS:
        case = rows[f"fetch of 65,536 rows, {pattern}"]
        for call in [call for call in case if call != _FLOOR]:
            what = f"fetch of 65,536 rows (32 MiB), {pattern}, {call}"
            yield Row(what, ms(case[call]), f"{times(case[call], case[_FLOOR])} a bare gRPC stream")
    for pattern in _PATTERNS:
        case = rows[f"fetch of 512 rows, {pattern}"]
        yield Row(
            f"fetch of 512 rows, {pattern}, stored", ms(case["stored"]), f"a bare gRPC call: {ms(case['bare call'])}"
        )
    for pattern in _PATTERNS:
        case = rows[f"push to 4,096 rows, {pattern}"]
        name, commit = _commit(case)
        what = f"durable push of gradients to 4,096 rows, {pattern}"
        yield Row(what, ms(case["push"]), f"a bare gRPC stream: {ms(case[_FLOOR])}; {name}: {ms(commit)}")
    measured = results("measuring")["ratios"]
    yield Row(
        f"measuring a fetch: {', '.join(measured)}",
        ", ".join(more(ratio) for ratio in measured.values()),
        "of the client's waiting time: the same without metrics",
    )
    tables = rows["tables"]
    yield Row(
        "creating a table of 10⁹ rows",
        f"{ms(tables['create_table_seconds'])}, {tables['create_table_disk_bytes'] >> 10} KiB on disk",
        "",
    )
    size, seconds = tables["schedule_table_bytes"], tables["schedule_build_seconds"]
    yield Row("transfer products for 1.4 M learning rates", f"{size >> 20} MiB, {rounded(seconds)} s", "")


def training() -> Iterator[Row]:
    """A trainer's steps, and operations on its table."""
    yield from _wire()
    yield _preset_step()
    yield _training_step()
    head = results("head")
    dense, ours = head["ImageNet-1K"], head["a step of K resident rows"]["512 images, K = 65536"]
    yield Row(
        "the head's step for 512 images with K = 65,536 rows of any N",
        f"{ms(ours['times']['step'])}, {gib(head['any']['tensor_bytes'])} of tensors",
        f"the three products alone: {ms(ours['times']['floor'])}; all of ImageNet-1K's {dense['rows']:,} rows: "
        f"{rounded(_median(dense['step']))} s, {gib(dense['tensor_bytes'])}",
    )
    yield _checkpoint()
    rollbacks = results("checkpoints")["sizes"]["10000000"]["rollbacks"]
    yield Row(
        "rolling back 1,000, 1 M of these rows",
        ", ".join(ms(rollbacks[number]["rollback"]) for number in ("1000", "1000000")),
        f"pushing them: {', '.join(ms(rollbacks[number]['pushes']) for number in ('1000', '1000000'))}",
    )


def _wire() -> Iterator[Row]:
    stores = [results("wire")[name] for name in ("resident", "remote", "remote, stored in bfloat16")]

    def row(what: str, shown: Callable[[Any], str], about_resident: str = "") -> Row:
        resident, remote, halved = map(shown, stores)
        return Row(what, f"{resident} resident{about_resident}", f"{remote} remote, {halved} in bfloat16")

    yield row(
        "bytes moved per step (B 512, K 65,536, W 131,072, S 16,384, D 128)",
        lambda store: f"{rounded(store['bytes_per_step'] / 1e6)} MB",
    )
    yield row(
        "– the two servers' processor time",
        lambda store: ms(store["server_seconds"]),
        f": {100 * 5 * stores[0]['server_seconds']:.2g} % of a core at five steps a second",
    )
    yield row("– the rows' part of such a step", lambda store: ms(store["step_seconds"]))


def _preset_step() -> Row:
    steps = results("steps")
    step, waiting = steps["step"], steps["row_wait_share"]["resident"]
    return Row(
        "a step of the preset `fashion-mnist`, with the shards on the same two cores",
        f"{ms(step['resident'])}, {100 * waiting:.2g} % of it waiting for rows",
        f"all rows in memory: {ms(step['dense'])}; remote: {ms(step['remote'])}",
    )


def _training_step() -> Row:
    scale = results("scale")
    fresh, dense = scale["resident, fresh table"], scale["dense"][0]
    steps = [1e3 * _median(of_size["step"]) for of_size in fresh]
    measured = f"{rounded(min(steps))}–{rounded(max(steps))} ms, trainer {gib(fresh[-1]['trainer_bytes'])}"
    measured += "".join(
        f"; {ms(of_size['step'])} with every entering row read from disk"
        for of_size in scale.get("resident, from disk", [])
    )
    return Row(
        "a training step at N = 10⁶ … 10⁹ rows (K 65,536, small encoder)",
        measured,
        f"all rows in memory, N = 10⁶: {ms(dense['step'])}, {gib(dense['trainer_bytes'])}",
    )


def _checkpoint() -> Row:
    largest = results("checkpoints")["sizes"]["10000000"]
    return Row(
        f"taking a checkpoint of 10 M stored rows ({largest['disk_bytes'] / 1e9:.1f} GB)",
        ms(largest["times"]["checkpoint"]),
        f"a durable write of one row: {ms(largest['times']['write of one row'])}",
    )


TABLES = {"servers": servers, "training": training}


def updated(text: str) -> str:
    """The page with its tables as the results say."""

    def table(found: re.Match[str]) -> str:
        lines = [f"| {' | '.join(row)} |" for row in TABLES[found[2]]()]
        return "\n".join([f"{found[1]}| | | compared with |", "|---|---|---|", *lines]) + found[3]

    return _TABLE.sub(table, text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    FILE.write_text(updated(FILE.read_text()))
