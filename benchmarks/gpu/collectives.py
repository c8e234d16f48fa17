"""Measures how long the collectives of a step take on their own.

torchrun ... -m benchmarks.gpu.collectives PRESET --OPTIONS: takes the trainer's arguments and writes extra.json into
--output: for each kind its bytes, the time of one, and the bytes a second that each GPU sends and receives for it
(2(n−1)/n of them in a ring of n ranks).
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import timing
from trainer.arguments import parse_config
from trainer.distributed import process_group
from trainer.model import build_model
from weightserver.torch import Ranks

_ROUNDS, _CALLS = 7, 10


def main(arguments: list[str] | None = None) -> None:
    config = parse_config(arguments)
    model = build_model(config.model.encoder, config.model.dim, head_layers=config.model.head_layers)
    numbers = {
        "gradients of encoder and head": sum(parameter.numel() for parameter in model.parameters()),
        "features of the batch": config.optimization.batch_size * config.model.dim,
        "sums of the softmax": 2 * config.optimization.batch_size,
    }
    with process_group(torch.device(config.compute.device)) as ranks:
        found = {name: measure(number, ranks) for name, number in numbers.items()}
        if ranks.is_first:
            config.run.output.mkdir(parents=True)
            (config.run.output / "extra.json").write_text(json.dumps(found) + "\n")


def measure(number: int, ranks: Ranks) -> dict[str, Any]:
    """All-reduces `number` float32 values."""
    tensor, seconds = torch.zeros(number, device=ranks.device), []
    for _ in range(1 + _ROUNDS):
        ranks.barrier()
        _finish(ranks.device)
        started = time.perf_counter()
        for _ in range(_CALLS):
            dist.all_reduce(tensor)
        _finish(ranks.device)
        seconds.append((time.perf_counter() - started) / _CALLS)
    median = timing(seconds[1:]).p50
    num_bytes = 4 * number
    factor = 2 * (ranks.world_size - 1) / ranks.world_size
    return {"bytes": num_bytes, "seconds": median, "bytes_per_second": factor * num_bytes / median}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
