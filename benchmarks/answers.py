"""Measures how soon the command line answers: help, and mistyped options, beside the start of Python itself.

python -m benchmarks.answers [--rounds 20] [--output benchmarks/results]

None of these answers needs torch, whose import takes seconds, so each is to come within 0.7 s. Commands take turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.measure import at_least, in_turn, write_results

ANSWERS = {
    "python -c pass": ("-c", "pass"),
    "python -c 'import numpy'": ("-c", "import numpy"),
    "pic --help": ("-m", "trainer.pic", "--help"),
    "pic train --help": ("-m", "trainer.pic", "train", "--help"),
    "pic train --help-all": ("-m", "trainer.pic", "train", "--help-all"),
    "pic embed --help": ("-m", "trainer.pic", "embed", "--help"),
    "pic tarin": ("-m", "trainer.pic", "tarin"),
    "pic train fashion-mnist --batchsize 8": ("-m", "trainer.pic", "train", "fashion-mnist", "--batchsize", "8"),
    "pic evaluate knn --pixles": ("-m", "trainer.pic", "evaluate", "knn", "--pixles"),
}
"""A command line, and the arguments of Python that run it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(2), default=20)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    calls: dict[str, Callable[[], object]] = {
        name: partial(subprocess.run, [sys.executable, *words], capture_output=True, check=False)
        for name, words in ANSWERS.items()
    }
    times = in_turn(calls, rounds=arguments.rounds)
    start = next(iter(times.values())).p50
    lines = ["| command | time | beyond the start of Python |", "|---|---|---|"]
    lines += [f"| `{name}` | {time} | {1e3 * (time.p50 - start):,.0f} ms |" for name, time in times.items()]
    command = f"python -m benchmarks.answers --rounds {arguments.rounds}"
    write_results(arguments.output, "answers", command, {"answer": times}, "\n".join(lines))


if __name__ == "__main__":
    main()
