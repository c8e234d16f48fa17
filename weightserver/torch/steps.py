"""The steps of a head, from their announcement to their end: those to come, and the one in progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightserver.common.tracing import CLIENT, spans
from weightserver.core.arrays import Int64Array
from weightserver.torch.agreement import Agreement, Doing, ids_of_all_ranks
from weightserver.torch.arguments import checked_ids
from weightserver.torch.loss import padded_rows
from weightserver.torch.negatives import NegativeSampler
from weightserver.torch.recency import Visited, visited_before
from weightserver.torch.rows import RowStore
from weightserver.torch.rows.slots import NoRoomError
from weightserver.torch.sampler import WindowSampler
from weightserver.torch.step import Announced, Step
from weightserver.torch.table import Table
from weightserver.torch.windows import RangesOrder


class Steps:
    """The queue of announced steps, the one in progress, and the number of those that ended.

    Args:
        table: is open when a step is announced or begun.
    """

    def __init__(self, table: Table, negatives: NegativeSampler, order: RangesOrder) -> None:
        self.sampler: WindowSampler | None = None
        """The one whose steps may be announced, if any."""
        self.iteration: object = None
        """The iteration over announced batches that has not ended."""
        self._table = table
        self._negatives = negatives
        self._order = order
        self._first_step = 0  # number of updates when the rows were opened, or returned to a state
        self._coming: deque[Announced] = deque()  # announced, and not begun
        self._last = Visited()  # what is recent after the last one of them
        self._begun: Step | None = None
        self._attempt = 0  # number of those at a step that failed
        self._requested = -1  # the last step whose rows were requested, as were those of all before it
        self._announced_in_vain = False  # the store may hold rows ready for steps that were forgotten

    @property
    def number(self) -> int:
        """Number of finished updates: the store's, since it makes them."""
        store = self._table.store
        return self._first_step if store is None else max(self._first_step, store.num_updates)

    @property
    def current(self) -> Step | None:
        """The step in progress."""
        return self._begun if self._begun is not None and self._begun.number == self.number else None

    @property
    def visited(self) -> Visited:
        """What was recently visited before the next update: rows (≤ K,) and their last visits."""
        following = [self.current.announced] if self.current else list(self._coming)
        return following[0].before if following else self._last

    def reset(self, number: int | None = None, recent: Visited | None = None) -> None:
        """Forgets all steps and ends the iteration; the next one is `number`, after which these rows are recent."""
        self._forget_coming(recent)
        self._first_step = self.number if number is None else number
        self._requested = self._first_step - 1
        self._begun = self.iteration = None

    def _forget_coming(self, recent: Visited | None = None) -> None:
        """Forgets the queue; what is recent then is `recent`, or what was before it."""
        if recent is not None or self._coming:
            self._last = recent or self._coming[0].before
        self._coming.clear()

    def _open_store(self, step_size: int) -> RowStore:
        """The store; makes it for steps of `step_size` images at the first use."""
        store = self._table.open_store(step_size, self.sampler)
        if self._announced_in_vain:
            in_progress = self.current is not None and self.current.weight is not None
            store.forget_announced(in_progress=in_progress)
            self._requested, self._announced_in_vain = self.number - 1, False
        return store

    # ---- announced steps

    def announce(self, *batches: Any) -> None:
        """See `ClassifierHead.announce`."""
        if not batches:
            raise ValueError("a step needs at least one batch: call announce(ids)")
        checked = [checked_ids(batch, self._table.spec.num_rows) for batch in batches]
        ids = ids_of_all_ranks(checked, self._table.ranks, step=self._next_number, attempt=self._attempt)  # (A, B[, P])
        self._negatives.check(ids.size)
        try:
            self._add(ids, self._drawn_by(ids))
        except BaseException:
            self._attempt += 1  # other ranks may have announced it, and count theirs when they fail at it
            raise

    @property
    def _next_number(self) -> int:
        """Number of the next step that was not announced."""
        return self.number + len(self._coming) + (self.current is not None)

    def _drawn_by(self, ids: Int64Array) -> WindowSampler | None:
        """The sampler if it draws these classes of all ranks, (A, B[, P]), for the next step that was not announced."""
        if self.sampler is None:
            return None
        its_own = self.sampler.classes_of_step(self._next_number)
        return self.sampler if np.array_equal(its_own, ids.reshape(-1, *ids.shape[2:])) else None

    def _add(self, ids: Int64Array, sampler: WindowSampler | None) -> None:
        """Adds a step with these classes of all ranks, which the sampler has drawn if one is given."""
        store, step = self._open_store(ids.size), self._next_number
        coming = self._classes_of(step, ids, sampler)
        self._coming.append(coming)
        try:
            self._request(store)
        except BaseException:
            self._coming.pop()
            self._announced_in_vain = True
            raise
        self._last = coming.after

    def _classes_of(self, step: int, ids: Int64Array, sampler: WindowSampler | None) -> Announced:
        """The step after the queue: a function of its ids, int64 (A, B), or (A, B, P) with -1 for none, its number, and
        what was recently visited before; if a sampler begins to draw, of what it would have drawn."""
        negatives, owners, visited = self._negatives, self._table.owners, self._last
        if sampler is None:
            rows = visits = self._order.rows(ids[ids >= 0])
        else:
            rows, size = sampler.rows_of_step(step), sampler.step_size
            visits = sampler.rows(step * size, (step + 1) * size)  # the same in their order, whoever makes them
            if visited.drawn_by is not sampler:
                visited = self._past(sampler, step)
        recent = None
        if negatives.num_recent and not (sampler is not None and negatives.takes_all):
            recent = visited.followed_by(visits, num_active=negatives.num_recent, owners=owners)
        active = negatives.active(step, rows, recent, owners)
        flat = ids.reshape(-1, *ids.shape[2:])
        labels = np.full(flat.shape, -1)
        labels[flat >= 0] = active.labels
        return Announced(active.rows, labels, ids, self._last, replace(recent or visited, drawn_by=sampler))

    def _past(self, sampler: WindowSampler, step: int) -> Visited:
        """What was recently visited before a step if the sampler drew all earlier ones."""
        if self._negatives.takes_all or not (num_recent := self._negatives.num_recent):
            return Visited()
        return visited_before(sampler.rows, step * sampler.step_size, num_active=num_recent)

    def _request(self, store: RowStore) -> None:
        """Requests the rows of the coming steps in their order, of as many as the store has room for. A step whose rows
        were not requested does so when it begins."""
        for step, coming in enumerate(self._coming, self.number + (self.current is not None)):
            if step - self.number > store.prefetch_steps:
                return
            if step > self._requested:
                try:
                    with self._table.class_in_errors():
                        store.prefetch(coming.rows, step=step)
                except NoRoomError:
                    return
                self._requested = step

    def announce_end(self) -> None:
        """Tells the other ranks, which all do so, that this one announces no more steps of its loader. Raises
        ValueError if one announces a step."""
        with Agreement(self._table.ranks, Doing.HAS_NONE, self._next_number, self._attempt):
            pass

    def forget(self, *, in_progress: bool = False) -> None:
        """See `ClassifierHead.forget_announced`."""
        current = self.current if in_progress else None
        self._forget_coming(current.announced.before if current else None)
        if current is not None:
            current.end()
            self._begun = None
        self._announced_in_vain = True

    def announcements(self, steps: range) -> Iterator[Announced]:
        """See `ClassifierHead.announcements`."""
        assert self.sampler is not None
        self._negatives.check(self.sampler.step_size)
        ahead = self._open_store(self.sampler.step_size).prefetch_steps
        for step in steps:
            while self._next_number in steps[: step + 1 + ahead - steps.start]:
                ids = self.sampler.classes_of_step(self._next_number)
                self._add(ids.reshape(self.sampler.batches_per_step, -1), self.sampler)
            yield self._coming[0]

    # ---- the step in progress

    def _forget_cleared(self, ids: Int64Array, *, anew: bool) -> None:
        """Forgets a step that was not announced and has failed, if these classes may be given instead: any, or those
        that were announced after it."""
        current = self.current
        if current is None or current.is_announced or not (current.is_cleared or (anew and not current.has_passes)):
            return
        after = list(self._coming)
        if not after or after[0].has(ids, self._table.ranks):
            self.forget(in_progress=True)
            for other in after:
                self._add(other.ids, self._drawn_by(other.ids))

    @torch.inference_mode(mode=False)  # its tensors are used in training also if evaluation begins the step
    def begin(self, *batches: Int64Array, anew: bool = False) -> Step:
        """The step in progress, `anew` only if it has had a pass; starts the next one that was announced, or one of
        these classes."""
        if batches:
            self._forget_cleared(batches[0], anew=anew)
        if self.current is None:
            is_announced, before = bool(self._coming), self.visited
            if not (is_announced or batches):
                raise ValueError("no step was announced: call head(embeddings, ids), or announce(ids)")
            try:
                if not is_announced:
                    self.announce(*batches)
                step = self._next_step(is_announced)
                self._begun, _ = step, self._coming.popleft()
            except BaseException:
                if not is_announced:
                    self._forget_coming(before)
                    self._announced_in_vain = True
                raise
        assert self._begun is not None
        return self._begun

    def _next_step(self, is_announced: bool) -> Step:
        table, num_padded = self._table, 0
        if table.ranks.device.type == "cuda":  # where shapes should be the same in each step
            num_padded = padded_rows(self._negatives.num_active, table.owners.surplus, table.ranks)
        return Step(
            table,
            self._coming[0],
            number=self.number,
            attempt=self._attempt,
            is_announced=is_announced,
            num_padded=num_padded,
        )

    def abort(self, number: int) -> None:
        """Returns a step to its beginning if it is in progress; losses that were computed are void."""
        if self.current is not None and self.number == number:
            self._attempt += 1
            self.current.restart(self._attempt)

    def clear_gradients(self) -> None:
        """Drops the gradients of the step in progress, if any; losses that were computed stay valid."""
        if self.current is not None:
            self._attempt += 1
            self.current.clear_gradients(self._attempt)

    @property
    def attempt(self) -> tuple[int, int]:
        """The number of the next update, and of the attempts at a step that failed."""
        return self.number, self._attempt

    def finish(self, step: Step, gradients: Tensor) -> None:
        """Updates the rows by the step in progress, which ends it: the store then has its number."""
        step.update(gradients)
        self._begun = None
        if traced := spans(CLIENT):
            traced.step_ended(step.number)
