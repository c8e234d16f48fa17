"""Several ranks compared with one: torchrun starts real processes that communicate by gloo and record their results.

As a script (under torchrun) this file is one of those ranks. The loss is in tests/weightserver/torch/test_margins.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.dealing import table_of_flushes
from tests.helpers.torchrun import torchrun
from trainer.batch_norm import BatchNormOfRanks
from trainer.config import TrainConfig
from trainer.data import Dataset
from trainer.distributed import process_group, with_first_ranks_buffers
from trainer.evaluate.knn_probe import KnnProbe
from trainer.loss import LossConfig
from trainer.model import EncoderConfig, build_model
from trainer.monitors import Monitors, Update
from trainer.run.resume import resolve_resume
from trainer.run_dataset import check_same_images
from weightserver.core.sharding import Sharding
from weightserver.torch import Ranks, padded
from weightserver.torch.loss import padded_rows
from weightserver.torch.ranks import RowOwners

ROOT = Path(__file__).parents[2]
PARTS, PART_SIZE, DIM, NUM_ROWS = 2, 7, 5, 23
TEXTS = ("", "größer als 255: ✓", "x" * 100_000)
Recorded = dict[str, Tensor]


def normed(ranks: Ranks) -> dict[str, Tensor]:
    """This rank's part of seven embeddings and of their gradient, by a loss of all ranks, and the statistics."""
    generator, share = torch.Generator().manual_seed(0), ranks.share(7)
    embeddings, pull = torch.randn(2, 7, DIM, generator=generator, dtype=torch.float64) + 3
    mine, norm = embeddings[share].clone().requires_grad_(), BatchNormOfRanks(DIM, affine=False).double()
    found = norm(mine)
    (found * pull[share]).sum().backward()
    assert mine.grad is not None
    return {"embeddings": found.detach(), "gradient": mine.grad, **norm.state_dict()}


def monitors(ranks: Ranks, owners: str) -> dict[str, Tensor]:
    """Two steps with unequal shares of the images, and rows of which rank 1 has a few or none."""
    generator = torch.Generator().manual_seed(0)
    encoder = nn.Linear(2, 2)
    encoder.weight.grad, encoder.bias.grad = torch.ones(2, 2), torch.ones(2)
    found = Monitors(encoder, LossConfig(), ranks, batch_size=PARTS * PART_SIZE)
    found._steps = type(found._steps)(maxlen=2)
    found.measure_gradient()
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
    probe = KnnProbe(model, data, ranks, seed=0)
    found = probe.observe(due=True)
    assert all(map(torch.equal, own, encoder.buffers())), "its own statistics are back"
    assert bool(found) == ranks.is_first
    features = {"features": probe._features(encoder)}
    probe._images = probe._images[:1]  # one of two ranks has none
    features["of one image"] = probe._features(encoder)
    return features | {name: torch.tensor(value) for name, value in found.items()}


def computed(ranks: Ranks) -> Recorded:
    """What all ranks compute alike, and of the normed embeddings and their gradient this rank's part."""
    parts: dict[str, Recorded] = {
        "monitors": monitors(ranks, "uneven"),
        "monitors, one empty": monitors(ranks, "one-empty"),
        "knn": knn(ranks),
        "norm": normed(ranks),
    }
    return {f"{part}: {name}": tensor for part, found in parts.items() for name, tensor in found.items()}


def record_rank(out: Path) -> None:
    """Computes and records the results of one rank of several."""
    torch.set_num_threads(1)
    with process_group(torch.device("cpu"), timeout_seconds=60) as ranks:
        save_file(computed(ranks), out / f"{ranks.rank}.safetensors")
        told = {
            "ranks": [ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size],
            "texts": [ranks.broadcast_text(text if ranks.is_first else None) for text in TEXTS],
            "sums": ranks.sum_over_ranks([1.0, 2.0**40 + ranks.rank, -0.5 * ranks.rank]),
            "maxima": ranks.max_over_ranks([float(ranks.rank), -float(ranks.rank)]),
        }
        chosen = {"epochs": 2.0 + ranks.rank, "knn_every": 1.0 + ranks.rank, "metrics_host": f"host-{ranks.rank}"}
        config = resolve_resume(TrainConfig().with_settings(**chosen), ranks).settings()
        told["settings"] = {name: config[name] for name in chosen}
        images, labels = torch.zeros(1, 1, 1, 1, dtype=torch.uint8), torch.zeros(1)
        same = Dataset(train_images=images, train_labels=labels, test_images=images, test_labels=labels, digests=("a",))
        check_same_images(same, ranks)
        with pytest.raises(ValueError, match=r"^the ranks have different images, so that a class would be another i"):
            check_same_images(replace(same, digests=(str(ranks.rank),)), ranks)
        ranks.barrier()
    assert not dist.is_initialized(), "the process group outlived its context"
    (out / f"{ranks.rank}.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    "world_size", [pytest.param(2, marks=pytest.mark.guard), pytest.param(3, marks=pytest.mark.slow)]
)
def test_several_ranks_compute_what_one_does(world_size: int, tmp_path: Path, one_thread: None) -> None:
    """BatchNorm, as torch does on one rank; monitors and kNN; what they tell each other. Parts differ in size."""
    torchrun("tests.trainer.test_distributed", tmp_path, num_ranks=world_size)
    expected, ranks = computed(Ranks()), [load_file(tmp_path / f"{rank}.safetensors") for rank in range(world_size)]
    assert expected["knn: knn_top1"] > 60, "chance is 50 %"
    assert 0 < expected["monitors: instance_top1"] < 100
    for name, tensor in expected.items():
        parts = [found[name] for found in ranks[: 1 if name.startswith("knn: knn") else None]]
        if name in ("norm: embeddings", "norm: gradient"):
            parts = [torch.cat(parts)]
        assert all(torch.equal(part, parts[0]) for part in parts), f"ranks differ in {name}"
        exact = name.startswith("norm")
        torch.testing.assert_close(parts[0], tensor, rtol=1e-12 if exact else 1e-4, atol=1e-12 if exact else 1e-6)
    total = sum(range(world_size))
    for rank in range(world_size):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "ranks": [rank, world_size, rank, world_size],
            "texts": list(TEXTS),
            "sums": [world_size, world_size * 2.0**40 + total, -0.5 * total],
            "maxima": [world_size - 1, 0],
            "settings": {"epochs": 2.0, "knn_every": 1.0, "metrics_host": f"host-{rank}"},
        }, "machines may choose differently, and have addresses of their own"


