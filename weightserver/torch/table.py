"""The table of a head: on weight servers, as new or as it was at a checkpoint, or dense in this process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightserver import Checkpoint, LocalCluster, NoTableError, TableSpec, WeightClient, WeightServerError
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.errors import RowError
from weightserver.core.initial import initial_rows
from weightserver.core.sharding import Sharding
from weightserver.torch.agreement import Agreement, Doing
from weightserver.torch.negatives import NegativeSampler
from weightserver.torch.ranks import Ranks, RowOwners, check_same_on_all_ranks, num_processes, ranks_of_process
from weightserver.torch.rates import LearningRates
from weightserver.torch.rows import DenseRows, RemoteRows, ResidentRows, RowStore
from weightserver.torch.sampler import WindowSampler
from weightserver.torch.saved_rows import SavedRows
from weightserver.torch.settings import BLOCK_OF_WINDOWS, Rows, Servers
from weightserver.torch.store_sizes import StoreSizes, share_of_capacity, sizes_for_steps
from weightserver.torch.transfer import to_device
from weightserver.torch.windows import RangesOrder

_clients: weakref.WeakSet[WeightClient] = weakref.WeakSet()
"""Clients that threads of stores may be calling."""


class Table:
    """A head's rows; once they are open, this rank holds a share of them. All ranks call `connect`, `open`, `read` and
    `checkpoint`.

    Args:
        spec: of a new table; later of the one that was opened.
        order: the row of each class.
        directory: of the servers that rank 0 starts if no addresses are given.
        learning_rates: float32 [n], the rows' own of the first n updates, if they are known in advance.
    """

    def __init__(
        self,
        spec: TableSpec,
        order: RangesOrder,
        servers: Servers,
        rows: Rows,
        negatives: NegativeSampler,
        *,
        run: str,
        directory: Path,
        learning_rates: Float32Array,
    ) -> None:
        self.spec = spec
        self.servers = servers
        self.run = run
        self._stack = ExitStack()  # closes what was opened, also if opening it failed
        self._process_id = os.getpid()
        self._is_closed = False
        self._order = order
        self._rows = rows
        self._negatives = negatives
        self._directory = directory
        self._learning_rates = learning_rates
        self.ranks = Ranks(device=torch.device("meta"))
        """The ranks that share the rows, and their device; none of them before the first use."""
        self._set_unopened()

    def _set_unopened(self) -> None:
        self.is_open = False
        self.client: WeightClient | None = None
        """This rank's client, once it is connected."""
        self.epoch = 0
        """Number of the session; 0 for dense rows."""
        self.store: RowStore | None = None
        self._largest_step = 0  # images of a step that the store is large enough for

    def disconnect(self) -> None:
        """Ends the threads, the session, and the servers if rank 0 started them; it may be opened again."""
        self._stack.close()
        self._set_unopened()

    def leave_for(self, saved: SavedRows) -> None:
        """Disconnects, if the table is open, so that it may be opened as it was when `saved` was taken.

        Raises ValueError for dense rows, or, if it is open, other servers than those of `saved`."""
        self._require_servers()
        if self.is_open:
            self.ranks.of_first(partial(saved.check_held, self.connect(self.ranks.device)))
            self.disconnect()

    @property
    def is_rounded(self) -> bool:
        """Whether resident rows are rounded when they are stored."""
        return self._rows.where == "resident" and self.spec.dtype != "float32"

    def close(self) -> None:
        """Disconnects for good; does nothing in a process that was forked from its owner."""
        if os.getpid() == self._process_id:
            self.disconnect()
            self._is_closed = True

    def require_usable(self) -> None:
        """Raises ValueError in a forked process, and after `close`."""
        if os.getpid() != self._process_id:
            raise ValueError(
                f"the head is that of process {self._process_id} and cannot be used in {os.getpid()}, which was forked "
                "from it: let DataLoader workers return images and classes, and call the head where it was made"
            )
        if self._is_closed:
            raise ValueError("the head is closed: make another one and load_state_dict() what checkpoint() left")

    # ---- opening

    def ranks_on(self, device: torch.device) -> Ranks:
        """This process among those of torch.distributed; asked for once, since it may make a process group. Raises
        ValueError if that was before torch.distributed was initialised."""
        if self.ranks.device != device and not self.is_open:
            self.ranks = ranks_of_process(device)
        elif self.ranks.world_size < num_processes() and not self.is_open:
            raise ValueError(
                "the head, or its sampler, was used before torch.distributed was initialised, as if this process were "
                "alone: call init_process_group() first"
            )
        return self.ranks

    def connect(self, device: torch.device) -> WeightClient:
        """This rank's client of the servers, which rank 0 starts if no addresses are given. Raises ValueError for dense
        rows, ranks on several machines without addresses, or a table that was closed."""
        self.require_usable()
        ranks = self.ranks_on(device)
        self._require_servers()
        if self.client is None:
            addresses, token = ranks.of_first(partial(self._start_servers, ranks))
            self.client = self._stack.enter_context(self.servers.client(addresses, token))
        return self.client

    def _require_servers(self) -> None:
        if self._rows.where == "dense":
            raise ValueError(
                "rows='dense' are in this process alone, without servers and saved states: use rows='resident'"
            )

    def _start_servers(self, ranks: Ranks) -> tuple[list[str], str]:
        """The addresses of the servers, which are started if none are given, and the token of those that are."""
        if addresses := self.servers.parsed():
            return addresses, ""
        if ranks.local_world_size < ranks.world_size:
            raise ValueError("ranks on several machines need weight servers that all of them reach: give servers")
        # who stops this process may send SIGTERM to all of its control group: a checkpoint still needs the servers
        options, token = ["--ignore-sigterm"], secrets.token_urlsafe()  # other users of the machine reach loopback, too
        cluster = LocalCluster(self.servers.num_shards, self._directory, serve_options=options, token=token)
        return self._stack.enter_context(cluster).addresses, token

    def open(
        self,
        device: torch.device,
        saved: SavedRows | None,
        sampler: WindowSampler | None,
        *,
        settings: Mapping[str, object],
    ) -> None:
        """Opens the table, as it was when `saved` was taken or for a new run.

        Args:
            device: where the rows of a step are to be.
            sampler: by whose window the blocks of a new table are chosen.
            settings: which all ranks must have.

        Raises:
            ValueError: the servers hold the rows of another run, or not the checkpoint `saved`; other settings.
            WeightServerError: servers that are unreachable or refuse.
        """
        with self._agreed(device, settings):
            self._open(saved, sampler is not None and sampler.schedule.window_size < sampler.schedule.num_rows)
        self._negatives.rows_per_block = self.spec.rows_per_block
        self.is_open = True

    @contextlib.contextmanager
    def _agreed(self, device: torch.device, settings: Mapping[str, object]) -> Iterator[Ranks]:
        """The ranks, which have the same settings; if the block fails on one, as if the head had not been used."""
        self.require_usable()
        check_same_on_all_ranks(settings, self.ranks_on(device))
        try:
            with Agreement(self.ranks, Doing.OPENS, 0, 0):
                yield self.ranks
        except BaseException:
            self.disconnect()
            raise

    def _open(self, saved: SavedRows | None, in_windows: bool) -> None:
        ranks = self.ranks
        if self._rows.where == "dense":
            self.spec = self._in_blocks(None, in_windows)
            self.rates = LearningRates(self.spec, self._learning_rates)
            return
        client = self.connect(ranks.device)
        session = ranks.of_first(partial(self._open_session, client, saved, in_windows))
        if not ranks.is_first:
            client.expect(session["marks"])
            client.open_session(self.run, join=session["epoch"], hold=False)  # the first rank does
        self.spec, self.epoch = replace(self.spec, rows_per_block=session["rows_per_block"]), session["epoch"]
        client.extend_schedule(0, self._learning_rates)
        known = client.learning_rates()[: max(saved.step if saved else 0, len(self._learning_rates))]
        self.rates = LearningRates(self.spec, known)

    def _open_session(self, client: WeightClient, saved: SavedRows | None, in_windows: bool) -> dict[str, Any]:
        """On rank 0: creates the table or rolls it back, and opens and holds a session; what other ranks need."""
        spec, epoch = self._begin(client, in_windows) if saved is None else self._return_to(client, saved)
        return {"rows_per_block": spec.rows_per_block, "epoch": epoch, "marks": client.marks()}

    def _begin(self, client: WeightClient, in_windows: bool) -> tuple[TableSpec, int]:
        """Creates the table of a new run, unless it is there and nothing was written; one in this head's own directory
        may be of other settings. Raises as `_unwritten`, and SessionInUseError without `take_over`, if a run of another
        process holds the servers."""
        found, take_over = self._unwritten(client), self.servers.take_over
        if found is not None and not self.servers.addresses:
            client.drop_table()
            found = None
        spec = self._in_blocks(found, in_windows)
        client.create_table(spec)
        epoch = client.open_session(self.run, take_over=take_over)
        for kept in client.checkpoints():  # of a run that was taken over before it wrote a row
            client.release(kept.name)
        return spec, epoch

    def _unwritten(self, client: WeightClient) -> TableSpec | None:
        """The servers' table, if there is one. Raises ValueError if rows were written, or, without `take_over`, another
        run took a checkpoint."""
        try:
            found = client.describe()
        except NoTableError:
            return None
        if found.clock > 0 or found.rows_stored > 0 or (found.checkpoint_names and not self.servers.take_over):
            holder = f" ({found.holder})" if found.holder else ""
            other = "other servers" if self.servers.addresses else "another directory"
            raise ValueError(
                f"the weight servers hold the rows of run {found.run!r} up to step {found.clock}: resume it (a "
                f"head by load_state_dict() of its state, the trainer by --resume), or use {other}{holder}"
            )
        return found.spec

    def _return_to(self, client: WeightClient, saved: SavedRows) -> tuple[TableSpec, int]:
        """Rolls the table back, and adds rows for classes that were added since."""
        saved.check_held(client)
        held = _enlarged(client, saved.num_rows, self.spec.num_rows)
        spec = self._in_blocks(held, in_windows=False)
        client.create_table(replace(spec, num_rows=held.num_rows))  # which refuses any other
        epoch = client.open_session(self.run, force=True, take_over=self.servers.take_over)
        client.rollback(saved.name)  # all servers, whatever they held before
        if held.num_rows < spec.num_rows:
            client.extend_table(spec.num_rows)
        return spec, epoch

    def _in_blocks(self, held: TableSpec | None, in_windows: bool) -> TableSpec:
        """The table with its blocks: as given, as in the servers' table, or for the order of the classes."""
        if self._rows.rows_per_block is not None:
            return self.spec
        if held is not None:
            return replace(self.spec, rows_per_block=held.rows_per_block)
        return replace(self.spec, rows_per_block=BLOCK_OF_WINDOWS) if in_windows else self.spec

    # ---- looking at a table that is not open

    def reader(
        self, device: torch.device, saved: SavedRows | None, *, settings: Mapping[str, object]
    ) -> Callable[[Int64Array], Tensor]:
        """How to read rows, int64 (n,), as they are when the table is opened as by `open`: float32 (n, D), on the
        device. Opens no session and changes nothing: other runs go on, and later checkpoints stay.

        Raises:
            ValueError: as `open`, or the state has fewer classes than the head.
            WeightServerError: servers that are unreachable or refuse.
        """
        with self._agreed(device, settings) as ranks:
            if self._rows.where != "dense":
                client = self.connect(device)
                ranks.of_first(partial(self._check_readable, client, saved))
                if saved is not None:
                    fetch = partial(client.fetch, step=saved.step, checkpoint=saved.checkpoint)
                    return lambda rows: to_device(fetch(rows), device)
        return lambda rows: to_device(initial_rows(self.spec, rows), device)

    def _check_readable(self, client: WeightClient, saved: SavedRows | None) -> None:
        if saved is None:
            self._unwritten(client)
            return
        saved.check_held(client)
        held = client.describe().spec
        if held.dim != self.spec.dim:
            raise ValueError(f"the state's rows have {held.dim} values, the head has dim={self.spec.dim}: give that")
        if held.num_rows < self.spec.num_rows:
            raise ValueError(
                f"the weight servers hold the rows of {held.num_rows} classes, the head has {self.spec.num_rows}: "
                "open() the head, which adds the others, or give it num_classes of the state"
            )

    # ---- the rows of an open table

    @property
    def owners(self) -> RowOwners:
        """Which rank holds a row."""
        num_shards = len(self.client.marks()) if self.client else 1
        return RowOwners(self.spec.rows_per_block, num_shards, self.ranks.world_size, self.ranks.rank)

    def tell(self, step: int, learning_rate: float) -> None:
        """See `LearningRates.tell`, for the rows' own; the client sends it with their updates."""
        self.rates.tell(step, *self._rows.learning_rates([learning_rate], step).tolist())
        if self.client is not None:
            self.client.extend_schedule(step, [self.rates.of_step(step)])

    @torch.inference_mode(mode=False)
    def open_store(self, step_size: int, sampler: WindowSampler | None = None) -> RowStore:
        """The store, for steps of up to `step_size` images, those of the sampler if it draws them; made at the first
        use, larger for larger steps."""
        if self.store is None:
            self.store = self._make_store(self.sizes(step_size, sampler))
        elif step_size > self._largest_step:
            self.store.reserve(share_of_capacity(self.sizes(step_size, sampler).capacity, self.owners))
        self._largest_step = max(self._largest_step, step_size)
        return self.store

    def sizes(self, step_size: int, sampler: WindowSampler | None) -> StoreSizes:
        """See `sizes_for_steps`."""
        return sizes_for_steps(step_size, sampler, spec=self.spec, rows=self._rows, negatives=self._negatives)

    def _make_store(self, sizes: StoreSizes) -> RowStore:
        if (client := self.client) is None:
            sharding = Sharding(self.spec.rows_per_block, self.ranks.world_size)
            return DenseRows(self.spec, self.rates, device=self.ranks.device, sharding=sharding, shard=self.ranks.rank)
        store: RowStore
        if self._rows.where == "remote":
            store = RemoteRows(client, self.ranks.device, value_bytes=self.spec.value_bytes)
        else:
            store = ResidentRows(
                client,
                self.spec,
                self.rates,
                capacity=share_of_capacity(sizes.capacity, self.owners),
                prefetch_steps=sizes.prefetch_steps,
                write_back_rows=sizes.write_back_rows // self.ranks.world_size + 1,
                device=self.ranks.device,
            )
        self._stack.callback(store.close)
        self._stack.callback(client.close)  # before the store: its threads do not wait for servers that are gone
        _clients.add(client)
        _close_clients_at_exit()
        return store

    def class_of(self, row: int) -> int:
        """The class whose row this is."""
        return int(self._order.images(np.array([row]))[0])

    @contextlib.contextmanager
    def class_in_errors(self) -> Iterator[None]:
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
            with self.class_in_errors():
                self.store.flush()

    def read(self, classes: Int64Array, *, step: int) -> Tensor:
        """The rows of classes (n,) before update `step`: float32 (n, D), on the CPU. All updates are durable."""
        distinct, inverse = np.unique(self._order.rows(classes), return_inverse=True)
        if self.client is None:
            if self.ranks.world_size > 1:
                raise ValueError("rows='dense' are spread over the ranks: use rows='resident'")
            weight = self.open_store(1).peek(distinct, step=step).cpu()
        else:
            weight = torch.from_numpy(self.client.fetch_state(distinct, step=step).weight)
        return weight[torch.from_numpy(inverse)]

    def peek(self, rows: Int64Array, *, step: int) -> Tensor:
        """Rows of this rank's share, int64 (n,), before update `step`: float32 (n, D), on the device. Changes nothing,
        not even what is durable, and makes no store for rows that are on the servers alone."""
        if self.client is not None and self.store is None:
            return to_device(self.client.fetch(rows, step=step), self.ranks.device)
        return self.open_store(1).peek(rows, step=step)

    def checkpoint(self, name: str | None, *, step: int) -> tuple[Checkpoint, SavedRows]:
        """See `ClassifierHead.checkpoint`, before update `step`; also returns what identifies the rows. All updates are
        durable."""
        client = self.connect(self.ranks.device)
        name = f"step-{step:012d}" if name is None else name

        def take() -> dict[str, Any]:
            client.checkpoint(name, step=step)
            (kept,) = (known for known in client.checkpoints() if known.name == name)
            return asdict(SavedRows.of(kept, client.table_identity(), self._order))

        saved = SavedRows(**self.ranks.of_first(take))  # before it ends no rank writes rows of later steps
        return saved.checkpoint, saved


@functools.cache
def _close_clients_at_exit() -> None:
    """Python waits for the threads of executors before it calls what `atexit` knows."""
    getattr(threading, "_register_atexit", atexit.register)(_close_clients)


def _close_clients() -> None:
    for client in list(_clients):
        client.close()


def _enlarged(client: WeightClient, *num_rows: int) -> TableSpec:
    """The table, with at least the first of these numbers of rows. If it has more, on some of the servers perhaps since
    an extension was interrupted, with the first that it can have."""
    for number in num_rows:
        with contextlib.suppress(ValueError):
            return client.extend_table(number)
    return client.describe().spec
