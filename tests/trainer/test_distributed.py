"""Several ranks compared with one: torchrun starts real processes that communicate by gloo and record their results.

As a script (under torchrun) this file is one of those ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.dealing import table_of_flushes
from tests.helpers import numerics
from trainer.batch_norm import BatchNormOfRanks
from trainer.distributed import process_group
from weightserver.core.sharding import Sharding
from weightserver.torch import Ranks, cosine_softmax_loss, padded, padded_rows
from weightserver.torch.ranks import RowOwners

ROOT = Path(__file__).parents[2]
NUM_INPUTS, DIM, NUM_ROWS = 6, 5, 23
LOW = 0.01
"""A temperature at which exp of a logit overflows."""
TEXTS = ("", "größer als 255: ✓", "x" * 100_000)
Recorded = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """One batch; `str` of a case names what is recorded of it."""

    batch_size: int
    owners: str
    """uneven: each rank has rows, of different numbers; one-empty: rank 1 has none."""
    temperature: float
    dtype: torch.dtype

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Features (B, D), weight (K, D), labels (B,).

        At the lower temperature all rows have one direction and images the same or the opposite: logits near 100 or
        -100.
        """
        generator = torch.Generator().manual_seed(self.batch_size)
        vectors = torch.randn(NUM_ROWS + self.batch_size, DIM, generator=generator, dtype=torch.float64)
        if self.temperature == LOW:
            vectors = 0.1 * vectors + torch.randn(DIM, generator=generator, dtype=torch.float64)
            vectors[NUM_ROWS::2] *= -1
        weight, features = vectors.to(self.dtype).split([NUM_ROWS, self.batch_size])
        labels = torch.randint(NUM_ROWS, (self.batch_size,), generator=generator)
        labels[-1] = labels[0]  # a row that the batch holds twice
        return features, weight, labels

    def owner(self, world_size: int) -> Tensor:
        """The rank of each row, (K,)."""
        rank = (torch.arange(NUM_ROWS) // 2) % world_size
        return torch.where(rank == 1, 0, rank) if self.owners == "one-empty" else rank

    def share(self, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
        """One rank's share of the inputs."""
        features, weight, labels = self.inputs()
        mine = self.owner(ranks.world_size) == ranks.rank
        local = torch.where(mine, mine.cumsum(0) - 1, -1)
        return features[ranks.share(self.batch_size)], weight[mine], local[labels]

    def __str__(self) -> str:
        return f"{self.batch_size} images, {self.owners}, temperature {self.temperature}, {self.dtype}"


CASES = [
    Case(*case)  # batches that divide, that do not, and that leave a rank without images
    for case in product((12, 7, 2), ("uneven", "one-empty"), (0.2, LOW), (torch.float32, torch.float64))
]


def loss_and_gradients(
    features: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    ranks: Ranks,
    *,
    autocast: bool = False,
    num_rows: int | None = None,
) -> dict[str, Tensor]:
    features, weight = features.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = cosine_softmax_loss(features, weight, labels, temperature=temperature, ranks=ranks, num_rows=num_rows)
    loss.backward()
    assert features.grad is not None
    assert weight.grad is not None
    return {"loss": loss.detach(), "features": features.grad, "weight": weight.grad}


def normed(ranks: Ranks) -> dict[str, Tensor]:
    """This rank's part of seven embeddings and of their gradient, by a loss of all ranks, and the statistics."""
    generator, share = torch.Generator().manual_seed(0), ranks.share(7)
    embeddings, pull = torch.randn(2, 7, DIM, generator=generator, dtype=torch.float64) + 3
    mine, norm = embeddings[share].clone().requires_grad_(), BatchNormOfRanks(DIM, affine=False).double()
    found = norm(mine)
    (found * pull[share]).sum().backward()
    assert mine.grad is not None
    return {"embeddings": found.detach(), "gradient": mine.grad, **norm.state_dict()}


def record_rank(out: Path) -> None:
    """Computes and records the results of one rank of several."""
    torch.set_num_threads(1)
    recorded: dict[str, Any] = {}
    with process_group(torch.device("cpu"), timeout_seconds=60) as ranks:
        for case in CASES:
            features, weight, labels = case.share(ranks)
            result = loss_and_gradients(features, weight, labels, case.temperature, ranks)
            recorded |= {f"{case}: {name}": value.numpy() for name, value in result.items()}

            result = loss_and_gradients(
                features, padded(weight, NUM_ROWS), labels, case.temperature, ranks, num_rows=len(weight)
            )
            assert not result["weight"][len(weight) :].any(), "rows that only fill up have a gradient"
            result["weight"] = result["weight"][: len(weight)]
            recorded |= {f"{case}: padded {name}": value.numpy() for name, value in result.items()}

            result = loss_and_gradients(features, weight, labels, case.temperature, ranks, autocast=True)
            recorded |= {f"{case}: autocast {name}": value.numpy() for name, value in result.items()}
        recorded |= {f"norm {name}": value.numpy() for name, value in normed(ranks).items()}
        told = {
            "ranks": [ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size],
            "texts": [ranks.broadcast_text(text if ranks.is_first else None) for text in TEXTS],
            "sums": ranks.sum_over_ranks([1.0, 2.0**40 + ranks.rank, -0.5 * ranks.rank]),
            "maxima": ranks.max_over_ranks([float(ranks.rank), -float(ranks.rank)]),
        }
        ranks.barrier()
    assert not dist.is_initialized(), "the process group outlived its context"
    np.savez(out / f"{ranks.rank}.npz", told=np.array(json.dumps(told)), **recorded)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids="{} ranks".format)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    """The results of each rank."""
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    command += ["-m", "tests.trainer.test_distributed", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    return [dict(np.load(out / f"{rank}.npz")) for rank in range(request.param)]


def of_whole(recorded: list[Recorded], case: Case, kind: str = "") -> dict[str, Tensor]:
    """Loss and gradients of the whole batch and all rows, put together from those of the ranks."""
    parts = {name: [part[f"{case}: {kind}{name}"] for part in recorded] for name in ("loss", "features", "weight")}
    assert len({part.tobytes() for part in parts["loss"]}) == 1, "ranks differ in the loss"
    weight = np.empty((NUM_ROWS, DIM), parts["loss"][0].dtype)
    for rank, part in enumerate(parts["weight"]):
        weight[case.owner(len(recorded)) == rank] = part
    features = np.concatenate(parts["features"]) / len(recorded)  # what averaging over ranks makes of it
    whole = {"loss": parts["loss"][0], "features": features, "weight": weight}
    return {name: torch.from_numpy(value) for name, value in whole.items()}


def expected_of(case: Case, features: numerics.Rounded | None = None) -> numerics.RoundedLoss:
    given, weight, labels = case.inputs()
    return numerics.softmax_loss(given if features is None else features, weight, labels, temperature=case.temperature)


@pytest.mark.guard
def test_loss_and_gradients_are_those_of_one_rank(recorded: list[Recorded]) -> None:
    """Each equals the formula up to rounding."""
    for case in CASES:
        expected = expected_of(case)
        one = loss_and_gradients(*case.inputs(), case.temperature, Ranks())
        # also with rows that fill up each rank's share
        for found in (one, of_whole(recorded, case), of_whole(recorded, case, "padded ")):
            for name, value in found.items():
                getattr(expected, name).assert_near(value, f"{case}, {name}")


@pytest.mark.guard
def test_autocast_changes_no_bit(recorded: list[Recorded]) -> None:
    for case in CASES:
        plain, autocast = of_whole(recorded, case), of_whole(recorded, case, "autocast ")
        assert all(torch.equal(plain[name], autocast[name]) for name in plain), str(case)


@pytest.mark.guard
def test_embeddings_are_normalised_over_all_ranks(recorded: list[Recorded]) -> None:
    """As torch's BatchNorm does on one rank; ranks may have different numbers of images."""
    for name, expected in normed(Ranks()).items():
        parts = [part[f"norm {name}"] for part in recorded]
        found = [np.concatenate(parts)] if name in ("embeddings", "gradient") else parts
        for one in found:
            np.testing.assert_allclose(one, expected, rtol=1e-12, atol=1e-12, err_msg=name)


def test_extreme_logits_are_extreme() -> None:
    features, weight, _ = Case(12, "uneven", LOW, torch.float32).inputs()
    logits = torch.nn.functional.cosine_similarity(features[:, None], weight[None], dim=-1) / LOW
    assert logits.exp().isinf().any(), "exp overflows"
    assert (logits.exp().sum(dim=1) < 1e-30).any(), "exp of a whole row is next to nothing"


@pytest.mark.guard
def test_ranks_exchange_values(recorded: list[Recorded]) -> None:
    world_size = len(recorded)
    for rank, part in enumerate(recorded):
        told = json.loads(str(part["told"]))
        assert told["ranks"] == [rank, world_size, rank, world_size]
        assert told["texts"] == list(TEXTS)
        total = sum(range(world_size))
        assert told["sums"] == [world_size, world_size * 2.0**40 + total, -0.5 * total]
        assert told["maxima"] == [world_size - 1, 0]


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
