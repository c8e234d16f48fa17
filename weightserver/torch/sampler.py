"""Batches of images in the order of the sliding window (Section 2.2 of the paper), for a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from torch.utils.data import Sampler

from weightserver.core.arrays import Int64Array, checked_integer
from weightserver.torch.class_order import ClassOrder
from weightserver.torch.ranks import Ranks
from weightserver.torch.windows import RangesOrder, VisitSchedule, dealt_to_nodes


class WindowSampler(Sampler[list[int]]):
    """A `batch_sampler` that visits the W images in a window in random order, then moves the window by S, and so on.

    Which images a step visits is a function of the seeds and the step, so the step is all that a resumed run needs.
    Every iteration begins at `next_step` and ends after about one visit for each image. On several ranks each yields
    its share of every batch. Unless images share classes, each of several machines is dealt neighbouring images.

    Args:
        order: number of images, or their order; a number means the random order of seed `order_seed`. Images that share
            classes have a `ClassOrder`, in which the window slides over neighbouring classes.
        window_size: W, number of images in the window; all images by default.
        window_stride: S; W by default. Without both, every image is visited once in each epoch.
        batch_size: B, images of a batch on all ranks together.
        batches_per_step: number of batches whose gradients are accumulated in one step.
        seed: of the order of the visits within windows.
        next_step: returns the number of the first step of an iteration; 0 by default.
        ranks: this process's rank among those that share a batch.

    Raises:
        TypeError: a number that is no integer.
        ValueError: unless 1 ≤ S ≤ W ≤ N and B ≥ the number of ranks.
    """

    def __init__(
        self,
        order: int | RangesOrder | ClassOrder,
        *,
        batch_size: int,
        window_size: int | None = None,
        window_stride: int | None = None,
        batches_per_step: int = 1,
        seed: int = 0,
        order_seed: int = 0,
        next_step: Callable[[], int] = lambda: 0,
        ranks: Ranks | None = None,
    ) -> None:
        if not isinstance(order, RangesOrder | ClassOrder):
            order = RangesOrder([checked_integer(order, "order")], checked_integer(order_seed, "order_seed"))
        self.order = order
        num_images = self.order.num_rows
        window_size = num_images if window_size is None else checked_integer(window_size, "window_size")
        batch_size = checked_integer(batch_size, "batch_size")
        batches_per_step = checked_integer(batches_per_step, "batches_per_step")
        self.schedule = VisitSchedule(
            num_rows=num_images,
            window_size=window_size,
            window_stride=window_size if window_stride is None else checked_integer(window_stride, "window_stride"),
            seed=checked_integer(seed, "seed"),
        )
        self.ranks = ranks or Ranks()
        if batch_size < self.ranks.world_size:
            raise ValueError(
                f"batch_size must be at least 1 on each of {self.ranks.world_size} ranks, got {batch_size}"
            )
        if batches_per_step < 1:
            raise ValueError(f"batches_per_step must be at least 1, got {batches_per_step}")
        self.batch_size = batch_size
        self.batches_per_step = batches_per_step
        self._next_step = next_step

    @property
    def step_size(self) -> int:
        """Number of visits of a step, on all ranks together."""
        return self.batch_size * self.batches_per_step

    def visits(self, step: int, part: int) -> Int64Array:
        """The numbers of this rank's visits in one of a step's batches: int64 (b,)."""
        return self._batch(step, part)[0][self.ranks.share(self.batch_size)]

    def images(self, step: int, part: int) -> Int64Array:
        """The images of these visits: int64 (b,)."""
        return self.order.images(self._batch(step, part)[1][self.ranks.share(self.batch_size)])

    def _batch(self, step: int, part: int) -> tuple[Int64Array, Int64Array]:
        """The visits of a batch, in the order of the ranks that they are dealt to, and their positions: int64 (B,)."""
        start = step * self.step_size + part * self.batch_size
        numbers, positions = start + np.arange(self.batch_size), self.schedule.visits(start, start + self.batch_size)
        if (num_nodes := self.ranks.num_nodes) == 1 or isinstance(self.order, ClassOrder):
            return numbers, positions
        order = dealt_to_nodes(positions, num_nodes, window_size=self.schedule.window_size)
        return numbers[order], positions[order]

    def rows(self, start: int, stop: int) -> Int64Array:
        """The rows of the classes of visits start … stop−1, which may be negative: int64 [stop − start]."""
        return self._rows(self.schedule.visits(start, stop))

    def _rows(self, positions: Int64Array) -> Int64Array:
        return self.order.rows(positions) if isinstance(self.order, ClassOrder) else positions

    def rows_of_step(self, step: int) -> Int64Array:
        """The rows of the classes of a whole step's images, in the order of ranks: int64 (batches_per_step · B,)."""
        return self._rows(np.concatenate([self._batch(step, part)[1] for part in range(self.batches_per_step)]))

    def classes_of_step(self, step: int) -> Int64Array:
        """These classes: int64 (batches_per_step · B,). Without a `ClassOrder` each image is its own class."""
        rows = self.rows_of_step(step)
        return self.order.class_of_row(rows) if isinstance(self.order, ClassOrder) else self.order.images(rows)

    def __len__(self) -> int:
        """Number of batches of an iteration, a multiple of `batches_per_step`."""
        return max(1, self.order.num_rows // self.step_size) * self.batches_per_step

    def __iter__(self) -> Iterator[list[int]]:
        first = self._next_step()
        for batch in range(len(self)):
            step, part = divmod(batch, self.batches_per_step)
            yield self.images(first + step, part).tolist()
