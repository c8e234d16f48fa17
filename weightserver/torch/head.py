"""`ClassifierHead`: the cosine softmax over the K most recent of any number of classes, as a torch module.

head = ClassifierHead(num_classes=N, dim=128, num_negatives=65_536, servers="ws0:50051,ws1:50051", run="a")
loader = DataLoader(images, batch_sampler=head.sampler(window_size=131_072, window_stride=16_384, batch_size=512))
for ids, batch in head.announced(loader):
    loss = head(encoder(batch), ids)
    loss.backward()
    optimizer.step(); head.step(learning_rate=optimizer.param_groups[0]["lr"]); optimizer.zero_grad()
"""

from __future__ import annotations

import math
import os
import re
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import grpc
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from weightserver import Checkpoint, TableSpec, WeightClient, WeightServerError
from weightserver.core.arrays import Int64Array
from weightserver.core.sharding import Sharding
from weightserver.torch.announced_batches import AHEAD, AnnouncedBatches
from weightserver.torch.arguments import (
    check_embeddings,
    check_ended_everywhere,
    checked_ids,
    first_of,
    ids_of_all_ranks,
)
from weightserver.torch.beginnings import Beginnings, norm_of
from weightserver.torch.class_order import ClassOrder, Labels
from weightserver.torch.coming_steps import Announced, ComingSteps, Visited
from weightserver.torch.loss import loss_of, padded, padded_rows
from weightserver.torch.margins import MarginKind, margin_of
from weightserver.torch.negatives import Negatives, NegativeSampler
from weightserver.torch.ranks import Ranks
from weightserver.torch.rates import LearningRates
from weightserver.torch.recency import announced, check_num_active
from weightserver.torch.rows import RowCounters, RowStore
from weightserver.torch.sampler import WindowSampler
from weightserver.torch.saved_rows import SavedRows, from_tensor, to_tensor
from weightserver.torch.served_table import OpenTable, ServedTable, StoreSizes, float32_rates
from weightserver.torch.transfer import to_device
from weightserver.torch.windows import RangesOrder

_MAX_PREFETCH_STEPS = 8
"""Steps in advance at which rows are requested if a sampler knows the classes to come."""


@dataclass
class _Step:
    """The step in progress."""

    announced: Announced
    before: Visited  # what was recently visited
    labels: Sequence[Tensor]  # A times (B,), on the device
    begun: set[int] = field(default_factory=set)  # numbers of the batches that had a forward pass
    weight: Tensor | None = None  # (K of this rank, D), padded: a leaf that collects the gradients
    beginnings: Beginnings | None = None


