"""One rank of runs on pretended GPUs, each compared with the same run on the CPU; as a program it records them.

python -m tests.helpers.gpu_runs OUT SERVERS IMAGES PORT,PORT,... SCENARIO,SCENARIO,...      (RANK and so on are set)
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.pretended_gpu import load, observed, pretended_gpus

if TYPE_CHECKING:
    from trainer.config import TrainConfig

NUM_STEPS = 6
NUM_IMAGES = 128
LOG_EVERY = 3
_IN_MEMORY: dict[str, Any] = {"dataset": "idx"}
_DECODED: dict[str, Any] = {"dataset": "folder"}
_TWO_VIEWS: dict[str, Any] = {"views": 2, "view_size": 12}
_RESUMED: dict[str, Any] = {"checkpoint_every": 5}
_KNN: dict[str, Any] = {"knn_every": 0.05}

SCENARIOS: dict[str, dict[str, Any]] = {
    "in memory, resident": _IN_MEMORY | _RESUMED | {"capacity": 56, "deterministic": True},
    "in memory, dense": _IN_MEMORY | {"rows": "dense", "precision": "bfloat16"} | _KNN,
    "decoded, remote": _DECODED | _RESUMED | _TWO_VIEWS | {"rows": "remote", "temperature": 0.01},
    "decoded, resident": _DECODED | _TWO_VIEWS | {"capacity": 56, "accumulate": 2, "precision": "bfloat16"},
    "decoded, dense": _DECODED | {"rows": "dense", "accumulate": 2, "deterministic": True} | _KNN,
}


def config(scenario: str, output: Path, servers: str, images: Path, device: str) -> TrainConfig:
    from tests.helpers.small_run import small_run
    from trainer.model import EncoderConfig

    settings = SCENARIOS[scenario]
    dataset, dense = settings["dataset"], settings.get("rows") == "dense"
    grey = dataset == "idx"
    fixed: dict[str, Any] = {
        "num_images": None,
        "data_dir": images / dataset,
        "servers": None if dense else servers,
        "device": device,
        "steps": NUM_STEPS,
        "log_every": LOG_EVERY,
        "batch_size": 8,
        "num_negatives": 32,
        "window_size": 16,
        "window_stride": 16,
        "rows_per_block": 2,
        "learning_rate": 0.05,
        "checkpoint_every": 1_000,
        "encoder": EncoderConfig(
            in_channels=1 if grey else 3, image_size=28 if grey else 16, width=8, stem_stride=2, pool_size=3
        ),
        "rank_timeout_seconds": 20,
        "retry_seconds": 10,
    }
    return small_run(output, **fixed | settings)


def run(settings: TrainConfig, ports: Iterator[str]) -> list[float]:
    """Trains and returns the losses of rank 0's metrics.jsonl; a run with checkpoints is resumed from the newest.

    The ranks use a new port each time: one that is ahead must not connect to remains of the previous run.
    """
    from trainer.loop import train
    from weightserver import WeightClient

    is_first = os.environ.get("RANK", "0") == "0"
    os.environ["MASTER_PORT"] = next(ports)
    if is_first and settings.servers.servers:
        with WeightClient(settings.servers.addresses) as client:
            client.drop_table()
    train(settings)
    if settings.run.checkpoint_every < NUM_STEPS:
        os.environ["MASTER_PORT"] = next(ports)
        train(settings.with_settings(resume=True))
    if not is_first:
        return []
    return [json.loads(line)["loss"] for line in (settings.run.output / "metrics.jsonl").read_text().splitlines()]


def main(out: Path, servers: str, images: Path, ports: list[str], scenarios: list[str]) -> None:
    load()
    import torch
    import torch._dynamo

    faulthandler.dump_traceback_later(450)  # before the waiting process times out
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    recorded, meeting_points = {}, iter(ports)
    for number, scenario in enumerate(scenarios):
        losses = {}
        for device in ("cpu", "cuda"):
            output = out / f"{world_size}-{number}-{device}"
            observed.clear()
            with pretended_gpus(world_size) if device == "cuda" else nullcontext():
                losses[device] = run(config(scenario, output, servers, images, device), meeting_points)
        recorded[scenario] = {
            "cpu": losses["cpu"],
            "cuda": losses["cuda"],
            "waits": [observed.waits_of_step(step) for step in range(observed.steps)],
            "shapes": [sorted(observed.shapes[step]) for step in range(observed.steps)],
            "memory_asked": sorted(observed.memory_asked),
            "num_seeds": len(observed.seeds),
            "used": sorted(observed.used),
            "copies": dict(observed.copies),
        }
        (out / f"{rank}.json").write_text(json.dumps(recorded, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4].split(","), sys.argv[5].split(";"))
