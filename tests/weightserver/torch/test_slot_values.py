"""Values of resident rows: the update in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from weightserver import TableSpec
from weightserver.torch import LearningRates
from weightserver.torch.rows import values
from weightserver.torch.rows.values import SlotValues

SPEC = TableSpec(num_rows=40, dim=5, init_std=0.1, seed=0, momentum=0.9, weight_decay=1e-3)
RATES = np.array([0.06, 0.05, 0.03], np.float32)


def updated() -> list[Tensor]:
    """Weight and momentum buffer of 40 slots after three updates of 17 of them, and dense SGD's."""
    generator = torch.Generator().manual_seed(0)
    held = SlotValues(SPEC, LearningRates(SPEC, RATES), SPEC.num_rows, torch.device("cpu"))
    held.weight.normal_(generator=generator)
    slots = np.random.default_rng(0).permutation(SPEC.num_rows)[:17]
    chosen = torch.from_numpy(slots)
    row = torch.nn.Parameter(held.weight[chosen])
    optimizer = torch.optim.SGD([row], momentum=SPEC.momentum, weight_decay=SPEC.weight_decay)
    for step, rate in enumerate(RATES.tolist()):
        row.grad = torch.randn(17, SPEC.dim, generator=generator)
        held.update(slots, chosen, row.grad, step)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    momentum_buffer = optimizer.state[row]["momentum_buffer"]
    return [held.weight, held.momentum_buffer, held.weight[chosen], row.detach(), momentum_buffer]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_parts_change_no_bit_of_an_update(rows: int, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = updated()
    monkeypatch.setattr(values, "_VALUES_OF_PART", rows * SPEC.dim)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    in_parts = updated()
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(at_once, in_parts, strict=True))
    torch.testing.assert_close(in_parts[2], in_parts[3])


def test_an_interrupted_update_changes_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    held = SlotValues(SPEC, LearningRates(SPEC, RATES), SPEC.num_rows, torch.device("cpu"))
    monkeypatch.setattr(values, "_VALUES_OF_PART", SPEC.dim)
    before, slots = held.weight.clone(), np.arange(9)

    def interrupted(work: Callable[[object], object], items: Sequence[object]) -> None:
        work(items[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(values, "in_threads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        held.update(slots, torch.from_numpy(slots), torch.ones(9, SPEC.dim), 0)
    assert torch.equal(held.weight, before)
    assert not held.momentum_buffer.any()
    assert not held.last_step.any()
