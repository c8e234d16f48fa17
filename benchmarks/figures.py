"""Writes the tables of figures in README.md and docs/figures.md from the benchmarks' results.

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
FILES = (ROOT / "README.md", ROOT / "docs/figures.md")
_TABLE = re.compile(r"(<!-- figures: (\w+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
"""A table in a document, between comments; its name is that of a function in `TABLES`."""
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


def _slow(timing: Any) -> float:
    """The 99th percentile, in medians."""
    return float(timing["p99"] / timing["p50"])


def _commit(case: dict[str, Any]) -> tuple[str, Any]:
    """Of a case of pushes: what LMDB commits, and its timing."""
    return next((name, timing) for name, timing in case.items() if name.startswith("LMDB"))


# ---- tables


def front_page() -> Iterator[Row]:
    """The five figures that matter."""
    fetch, push = results("rows")["fetch of 65,536 rows, contiguous"], results("rows")["push to 4,096 rows, contiguous"]
    yield Row(
        "fetch of 65,536 neighbouring rows (32 MiB), each corrected over 18,000 steps",
        ms(fetch["stored"]),
        f"{times(fetch['stored'], fetch[_FLOOR])} a bare gRPC stream",
    )
    yield Row(
        "durable push of gradients to 4,096 neighbouring rows",
        ms(push["push"]),
        f"LMDB's commit: {ms(_commit(push)[1])}",
    )
    yield _preset_step()
    yield _training_step()
    yield _checkpoint()


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
    ratios = results("checksums")["ratios"]
    yield Row(
        f"verifying checksums as blocks are read: {', '.join(ratios)}",
        ", ".join(more(ratio) for ratio in ratios.values()),
        "`--no-verify-reads`",
    )
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
    readers = results("readers")
    four, one, moved = readers["2, 4"], readers["2, 1"], 4 * 65_536 * 128 * 4 / 2**30
    yield Row(
        "four clients that fetch 65,536 rows each at the same time, from two shards on the same two cores",
        f"{ms(four['ours'])}, {rounded(moved / _median(four['ours']))} GiB/s; one client: {ms(one['ours'])}",
        f"as many bare gRPC streams: {ms(four['bare'])}",
    )
    yield _preset_step()
    yield _training_step()
    head = results("head")
    dense, parts = head["ImageNet-1K"], head["a step of K resident rows"]["512 images, K = 65536"]
    yield Row(
        "the head's step for 512 images with K = 65,536 rows of any N",
        f"{ms(parts['times']['in parts'])}, {gib(parts['peak_bytes']['in parts'])} of tensors",
        f"the three products alone: {ms(parts['times']['floor'])}; all of ImageNet-1K's {dense['rows']:,} rows: "
        f"{rounded(_median(dense['step']))} s, {gib(dense['tensor_bytes'])}",
    )
    yield _checkpoint()
    rollbacks = results("checkpoints")["sizes"]["10000000"]["rollbacks"]
    yield Row(
        "rolling back 1,000, 1 M of these rows",
        ", ".join(ms(rollbacks[number]["rollback"]) for number in ("1000", "1000000")),
        f"pushing them: {', '.join(ms(rollbacks[number]['pushes']) for number in ('1000', '1000000'))}",
    )
    rates = results("augment")["images_per_second"]
    yield Row(
        "augmenting 224 px views on two cores, before crops and jitter matched torchvision's: ours, torchvision in 2 "
        "processes",
        f"{rounded(rates['ours'])}, {rounded(rates['torchvision, 2 processes'])} images/s",
        f"our decoding and cropping alone: {rounded(rates['of ours: decoding and cropping'])}; a GPU does the rest",
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
    fresh, (dense,) = scale["resident, fresh table"], scale["dense"]
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


# ---- beside other stores

_PEERS = {
    "ours": "ours",
    "lmdb-grpc": "LMDB behind gRPC",
    "redis-aof": "Redis, AOF synced",
    "rocksdb-synced": "RocksDB, synced, embedded",
    "postgres": "PostgreSQL",
    "torch-rpc": "torch.distributed.rpc, not durable",
}
"""Key to heading of the peers that are shown."""
_CASES = (
    "fetch, 512 rows",
    "fetch, 65,536 rows",
    "write, 512 rows",
    "write, 4,096 rows",
    "write, 65,536 rows",
    "fetch and write, 4,096 rows",
    "fetch and write, 65,536 rows",
)


def peers() -> str:
    """Milliseconds of each pattern, and what ours are as a multiple of the fastest durable peer's."""
    measured = results("peers")
    durable = [key for key, lacking in measured["does_not"].items() if "durability" not in lacking and key != "ours"]
    lines = [f"| | {' | '.join(_PEERS.values())} | ours × the fastest durable |", "|---" * (len(_PEERS) + 2) + "|"]
    for case in _CASES:
        of_patterns = [measured["cases"][f"{case}, {pattern}"] for pattern in _PATTERNS]
        cells = [" / ".join(rounded(1e3 * _median(found[key])) for found in of_patterns) for key in _PEERS]
        ratios = [_median(found["ours"]) / min(_median(found[key]) for key in durable) for found in of_patterns]
        lines.append(f"| {case} | {' | '.join(cells)} | {' / '.join(map(rounded, ratios))} |")
    return "\n".join(lines)


