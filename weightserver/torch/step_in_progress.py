"""The step of a head that was begun and is not finished."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from weightserver.core.arrays import Int64Array
from weightserver.torch.arguments import first_of
from weightserver.torch.beginnings import Beginnings
from weightserver.torch.coming_steps import Announced, Visited
from weightserver.torch.loss import padded
from weightserver.torch.opened_rows import OpenedRows
from weightserver.torch.rows import RowStore
from weightserver.torch.transfer import to_device


class StepInProgress:
    """The active rows of a step, the forward passes of its batches, and the gradients that they left.

    Args:
        rows: with an open store.
        announced: the classes of the step.
        before: what was recently visited before it.
        number: of finished updates before it.
        num_padded: number of rows that `weight` has at least.
        init_norm: length of rows that begin at their image's embedding; None if rows begin at random.
    """

    def __init__(
        self,
        rows: OpenedRows,
        announced: Announced,
        before: Visited,
        *,
        number: int,
        num_padded: int,
        init_norm: float | None,
    ) -> None:
        assert rows.store is not None
        self.announced = announced
        self.before = before
        labels = to_device(announced.labels, rows.device)
        self.labels = torch.split(labels, announced.ids.shape[1])  # A times (B,) or (B, P)
        self.weight: Tensor | None = None  # (K of this rank, D), padded: a leaf that collects the gradients
        self._rows = rows
        self._store: RowStore = rows.store
        self._number = number
        self._num_padded = num_padded
        self._init_norm = init_norm
        self._passed: set[int] = set()  # numbers of the batches that had a forward pass
        self._beginnings: Beginnings | None = None

    # ---- forward

    def part_of(self, ids: Int64Array) -> int:
        """The number of the batch that has these classes on this rank, int64 (b,) or (b, P); of several that have
        them, the first without a forward pass."""
        of_all_ranks = self.announced.ids
        share = self._rows.ranks.share(of_all_ranks.shape[1])
        same = [part for part, of_part in enumerate(of_all_ranks) if np.array_equal(of_part[share], ids)]
        if same:
            return next((part for part in same if part not in self._passed), same[-1])
        raise ValueError(
            f"the classes {first_of(ids)} are not those that were announced for step {self._number} "
            f"({first_of(of_all_ranks[0, share])}): give each batch in the order of its announcement, call step() "
            "after the last batch of a step (skip() if it failed), and announce the batches of one step together"
        )

    def active_rows(self) -> Tensor:
        """The rows before the step's update, with those that have begun: float32 (K of this rank, D), padded with
        zeros. Waits for them at the first call."""
        if self.weight is None:
            with self._rows.naming_classes():
                weight = self._store.weights(self.announced.rows, step=self._number)
            self.weight = padded(weight, self._num_padded).requires_grad_()
            if self._init_norm is not None:
                self._beginnings = Beginnings(self._store.fresh, self._init_norm)
        return self.weight if self._beginnings is None else self._beginnings.begun(self.weight)

    def rows_for(self, part: int, embeddings: Tensor) -> Tensor:
        """`active_rows` for the forward pass of a batch, whose embeddings (b, D) its fresh classes begin at."""
        weight = self.active_rows()
        self._passed.add(part)
        if self._beginnings is None or self.weight is None:
            return weight
        labels = self.announced.labels.reshape(self.announced.ids.shape)[part]
        self._beginnings.add(embeddings.detach(), self.weight, labels, self._rows.ranks)
        return self._beginnings.begun(self.weight)

    # ---- update

    def gradients(self, scale: float) -> Tensor:
        """The rows' gradients divided by the loss's scale: float32 (K of this rank, D); zeros if they overflowed.

        Raises:
            ValueError: a batch without a forward pass, no backward pass, or (without a scale, on a CPU) a gradient that
                is infinite or NaN.
        """
        if self.weight is None:
            raise ValueError("step() without a forward pass: call head(embeddings, ids) first")
        if self.weight.grad is None:
            raise ValueError("step() without a backward pass: call loss.backward() first")
        if len(self._passed) < len(self.announced.ids):
            raise ValueError(
                f"step() after {len(self._passed)} of the {len(self.announced.ids)} batches that were announced for "
                f"step {self._number}: call it after the last one, or skip()"
            )
        gradients = self.weight.grad[: len(self.announced.rows)]
        if scale == 1:
            self._require_finite(gradients)
            return gradients
        return self._unscaled(gradients, scale)

    def _require_finite(self, gradients: Tensor) -> None:
        """Raises ValueError if a gradient is infinite or NaN; on a GPU it would have to wait to find out."""
        if gradients.device.type != "cpu" or math.isfinite(gradients.sum()):
            return
        if len(bad := (~gradients.isfinite().all(dim=1)).nonzero()):
            named = self._rows.class_of(int(self.announced.rows[int(bad[0])]))
            raise ValueError(
                f"the gradient of class {named} is infinite or NaN in step {self._number}, nothing was updated: "
                "skip() the step, or lower the learning rate"
            )

    def _unscaled(self, gradients: Tensor, scale: float) -> Tensor:
        """Gradients divided by a scale; zeros on all ranks if those of one are infinite or NaN."""
        overflowed = not bool(gradients.isfinite().all())
        (overflowed_somewhere,) = self._rows.ranks.max_over_ranks([overflowed])
        return torch.zeros_like(gradients) if overflowed_somewhere else gradients / scale

    def no_gradients(self) -> Tensor:
        """Zeros of the shape of `gradients`."""
        return torch.zeros_like(self.active_rows(), requires_grad=False)[: len(self.announced.rows)]

    def update(self, gradients: Tensor) -> None:
        """Updates the rows, those that have begun from where they begin."""
        if self._beginnings is not None and self.weight is not None:
            self._store.begin(*self._beginnings.of(self.weight.detach()))
        with self._rows.naming_classes():
            self._store.apply_gradients(self.announced.rows, gradients, step=self._number)
