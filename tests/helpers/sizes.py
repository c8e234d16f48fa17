"""How many rows a run would keep resident, without starting it."""

from __future__ import annotations

from trainer.build import _sampler
from trainer.classes import RunClasses
from trainer.config import TrainConfig
from trainer.run.opening import head_of
from weightserver.torch import RangesOrder, Ranks


def resident_rows(config: TrainConfig, num_images: int) -> int:
    """Of a run whose images are their own classes."""
    order = RangesOrder([num_images], config.sampling.order_seed)
    classes = RunClasses(order, order)
    head = head_of(config, classes, Ranks())
    sampler = _sampler(config, classes, head)
    return head._table.sizes(config.optimization.batch_size, sampler).capacity
