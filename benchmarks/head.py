"""The paper's Section 4 comparison: all N rows on the device against the K most recent ones.

python -m benchmarks.head [--rounds 3] [--data-sets ImageNet-1K ImageNet-11K] [--output benchmarks/results]

One step of the head (logits, softmax, gradients, SGD over the rows on the device) at B 512, D 128, float32, on the GPU
where there is one, else on the CPU. The encoder is left out: it is the same for both. Bytes are those of the tensors
that live at the same time: rows, their gradients and momentum, log-probabilities and gradients of logits.

On a CPU also: a step with K resident rows, and the update of the rows, beside what no step can do without: three
matrix products, and one pass over weight and momentum. The peak is what a step adds to the memory of the process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.measure import Timing, at_least, in_turn, timing, write_results
from weightserver import TableSpec
from weightserver.common.malloc import keep_large_buffers, return_free_memory
from weightserver.torch.loss import Loss
from weightserver.torch.rates import LearningRates
from weightserver.torch.rows.values import SlotValues

BATCH_SIZE, DIM = 512, 128
NUM_ACTIVE = 65_536
SHAPES = ((128, 1_024), (512, 1_024), (128, NUM_ACTIVE), (512, NUM_ACTIVE), (4_096, NUM_ACTIVE))
"""Images and active rows of the steps."""
RESIDENT = "a step of K resident rows"
SIZES = {"ImageNet-1K": 1_281_167, "ImageNet-11K": 7_470_000}


def tensor_bytes(num_rows: int) -> int:
    """float32 rows four times (weight, gradient, momentum, normalised or decayed), logits three times."""
    return 4 * (4 * num_rows * DIM + 3 * BATCH_SIZE * num_rows)


def measure(num_rows: int, rounds: int, device: torch.device) -> Timing:
    weight = torch.nn.Parameter(torch.randn(num_rows, DIM, device=device) * 0.01)
    optimizer = torch.optim.SGD([weight], lr=0.06, momentum=0.9, weight_decay=1e-4)
    features = torch.randn(BATCH_SIZE, DIM, device=device, requires_grad=True)
    labels = torch.randint(num_rows, (BATCH_SIZE,), device=device)
    seconds = []
    for _ in range(1 + rounds):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = Loss()(features, weight, labels)
        loss.backward()
        optimizer.step()
        loss.item()
        seconds.append(time.perf_counter() - started)
    return timing(seconds[1:])


class Step:
    """The loss of some images over K resident rows, its gradients, and the update of the rows."""

    def __init__(self, batch_size: int, num_rows: int) -> None:
        spec = TableSpec(num_rows=3 * num_rows // 2, dim=DIM, init_std=0.01, seed=0)
        rates = LearningRates(spec, np.full(1, 0.06, np.float32))
        self._slots = np.random.default_rng(0).permutation(spec.num_rows)[:num_rows]
        self._on_device = torch.from_numpy(self._slots)
        self._values = SlotValues(spec, rates, spec.num_rows, self._on_device.device)
        self._values.weight.normal_(std=spec.init_std)
        self._features = torch.randn(batch_size, DIM, requires_grad=True)
        self._labels = torch.randint(num_rows, (batch_size,))

    def __call__(self) -> None:
        weight = self._values.weight.index_select(0, self._on_device).requires_grad_()
        self._features.grad = None
        Loss()(self._features, weight, self._labels).backward()
        assert weight.grad is not None
        self._values.update(self._slots, self._on_device, weight.grad, 0)


class Floor:
    """Three matrix products, and one pass over weight and momentum, in memory that is there."""

    def __init__(self, batch_size: int, num_rows: int) -> None:
        self._features, self._logits = torch.randn(batch_size, DIM), torch.zeros(batch_size, num_rows)
        self._rows, self._gradients, self._momentum = (torch.randn(num_rows, DIM) for _ in range(3))

    def __call__(self) -> None:
        torch.mm(self._features, self._rows.T, out=self._logits)
        torch.mm(self._logits, self._rows)
        torch.mm(self._logits.T, self._features, out=self._gradients)
        torch.add(self._rows, self._momentum, alpha=1e-9, out=self._momentum)


def peak_bytes(call: Callable[[], object]) -> int:
    """What a call adds to the process's memory at its peak."""
    return_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = psutil.Process().memory_info().rss
    call()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0]) - before


def resident_steps(rounds: int) -> dict[str, Any]:
    """Times and peak bytes of steps with K resident rows."""
    results: dict[str, Any] = {}
    for batch_size, num_rows in SHAPES:
        step = Step(batch_size, num_rows)
        times = in_turn({"step": step, "floor": Floor(batch_size, num_rows)}, rounds=rounds, warm_up=3)
        results[f"{batch_size} images, K = {num_rows}"] = {"times": times, "peak_bytes": peak_bytes(step)}
    return results


def as_table(results: dict[str, Any], device: str) -> str:
    lines = ["| data set | rows on the device | bytes of tensors | time of the head's step |", "|---|---|---|---|"]
    for name, found in [(name, found) for name, found in results.items() if name != RESIDENT]:
        rows = f"K = {found['rows']:,}" if found["rows"] == NUM_ACTIVE else f"all N = {found['rows']:,}"
        time_of_step = found["step"] or "does not fit"
        lines.append(f"| {name} | {rows} | {found['tensor_bytes'] / 2**30:.2f} GiB | {time_of_step} |")
    lines += ["", f"Device: {device}."]
    if RESIDENT in results:
        lines += ["", "| | step | floor | peak |", "|---|---|---|---|"]
        for name, found in results[RESIDENT].items():
            times = found["times"]
            lines.append(f"| {name} | {times['step']} | {times['floor']} | {found['peak_bytes'] / 2**20:,.0f} MiB |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(2), default=3)
    parser.add_argument("--data-sets", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    keep_large_buffers()  # as the trainer does
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available
    results: dict[str, Any] = {}
    for name, num_rows in [("any", NUM_ACTIVE), *((name, SIZES[name]) for name in arguments.data_sets)]:
        num_bytes = tensor_bytes(num_rows)
        time_of_step = measure(num_rows, arguments.rounds, device) if 1.2 * num_bytes < free else None
        results[name] = {"rows": num_rows, "tensor_bytes": num_bytes, "step": time_of_step}
    if device.type == "cpu":
        results[RESIDENT] = resident_steps(max(2, arguments.rounds))
    write_results(
        arguments.output,
        "head",
        f"python -m benchmarks.head --rounds {arguments.rounds} --data-sets {' '.join(arguments.data_sets)}",
        results,
        as_table(results, torch.cuda.get_device_name() if device.type == "cuda" else "CPU"),
    )


if __name__ == "__main__":
    main()
