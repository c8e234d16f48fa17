"""Opens the table of a head: its weight servers, its session, and the store of a rank's share of the rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

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
from weightserver.torch.shared_session import SharedSession, share_session
from weightserver.torch.store_sizes import StoreSizes, share_of_capacity
from weightserver.torch.windows import RangesOrder


@dataclass(frozen=True)
class ServedTable:
    """Where a head's rows are stored, and how."""

    spec: TableSpec
    servers: Sequence[str]
    """Addresses; empty for shards of its own in `directory`."""
    run: str
    directory: Path
    num_shards: int
    rows: Literal["resident", "remote", "dense"]
    learning_rates: Float32Array
    take_over: bool = False
    """Whether to end a live run of another name that holds the servers."""
    client_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rows not in ("resident", "remote", "dense"):
            raise ValueError(f"rows must be 'resident', 'remote' or 'dense', got {self.rows!r}")
        if self.rows != "dense":
            return
        if self.spec.correction == "paper":
            raise ValueError("rows='dense' leave no gap to correct: use correction=True, or rows='resident'")
        if self.spec.dtype != "float32":
            raise ValueError(f"rows='dense' are float32, not {self.spec.dtype}: omit dtype, or use rows='resident'")
        if self.servers:
            raise ValueError("rows='dense' keeps the rows in this process: omit servers, or use rows='resident'")

    def open(
        self,
        order: RangesOrder,
        sizes: Callable[[int], StoreSizes],
        *,
        ranks: Ranks,
        device: torch.device,
        saved: SavedRows | None,
        stack: ExitStack,
    ) -> OpenedRows:
        """Opens the table, as it was when `saved` was taken or for a new run; `stack` closes what was opened, also if
        opening it failed. The other arguments are those of `OpenedRows`.

        Raises:
            ValueError: the servers hold the rows of another run, or not the checkpoint `saved`.
            WeightServerError: servers that are unreachable or refuse.
        """
        opened = partial(OpenedRows, self.spec, order, ranks=ranks, device=device, sizes=sizes)
        if self.rows == "dense":
            if saved is not None:
                raise ValueError("rows='dense' are in this process alone and cannot be restored: use rows='resident'")
            rates = LearningRates(self.spec, self.learning_rates)
            sharding = Sharding(self.spec.rows_per_block, ranks.world_size)
            dense = partial(DenseRows, self.spec, rates, device=device, sharding=sharding, shard=ranks.rank)
            return opened(rates, lambda _: dense())

        session = share_session(
            self.run, ranks, stack, lambda: self._open_session(ranks, saved, stack), self._make_client
        )
        client, first_step = session.client, saved.step if saved else 0
        client.extend_schedule(0, self.learning_rates)
        rates = LearningRates(self.spec, client.learning_rates()[: max(first_step, len(self.learning_rates))])

        def make_store(sizes: StoreSizes) -> RowStore:
            store: RowStore
            if self.rows == "remote":
                store = RemoteRows(client, device, value_bytes=self.spec.value_bytes)
            else:
                store = ResidentRows(
                    client,
                    self.spec,
                    rates,
                    capacity=share_of_capacity(sizes.capacity, self.spec, ranks),
                    prefetch_steps=sizes.prefetch_steps,
                    write_back_rows=sizes.write_back_rows // ranks.world_size + 1,
                    device=device,
                )
            stack.callback(store.close)
            stack.callback(client.close)  # before the store, so that its threads do not wait for servers that are gone
            return store

        return opened(rates, make_store, client=client, first_step=first_step)

    def _make_client(self, addresses: Sequence[str]) -> WeightClient:
        return WeightClient(addresses, **(self.client_options if self.servers else {}))

    def _open_session(self, ranks: Ranks, saved: SavedRows | None, stack: ExitStack) -> SharedSession:
        """On rank 0: starts shards if none were given, creates the table or rolls it back, and opens a session."""
        addresses = self.servers
        if not addresses:
            if ranks.local_world_size < ranks.world_size:
                raise ValueError("ranks on several machines need weight servers that all of them reach: give servers")
            addresses = stack.enter_context(LocalCluster(self.num_shards, self.directory)).addresses
        client = stack.enter_context(self._make_client(addresses))
        if saved is None:
            remedy = "call load_state_dict() with a state of them, or use other servers" + " or another directory" * (
                not self.servers
            )
            epoch = open_new_run(client, self.spec, self.run, remedy=remedy, take_over=self.take_over)
        else:
            saved.check_held(client)
            client.create_table(self.spec)
            epoch = client.open_session(self.run, force=True, hold=True, take_over=self.take_over)
            client.rollback(saved.name)
        return SharedSession(client, addresses, epoch)


def open_new_run(client: WeightClient, spec: TableSpec, run: str, *, remedy: str, take_over: bool = False) -> int:
    """Creates the table of a new run, and opens and holds its session; returns the epoch.

    Raises:
        ValueError: the servers hold rows that were written, or, without `take_over`, another run's checkpoint.
        SessionInUseError: without `take_over`, if a run of another process holds the servers.
    """
    with contextlib.suppress(NoTableError):
        info = client.describe()
        if info.clock > 0 or info.rows_stored > 0 or (info.checkpoint_names and not take_over):
            holder = f" ({info.holder})" if info.holder else ""
            raise ValueError(
                f"the weight servers hold the rows of run {info.run!r} up to step {info.clock}: {remedy}{holder}"
            )
    client.create_table(spec)
    epoch = client.open_session(run, hold=True, take_over=take_over)
    for kept in client.checkpoints():  # of a run that was taken over before it wrote a row
        client.release(kept.name)
    return epoch


def float32_rates(learning_rates: Any) -> Float32Array:
    """Learning rates given in advance, float32 [n]; none if None. Raises ValueError for another shape."""
    rates = np.zeros(0, np.float32) if learning_rates is None else np.asarray(learning_rates, np.float32)
    if rates.ndim != 1:
        raise ValueError(f"learning_rates must have shape (n,), one for each step, got {rates.shape}")
    return rates
