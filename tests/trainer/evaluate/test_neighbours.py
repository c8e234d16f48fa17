"""Nearest neighbours in blocks, against all similarities at once in float64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.evaluate.neighbours import nearest, predict

ROOT = Path(__file__).parents[3]


def unit(features: Tensor) -> Tensor:
    return torch.nn.functional.normalize(features.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bank_rows", "query_rows"), [(1_000, 1_000), (64, 7), (5, 50), (1, 1)])
def test_blocks_find_the_neighbours_that_all_at_once_have(bank_rows: int, query_rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(bank_rows)
    bank = torch.randn(200, 24, generator=generator).to(dtype)
    queries = torch.randn(30, 24, generator=generator).to(dtype)
    similarity, index = nearest(bank, queries, 9, bank_rows=bank_rows, query_rows=query_rows)
    cosine = unit(queries) @ unit(bank).T
    # Of float32 unit vectors of 24 values: each product and sum of a dot product rounds once.
    tolerance = (24 + 8) * 2.0**-24
    assert torch.allclose(similarity.double(), cosine.topk(9).values, atol=tolerance, rtol=0)
    assert torch.allclose(cosine.gather(1, index), similarity.double(), atol=tolerance, rtol=0)
    assert (similarity[:, :-1] >= similarity[:, 1:]).all()
    assert all(len(set(row)) == 9 for row in index.tolist()), "a neighbour is counted once"


@pytest.mark.parametrize("wanted", [0, 6, -1])
def test_rejects_a_number_of_neighbours_that_the_bank_does_not_have(wanted: int) -> None:
    with pytest.raises(ValueError, match=rf"num_neighbours must lie in 1\.\.5, the size of the bank, got {wanted}"):
        nearest(torch.ones(5, 2), torch.ones(1, 2), wanted)


def test_votes_by_hand() -> None:
    """Two neighbours of class 1 at 0.9 outvote one of class 0 at 1.0 at temperature 1, and not at 0.07."""
    similarity, labels = torch.tensor([[1.0, 0.9, 0.9]]), torch.tensor([[0, 1, 1]])
    for k, temperature, classes in ((1, 1.0, [0, -1]), (3, 1.0, [1, 0]), (3, 0.07, [0, 1]), (3, 1e-4, [0, -1])):
        assert predict(similarity, labels, 3, k=k, temperature=temperature, top=2).tolist() == [classes]


def test_votes_of_many_classes_are_counted_for_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    similarity = torch.rand(50, 9, generator=generator).sort(descending=True).values
    labels = torch.randint(0, 300, (50, 9), generator=generator)
    whole = predict(similarity, labels, 300, k=9, temperature=0.07)
    monkeypatch.setattr("trainer.evaluate.neighbours._MOST_VOTES", 1_000)  # three queries
    assert torch.equal(predict(similarity, labels, 300, k=9, temperature=0.07), whole)
    monkeypatch.setattr("trainer.evaluate.neighbours._MOST_VOTES", 1)
    assert torch.equal(predict(similarity, labels, 300, k=9, temperature=0.07), whole)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_similarities(tmp_path: Path) -> None:
    """200,000 features in a file against 4,000 queries: 3.2 GB of similarities, in less than 1 GB beside the file."""
    path = tmp_path / "features"
    np.random.default_rng(0).standard_normal((200_000, 16), np.float32).astype(np.float16).tofile(path)
    code = f"""
import resource, torch
from trainer.evaluate.neighbours import nearest
bank = torch.from_file({str(path)!r}, size=200_000 * 16, dtype=torch.float16).view(-1, 16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
similarity, index = nearest(bank, bank[:4_000], 20)
assert (index[:, 0] == torch.arange(4_000)).all(), "each is its own nearest neighbour"
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < 1_000_000, f"{{grown}} KiB"
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=240)