# ---- aims


class Aim(NamedTuple):
    """What was aimed at, and what bounds it."""

    what: str
    aim: str
    measured: str
    is_met: bool
    bound: str


def aims() -> str:
    """Every aim beside what was measured."""
    lines = ["| | aim | measured | | what bounds it |", "|---|---|---|---|---|"]
    for aim in _aims():
        bound = "" if aim.is_met else aim.bound
        lines.append(f"| {aim.what} | {aim.aim} | {aim.measured} | {'met' if aim.is_met else 'missed'} | {bound} |")
    return "\n".join(lines)


def _aims() -> Iterator[Aim]:
    rows = results("rows")

    def fetch(num_rows: str, pattern: str, call: str, what: str, most: float, floor: str, bound: str) -> Aim:
        case = rows[f"fetch of {num_rows} rows, {pattern}"]
        ratio = _median(case[call]) / _median(case[floor])
        return Aim(what, f"≤ {most:g} × a {floor}", f"{ratio:.2f} ×", ratio <= most, bound)

    twice = (
        "a fetch reads twice the bytes that it sends, since correction needs the momentum; the stream alone keeps both "
        "cores busy copying"
    )
    unverified = results("checksums")

    def blocks(rows_read: str) -> str:
        return f"a row is verified with its group of 4 rows; unverified {ms(unverified[rows_read]['trusted'])}"

    unverified_512 = blocks("512 scattered over all")
    calls = "two changes of threads in the client, whose main thread must not call gRPC; Python on both sides"
    yield fetch("65,536", "contiguous", "stored", "fetch of 65,536 contiguous rows", 1.5, _FLOOR, twice)
    yield fetch(
        "65,536", "contiguous", "stored, 9,000 distinct gaps", "– with 9,000 distinct gaps", 1.6, _FLOOR, "the same"
    )
    yield fetch(
        "65,536", "half of a window", "stored", "– half of a window", 2, _FLOOR, "the same, of twice the blocks"
    )
    yield fetch(
        "65,536", "scattered", "stored", "– scattered over a million", 5, _FLOOR, blocks("65,536 scattered over all")
    )
    yield _beside_redis_and_rocksdb(
        "fetch, 65,536 rows, scattered", "– the same", ["redis-aof"], blocks("65,536 scattered over all")
    )
    yield fetch("65,536", "contiguous", "never written", "– never written", 2.5, _FLOOR, "drawing them")
    yield fetch("512", "contiguous", "stored", "fetch of 512 contiguous rows", 1.4, "bare call", calls)
    yield fetch("512", "half of a window", "stored", "– half of a window", 1.4, "bare call", "the same")
    slowest = max(_slow(rows[f"fetch of 512 rows, {pattern}"]["stored"]) for pattern in _PATTERNS[:2])
    yield Aim(
        "– 99th percentile of both",
        "≤ 3 × the median",
        f"{slowest:.2f} ×",
        slowest <= 3,
        "threads wait for a core",
    )
    yield fetch(
        "512", "scattered", "stored", "– scattered over a million", 2, "bare call", f"the same; {unverified_512}"
    )
    yield from _aims_of_pushes()
    wire = results("wire")
    seconds, share = wire["remote"]["step_seconds"], 5 * wire["resident"]["server_seconds"]
    yield Aim(
        "a `remote` step at the paper's K",
        "≤ 100 ms",
        f"{ms(seconds)}; in bfloat16 {ms(wire['remote, stored in bfloat16']['step_seconds'])}",
        seconds <= 0.1,
        "every block that a row is in is committed whole, with momentum (docs/design.md)",
    )
    yield Aim(
        "the servers' processor time for `resident` rows at five steps a second",
        "≤ 2 % of a core",
        f"{100 * share:.2g} %",
        share <= 0.02,
        "",
    )
    seconds = _median(results("head")["a step of K resident rows"]["512 images, K = 65536"]["times"]["in parts"])
    yield Aim(
        "the head's step on a CPU, 512 images and K = 65,536",
        "about 250 ms",
        ms(seconds),
        seconds <= 0.25,
        "a fourth matrix product, and normalising",
    )
    yield from _aims_of_peers()


