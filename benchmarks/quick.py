"""Have fetches and pushes become slower? Ratios to the floor, beside those that were recorded last.

python -m benchmarks.quick [--seconds 20] [--record] [--output benchmarks/results]

The cases of `benchmarks.rows`, in about two minutes. A ratio is that of a call to the bare stream of the same round,
shown as the median of the rounds with its 95 % interval. A case is marked SLOWER if its median exceeds the recorded one
by more than both intervals and the difference between two runs of the same code (`BETWEEN_RUNS`) explain, combined as
independent errors; FASTER the other way round. If rounds and runs spread as on a quiet machine, a slowdown of 25 % is
marked in 99 of 100 cases, of 20 % in 95, of 15 % in 78, of 10 % in 41; the same code is marked in one. Marks of bare
calls and of LMDB's commits, which are not ours, say that the machine has changed.

Ratios depend on the processor: they are recorded for each, by --record, which a release runs; on a processor without a
record those of another one are shown and nothing is marked. The exit status is 0 in any case: timings decide nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from itertools import accumulate
from math import comb, hypot, log
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, seconds_in_turn
from benchmarks.rows import FLOOR, cases
from weightserver.common.atomic_files import atomic_write

BETWEEN_RUNS = 1.10
"""By which factor two runs of the same code are taken to differ at most, beyond their intervals, in 99 of 100 pairs: a
process's memory layout and its neighbours on the machine stay the same for all rounds of a run."""
MOST_ROUNDS = 300
"""An interval of about ± 2 %, far below `BETWEEN_RUNS`: the time is better spent on the cases of long calls."""
LEAST_ROUNDS = 12
_FILE = "quick.json"


@dataclass(frozen=True)
class Ratio:
    """The ratio of a call's seconds to the floor's in the same round: the median, and its 95 % interval."""

    p50: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float], floor: list[float]) -> Ratio:
        """Summarizes at least six rounds. The interval is that of the sign test, which assumes no distribution."""
        ratios = sorted(ours / bare for ours, bare in zip(seconds, floor, strict=True))
        num_rounds = len(ratios)
        # With probability P(Binomial(n, 1/2) < rank) ≤ 1/40 the median is below the rank-th smallest ratio.
        cumulative = accumulate(comb(num_rounds, below) for below in range(num_rounds))
        rank = sum(40 * count <= 2**num_rounds for count in cumulative)
        return cls(statistics.median(ratios), ratios[rank - 1], ratios[-rank])

    def is_slower(self, other: Ratio) -> bool:
        """Whether the medians differ by more than chance and `BETWEEN_RUNS` explain.

        Independent errors add in quadrature, also those of intervals that are not symmetric (Zou and Donner, 2008).
        """
        margin = hypot(log(self.p50 / self.low), log(other.high / other.p50), log(BETWEEN_RUNS))
        return log(self.p50 / other.p50) > margin

    def beside(self, recorded: Ratio) -> str:
        """SLOWER, FASTER, or nothing."""
        return "SLOWER" if self.is_slower(recorded) else "FASTER" if recorded.is_slower(self) else ""

    def __str__(self) -> str:
        return f"{self.p50:.2f} ({self.low:.2f}–{self.high:.2f})"


def measured(seconds: float) -> dict[str, Ratio]:
    """The ratios of all calls to the floor of their case, each case measured for `seconds`."""
    ratios: dict[str, Ratio] = {}
    with cases() as all_cases:
        for case, calls in all_cases:
            times = seconds_in_turn(calls, rounds=MOST_ROUNDS, budget=seconds, least_rounds=LEAST_ROUNDS)
            ratios |= {f"{case}, {name}": Ratio.of(times[name], times[FLOOR]) for name in calls if name != FLOOR}
    return ratios


def recorded(records: dict[str, Any], processor: str) -> tuple[dict[str, Any], str]:
    """The record of this processor, or the newest of another one; and why the two may not be compared, if so."""
    if processor in records:
        return records[processor], ""
    newest: dict[str, Any] = max(records.values(), key=lambda record: record["machine"]["date"], default={})
    return newest, "nothing is recorded for this processor: run it at the last release with --record, then here"


def as_table(ratios: dict[str, Ratio], record: dict[str, Any], unlike: str = "") -> str:
    """The ratios beside those of the record, with marks unless the two may not be compared: `unlike` says why."""
    lines = [f"{'times the bare stream (95 % interval of the median)':64}  {'now':22}  {'recorded':22}".rstrip()]
    for name, ratio in ratios.items():
        known = record.get("ratios", {}).get(name)
        before = Ratio(**known) if known else None
        mark = ratio.beside(before) if before and not unlike else ""
        lines.append(f"{name:64}  {ratio!s:22}  {before or '-'!s:22}  {mark}".rstrip())
    if record:
        facts = record["machine"]
        lines.append(f"recorded on {facts['date']} at {facts['commit']} on {facts['processor']}")
    if unlike:
        lines.append(f"nothing is marked: {unlike}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=20, help=f"for each of nine cases, of {LEAST_ROUNDS} to {MOST_ROUNDS} rounds"
    )
    parser.add_argument("--record", action="store_true", help="keep the ratios as this processor's")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder of the records")
    arguments = parser.parse_args()
    file, facts = arguments.output / _FILE, machine()
    records = json.loads(file.read_text()) if file.exists() else {}
    record, unlike = recorded(records, facts["processor"])
    ratios = measured(arguments.seconds)
    print(as_table(ratios, record, unlike))
    if arguments.record:
        records[facts["processor"]] = {
            "machine": facts,
            "ratios": {name: vars(ratio) for name, ratio in ratios.items()},
        }
        arguments.output.mkdir(parents=True, exist_ok=True)
        text = json.dumps(records, indent=2, sort_keys=True) + "\n"
        atomic_write(file, lambda path: path.write_text(text))


if __name__ == "__main__":
    main()
