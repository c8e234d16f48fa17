"""Monitors and kNN evaluations on two ranks against one; the ranks are real processes.

As a script (under torchrun) this file is one of those ranks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.data import Dataset
from trainer.distributed import process_group, with_first_ranks_buffers
from trainer.evaluate.knn_probe import KnnProbe
from trainer.loss import LossConfig
from trainer.model import EncoderConfig, build_model
from trainer.monitors import Monitors, Update
from weightserver.torch import Ranks, padded

ROOT = Path(__file__).parents[2]
PARTS, PART_SIZE, DIM, NUM_ROWS = 2, 7, 5, 23


def monitors(ranks: Ranks, owners: str) -> dict[str, Tensor]:
    """Two steps with unequal shares of the images, and rows of which rank 1 has a few or none."""
    generator = torch.Generator().manual_seed(0)
    encoder = nn.Linear(2, 2)
    encoder.weight.grad, encoder.bias.grad = torch.ones(2, 2), torch.ones(2)
    found = Monitors(encoder, LossConfig(), ranks, batch_size=PARTS * PART_SIZE)
    found._steps = type(found._steps)(maxlen=2)
    values: dict[str, float] = {}
    for _ in range(2):
        embeddings = torch.randn(PARTS, PART_SIZE, DIM, generator=generator)
        classes = torch.randn(NUM_ROWS, DIM, generator=generator)
        labels = torch.randint(NUM_ROWS, (PARTS * PART_SIZE,), generator=generator)
        classes[labels] += 2 * embeddings.flatten(0, 1)  # so that some are recognised
        owner = (torch.arange(NUM_ROWS) % 5 == 0).long() if owners == "uneven" else torch.zeros(NUM_ROWS)
        mine = (owner == ranks.rank) if ranks.world_size > 1 else torch.ones(NUM_ROWS, dtype=torch.bool)
        labels = torch.where(mine, mine.cumsum(0) - 1, -1)[labels]
        embeddings = embeddings[:, ranks.share(PART_SIZE)]
        found.keep(embeddings)
        update = Update(torch.tensor(0.0), embeddings, padded(classes[mine], 20), labels)
        values = found.measure(update, num_rows=int(mine.sum()))
    return {name: torch.tensor(value) for name, value in values.items()}


def knn(ranks: Ranks) -> dict[str, Tensor]:
    """kNN top-1 and features by an encoder whose BatchNorm statistics differ between ranks."""
    model = build_model(EncoderConfig(width=8, stem_stride=2, blocks=(1,)), 4, seed=0)
    encoder = model.encoder
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            module.running_mean += ranks.rank
    own = [buffer.clone() for buffer in encoder.buffers()]
    with with_first_ranks_buffers(encoder, ranks):
        assert all(map(torch.equal, own, encoder.buffers())) == ranks.is_first
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (301,), generator=generator)
    pixels = torch.randint(256, (301, 1, 28, 28), generator=generator) * (1 + labels[:, None, None, None]) // 2
    images = pixels.to(torch.uint8)
    data = Dataset(train_images=images, train_labels=labels, test_images=images[:0], test_labels=labels[:0])
    probe = KnnProbe(model, data, ranks, seed=0, fraction=1e6)
    found = probe.observe(1e6, due=True, last=False)
    assert all(map(torch.equal, own, encoder.buffers())), "its own statistics are back"
    assert bool(found) == ranks.is_first
    features = {"features": probe._features()}
    probe._images = probe._images[:1]  # one of two ranks has none
    features["of one image"] = probe._features()
    return features | {name: torch.tensor(value) for name, value in found.items()}


def recorded(ranks: Ranks) -> dict[str, Tensor]:
    parts: dict[str, dict[str, Tensor]] = {
        "even": monitors(ranks, "uneven"),
        "one empty": monitors(ranks, "one-empty"),
        "knn": knn(ranks),
    }
    return {f"{part}: {name}": tensor for part, found in parts.items() for name, tensor in found.items()}


@pytest.mark.slow
def test_two_ranks_record_what_one_records(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["tests.trainer.test_monitors_of_ranks", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    one: dict[str, Any] = recorded(Ranks())
    ranks = [load_file(tmp_path / f"{rank}.safetensors") for rank in (0, 1)]
    assert ranks[0].keys() == one.keys()
    assert one["knn: knn_top1"] > 60, "chance is 50 %"
    assert 0 < one["even: instance_top1"] < 100
    for name, tensor in one.items():
        torch.testing.assert_close(ranks[0][name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    for name, tensor in ranks[1].items():
        assert torch.equal(ranks[0][name], tensor), f"ranks differ in {name}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group(torch.device("cpu"), timeout_seconds=60) as ranks:
        save_file(recorded(ranks), Path(sys.argv[1]) / f"{ranks.rank}.safetensors")
