"""The batches of a loader, announced to a head some steps ahead."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from weightserver.torch.sampler import WindowSampler

if TYPE_CHECKING:
    from weightserver.torch.sampled_softmax import SampledSoftmax

AHEAD = 2
"""Steps whose batches are loaded in advance if no sampler knows them."""


class AnnouncedBatches:
    """An iterable over a loader's batches; see `ClassifierHead.announced`."""

    def __init__(
        self, head: SampledSoftmax, loader: Iterable[Any], ids_of: Callable[[Any], Any], batches_per_step: int
    ) -> None:
        self._head = head
        self._loader = loader
        self._ids_of = ids_of
        self._batches_per_step = batches_per_step

    def __len__(self) -> int:
        num_batches = len(self._loader)  # type: ignore[arg-type]
        return num_batches if self._head.sampler_of(self._loader) else self._whole_steps(num_batches)

    def _whole_steps(self, num_batches: int) -> int:
        return num_batches // self._batches_per_step * self._batches_per_step

    def __iter__(self) -> Iterator[Any]:
        self._head.forget_announced(in_progress=True)
        sampler = self._head.sampler_of(self._loader)
        return self._by_loading() if sampler is None else self._by_sampler(sampler)

    def _by_sampler(self, sampler: WindowSampler) -> Iterator[Any]:
        first, parts = self._head.num_steps, sampler.batches_per_step
        steps = range(first, first + len(sampler) // parts)
        try:
            with closing(self._head.announcements(sampler, steps)) as announcements:
                for number, batch in enumerate(self._loader):
                    if number % parts == 0:
                        next(announcements)
                    yield batch
        finally:
            self._head.forget_announced()

    def _by_loading(self) -> Iterator[Any]:
        steps, loaded = self._announced_steps(), deque[list[Any]]()
        try:
            while True:
                while len(loaded) <= AHEAD and (step := next(steps, None)):
                    loaded.append(step)
                if not loaded:
                    return
                yield from loaded.popleft()
        finally:
            self._head.forget_announced()

    def _announced_steps(self) -> Iterator[list[Any]]:
        """The batches of each step, announced."""
        batches = iter(self._loader)
        while len(step := list(itertools.islice(batches, self._batches_per_step))) == self._batches_per_step:
            self._head.announce(*map(self._ids_of, step))
            yield step
        self._head.announce_end()
