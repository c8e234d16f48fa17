"""Live clusters answer with the same bits, whether the compiled kernel or NumPy computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.row_model import schedule
from tests.helpers.watching import page
from weightserver import LocalCluster, RowState, TableSpec, WeightClient
from weightserver.core import kernel
from weightserver.core.arrays import Float32Array, Int64Array

NUM_STEPS, EVERY, FUTURE = 360, 9, 90
KEPT_AT, BACK_AT, LARGE_FROM = 13 * EVERY, 26 * EVERY, 36 * EVERY


def answers(client: WeightClient, spec: TableSpec) -> Iterator[bytes]:
    """Of a random history: pushes on time and late, raw writes, fetches, a checkpoint and the return to it."""
    generator = np.random.default_rng(5)

    def some_rows() -> Int64Array:
        return generator.permutation(spec.num_rows)[: generator.choice([1, 30, spec.num_rows])]

    def values(rows: Int64Array, *sizes: float) -> Float32Array:
        return (generator.choice(sizes) * generator.standard_normal((len(rows), spec.dim))).astype(np.float32)

    def bits(state: RowState) -> bytes:
        return b"".join(array.tobytes() for array in vars(state).values())

    client.create_table(spec)
    client.extend_schedule(0, schedule(NUM_STEPS + FUTURE))
    client.open_session("test")
    for now in range(0, NUM_STEPS, EVERY):
        if now == KEPT_AT:
            client.checkpoint("kept", step=now)
        if now == BACK_AT:
            yield bits(client.fetch_state(some_rows(), step=now, checkpoint="kept"))
            client.rollback("kept")
        rows, later = some_rows(), now + 1 + int(generator.integers(FUTURE))
        if generator.random() < 0.3:
            large = 1e11 if now >= LARGE_FROM else 1  # which the kernel leaves to NumPy
            client.write_state(rows, values(rows, 1e-3, large), values(rows, 1e-3, 1), now)
        else:
            late = generator.random() < 0.3
            client.push_gradients(rows, values(rows, 1e-3, 1), step=int(generator.integers(now + 1)) if late else now)
        yield client.fetch(some_rows(), step=later).tobytes()
        yield bits(client.fetch_state(some_rows(), step=later if generator.random() < 0.5 else None))
    yield bits(client.fetch_state(np.arange(spec.num_rows)))


@pytest.mark.guard
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_history_has_the_same_bits(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel._found() is None:
        pytest.skip("this installation has no compiled kernel")
    spec = TableSpec(num_rows=500, dim=9, rows_per_block=7, weight_decay=1e-3, dtype=dtype)
    found = []
    for name in ("numpy", "compiled"):
        monkeypatch.setenv(kernel.VARIABLE, name)
        with LocalCluster(2) as cluster, WeightClient(cluster.addresses) as client:
            assert all(f'kernel="{name}"' in page(address) for address in cluster.metrics_addresses)
            found.append(list(answers(client, spec)))
    differing = [number for number, (one, other) in enumerate(zip(*found, strict=True)) if one != other]
    assert not differing
