"""The rows of a head after its table was opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from weightserver import Checkpoint, TableSpec, WeightClient, WeightServerError
from weightserver.core.arrays import Int64Array
from weightserver.core.errors import RowError
from weightserver.torch.ranks import Ranks
from weightserver.torch.rates import LearningRates
from weightserver.torch.rows import RowStore
from weightserver.torch.saved_rows import SavedRows
from weightserver.torch.store_sizes import StoreSizes, share_of_capacity
from weightserver.torch.transfer import to_device
from weightserver.torch.windows import RangesOrder


class OpenedRows:
    """The rows of an open table, of which this rank holds a share; all ranks call `read` and `checkpoint`.

    Args:
        spec: of the table.
        rates: the learning rates so far.
        order: the row of each class.
        ranks: those that share the rows.
        device: where the rows of a step are.
        make_store: makes the store of this rank's share, once.
        sizes: those of the store, given the number of images of a step.
        client: of the servers; None for dense rows.
        first_step: number of updates that the rows have.
        epoch: of the session; 0 for dense rows.
    """

    def __init__(
        self,
        spec: TableSpec,
        rates: LearningRates,
        *,
        order: RangesOrder,
        ranks: Ranks,
        device: torch.device,
        make_store: Callable[[StoreSizes], RowStore],
        sizes: Callable[[int], StoreSizes],
        client: WeightClient | None = None,
        first_step: int = 0,
        epoch: int = 0,
    ) -> None:
        self.spec = spec
        self.rates = rates
        self.ranks = ranks
        self.device = device
        self.client = client
        self.first_step = first_step
        self.epoch = epoch
        self.store: RowStore | None = None
        self._order = order
        self._make_store = make_store
        self._sizes = sizes
        self._largest_step = 0  # images of a step that the store is large enough for

    def tell(self, step: int, learning_rate: float) -> None:
        """See `LearningRates.tell`; the client sends it with the rows' updates."""
        self.rates.tell(step, learning_rate)
        if self.client is not None:
            self.client.extend_schedule(step, [self.rates.of_step(step)])

    @torch.inference_mode(mode=False)
    def open_store(self, step_size: int) -> RowStore:
        """The store, for steps of up to `step_size` images; made at the first use, larger for larger steps."""
        if self.store is None:
            self.store = self._make_store(self._sizes(step_size))
        elif step_size > self._largest_step:
            self.store.reserve(share_of_capacity(self._sizes(step_size).capacity, self.spec, self.ranks))
        self._largest_step = max(self._largest_step, step_size)
        return self.store

    def class_of(self, row: int) -> int:
        """The class whose row this is."""
        return int(self._order.images(np.array([row]))[0])

    @contextmanager
    def naming_classes(self) -> Iterator[None]:
        """Adds the class to an error that names a row."""
        try:
            yield
        except (WeightServerError, RowError) as error:
            if (row := error.row) is None or row >= self.spec.num_rows:
                raise
            raise type(error)(f"{error} (row {row} is class {self.class_of(row)})", row=row) from error

    def flush(self) -> None:
        """Returns once this rank's updates are durable on the servers; dense rows are not stored."""
        if self.store is not None:
            with self.naming_classes():
                self.store.flush()

    def read(self, classes: Int64Array, *, step: int) -> Tensor:
        """The rows of classes (n,) before update `step`: float32 (n, D), on the CPU. Makes all updates durable."""
        distinct, inverse = np.unique(self._order.rows(classes), return_inverse=True)
        self._make_durable()
        if self.client is None:
            if self.ranks.world_size > 1:
                raise ValueError("rows='dense' are spread over the ranks: use rows='resident'")
            state = self.open_store(1).read_state(distinct, step=step)
        else:
            state = self.client.fetch_state(distinct, step=step)
        self.ranks.barrier()  # before it no rank writes rows of later steps, or stops the servers
        return torch.from_numpy(state.weight[inverse])

    def peek(self, rows: Int64Array, *, step: int) -> Tensor:
        """Rows of this rank's share, int64 (n,), before update `step`: float32 (n, D), on the device. Changes nothing,
        not even what is durable, and makes no store for rows that are on the servers alone."""
        if self.client is not None and self.store is None:
            return to_device(self.client.fetch(rows, step=step), self.device)
        return self.open_store(1).peek(rows, step=step)

    def checkpoint(self, name: str | None, *, step: int) -> tuple[Checkpoint, SavedRows]:
        """Keeps the rows as they are before update `step` on the servers; also returns what identifies them.

        Raises:
            ValueError: dense rows.
            InvalidRequestError: the name was used for another state.
        """
        if (client := self.client) is None:
            raise ValueError("rows='dense' leave no checkpoints: use rows='resident'")
        name = f"step-{step:012d}" if name is None else name
        self._make_durable()
        if self.ranks.is_first:
            client.checkpoint(name, step=step)
        self.ranks.barrier()  # before it no rank writes rows of later steps
        (kept,) = (known for known in client.checkpoints() if known.name == name)
        saved = SavedRows.of(kept, client.table_identity(), self._order)
        self.ranks.barrier()  # before it rank 0 does not stop the servers
        return kept, saved

    def _make_durable(self) -> None:
        """Returns once the updates of all ranks are durable."""
        self.flush()
        self.ranks.barrier()
