"""Steps that are announced further ahead than rows are requested, and rows that barely have room: as with dense SGD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weightserver.torch import ClassifierHead

NUM_CLASSES, DIM, BATCH, ACTIVE, STEPS = 400, 8, 8, 32, 60


def trained(ahead: int, **settings: Any) -> tuple[list[float], torch.Tensor]:
    """The losses, and all rows after the last step; `ahead` steps are announced before the one in progress."""
    numbers = np.random.default_rng(0)
    ids = [numbers.choice(NUM_CLASSES, BATCH, replace=False) for _ in range(STEPS)]
    embeddings = torch.randn(STEPS, BATCH, DIM, generator=torch.Generator().manual_seed(0))
    losses = []
    with ClassifierHead(NUM_CLASSES, DIM, num_negatives=ACTIVE, **settings) as head:
        for announced in ids[:ahead]:
            head.announce(announced)
        for step in range(STEPS):
            if step + ahead < STEPS:
                head.announce(ids[step + ahead])
            loss = head(embeddings[step], ids[step])
            loss.backward()
            head.step(0.5)
            losses.append(loss.item())
        return losses, head.rows(np.arange(NUM_CLASSES))


@pytest.mark.parametrize(
    ("ahead", "settings"),
    [*((ahead, {}) for ahead in (1, 4, 9, 20)), *((1, {"capacity": capacity}) for capacity in (32, 36, 39, 40, 48))],
)
def test_rows_are_requested_in_the_order_of_their_steps(ahead: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """A store fetches them in it: a later step's rows were taken for those of the step in progress."""
    expected, rows = trained(ahead, rows="dense")
    losses, found = trained(ahead, rows="resident", directory=tmp_path, **settings)
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-4)