def test_a_single_rank_does_not_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with process_group(torch.device("cpu")) as ranks:
        assert ranks == Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
        assert not dist.is_initialized()
        ranks.barrier()
        assert ranks.is_first
        assert ranks.share(7) == slice(0, 7)
        assert ranks.broadcast_text("größe") == "größe"
        assert ranks.sum_over_ranks([1.5, -2.0]) == ranks.max_over_ranks([1.5, -2.0]) == [1.5, -2.0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("num_items", [0, 1, 2, 63, 64, 65, 1000])
def test_shares_are_contiguous_and_even(num_items: int, world_size: int) -> None:
    shares = [Ranks(rank=rank, world_size=world_size).share(num_items) for rank in range(world_size)]
    items = [list(range(num_items)[share]) for share in shares]
    assert list(chain(*items)) == list(range(num_items))
    assert max(map(len, items)) - min(map(len, items)) <= 1


@given(
    num_shards=st.integers(1, 80),
    num_ranks=st.integers(1, 130),
    rows_per_block=st.integers(1, 9),
    first=st.integers(0, 10**9),
    num_rows=st.integers(1, 5000),
)
@settings(deadline=None)
def test_consecutive_rows_are_dealt_evenly_to_the_few_ranks_of_each_shard(
    num_shards: int, num_ranks: int, rows_per_block: int, first: int, num_rows: int
) -> None:
    rows = first + np.arange(num_rows)
    owners = RowOwners(rows_per_block, num_shards, num_ranks)
    held = owners.rank_of(rows)
    assert 0 <= held.min() <= held.max() < num_ranks
    assert np.bincount(held).max() <= num_rows / num_ranks + owners.surplus
    pairs = set(zip(Sharding(rows_per_block, num_shards).shard_of(rows).tolist(), held.tolist(), strict=True))
    assert len(pairs) <= num_shards + num_ranks - 1
    assert len({rank for shard, rank in pairs if shard == 0}) <= -(-num_ranks // num_shards) + 1
    assert np.array_equal(RowOwners(rows_per_block, 1, num_ranks).rank_of(rows), rows // rows_per_block % num_ranks)


def test_the_documentation_has_the_simulated_flushes() -> None:
    assert "\n".join(table_of_flushes()) in (ROOT / "docs/scale.md").read_text(), "python -m benchmarks.dealing"


def test_nearly_every_share_of_the_active_rows_fits_into_what_it_is_padded_to() -> None:
    """With random blocks, since the windows' order makes the most recent rows random."""
    generator = np.random.default_rng(0)
    for num_active, owners in (
        (65_536, RowOwners(63, num_shards=1, num_ranks=8)),
        (65_536, RowOwners(63, num_shards=63, num_ranks=8)),
        (1024, RowOwners(63, num_shards=3, num_ranks=2)),
        (4096, RowOwners(1, num_shards=16, num_ranks=64)),
    ):
        ranks = Ranks(world_size=owners.num_ranks)
        limit = padded_rows(num_active, owners.surplus, ranks)
        active = (generator.choice(4 * num_active, num_active, replace=False) for _ in range(200))
        shares = [np.bincount(owners.rank_of(rows)).max() for rows in active]
        assert np.mean(np.array(shares) > limit) < 0.01
        assert limit <= num_active
    assert padded_rows(1000, 63, Ranks()) == 1000


if __name__ == "__main__":
    record_rank(Path(sys.argv[1]))
