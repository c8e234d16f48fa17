"""The paper's Section 4 comparison: all N rows on the device against the K most recent ones.

python -m benchmarks.head [--rounds 3] [--output benchmarks/results]

One step of the head (logits, softmax, gradients, SGD over the rows on the device) at B 512, D 128, float32, on the GPU
where there is one, else on the CPU. The encoder is left out: it is the same for both. Bytes are those of the tensors
that live at the same time: rows, their gradients and momentum, logits and their gradients.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.measure import Timing, draw_bars, timing, write_results
from weightserver.torch import cosine_softmax_loss

BATCH_SIZE, DIM = 512, 128
NUM_ACTIVE = 65_536
SIZES = {"ImageNet-1K": 1_281_167, "ImageNet-11K": 7_470_000}


def tensor_bytes(num_rows: int) -> int:
    """float32 rows three times (weight, gradient, momentum), normalised once more; logits twice."""
    return 4 * (4 * num_rows * DIM + 2 * BATCH_SIZE * num_rows)


def measure(num_rows: int, rounds: int, device: torch.device) -> Timing:
    weight = torch.nn.Parameter(torch.randn(num_rows, DIM, device=device) * 0.01)
    optimizer = torch.optim.SGD([weight], lr=0.06, momentum=0.9, weight_decay=1e-4)
    features = torch.randn(BATCH_SIZE, DIM, device=device, requires_grad=True)
    labels = torch.randint(num_rows, (BATCH_SIZE,), device=device)
    seconds = []
    for _ in range(1 + rounds):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = cosine_softmax_loss(features, weight, labels, temperature=0.2)
        loss.backward()
        optimizer.step()
        loss.item()
        seconds.append(time.perf_counter() - started)
    return timing(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available
    lines = ["| data set | rows on the device | bytes of tensors | time of the head's step |", "|---|---|---|---|"]
    results: dict[str, dict[str, Any]] = {}
    for name, num_rows in [("any", NUM_ACTIVE), *SIZES.items()]:
        num_bytes = tensor_bytes(num_rows)
        fits = 1.2 * num_bytes < free
        time_of_step = measure(num_rows, arguments.rounds, device) if fits else None
        results[name] = {"rows": num_rows, "tensor_bytes": num_bytes, "step": time_of_step}
        rows = f"K = {num_rows:,}" if num_rows == NUM_ACTIVE else f"all N = {num_rows:,}"
        lines.append(f"| {name} | {rows} | {num_bytes / 2**30:.2f} GiB | {time_of_step or 'does not fit'} |")
    lines += ["", f"Device: {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}."]
    write_results(
        arguments.output,
        "head",
        f"python -m benchmarks.head --rounds {arguments.rounds}",
        results,
        "\n".join(lines) + "\n\n![Bytes of the head's tensors](head.png)",
    )
    draw_bars(
        arguments.output / "head.png",
        {f"{values['rows']:,} rows": values["tensor_bytes"] / 2**30 for values in results.values()},
        "tensors of the head (GiB)",
    )


if __name__ == "__main__":
    main()
