"""`ClassifierHead`: the cosine softmax over the K most recent of any number of classes, as a torch module.

head = ClassifierHead(num_classes=N, dim=128, num_negatives=65_536, servers="ws0:50051,ws1:50051", run="a")
loader = DataLoader(images, batch_sampler=head.sampler(window_size=131_072, window_stride=16_384, batch_size=512))
for ids, batch in head.announced(loader):
    loss = head(encoder(batch), ids)
    loss.backward()
    optimizer.step(); head.step(learning_rate=optimizer.param_groups[0]["lr"]); optimizer.zero_grad()
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import grpc
import numpy.typing as npt
import torch
from torch import Tensor

from weightserver import Checkpoint, TableSpec, WeightClient
from weightserver.common.addresses import parse_addresses
from weightserver.core.arrays import checked_integer
from weightserver.torch.arguments import checked_ids
from weightserver.torch.beginnings import norm_of
from weightserver.torch.loss import DEFAULT_TEMPERATURE, SoftmaxLoss, loss_of
from weightserver.torch.margins import MarginKind, margin_of
from weightserver.torch.negatives import Negatives, NegativeSampler, share_of_recent
from weightserver.torch.opened_rows import OpenedRows
from weightserver.torch.ranks import Ranks, check_same_on_all_ranks
from weightserver.torch.rates import LearningRates
from weightserver.torch.rows import RowStore
from weightserver.torch.sampled_softmax import SampledSoftmax
from weightserver.torch.saved_rows import SavedRows, from_tensor, to_tensor
from weightserver.torch.served_table import OpenTable, ServedTable, float32_rates
from weightserver.torch.store_sizes import checked_capacity, sizes_for_steps
from weightserver.torch.windows import RangesOrder


class ClassifierHead(SampledSoftmax):
    """A linear classifier without bias whose rows, one for each class, live on weight servers.

    A step is: any number of forward and backward passes, then `step`. Its classes are the K most recently visited ones,
    those of its own images included. Rows are no parameters of the module: `step` updates them by SGD, exactly as
    torch.optim.SGD would update a dense matrix, those of inactive classes included.

    With torch.distributed, every rank calls the same methods in the same order, with its own images; each rank holds a
    share of the rows, and DistributedDataParallel averages the encoder's gradients as usual. The module follows
    `to(device)` until its first use. A context manager; `close` ends threads and servers.

    Args:
        num_classes: N.
        dim: D, the length of an embedding.
        num_negatives: K, the number of classes of a step.
        servers: addresses "host:port,host:port" of all weight servers, or a list of them. Without servers the module
            starts `num_shards` of its own on this machine, which keep the rows in `directory`.
        run: name of the run, which the servers show.
        directory: by default rows/RUN in the current directory.
        rows: "resident" keeps the rows around the active ones on the module's device; "remote" fetches and pushes them
            in each step; "dense" keeps all rows in memory, without servers.
        momentum: m of the rows' SGD.
        weight_decay: λ of the rows' SGD.
        correction: how inactive rows move, see `TableSpec`.
        init_std: standard deviation of random initial rows.
        seed: of the initial rows and of sampled negatives.
        init: "random", or "embedding": a class that is met for the first time begins at the direction of its own
            image's embedding, and only classes that were met are active.
        init_norm: length of a row that begins at an embedding; by default the mean length of the random rows.
        order_seed: seed of the random order in which rows are stored, and of the sampler's order.
        temperature: τ, which divides cosines.
        negatives: which classes are active besides a step's own: the most "recent" ones, "uniform" ones sampled in
            whole blocks of rows, or "both"; see `NegativeSampler`.
        recent_share: with "both", the share of K that recent classes have; by default half.
        margin: on the cosine of an image's own class: "none", "cosface" or "arcface"; see `Margin`.
        margin_size: m; by default the usual one.
        label_smoothing: share of the target distribution that is spread evenly over all active classes, at least 0 and
            below 1; see `softmax_loss`.
        softmax: "cosine", or "plain" for inner products.
        learning_rates: float32 [n], those of the first n steps if they are known in advance: `step` then needs none.
        capacity: number of resident rows on all ranks together; by default as many as the steps need.
        timeout_seconds: deadline of a call, see `WeightClient`.
        retry_seconds: how long calls of an unreachable weight server are retried.
        credentials: gRPC channel credentials (TLS) for servers on other machines.
        token: bearer token sent with every call.
        insecure: whether servers on other machines may be called without credentials.
        take_over: end a live run that uses the servers: its next step raises FencedError.
        dtype: of the stored rows, see `TableSpec`; they are float32 while they are resident.

    Raises:
        TypeError: a setting of the wrong type.
        ValueError: settings that are out of range or contradict each other.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        num_negatives: int,
        servers: str | Sequence[str] | None = None,
        run: str = "head",
        directory: str | Path | None = None,
        num_shards: int = 1,
        rows: Literal["resident", "remote", "dense"] = "resident",
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        correction: bool | Literal["exact", "paper", "none"] = True,
        init_std: float = 0.01,
        seed: int = 0,
        init: Literal["random", "embedding"] = "random",
        init_norm: float | None = None,
        order_seed: int = 0,
        rows_per_block: int = 63,
        temperature: float = DEFAULT_TEMPERATURE,
        softmax: Literal["cosine", "plain"] = "cosine",
        negatives: Negatives = "recent",
        recent_share: float | None = None,
        margin: MarginKind = "none",
        margin_size: float | None = None,
        label_smoothing: float = 0.0,
        learning_rates: npt.ArrayLike | None = None,
        capacity: int | None = None,
        timeout_seconds: float = 30,
        retry_seconds: float = 300,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        insecure: bool = False,
        take_over: bool = False,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        spec = TableSpec(
            num_rows=num_classes,
            dim=dim,
            momentum=momentum,
            weight_decay=weight_decay,
            init_std=init_std,
            seed=seed,
            rows_per_block=rows_per_block,
            correction=correction,
            dtype=dtype,
        )
        table = ServedTable(
            spec=spec,
            servers=parse_addresses(*([servers] if isinstance(servers, str) else servers or [])),
            run=run,
            directory=Path("rows") / run if directory is None else Path(directory),
            num_shards=checked_integer(num_shards, "num_shards"),
            rows=rows,
            learning_rates=float32_rates(learning_rates),
            take_over=take_over,
            client_options={
                "timeout_seconds": timeout_seconds,
                "retry_seconds": retry_seconds,
                "credentials": credentials,
                "token": token,
                "insecure": insecure,
            },
        )
        sampled = NegativeSampler(
            checked_integer(num_negatives, "num_negatives"),
            num_rows=num_classes,
            rows_per_block=rows_per_block,
            kind=negatives,
            recent_share=share_of_recent(negatives, recent_share),
            only_met=init == "embedding",
            seed=seed,
        )
        self._set_up(
            spec,
            negatives=sampled,
            loss=loss_of(softmax, temperature, margin_of(margin, margin_size), label_smoothing=label_smoothing),
            order=RangesOrder([spec.num_rows], checked_integer(order_seed, "order_seed")),
            init_norm=norm_of(init, spec, init_norm, rows),
            table=table,
            capacity=checked_capacity(capacity),
        )
        _refuse_without_effect(
            "servers are given, but directory and num_shards are of a head's own ones",
            bool(table.servers) and (directory is not None or table.num_shards != 1),
        )
        _refuse_without_effect(
            f"capacity is a number of resident rows, but rows={rows!r}", capacity is not None and rows != "resident"
        )
        _refuse_without_effect(
            "temperature divides cosines, but softmax='plain'",
            softmax == "plain" and temperature != DEFAULT_TEMPERATURE,
        )
        loss = {"softmax": softmax, "temperature": temperature, "margin": margin, "margin_size": margin_size}
        loss |= {"label_smoothing": label_smoothing}
        active = {"num_negatives": num_negatives, "negatives": negatives, "recent_share": recent_share, "init": init}
        self._settings = asdict(spec) | loss | active | {"order_seed": order_seed, "rows": rows, "init_norm": init_norm}

    @classmethod
    def over(
        cls,
        store: RowStore,
        spec: TableSpec,
        rates: LearningRates,
        *,
        negatives: NegativeSampler,
        loss: SoftmaxLoss,
        order: RangesOrder,
        ranks: Ranks,
        init_norm: float | None = None,
        first_step: int = 0,
    ) -> Self:
        """A head over a store that the caller opened and closes, for training loops that manage their own sessions.

        Args:
            rates: those of the store, which its servers know.
            negatives: the classes of a step.
            loss: its settings.
            order: the row of each class.
            init_norm: length of rows that begin at their image's embedding; None if rows begin at random.
        """
        head = cls.__new__(cls)
        head._set_up(spec, negatives=negatives, loss=loss, order=order, init_norm=init_norm)
        head.to(ranks.device)
        head._use_table(OpenTable(lambda _: store, rates, first_step=first_step), ranks, store)
        return head

    def _set_up(
        self,
        spec: TableSpec,
        *,
        negatives: NegativeSampler,
        loss: SoftmaxLoss,
        order: RangesOrder,
        init_norm: float | None,
        table: ServedTable | None = None,
        capacity: int | None = None,
    ) -> None:
        super().__init__(spec, negatives=negatives, loss=loss, order=order, init_norm=init_norm)
        self._table = table
        self._capacity = capacity
        self._saved: SavedRows | None = None
        self._stack = ExitStack()
        self._process_id = os.getpid()
        finalizer = weakref.finalize(self, _close_in_process, self._stack, self._process_id)
        finalizer.atexit = False  # the shards end with the process

    # ---- opening

    @property
    def client(self) -> WeightClient | None:
        """The client of the weight servers, which has the session; None for dense rows, and before the first use."""
        return self._opened.table.client if self._opened else None

    def _open(self) -> OpenedRows:
        if os.getpid() != self._process_id:
            raise ValueError(
                f"the head is that of process {self._process_id} and cannot be used in {os.getpid()}, which was forked "
                "from it: let DataLoader workers return images and classes, and call the head where it was made"
            )
        if self._opened is None:
            if self._table is None:
                raise ValueError("the head is closed: make another one and load_state_dict() what checkpoint() left")
            ranks = self._own_ranks()
            check_same_on_all_ranks(self._settings, ranks)
            try:
                table = self._table.open(ranks, self.device, self._saved, self._stack)
            except BaseException:
                self._stack.close()
                raise
            self._use_table(table, ranks)
        assert self._opened is not None
        if self._opened.device != self.device:
            raise ValueError(f"the head's rows are on {self._opened.device}: move the head before its first use")
        return self._opened

    def _use_table(self, table: OpenTable, ranks: Ranks, store: RowStore | None = None) -> None:
        sizes = partial(
            sizes_for_steps,
            spec=self.spec,
            negatives=self.negatives,
            coming=self._coming,
            capacity=self._capacity,
        )
        self._use(OpenedRows(table, self.spec, self.order, ranks=ranks, device=self.device, sizes=sizes, store=store))

    def close(self) -> None:
        """Ends the threads, and the servers if the module started them; updates since the last checkpoint or `flush`
        may be lost. Safe to repeat. A head that is garbage-collected closes itself."""
        _close_in_process(self._stack, self._process_id)
        self._opened = self._table = self._current = None
        self._coming.forget()
        self._iteration += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a ClassifierHead holds a session of the weight servers and cannot be copied or pickled: copy the encoder, "
            "and save its state_dict()"
        )

    # ---- states

    def flush(self) -> None:
        """Returns once this rank's updates are durable on the servers; dense rows are not stored."""
        if self._opened is not None:
            self._opened.flush()

    def rows(self, ids: Any) -> Tensor:
        """The rows of classes (integers (n,), any order) after all updates so far: float32 (n, D), on the CPU.

        All ranks call it, with any classes; it makes every rank's updates durable.
        """
        wanted = checked_ids(ids, self.spec.num_rows)
        if wanted.ndim != 1:
            raise ValueError(f"classes must have shape (n,), got {wanted.shape}")
        return self._open().read(wanted, step=self.num_steps)

    def checkpoint(self, name: str | None = None) -> Checkpoint:
        """Keeps the rows as they are after the finished updates, on the servers, under `name`; takes no copy.

        All ranks call it, between two steps. `state_dict` then contains what identifies the checkpoint.

        Args:
            name: by default made from the step.

        Raises:
            ValueError: dense rows, or a step is in progress.
            InvalidRequestError: the name was used for another state.
        """
        if self._current is not None:
            raise ValueError("a step is in progress: call checkpoint() after step()")
        kept, self._saved = self._open().checkpoint(name, step=self.num_steps)
        return kept

    def get_extra_state(self) -> Tensor:
        """What identifies the rows, for `state_dict`: uint8 [n], followed by the recently visited classes.

        A single rank takes a checkpoint for it if none was taken after the last step.

        Raises:
            ValueError: `checkpoint` was not called after the last step, on several ranks or before `close`.
        """
        if self._opened is None and self._saved is None and not self.num_steps:
            return torch.zeros(0, dtype=torch.uint8)
        if self._saved is None or self._saved.step != self.num_steps:
            if self._ranks.world_size > 1:
                raise ValueError(
                    f"the rows have no checkpoint of step {self.num_steps}: call head.checkpoint() on all ranks "
                    "before state_dict()"
                )
            self.checkpoint()
        assert self._saved is not None
        return to_tensor(self._saved, self._coming.visited_before(self.num_steps))

    def set_extra_state(self, state: Tensor) -> None:
        """Rolls the rows back to the checkpoint of a `state_dict`. The state of a head before its first use names
        none: loading it changes nothing, and is refused after the first step.

        Raises:
            ValueError: a damaged state, one of rows in another order, or none of this head's rows.
        """
        if not len(state):
            if self.num_steps:
                raise ValueError(
                    f"the state is that of a head before its first use, to which the rows cannot return after "
                    f"{self.num_steps} steps: call head.checkpoint() before state_dict(), or make a head of other rows"
                )
            return
        saved, recent = from_tensor(state)
        saved.check_order(self.order)
        if self._opened is not None:
            assert self._table is not None, "the owner of a store restores it"
            self._stack.close()
            self._opened = None
        self._coming.restore(recent)
        self._iteration += 1
        self._saved, self.num_steps, self._current = saved, saved.step, None


def _refuse_without_effect(problem: str, is_given: bool) -> None:
    """Raises ValueError if a setting is given that has no effect with the others."""
    if is_given:
        raise ValueError(f"{problem}: omit one of them")


def _close_in_process(stack: ExitStack, process_id: int) -> None:
    """Closes the stack, except in a process that was forked from its owner."""
    if os.getpid() == process_id:
        stack.close()