def _aims_of_pushes() -> Iterator[Aim]:
    case = results("rows")["push to 4,096 rows, contiguous"]
    push, floor = (1e3 * _median(case[name]) for name in ("push", _FLOOR))
    most = 2 * floor + 1e3 * _median(_commit(case)[1])
    yield Aim(
        "durable push to 4,096 contiguous rows",
        "≤ 2 × a bare stream and LMDB's commit",
        f"{rounded(push)} ms of {rounded(most)} ms",
        push <= most,
        "receiving, checking, changing blocks and the commit follow one another (docs/design.md)",
    )
    blocks = results("blocks")
    small, usual = (blocks[f"float32, {number} rows"]["seconds"]["push, scattered"] for number in (7, 63))
    bounds = (
        "whole blocks are committed, with momentum: four times the bytes of the rows",
        "every block of 64 KiB is read and rewritten; those of 7 rows (`--rows-per-block 7`) take "
        f"{times(small, usual)} the time",
    )
    for pattern, bound in zip(_PATTERNS[1:], bounds, strict=True):
        yield _beside_redis_and_rocksdb(
            f"write, 4,096 rows, {pattern}", f"– {pattern}", ["redis-aof", "rocksdb-synced"], bound
        )


def _beside_redis_and_rocksdb(case: str, what: str, others: list[str], bound: str) -> Aim:
    of_case = results("peers")["cases"][case]
    ours, *theirs = (1e3 * _median(of_case[key]) for key in ("ours", *others))
    aim = "below " + " and ".join(_PEERS[key].split(",")[0] for key in others)
    return Aim(what, aim, f"{rounded(ours)} ms, {' and '.join(map(rounded, theirs))}", ours < min(theirs), bound)


def _aims_of_peers() -> Iterator[Aim]:
    """How often ours is the fastest."""
    measured = results("peers")
    others = [key for key in measured["does_not"] if key != "ours"]
    durable = [key for key in others if "durability" not in measured["does_not"][key]]

    def aim(what: str, cases: list[str], peers: list[str], bound: str) -> Aim:
        of_cases = [measured["cases"][case] for case in cases]
        won = sum(_median(found["ours"]) < min(_median(found[key]) for key in peers) for found in of_cases)
        return Aim(what, f"in all {len(cases)} cases", f"in {won}", won == len(cases), bound)

    every = list(measured["cases"])
    yield aim(
        "faster than every durable store of the next table",
        every,
        durable,
        "512 rows: calls, as above. Writes: twice the bytes of a row, in whole blocks",
    )
    yield aim(
        "– than the others too, in a window's patterns",
        [case for case in every if not case.endswith("scattered")],
        others,
        "rows in memory need neither checks nor a disk, and these correct nothing",
    )


# ---- documents


def _as_table(rows: Iterator[Row]) -> str:
    return "\n".join(["| | | compared with |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


TABLES: dict[str, Callable[[], str]] = {
    "front_page": lambda: _as_table(front_page()),
    "servers": lambda: _as_table(servers()),
    "training": lambda: _as_table(training()),
    "peers": peers,
    "aims": aims,
}


def updated(text: str) -> str:
    """A document with its tables as the results say."""
    return _TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for document in FILES:
        document.write_text(updated(document.read_text()))
