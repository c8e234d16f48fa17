"""The table of a head: connects to its weight servers, and opens it as new or as it was at a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightserver import LocalCluster, NoTableError, TableSpec, WeightClient
from weightserver.core.arrays import Float32Array
from weightserver.core.sharding import Sharding
from weightserver.torch.opened_rows import OpenedRows
from weightserver.torch.ranks import Ranks
from weightserver.torch.rates import LearningRates
from weightserver.torch.rows import DenseRows, RemoteRows, ResidentRows, RowStore
from weightserver.torch.saved_rows import SavedRows
from weightserver.torch.settings import BLOCK_OF_WINDOWS, Rows, Servers
from weightserver.torch.store_sizes import StoreSizes, share_of_capacity
from weightserver.torch.windows import RangesOrder


@dataclass
class Table:
    """Where a head's rows are stored, and how. All ranks call its methods."""

    spec: TableSpec
    order: RangesOrder
    servers: Servers
    rows: Rows
    run: str
    directory: Path
    """Of the servers that rank 0 starts if no addresses are given."""
    learning_rates: Float32Array
    stack: ExitStack
    """Closes what was opened, also if opening it failed."""
    client: WeightClient | None = None
    """This rank's, once it is connected."""

    def connect(self, ranks: Ranks) -> WeightClient:
        """This rank's client of the servers, which rank 0 starts if no addresses are given.

        Raises:
            ValueError: dense rows, or ranks on several machines without addresses.
        """
        if self.rows.where == "dense":
            raise ValueError("rows='dense' are in this process, without servers: use rows='resident'")
        if self.client is None:
            addresses = ranks.of_first(partial(self._start_servers, ranks))
            self.client = self.stack.enter_context(self.servers.client(addresses))
        return self.client

    def _start_servers(self, ranks: Ranks) -> list[str]:
        if addresses := self.servers.parsed():
            return addresses
        if ranks.local_world_size < ranks.world_size:
            raise ValueError("ranks on several machines need weight servers that all of them reach: give servers")
        return self.stack.enter_context(LocalCluster(self.servers.num_shards, self.directory)).addresses

    def open(
        self,
        sizes: Callable[..., StoreSizes],
        *,
        ranks: Ranks,
        device: torch.device,
        saved: SavedRows | None,
        in_windows: bool,
    ) -> OpenedRows:
        """Opens the table, as it was when `saved` was taken or for a new run.

        Args:
            sizes: those of the store, given the number of images of a step and the table.
            in_windows: whether a window orders the classes, for which a new table's blocks are chosen.

        Raises:
            ValueError: the servers hold the rows of another run, or not the checkpoint `saved`.
            WeightServerError: servers that are unreachable or refuse.
        """
        opened = partial(OpenedRows, order=self.order, ranks=ranks, device=device)
        if self.rows.where == "dense":
            if saved is not None:
                raise ValueError("rows='dense' are in this process alone and cannot be restored: use rows='resident'")
            spec = self._in_blocks(None, in_windows)
            rates = LearningRates(spec, self.learning_rates)
            sharding = Sharding(spec.rows_per_block, ranks.world_size)
            dense = partial(DenseRows, spec, rates, device=device, sharding=sharding, shard=ranks.rank)
            return opened(spec, rates, make_store=lambda _: dense(), sizes=partial(sizes, spec=spec))

        client = self.connect(ranks)
        session = ranks.of_first(partial(self._open_session, client, saved, in_windows))
        if not ranks.is_first:
            client.expect(session["marks"])
            client.open_session(self.run, join=session["epoch"])
        spec, first_step = replace(self.spec, rows_per_block=session["rows_per_block"]), saved.step if saved else 0
        client.extend_schedule(0, self.learning_rates)
        rates = LearningRates(spec, client.learning_rates()[: max(first_step, len(self.learning_rates))])

        def make_store(sizes: StoreSizes) -> RowStore:
            store: RowStore
            if self.rows.where == "remote":
                store = RemoteRows(client, device, value_bytes=spec.value_bytes)
            else:
                store = ResidentRows(
                    client,
                    spec,
                    rates,
                    capacity=share_of_capacity(sizes.capacity, spec, ranks),
                    prefetch_steps=sizes.prefetch_steps,
                    write_back_rows=sizes.write_back_rows // ranks.world_size + 1,
                    device=device,
                )
            self.stack.callback(store.close)
            self.stack.callback(client.close)  # before the store: its threads do not wait for servers that are gone
            return store

        return opened(
            spec,
            rates,
            make_store=make_store,
            sizes=partial(sizes, spec=spec),
            client=client,
            first_step=first_step,
            epoch=session["epoch"],
        )

    def _open_session(self, client: WeightClient, saved: SavedRows | None, in_windows: bool) -> dict[str, Any]:
        """On rank 0: creates the table or rolls it back, and opens and holds a session; what other ranks need."""
        spec, epoch = self._begin(client, in_windows) if saved is None else self._return_to(client, saved)
        return {"rows_per_block": spec.rows_per_block, "epoch": epoch, "marks": client.marks()}

    def _begin(self, client: WeightClient, in_windows: bool) -> tuple[TableSpec, int]:
        """Creates the table of a new run, unless it is there and nothing was written.

        Raises:
            ValueError: the servers hold rows that were written, or, without `take_over`, another run's checkpoint.
            SessionInUseError: without `take_over`, if a run of another process holds the servers.
        """
        found, take_over = None, self.servers.take_over
        with contextlib.suppress(NoTableError):
            found = client.describe()
            if found.clock > 0 or found.rows_stored > 0 or (found.checkpoint_names and not take_over):
                holder = f" ({found.holder})" if found.holder else ""
                other = "other servers" if self.servers.addresses else "another directory"
                raise ValueError(
                    f"the weight servers hold the rows of run {found.run!r} up to step {found.clock}: resume it (a "
                    f"head by load_state_dict() of its state, the trainer by --resume), or use {other}{holder}"
                )
        spec = self._in_blocks(found.spec if found else None, in_windows)
        client.create_table(spec)
        epoch = client.open_session(self.run, hold=True, take_over=take_over)
        for kept in client.checkpoints():  # of a run that was taken over before it wrote a row
            client.release(kept.name)
        return spec, epoch

    def _return_to(self, client: WeightClient, saved: SavedRows) -> tuple[TableSpec, int]:
        """Rolls the table back, and adds rows for classes that were added since."""
        saved.check_held(client)
        held = _enlarged(client, saved.num_rows, self.spec.num_rows)
        spec = self._in_blocks(held, in_windows=False)
        client.create_table(replace(spec, num_rows=held.num_rows))  # which refuses any other
        epoch = client.open_session(self.run, force=True, hold=True, take_over=self.servers.take_over)
        client.rollback(saved.name)  # all servers, whatever they held before
        if held.num_rows < spec.num_rows:
            client.extend_table(spec.num_rows)
        return spec, epoch

    def _in_blocks(self, held: TableSpec | None, in_windows: bool) -> TableSpec:
        """The table with its blocks: as given, as in the servers' table, or for the order of the classes."""
        if self.rows.rows_per_block is not None:
            return self.spec
        if held is not None:
            return replace(self.spec, rows_per_block=held.rows_per_block)
        return replace(self.spec, rows_per_block=BLOCK_OF_WINDOWS) if in_windows else self.spec


def _enlarged(client: WeightClient, *num_rows: int) -> TableSpec:
    """The table, with at least the first of these numbers of rows. If it has more, on some of the servers perhaps since
    an extension was interrupted, with the first that it can have."""
    for number in num_rows:
        with contextlib.suppress(ValueError):
            return client.extend_table(number)
    return client.describe().spec


def float32_rates(learning_rates: Any) -> Float32Array:
    """Learning rates given in advance, float32 [n]; none if None. Raises ValueError for another shape."""
    rates = np.zeros(0, np.float32) if learning_rates is None else np.asarray(learning_rates, np.float32)
    if rates.ndim != 1:
        raise ValueError(f"learning_rates must have shape (n,), one for each step, got {rates.shape}")
    return rates
