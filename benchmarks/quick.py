"""Have fetches and pushes become slower? Ratios to the floor, beside those that were recorded last.

python -m benchmarks.quick [--rounds 12] [--record] [--output benchmarks/results]

The cases of `benchmarks.rows`, in two minutes. A ratio is that of a call to the bare stream of the same round. A case
is marked SLOWER if nine of ten rounds are slower than nine of ten recorded ones, FASTER the other way round. Ratios
depend on the processor: they are recorded for each, by --record, which a release runs; on a processor without a record
those of another one are shown and nothing is marked. The exit status is 0 in any case: timings decide nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, number_of_rounds, seconds_in_turn
from benchmarks.rows import FLOOR, cases

_FILE = "quick.json"


@dataclass(frozen=True)
class Ratio:
    """Of a call's seconds to those of the floor in the same round."""

    p50: float
    p10: float
    p90: float

    @classmethod
    def of(cls, seconds: list[float], floor: list[float]) -> Ratio:
        ratios = [ours / bare for ours, bare in zip(seconds, floor, strict=True)]
        deciles = statistics.quantiles(ratios, n=10, method="inclusive")
        return cls(statistics.median(ratios), deciles[0], deciles[-1])

    def beside(self, recorded: Ratio) -> str:
        """SLOWER or FASTER beyond the spread of both, or nothing."""
        return "SLOWER" if self.p10 > recorded.p90 else "FASTER" if self.p90 < recorded.p10 else ""

    def __str__(self) -> str:
        return f"{self.p50:.2f} ({self.p10:.2f}–{self.p90:.2f})"


def measured(rounds: int) -> dict[str, Ratio]:
    """The ratios of all calls to the floor of their case."""
    ratios: dict[str, Ratio] = {}
    with cases() as all_cases:
        for case, calls in all_cases:
            seconds = seconds_in_turn(calls, rounds=rounds)
            ratios |= {f"{case}, {name}": Ratio.of(seconds[name], seconds[FLOOR]) for name in calls if name != FLOOR}
    return ratios


def recorded(records: dict[str, Any], processor: str) -> tuple[dict[str, Any], bool]:
    """The record of this processor, or the newest of another one; and whether the two may be compared."""
    if processor in records:
        return records[processor], True
    return max(records.values(), key=lambda record: record["machine"]["date"], default={}), False


def as_table(ratios: dict[str, Ratio], record: dict[str, Any], *, comparable: bool) -> str:
    lines = [f"{'times the bare stream':64}  {'now':22}  {'recorded':22}"]
    for name, ratio in ratios.items():
        known = record.get("ratios", {}).get(name)
        before = Ratio(**known) if known else None
        mark = ratio.beside(before) if before and comparable else ""
        lines.append(f"{name:64}  {ratio!s:22}  {before or '-'!s:22}  {mark}".rstrip())
    if record:
        facts = record["machine"]
        lines.append(f"recorded on {facts['date']} at {facts['commit']} on {facts['processor']}")
    if not comparable:
        lines.append("nothing is recorded for this processor: run it at the last release with --record, then here")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=number_of_rounds, default=12)
    parser.add_argument("--record", action="store_true", help="keep the ratios as this processor's")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder of the records")
    arguments = parser.parse_args()
    file, facts = arguments.output / _FILE, machine()
    records = json.loads(file.read_text()) if file.exists() else {}
    record, comparable = recorded(records, facts["processor"])
    ratios = measured(arguments.rounds)
    print(as_table(ratios, record, comparable=comparable))
    if arguments.record:
        records[facts["processor"]] = {
            "machine": facts,
            "ratios": {name: vars(ratio) for name, ratio in ratios.items()},
        }
        file.write_text(json.dumps(records, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
