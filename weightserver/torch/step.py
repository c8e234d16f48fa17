"""One step of a head: the rows of its classes, the passes of its batches, and the gradients that they leave."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from weightserver.core.arrays import Int64Array
from weightserver.torch.agreement import Agreement, Doing
from weightserver.torch.arguments import first_of
from weightserver.torch.loss import padded
from weightserver.torch.ranks import Ranks
from weightserver.torch.recency import ActiveRows, Visited
from weightserver.torch.rows import RowStore
from weightserver.torch.table import Table
from weightserver.torch.transfer import to_device


@dataclass(frozen=True)
class Announced(ActiveRows):
    """The classes of one step that was announced. Rows are those of this rank."""

    ids: Int64Array  # (A, B) or (A, B, P), the classes of each batch of the step, on all ranks together
    before: Visited
    after: Visited

    def has(self, ids: Int64Array, ranks: Ranks) -> bool:
        """Whether a batch of it has these classes on this rank."""
        return any(np.array_equal(of_part[ranks.share(len(of_part))], ids) for of_part in self.ids)


class Step:
    """A step that was begun, and is in progress until the store has made its update.

    A batch has one backward pass, and one more for each further view of it; a new attempt begins them anew. `number`
    updates precede it, and `attempt` attempts at any step that failed, on every rank as many.
    """

    def __init__(
        self,
        rows: Table,
        announced: Announced,
        *,
        number: int,
        attempt: int,
        is_announced: bool,
        num_padded: int,
    ) -> None:
        assert rows.store is not None
        self.announced = announced
        self.number = number
        self.attempt = attempt
        self.is_announced = is_announced
        self.is_cleared = False
        """Whether it has had no pass since an attempt failed: the batches are given again, or others."""
        labels = to_device(self.announced.labels, rows.ranks.device)
        self.labels = torch.split(labels, self.announced.ids.shape[1])  # A times (B,) or (B, P)
        self.weight: Tensor | None = None  # (K of this rank, D), padded: a leaf that collects the gradients
        self._rows = rows
        self._store: RowStore = rows.store
        self._own_ids = self.announced.ids[:, rows.ranks.share(self.announced.ids.shape[1])]  # (A, b) or (A, b, P)
        self._num_padded = num_padded
        self._forward: set[tuple[int, int]] = set()  # (batch, view) of each forward pass
        self._backward: dict[tuple[int, int], int] = {}  # the same -> number of its backward pass in the process
        self._valid_from = attempt  # losses of earlier attempts are void

    @property
    def is_over(self) -> bool:
        """Whether the store has made its update."""
        return self._store.num_updates > self.number

    @property
    def has_passes(self) -> bool:
        return bool(self._forward or self._backward)

    # ---- forward

    def part_of(self, ids: Int64Array, view: int) -> int:
        """The number of the batch that has these classes on this rank, int64 (b,) or (b, P); of several that have
        them, the first without a forward pass of this view."""
        same = self._batches_of(ids)
        if same:
            return next((part for part in same if (part, view) not in self._forward), same[-1])
        if len({part for part, _ in self._forward}) == len(self._own_ids):
            raise self._has_not_ended(ids)
        raise self._has_others(ids)

    def check_classes(self, batches: list[Int64Array]) -> None:
        """Raises ValueError unless each is a batch of the step, that has had no pass."""
        for ids in batches:
            if not (same := self._batches_of(ids)) and not self._forward:
                raise self._has_others(ids)
            if {part for part, _ in self._forward}.issuperset(same):
                raise self._has_not_ended(ids)

    def _batches_of(self, ids: Int64Array) -> list[int]:
        return [part for part, own in enumerate(self._own_ids) if np.array_equal(own, ids)]

    def _has_others(self, ids: Int64Array) -> ValueError:
        return ValueError(
            f"the classes {first_of(ids)} are not those that were announced for step {self.number} "
            f"({first_of(self._own_ids[0])}): give each batch in the order of its announcement, call step() after the "
            "last batch of a step (skip() if it failed), and announce the batches of one step together"
        )

    def _has_not_ended(self, ids: Int64Array) -> ValueError:
        forgotten = "step()" if self._num_passed == len(self._own_ids) else "backward()"
        return ValueError(
            f"{forgotten} of the batch before was not called: a batch of the classes {first_of(ids)} is given, but "
            f"step {self.number} ({first_of(self._own_ids[0])}) has not ended; if it failed, call skip(), or "
            "zero_grad() and repeat it; to accumulate the gradients of both, announce(first, second)"
        )

    @property
    def _num_passed(self) -> int:
        """Number of batches that had a backward pass."""
        return len({part for part, _ in self._backward})

    @torch.inference_mode(mode=False)
    def active_rows(self) -> Tensor:
        """The rows before the step's update: float32 (K of this rank, D), padded with zeros. Waits for them at the
        first call."""
        if self.weight is None:
            with self._rows.class_in_errors():
                weight = self._store.weights(self.announced.rows, step=self.number)
            self.weight = padded(weight, self._num_padded).requires_grad_()
        return self.weight

    def rows_for(self, part: int, *, view: int) -> Tensor:
        """`active_rows` for the forward pass of a batch. Raises ValueError if another rank does something else, or
        gives another batch or view, or its sampler drew other classes."""
        with Agreement(self._rows.ranks, Doing.PASSES, self.number, self.attempt) as agreement:
            alike = f"in step {self.number}, got {{}} to {{}}: every rank gives the batches and views in the same order"
            agreement.same(f"the ranks give different batches {alike}", part)
            agreement.same(f"the ranks give different views {alike}", view)
            agreement.same(
                f"the ranks announce different classes for step {self.number}: give every rank's sampler the same "
                "arguments, its seed too",
                crc32(self.announced.ids.tobytes()),
            )
            weight = self.active_rows()  # one rank's may be on a server that is away
        self._forward.add((part, view))
        self.is_cleared = False
        of_pass = weight.view_as(weight)
        note = partial(self._note_backward, part, view, self.attempt)
        of_pass.register_hook(note)  # type: ignore[no-untyped-call]
        return of_pass

    def _note_backward(self, part: int, view: int, attempt: int, gradient: Tensor) -> None:
        """Is called before a backward pass reaches the rows, and before it reaches the encoder. Raises ValueError if
        the step has ended, or it is a second pass of the same view, whose gradients would count twice."""
        if attempt < self._valid_from or self.is_over:
            raise ValueError(f"backward() of a loss of step {self.number}, which has ended: call head(...) again")
        this = torch._C._current_graph_task_id()
        if self._backward.get((part, view), this) != this:
            raise ValueError(
                "step() of the batch before was not called, or it is repeated: a second backward pass of the same "
                f"batch would count twice in step {self.number}: call head.zero_grad() before you repeat a batch that "
                "failed, and number further views, head(embeddings, ids, view=1)"
            )
        self._forward.add((part, view))
        self._backward[part, view] = this
        self.is_cleared = False

    # ---- update

    def gradients(self) -> Tensor:
        """The rows' gradients as the backward passes left them: float32 (K of this rank, D). Raises ValueError for a
        batch without a forward pass, or none with a backward pass."""
        if self.weight is None or not self._forward:
            raise ValueError("step() without a forward pass: call head(embeddings, ids) first")
        if (passed := self._num_passed) < len(self._own_ids) and self.weight.grad is not None:
            what = " backward() was not called for another." if len(self._forward) > len(self._backward) else ""
            raise ValueError(
                f"step() after {passed} of the {len(self._own_ids)} batches that were announced for step "
                f"{self.number}: call it after the last one, or skip().{what}"
            )
        if self.weight.grad is None:
            raise ValueError("step() without a backward pass: call loss.backward() first, or skip()")
        return self.weight.grad[: len(self.announced.rows)]

    def bad_class(self, gradients: Tensor) -> int | None:
        """A class whose gradient is infinite or NaN, if there is one."""
        bad = (~gradients.isfinite().all(dim=1)).nonzero()
        return self._rows.class_of(int(self.announced.rows[int(bad[0])])) if len(bad) else None

    def no_gradients(self) -> Tensor:
        """Zeros of the shape of `gradients`."""
        return torch.zeros_like(self.active_rows(), requires_grad=False)[: len(self.announced.rows)]

    def update(self, gradients: Tensor) -> None:
        """Updates the rows, and ends the step."""
        with self._rows.class_in_errors():
            self._store.apply_gradients(self.announced.rows, gradients, step=self.number)

    def clear_gradients(self, attempt: int) -> None:
        """Begins an attempt without gradients and passes; losses that were computed stay valid."""
        self.attempt = attempt
        self._forward.clear()
        self._backward.clear()
        self.is_cleared = True
        if self.weight is not None:
            self.weight.grad = None

    def restart(self, attempt: int) -> None:
        """Begins an attempt as `clear_gradients` does; losses that were computed are void."""
        self.clear_gradients(attempt)
        self._valid_from = attempt
        self.weight = None

    def end(self) -> None:
        """Makes the losses that were computed void: the step was forgotten."""
        self._valid_from = self.attempt + 1
