"""The batches of a loader, announced to a head some steps ahead."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from weightserver.torch.sampler import WindowSampler
from weightserver.torch.steps import Steps
from weightserver.torch.store_sizes import AHEAD


def first_element(batch: Any) -> Any:
    """The classes of a batch that is a tuple or list and begins with them.

    Raises:
        TypeError: another batch.
    """
    if not isinstance(batch, tuple | list):
        raise TypeError(
            f"a batch is a {type(batch).__name__}, not a tuple or list that begins with the classes: tell announced() "
            "where they are, such as ids_of=lambda batch: batch['ids']"
        )
    return batch[0]


@dataclass(frozen=True, eq=False)
class AnnouncedBatches:
    """An iterable over a loader's batches; see `ClassifierHead.announced`."""

    _open_table: Callable[[], object]
    _steps: Steps
    _loader: Iterable[Any]
    _ids_of: Callable[[Any], Any]
    _batches_per_step: int

    @property
    def sampler(self) -> WindowSampler | None:
        """The head's sampler, if the loader uses it."""
        sampler = self._steps.sampler
        return sampler if getattr(self._loader, "batch_sampler", self) is sampler else None

    def __len__(self) -> int:
        num_batches = len(self._loader)  # type: ignore[arg-type]
        return num_batches if self.sampler else num_batches // self._batches_per_step * self._batches_per_step

    def __iter__(self) -> Iterator[Any]:
        self._open_table()
        self._steps.forget(in_progress=True)
        self._steps.iteration = iteration = object()
        batches = self._by_loading() if self.sampler is None else self._by_sampler(self.sampler)
        return self._while_current(iteration, batches)

    def _while_current(self, iteration: object, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; forgets what they announced in vain, unless their iteration has ended before."""
        try:
            while True:
                if self._steps.iteration is not iteration:
                    raise ValueError(
                        "the iteration over announced(...) has ended, since another one began, or the head was "
                        "closed or loaded a state: begin a new one"
                    )
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                yield batch
        finally:
            if self._steps.iteration is iteration:
                self._steps.forget()

    def _by_sampler(self, sampler: WindowSampler) -> Iterator[Any]:
        first, parts = self._steps.number, sampler.batches_per_step
        announcements = self._steps.announcements(range(first, first + len(sampler) // parts))
        for number, batch in enumerate(self._loader):
            if number % parts == 0:
                next(announcements)
            if number % parts == 0 or self._steps.number <= first + number // parts:  # it was not skipped
                yield batch

    def _by_loading(self) -> Iterator[Any]:
        steps, loaded = self._announced_steps(), deque[list[Any]]()
        for number in itertools.count(self._steps.number):
            while len(loaded) <= AHEAD and (step := next(steps, None)):
                loaded.append(step)
            if not loaded:
                return
            for part, batch in enumerate(loaded.popleft()):
                if part == 0 or self._steps.number <= number:  # it was not skipped
                    yield batch

    def _announced_steps(self) -> Iterator[list[Any]]:
        """The batches of each step, announced."""
        batches = iter(self._loader)
        while len(step := list(itertools.islice(batches, self._batches_per_step))) == self._batches_per_step:
            self._steps.announce(*map(self._ids_of, step))
            yield step
        self._steps.announce_end()
