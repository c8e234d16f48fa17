"""Initial rows: golden bytes, independence of rows, and the normal distribution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from weightserver.core.initial import initial_rows
from weightserver.core.spec import TableSpec
from weightserver.core.splitmix import splitmix64

GOLDEN = Path(__file__).parents[1] / "golden" / "initial_rows.json"


def rows_of(rows: list[int], *, dim: int = 128, seed: int = 0, **changes: Any) -> npt.NDArray[np.float32]:
    fields: dict[str, Any] = {"num_rows": 2**40, "dim": dim, "seed": seed, **changes}
    return initial_rows(TableSpec(**fields), np.array(rows, np.int64))


@pytest.mark.parametrize(
    "case", json.loads(GOLDEN.read_text()), ids=lambda case: "seed {seed}, dim {dim}".format(**case)
)
def test_golden_bytes(case: dict[str, Any]) -> None:
    """These bytes must never change: rows that were never written are stored nowhere."""
    spec = TableSpec(num_rows=2**40, dim=case["dim"], seed=case["seed"], init_std=case["init_std"])
    weight = initial_rows(spec, np.array(case["rows"], np.int64)).astype("<f4")
    assert weight[0, :3].tobytes().hex(" ", 4).split() == case["first_values"]
    assert xxhash.xxh3_64_hexdigest(weight.tobytes()) == case["xxh3_64"]


def test_splitmix64_is_the_published_generator() -> None:
    """The first outputs for state 1234567, from the reference implementation (Vigna, splitmix64.c)."""
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    mask, state = 2**64 - 1, 1234567
    gamma = 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert [mix((state + gamma * i) & mask) for i in range(1, 5)] == reference
    for seed in (0, 1, 2**64 - 1):
        index = [0, 1, 77, 2**63, 2**64 - 1]
        begin = mix((seed + gamma) & mask)
        expected = [mix((begin + gamma * i) & mask) for i in index]
        assert splitmix64(seed, np.array(index, np.uint64)).tolist() == expected


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.integers(0, 2**40 - 1), max_size=40) | st.just([*range(2**33, 2**33 + 1_500)]),
    dim=st.sampled_from([1, 2, 7, 128, 513]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_row_depends_only_on_seed_and_id(rows: list[int], dim: int, seed: int) -> None:
    """Not on its place, on other rows, nor on the chunk that it is computed in."""
    together = rows_of(rows, dim=dim, seed=seed)
    assert together.shape == (len(rows), dim)
    assert rows_of(rows[::-1], dim=dim, seed=seed).tobytes() == together[::-1].tobytes()
    other_table = {"num_rows": 2**41, "rows_per_block": 5, "momentum": 0.5, "weight_decay": 0.0}
    for row, weight in [*zip(rows, together, strict=True)][:: 1 + len(rows) // 40]:
        assert rows_of([row], dim=dim, seed=seed, **other_table).tobytes() == weight.tobytes()


@pytest.mark.parametrize(("seed", "first"), [(0, 0), (1, 0), (2**64 - 1, 2**39)])
def test_values_are_standard_normal(seed: int, first: int) -> None:
    values = rows_of(list(range(first, first + 7_813)), seed=seed, init_std=1.0).ravel().astype(np.float64)
    num = len(values)
    assert num >= 10**6
    assert abs(values.mean()) < 4.5 / num**0.5
    assert abs(values.std() - 1) < 4.5 / (2 * num) ** 0.5
    assert abs(stats.skew(values)) < 4.5 * (6 / num) ** 0.5
    assert abs(stats.kurtosis(values)) < 4.5 * (24 / num) ** 0.5
    assert stats.kstest(values, "norm").pvalue > 1e-4


def test_rows_columns_and_seeds_are_uncorrelated() -> None:
    def rows_from(first: int, seed: int = 0) -> npt.NDArray[np.float64]:
        return rows_of(list(range(first, first + 4_096)), seed=seed, init_std=1.0).astype(np.float64)

    here = rows_from(0)
    pairs = {"row": (here[:-1], here[1:]), "column": (here[:, :-1], here[:, 1:]), "half": (here[:, :64], here[:, 64:])}
    pairs |= {f"seed {seed}": (here, rows_from(0, seed)) for seed in (1, 2, 2**32, 2**63)}
    pairs |= {f"{distance} rows on": (here, rows_from(distance)) for distance in (2**20, 2**32, 2**39)}
    for name, (a, b) in pairs.items():
        for x, y in ((a, b), (np.abs(a), np.abs(b))):  # sizes too: a shared sign bit alone would not show in values
            assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 4.5 / a.size**0.5, name
    # Row against row: the cosines of 500 rows are those of independent normals, N(0, 1/dim).
    unit = here[:500] / np.linalg.norm(here[:500], axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(500, 1)]
    assert abs(cosines.std() * 128**0.5 - 1) < 0.02
    assert np.abs(cosines).max() < 6 / 128**0.5