class ClassifierHead(nn.Module):
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
        recent_share: with "both", the share of K that recent classes have.
        margin: on the cosine of an image's own class: "none", "cosface" or "arcface"; see `Margin`.
        margin_size: m; by default the usual one.
        softmax: "cosine", or "plain" for inner products.
        learning_rates: float32 [n], those of the first n steps if they are known in advance: `step` then needs none.
        capacity: number of resident rows on all ranks together; by default as many as the steps need.
        timeout_seconds: deadline of a call, see `WeightClient`.
        retry_seconds: how long calls of an unreachable weight server are retried.
        credentials: gRPC channel credentials (TLS) for servers on other machines.
        token: bearer token sent with every call.
        insecure: whether servers on other machines may be called without credentials.
        dtype: of the stored rows, see `TableSpec`; they are float32 while they are resident.

    Raises:
        ValueError: settings that are out of range or contradict each other.
    """

    num_steps: int
    """Number of finished updates."""

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
        temperature: float = 0.2,
        softmax: Literal["cosine", "plain"] = "cosine",
        negatives: Negatives = "recent",
        recent_share: float = 0.5,
        margin: MarginKind = "none",
        margin_size: float | None = None,
        learning_rates: npt.ArrayLike | None = None,
        capacity: int | None = None,
        timeout_seconds: float = 30,
        retry_seconds: float = 300,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        insecure: bool = False,
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
        addresses = servers.split(",") if isinstance(servers, str) else list(servers or [])
        table = ServedTable(
            spec=spec,
            servers=[address.strip() for address in addresses],
            run=run,
            directory=Path("rows") / run if directory is None else Path(directory),
            num_shards=num_shards,
            rows=rows,
            learning_rates=float32_rates(learning_rates),
            client_options={
                "timeout_seconds": timeout_seconds,
                "retry_seconds": retry_seconds,
                "credentials": credentials,
                "token": token,
                "insecure": insecure,
            },
        )
        sampled = NegativeSampler(
            num_negatives,
            num_rows=num_classes,
            rows_per_block=rows_per_block,
            kind=negatives,
            recent_share=recent_share,
            only_met=init == "embedding",
            seed=seed,
        )
        self._set_up(
            spec,
            negatives=sampled,
            loss=loss_of(softmax, temperature, margin_of(margin, margin_size)),
            order=RangesOrder([num_classes], order_seed),
            init_norm=norm_of(init, spec, init_norm, rows),
            table=table,
            capacity=capacity,
        )

    @classmethod
    def over(
        cls,
        store: RowStore,
        spec: TableSpec,
        rates: LearningRates,
        *,
        negatives: NegativeSampler,
        loss: Callable[..., Tensor],
        order: RangesOrder,
        ranks: Ranks,
        init_norm: float | None = None,
        first_step: int = 0,
    ) -> Self:
        """A head over a store that the caller opened and closes, for training loops that manage their own sessions.

        Args:
            rates: those of the store, which its servers know.
            negatives: the classes of a step.
            loss: `cosine_softmax_loss` or `softmax_loss`, with their settings.
            order: the row of each class.
            init_norm: length of rows that begin at their image's embedding; None if rows begin at random.
        """
        head = cls.__new__(cls)
        head._set_up(spec, negatives=negatives, loss=loss, order=order, init_norm=init_norm)
        head.to(ranks.device)
        head._use(OpenTable(lambda _: store, rates, first_step=first_step), ranks)
        head._store = store
        return head

    def _set_up(
        self,
        spec: TableSpec,
        *,
        negatives: NegativeSampler,
        loss: Callable[..., Tensor],
        order: RangesOrder,
        init_norm: float | None,
        table: ServedTable | None = None,
        capacity: int | None = None,
    ) -> None:
        super().__init__()
        check_num_active(negatives.num_active, spec.num_rows, 1)
        self.spec = spec
        self.order = order
        self.negatives = negatives
        self.num_steps = 0
        self.register_buffer("_where", torch.zeros(0), persistent=False)  # follows `to(device)`
        self._loss = loss
        self._init_norm = init_norm
        self._table = table
        self._capacity = capacity
        self._stack = ExitStack()
        finalizer = weakref.finalize(self, _close_in_process, self._stack, os.getpid())
        finalizer.atexit = False  # the shards end with the process
        self._opened: OpenTable | None = None
        self._opened_on = self.device
        self._store: RowStore | None = None
        self._ranks = Ranks()
        self._known_ranks: Ranks | None = None
        self._saved: SavedRows | None = None
        self._coming = ComingSteps(negatives, order)
        self._current: _Step | None = None
        self._announced_in_vain = False  # the store may hold rows ready for steps that were forgotten

    # ---- opening

    @property
    def device(self) -> torch.device:
        """The device of embeddings and rows."""
        where: Tensor = self._where  # type: ignore[assignment]
        return where.device

    @property
    def client(self) -> WeightClient | None:
        """The client of the weight servers, which has the session; None for dense rows, and before the first use."""
        return self._opened.client if self._opened else None

    def _open(self) -> OpenTable:
        """The table; opens it at the first use."""
        if self._opened is None:
            if self._table is None:
                raise ValueError("the head is closed: make another one and load_state_dict() what checkpoint() left")
            ranks = self._own_ranks()
            try:
                opened = self._table.open(ranks, self.device, self._saved, self._stack)
            except BaseException:
                self._stack.close()
                raise
            self._use(opened, ranks)
        if self._opened_on != self.device:
            raise ValueError(f"the head's rows are on {self._opened_on}: move the head before its first use")
        assert self._opened is not None
        return self._opened

    def _own_ranks(self) -> Ranks:
        """This process among those of torch.distributed; asked for once, since it may make a process group."""
        if self._known_ranks is None or self._known_ranks.device != self.device:
            self._known_ranks = _ranks(self.device)
        return self._known_ranks

    def _use(self, opened: OpenTable, ranks: Ranks) -> None:
        self._opened, self._opened_on, self._ranks = opened, self.device, ranks
        self.num_steps = opened.first_step
        self._coming.use(ranks, Sharding(self.spec.rows_per_block, ranks.world_size))
        on_gpu = self.device.type == "cuda"
        self._padded_rows = padded_rows(self.negatives.num_active, self.spec.rows_per_block, ranks) if on_gpu else 0

    def _open_store(self, step_size: int) -> RowStore:
        """The store; makes it for steps of `step_size` images at the first use."""
        opened = self._open()
        if self._store is None:
            self.negatives.check(step_size)
            self._store = opened.make_store(self._sizes(step_size))
        if self._announced_in_vain:
            in_progress = self._current is not None and self._current.weight is not None
            self._store.forget_announced(in_progress=in_progress)
            self._announced_in_vain = False
        return self._store

    def _sizes(self, step_size: int) -> StoreSizes:
        if (sampler := self._coming.sampler) is None:
            sampled = (AHEAD + 1) * self.negatives.num_sampled(step_size)
            capacity = self.negatives.num_active + sampled + 2 * (AHEAD + 1) * step_size
            capacity = min(self.spec.num_rows, capacity)
            return StoreSizes(self._capacity or capacity, AHEAD, max(step_size, self.spec.rows_per_block))
        schedule = sampler.schedule
        needed, capacity = self.negatives.resident_rows(
            None if isinstance(sampler.order, ClassOrder) else schedule, step_size, _MAX_PREFETCH_STEPS
        )
        if self._capacity is not None and self._capacity < needed:
            raise ValueError(f"capacity is {self._capacity}, the steps that are prefetched need {needed}: raise it")
        return StoreSizes(self._capacity or capacity, _MAX_PREFETCH_STEPS, min(schedule.window_stride, 1 << 14))

    def close(self) -> None:
        """Ends the threads, and the servers if the module started them; updates since the last checkpoint or `flush`
        may be lost. Safe to repeat. A head that is garbage-collected closes itself."""
        self._stack.close()
        self._opened = self._table = self._store = self._current = None
        self._coming.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a ClassifierHead holds a session of the weight servers and cannot be copied or pickled: copy the encoder, "
            "and save its state_dict()"
        )

    # ---- what comes

    def sampler(
        self,
        *,
        batch_size: int,
        window_size: int | None = None,
        window_stride: int | None = None,
        batches_per_step: int = 1,
        seed: int = 0,
        classes: Labels | None = None,
    ) -> WindowSampler:
        """A `batch_sampler` over all images that continues after the head's finished steps.

        The other arguments are those of `WindowSampler`.

        Args:
            classes: class of each image, integers [number of images], for classes that images share: the window then
                slides over neighbouring classes, see `ClassOrder`. Without it each image is its own class.

        Raises:
            ValueError: a window that does not fit, or a class map of other classes.
        """
        sampler = WindowSampler(
            self.order if classes is None else ClassOrder(classes, self.order),
            batch_size=batch_size,
            window_size=window_size,
            window_stride=window_stride,
            batches_per_step=batches_per_step,
            seed=seed,
            next_step=lambda: self.num_steps,
            ranks=self._own_ranks(),
        )
        self._coming.sampler = sampler
        return sampler

    def sampler_of(self, loader: object) -> WindowSampler | None:
        """The sampler that `sampler` made, if the loader uses it."""
        return self._coming.sampler if getattr(loader, "batch_sampler", self) is self._coming.sampler else None

    def announced(
        self,
        loader: Iterable[Any],
        *,
        ids_of: Callable[[Any], Any] = lambda batch: batch[0],
        batches_per_step: int = 1,
    ) -> AnnouncedBatches:
        """The batches of a loader, whose rows are requested before they are needed; may be iterated repeatedly.

        If the loader's batch_sampler is that of `sampler`, the classes to come are known; otherwise the batches of two
        further steps are loaded in advance.

        Args:
            ids_of: returns the classes of a batch, integers (b,); by default its first element.
            batches_per_step: number of batches whose gradients are accumulated in one step; batches at the end of the
                loader that make no whole step are left out.
        """
        return AnnouncedBatches(self, loader, ids_of, batches_per_step)

    def announce(self, *batches: Any) -> None:
        """Announces the classes of the next step that was not announced, those of `forward` for each of its batches;
        their rows are requested. Without it a step's first forward pass announces its own classes.

        Raises:
            ValueError: classes that do not exist, or not as many on every rank.
        """
        if not batches:
            raise ValueError("a step needs at least one batch: call announce(ids)")
        checked = [checked_ids(batch, self.spec.num_rows) for batch in batches]
        self._open()
        ids = ids_of_all_ranks(checked, self._ranks)  # (A, B) or (A, B, P)
        self.negatives.check(ids.size)
        store, pending = self._open_store(ids.size), len(self._coming) + (self._current is not None)
        step = self.num_steps + pending
        announced = self._coming.add_batches(step, ids)
        if pending <= store.prefetch_steps:
            try:
                with self._naming_classes():
                    store.prefetch(announced.rows, step=step)
            except BaseException:
                self._coming.remove_last()
                raise

    def announce_end(self) -> None:
        """Tells the other ranks that this one announces no more steps of its loader. Every rank calls it.

        Raises:
            ValueError: another rank announces one.
        """
        check_ended_everywhere(self._ranks)

    def forget_announced(self, *, in_progress: bool = False) -> None:
        """Forgets the steps that were announced and not begun, as when the iteration of a loader is left early; with
        `in_progress` also the one in progress, with its gradients."""
        current = self._current if in_progress else None
        self._coming.forget(current.before if current else None)
        if in_progress:
            self._current = None
        self._announced_in_vain = True

    def announcements(self, sampler: WindowSampler, steps: range) -> Generator[Announced, None, None]:
        """Announces a sampler's steps, some of them ahead, and yields each in its turn. Close the generator to end its
        thread."""
        self._open()
        self.negatives.check(sampler.step_size)
        store = self._open_store(sampler.step_size)
        with closing(announced(self._coming.of_sampler(sampler), store, steps)) as coming:
            for _ in steps:
                with self._naming_classes():
                    step = next(coming)
                self._coming.add_sampled(step, sampler)
                yield step

    # ---- a step

    def forward(self, embeddings: Tensor, ids: Any, *, update_rows: bool = True) -> Tensor:
        """The mean loss of a batch over the active classes (Equation 1): a scalar, float32, also under autocast.

        Args:
            embeddings: float (b, D) of any precision, of this rank's images.
            ids: integers (b,), the class of each, or (b, P), up to P classes of each, -1 for fewer: the target
                distribution is then uniform over an image's classes (see `softmax_loss`). Best on the CPU, since
                reading them from a GPU waits for it.
            update_rows: whether the loss's gradient updates the rows too.

        Raises:
            ValueError: shapes, devices or classes that do not fit, or not the classes that were announced.
            WeightServerError: rows could not be fetched, or an earlier update could not be stored.
        """
        checked = checked_ids(ids, self.spec.num_rows)
        check_embeddings(embeddings, len(checked), self.spec.dim, self.device)
        step = self._begin(checked)
        part = self._part(step, checked)
        weight = self.active_rows()
        step.begun.add(part)
        if step.beginnings is not None and step.weight is not None:
            labels = step.announced.labels.reshape(step.announced.ids.shape)[part]
            step.beginnings.add(embeddings.detach(), step.weight, labels, self._ranks)
            weight = step.beginnings.begun(step.weight)
        loss: Tensor = self._loss(
            embeddings.float(),
            weight if update_rows else weight.detach(),
            step.labels[part],
            ranks=self._ranks,
            num_rows=len(step.announced.rows),
        )
        return loss

    def active_rows(self) -> Tensor:
        """The rows of the step in progress, or of the next one that was announced, before its update: float32
        (K of this rank, D), padded with zeros on several GPUs. Waits for them."""
        step = self._current or self._begin(None)
        if step.weight is None:
            assert self._store is not None
            with self._naming_classes():
                weight = self._store.weights(step.announced.rows, step=self.num_steps)
            step.weight = padded(weight, self._padded_rows).requires_grad_()
            if self._init_norm is not None:
                step.beginnings = Beginnings(self._store.fresh, self._init_norm)
        return step.weight if step.beginnings is None else step.beginnings.begun(step.weight)

    @property
    def counters(self) -> RowCounters:
        """What the row store has done so far."""
        return self._store.counters if self._store else RowCounters()

    @property
    def labels(self) -> Tensor:
        """The positions of the classes of all ranks' images among `active_rows`, int64 (A · B,); -1 for classes of
        other ranks."""
        return torch.cat(list(self._current.labels)) if self._current else torch.zeros(0, dtype=torch.int64)

    def step(self, learning_rate: float | None = None, *, gradient_scale: float = 1.0) -> None:
        """Updates the rows by the gradients since the last step; may return before it is done.

        Args:
            learning_rate: of this update, on every rank the same; may be omitted if it was given in advance.
            gradient_scale: what the loss was multiplied by, as `torch.amp.GradScaler.get_scale()` returns it before the
                scaler's update(). If then a gradient overflowed, the step is one without gradients, as in `skip`.

        Raises:
            ValueError: no forward and backward pass of each of the step's batches precedes, no learning rate is known,
                or (without a scale, on a CPU) a gradient is infinite or NaN.
            WeightServerError: an earlier update could not be stored.
        """
        if (step := self._current) is None or step.weight is None:
            raise ValueError("step() without a forward pass: call head(embeddings, ids) first")
        if step.weight.grad is None:
            raise ValueError("step() without a backward pass: call loss.backward() first")
        if len(step.begun) < len(step.announced.ids):
            raise ValueError(
                f"step() after {len(step.begun)} of the {len(step.announced.ids)} batches that were announced for step "
                f"{self.num_steps}: call it after the last one, or skip()"
            )
        gradients = step.weight.grad[: len(step.announced.rows)]
        if gradient_scale == 1:
            self._require_finite(step.announced, gradients)
        else:
            gradients = self._unscaled(gradients, gradient_scale)
        self._finish(step, gradients, learning_rate)

    def skip(self, learning_rate: float | None = None) -> None:
        """Ends the step in progress, or the next one that was announced, without gradients: its rows move by their
        momentum and weight decay, like those of all other classes. For batches that failed or are left out."""
        weight = self.active_rows()
        assert self._current is not None
        gradients = torch.zeros_like(weight, requires_grad=False)[: len(self._current.announced.rows)]
        self._finish(self._current, gradients, learning_rate)

    def _finish(self, step: _Step, gradients: Tensor, learning_rate: float | None) -> None:
        rates = self._open().rates
        if learning_rate is not None:
            rates.tell(self.num_steps, float(learning_rate))
        elif self.num_steps >= len(rates):
            raise ValueError(f"the learning rate of step {self.num_steps} is not known: give step(learning_rate=...)")
        assert self._store is not None
        if step.beginnings is not None and step.weight is not None:
            self._store.begin(*step.beginnings.of(step.weight.detach()))
        with self._naming_classes():
            self._store.apply_gradients(step.announced.rows, gradients, step=self.num_steps)
        self._current = None
        self.num_steps += 1

    def _require_finite(self, announced: Announced, gradients: Tensor) -> None:
        """Raises ValueError if a gradient is infinite or NaN; on a GPU it would have to wait to find out."""
        if gradients.device.type != "cpu" or math.isfinite(gradients.sum()):
            return
        if len(bad := (~gradients.isfinite().all(dim=1)).nonzero()):
            (named,) = self.order.images(announced.rows[bad[0].numpy()])
            raise ValueError(
                f"the gradient of class {named} is infinite or NaN in step {self.num_steps}, nothing was updated: "
                "skip() the step, or lower the learning rate"
            )

    def _unscaled(self, gradients: Tensor, scale: float) -> Tensor:
        """Gradients divided by a scale; zeros on all ranks if those of one are infinite or NaN."""
        overflowed = not bool(gradients.isfinite().all())
        (overflowed_somewhere,) = self._ranks.max_over_ranks([overflowed])
        return torch.zeros_like(gradients) if overflowed_somewhere else gradients / scale

    def _begin(self, ids: Int64Array | None) -> _Step:
        """The step in progress; starts the next one that was announced, or one of these classes."""
        if self._current is None:
            if not self._coming:
                if ids is None:
                    raise ValueError("no step was announced: call head(embeddings, ids), or announce(ids)")
                self.announce(ids)
            announced, before = self._coming.take()
            labels = to_device(announced.labels, self.device)
            self._current = _Step(announced, before, torch.split(labels, announced.ids.shape[1]))
        return self._current

    def _part(self, step: _Step, ids: Int64Array) -> int:
        """The number of the step's batch that has these classes on this rank, int64 (b,); of several that have them,
        the first without a forward pass."""
        announced, share = step.announced, self._ranks.share(step.announced.ids.shape[1])
        same = [part for part, of_all in enumerate(announced.ids) if np.array_equal(of_all[share], ids)]
        if same:
            return next((part for part in same if part not in step.begun), same[-1])
        raise ValueError(
            f"the classes {first_of(ids)} are not those that were announced for step {self.num_steps} "
            f"({first_of(announced.ids[0, share])}): give each batch in the order of its announcement, call step() "
            "after the last batch of a step (skip() if it failed), and announce the batches of one step together"
        )

    @contextmanager
    def _naming_classes(self) -> Iterator[None]:
        """Adds the class to an error that names a row."""
        try:
            yield
        except (WeightServerError, ValueError) as error:
            found = re.search(r"\brow (\d+)\b", str(error))
            if found is None or int(found[1]) >= self.spec.num_rows:
                raise
            (named,) = self.order.images(np.array([int(found[1])]))
            raise type(error)(f"{error} (row {found[1]} is class {named})") from error

    # ---- states

    def flush(self) -> None:
        """Returns once this rank's updates are durable on the servers; dense rows are not stored."""
        if self._store is not None:
            with self._naming_classes():
                self._store.flush()

    def rows(self, ids: Any) -> Tensor:
        """The rows of classes (integers (n,), any order) after all updates so far: float32 (n, D), on the CPU.

        All ranks call it, with any classes; it makes every rank's updates durable.
        """
        wanted = checked_ids(ids, self.spec.num_rows)
        if wanted.ndim != 1:
            raise ValueError(f"classes must have shape (n,), got {wanted.shape}")
        opened = self._open()
        distinct, inverse = np.unique(self.order.rows(wanted), return_inverse=True)
        self._make_durable(opened)
        if opened.client is None:
            if self._ranks.world_size > 1:
                raise ValueError("rows='dense' are spread over the ranks: use rows='resident'")
            state = self._open_store(1).read_state(distinct, step=self.num_steps)
        else:
            state = opened.client.fetch_state(distinct, step=self.num_steps)
        self._ranks.barrier()  # before it no rank writes rows of later steps, or stops the servers
        return torch.from_numpy(state.weight[inverse])

    def _make_durable(self, opened: OpenTable) -> None:
        """Returns once the updates of all ranks are durable, and the servers know their learning rates."""
        self.flush()
        if opened.published is not None:
            opened.published.require(self.num_steps)
        self._ranks.barrier()

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
        opened = self._open()
        if (client := opened.client) is None:
            raise ValueError("rows='dense' leave no checkpoints: use rows='resident'")
        name = f"step-{self.num_steps:012d}" if name is None else name
        self._make_durable(opened)
        if self._ranks.is_first:
            client.checkpoint(name, step=self.num_steps)
        self._ranks.barrier()  # before it no rank writes rows of later steps
        (kept,) = (known for known in client.checkpoints() if known.name == name)
        self._saved = SavedRows.of(kept, client.table_identity(), self.order.order_seed)
        self._ranks.barrier()  # before it rank 0 does not stop the servers
        return kept

    def get_extra_state(self) -> Tensor:
        """What identifies the rows, for `state_dict`: uint8 [n], followed by the recently visited classes.

        A single rank takes a checkpoint for it if none was taken after the last step.

        Raises:
            ValueError: on several ranks, `checkpoint` was not called after the last step.
        """
        if self._opened is None and self._saved is None:
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
        """Rolls the rows back to the checkpoint of a `state_dict`; an unused head's state changes nothing."""
        if not len(state):
            return
        saved, recent = from_tensor(state)
        if saved.order_seed != self.order.order_seed:
            raise ValueError(
                f"the state's rows have the order of order_seed={saved.order_seed}, the head that of "
                f"{self.order.order_seed}: give it the same order_seed"
            )
        if self._opened is not None:
            assert self._table is not None, "the owner of a store restores it"
            self._stack.close()
            self._opened = self._store = None
        self._coming.restore(recent)
        self._saved, self.num_steps, self._current = saved, saved.step, None


def _close_in_process(stack: ExitStack, process_id: int) -> None:
    """Closes the stack, except in a process that was forked from its owner."""
    if os.getpid() == process_id:
        stack.close()


def _ranks(device: torch.device) -> Ranks:
    """This process among those of torch.distributed, if that is initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(device=device)
    world_size = dist.get_world_size()
    has_gloo = "gloo" in dist.get_backend_config(dist.group.WORLD)
    return Ranks(
        rank=dist.get_rank(),
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        device=device,
        control=None if has_gloo else dist.new_group(backend="gloo"),
    )
