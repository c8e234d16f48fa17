"""Benchmarks a machine with GPUs: images per second, idle time, memory, and the paper's Section 4.

python -m benchmarks.gpu [--quick] [--sections rates idle ...] [--minutes 30] [--resume] [--output benchmarks/results]

Every run is the trainer as users start it, in its own processes; the images are generated. gpu.json and gpu.md are
written after each figure, so that a failure or the end of the time loses nothing else. Sections measured earlier on the
same GPUs stay in the files; --resume measures only incomplete ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu.runs import RunFailedError, Runner, Start, start_processes
from benchmarks.gpu.sections import SECTIONS, SIZES, Bench
from benchmarks.measure import machine, restored, save_results

_MINUTES = {"full": 30.0, "quick": 9.0, "toy": 3.0}
_RUN_SECONDS = 240.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_const", const="quick", dest="size", help="every section, in 9 minutes")
    parser.add_argument("--size", choices=SIZES, help="toy: to try the code without a GPU, with --device cpu")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--minutes", type=float, help="after which no more is measured")
    parser.add_argument("--resume", action="store_true", help="keep what is in gpu.json whole, measure the rest")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.set_defaults(size="full")
    return parser


def main(arguments: Sequence[str] | None = None, *, start: Start = start_processes) -> int:
    """Returns the exit status: 1 without a GPU, or if a section could not be measured."""
    given = _parser().parse_args(arguments)
    size, output = SIZES[given.size], given.output
    minutes = _MINUTES[given.size] if given.minutes is None else given.minutes
    runner = Runner(given.device, _RUN_SECONDS, size.warm_up, start)
    facts = runner.facts()
    runner.deadline = time.monotonic() + 60 * minutes
    if given.device == "cuda" and not facts["gpus"]:
        print("bench-gpu: no GPU that torch can use (see nvidia-smi): run it where there is one", file=sys.stderr)
        return 1
    results = _measured_before(output / "gpu.json", facts, given.size)
    command = "python -m benchmarks.gpu " + " ".join(sys.argv[1:] if arguments is None else arguments)
    gpu_bytes = min(facts["gpu_bytes"], default=facts["host_bytes"])
    bench = Bench(runner, size, _numbers(len(facts["gpus"])), gpu_bytes)
    for name in given.sections:
        if given.resume and name in results["sections"] and "error" not in results["sections"][name]:
            continue
        section = results["sections"][name] = {
            "date": date.today().isoformat(),
            "commit": machine()["commit"],
            "found": {},
        }
        started = time.perf_counter()
        try:
            for _ in SECTIONS[name][0](bench, section["found"]):
                section["seconds"] = time.perf_counter() - started
                text = save_results(output, "gpu", command, results, table(results))
        except (RunFailedError, OSError) as error:
            section["error"] = str(error)
            print(f"bench-gpu: {name}: {error}", file=sys.stderr)
        text = save_results(output, "gpu", command, results, table(results))
        print("\n".join(_lines_of(name, section)), flush=True)
    print(text)
    return int(any("error" in results["sections"][name] for name in given.sections))


def _numbers(num_gpus: int) -> tuple[int, ...]:
    """1, 2, 4, … and all GPUs."""
    doubled = [1 << power for power in range(max(1, num_gpus).bit_length())]
    return tuple(sorted({*(number for number in doubled if number <= num_gpus), max(1, num_gpus)}))


def _measured_before(path: Path, facts: dict[str, Any], size: str) -> dict[str, Any]:
    """The results in a file if they are of the same GPUs and size, else empty results."""
    fresh = {"size": size, "gpus": facts, "sections": {}}
    if not path.exists():
        return fresh
    before: dict[str, Any] = json.loads(path.read_text())["results"]
    if before["size"] != size or before["gpus"] != facts:
        return fresh
    before["sections"] = restored(before["sections"])
    return before


def table(results: dict[str, Any]) -> str:
    gpus = results["gpus"]
    lines = [
        f"GPUs: {len(gpus['gpus'])} × {gpus['gpus'][0]}, {gpus['gpu_bytes'][0] / 2**30:.0f} GiB; driver "
        f"{gpus['driver'] or 'unknown'}, CUDA {gpus['cuda']}, NCCL {gpus['nccl']}, cuDNN {gpus['cudnn']}."
        if gpus["gpus"]
        else "No GPU: this says nothing but that the code runs."
    ]
    lines[0] += f" torch {gpus['torch']}; size {results['size']}."
    for name in SECTIONS:
        if name in results["sections"]:
            lines += ["", *_lines_of(name, results["sections"][name])]
    return "\n".join(lines)


def _lines_of(name: str, section: dict[str, Any]) -> list[str]:
    measure, draw = SECTIONS[name]
    heading = f"## {name}"
    described = (
        f"{measure.__doc__} Measured {section['date']} at {section['commit']}, in {section.get('seconds', 0):.0f} s."
    )
    lines = [heading, "", described, ""]
    if section["found"] or "error" not in section:
        lines += draw(section["found"])
    return lines + (["", f"**Not whole:** {section['error']}"] if "error" in section else [])


if __name__ == "__main__":
    sys.exit(main())
