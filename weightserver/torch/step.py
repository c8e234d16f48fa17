"""One step of a head: the rows of its classes, the passes of its batches, and the gradients that they leave."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from weightserver.core.arrays import Int64Array
from weightserver.torch.arguments import first_of
from weightserver.torch.beginnings import Beginnings
from weightserver.torch.coming_steps import Coming
from weightserver.torch.loss import padded
from weightserver.torch.opened_rows import OpenedRows
from weightserver.torch.rows import RowStore
from weightserver.torch.transfer import to_device


class Step:
    """A step that was begun and is not finished.

    A batch has one backward pass, and one more for each further view of it; `clear_gradients` begins them anew.

    Args:
        rows: with an open store.
        coming: the classes of the step, and what was recently visited before it.
        number: of finished updates before it.
        is_announced: whether its classes were announced before it began.
        num_padded: number of rows that `weight` has at least.
        init_norm: length of rows that begin at their image's embedding; None if rows begin at random.
    """

    def __init__(
        self,
        rows: OpenedRows,
        coming: Coming,
        *,
        number: int,
        is_announced: bool,
        num_padded: int,
        init_norm: float | None,
    ) -> None:
        assert rows.store is not None
        self.announced = coming.announced
        self.before = coming.before
        self.number = number
        self.is_announced = is_announced
        self.is_cleared = False
        """Whether the gradients were cleared since its last pass: the batches are given again, or others."""
        labels = to_device(self.announced.labels, rows.device)
        self.labels = torch.split(labels, self.announced.ids.shape[1])  # A times (B,) or (B, P)
        self.weight: Tensor | None = None  # (K of this rank, D), padded: a leaf that collects the gradients
        self._rows = rows
        self._store: RowStore = rows.store
        self._num_padded = num_padded
        self._init_norm = init_norm
        self._forward: set[int] = set()  # numbers of the batches that had a forward pass
        self._backward: dict[tuple[int, int], int] = {}  # (batch, view) -> number of its backward pass in the process
        self._attempt = 0  # losses of earlier ones are void
        self._beginnings: Beginnings | None = None

    # ---- forward

    def part_of(self, ids: Int64Array) -> int:
        """The number of the batch that has these classes on this rank, int64 (b,) or (b, P); of several that have
        them, the first without a forward pass."""
        share = self._rows.ranks.share(self.announced.ids.shape[1])
        same = [part for part, of_part in enumerate(self.announced.ids) if np.array_equal(of_part[share], ids)]
        if same:
            return next((part for part in same if part not in self._forward), same[-1])
        if len(self._forward) == self._num_batches:
            raise self._has_not_ended(ids)
        raise self._has_others(ids)

    def check_without_pass(self, ids: Int64Array) -> None:
        """Raises ValueError if the step has had a pass: then a batch of other classes comes too early."""
        if self._forward:
            raise self._has_not_ended(ids)

    def check_classes(self, batches: list[Int64Array]) -> None:
        """Raises ValueError unless the step's batches have these classes on this rank."""
        own = self.announced.ids[:, self._rows.ranks.share(self.announced.ids.shape[1])]
        if len(batches) != len(own) or not all(map(np.array_equal, own, batches)):
            raise self._has_others(batches[0])

    def _has_others(self, ids: Int64Array) -> ValueError:
        return ValueError(
            f"the classes {first_of(ids)} are not those that were announced for step {self.number} ({self._own}): "
            "give each batch in the order of its announcement, call step() after the last batch of a step (skip() if "
            "it failed), and announce the batches of one step together"
        )

    def _has_not_ended(self, ids: Int64Array) -> ValueError:
        forgotten = "step()" if self._num_passed == self._num_batches else "backward()"
        return ValueError(
            f"{forgotten} of the batch before was not called: a batch of the classes {first_of(ids)} is given, but "
            f"step {self.number} ({self._own}) has not ended; if it failed, call skip(), or zero_grad() and repeat it"
        )

    @property
    def _own(self) -> str:
        return first_of(self.announced.ids[0, self._rows.ranks.share(self.announced.ids.shape[1])])

    @property
    def _num_batches(self) -> int:
        return len(self.announced.ids)

    @property
    def _num_passed(self) -> int:
        """Number of batches that had a backward pass."""
        return len({part for part, _ in self._backward})

    @torch.inference_mode(mode=False)
    def active_rows(self) -> Tensor:
        """The rows before the step's update, with those that have begun: float32 (K of this rank, D), padded with
        zeros. Waits for them at the first call."""
        if self.weight is None:
            with self._rows.naming_classes():
                weight = self._store.weights(self.announced.rows, step=self.number)
            self.weight = padded(weight, self._num_padded).requires_grad_()
            if self._init_norm is not None:
                self._beginnings = Beginnings(self._store.fresh, self._init_norm)
        return self.weight if self._beginnings is None else self._beginnings.begun(self.weight)

    def rows_for(self, part: int, embeddings: Tensor, *, view: int, update_rows: bool) -> Tensor:
        """`active_rows` for the forward pass of a batch, whose embeddings (b, D) its fresh classes begin at."""
        weight = self.active_rows()
        self._forward.add(part)
        self.is_cleared = False
        if self._beginnings is not None and self.weight is not None:
            labels = self.announced.labels.reshape(self.announced.ids.shape)[part]
            self._beginnings.add(embeddings.detach(), self.weight, labels, self._rows.ranks)
            weight = self._beginnings.begun(self.weight)
        if not update_rows:
            self._backward.setdefault((part, view), -1)
            return weight.detach()
        of_pass = weight.view_as(weight)
        note = partial(self._note_backward, part, view, self._attempt)
        of_pass.register_hook(note)  # type: ignore[no-untyped-call]
        return of_pass

    def _note_backward(self, part: int, view: int, attempt: int, gradient: Tensor) -> None:
        """Is called before a backward pass reaches the rows, and before it reaches the encoder.

        Raises:
            ValueError: the step has ended, or it is a second pass of the same view, whose gradients would count twice.
        """
        if attempt != self._attempt or self._store.num_updates > self.number:
            raise ValueError(f"backward() of a loss of step {self.number}, which has ended: call head(...) again")
        this = torch._C._current_graph_task_id()
        if self._backward.get((part, view), -1) not in (-1, this):
            raise ValueError(
                "step() of the batch before was not called, or it is repeated: a second backward pass of the same "
                f"batch would count twice in step {self.number}: call head.zero_grad() before you repeat a batch that "
                "failed, and number further views, head(embeddings, ids, view=1)"
            )
        self._forward.add(part)
        self._backward[part, view] = this
        self.is_cleared = False

    # ---- update

    def gradients(self) -> Tensor:
        """The rows' gradients as the backward passes left them: float32 (K of this rank, D).

        Raises:
            ValueError: a batch without a forward pass, or no backward pass.
        """
        if self.weight is None:
            raise ValueError("step() without a forward pass: call head(embeddings, ids) first")
        if self.weight.grad is None:
            raise ValueError("step() without a backward pass: call loss.backward() first")
        if (passed := self._num_passed) < self._num_batches:
            what = "" if len(self._forward) == passed else " backward() was not called for another."
            raise ValueError(
                f"step() after {passed} of the {self._num_batches} batches that were announced for step "
                f"{self.number}: call it after the last one, or skip().{what}"
            )
        return self.weight.grad[: len(self.announced.rows)]

    def require_finite(self, gradients: Tensor) -> None:
        """Raises ValueError if a gradient is infinite or NaN; on a GPU it would have to wait to find out."""
        if gradients.device.type != "cpu" or math.isfinite(gradients.sum()):
            return
        if len(bad := (~gradients.isfinite().all(dim=1)).nonzero()):
            named = self._rows.class_of(int(self.announced.rows[int(bad[0])]))
            raise ValueError(
                f"the gradient of class {named} is infinite or NaN in step {self.number}, nothing was updated: "
                "skip() the step, or lower the learning rate"
            )

    def no_gradients(self) -> Tensor:
        """Zeros of the shape of `gradients`."""
        return torch.zeros_like(self.active_rows(), requires_grad=False)[: len(self.announced.rows)]

    def update(self, gradients: Tensor) -> None:
        """Updates the rows, those that have begun from where they begin."""
        begun = None
        if self._beginnings is not None and self.weight is not None:
            begun = self._beginnings.of(self.weight.detach())
        with self._rows.naming_classes():
            self._store.apply_gradients(self.announced.rows, gradients, step=self.number, begun=begun)

    def clear_gradients(self) -> None:
        """Forgets the gradients so far, and that there were passes; losses that were computed stay valid."""
        self._forward.clear()
        self._backward.clear()
        self.is_cleared = True
        if self.weight is not None:
            self.weight.grad = None

    def restart(self) -> None:
        """Returns the step to its beginning; losses that were computed are void."""
        self.end()
        self.clear_gradients()
        self.weight = self._beginnings = None

    def end(self) -> None:
        """Makes the losses that were computed void."""
        self._attempt += 1
