"""`ClassifierHead`: the cosine softmax over the K most recent of any number of classes, as a torch module.

head = ClassifierHead(num_classes=N, dim=128, num_negatives=65_536, servers="ws0:50051,ws1:50051", run="a")
loader = DataLoader(images, batch_sampler=head.sampler(window_size=131_072, window_stride=16_384, batch_size=512))
for ids, batch in head.announced(loader):
    loss = head(encoder(batch), ids)
    loss.backward()
    optimizer.step(); head.step(learning_rate=optimizer.param_groups[0]["lr"]); optimizer.zero_grad()
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
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
from weightserver.torch.class_order import ClassOrder, Labels
from weightserver.torch.loss import cosine_softmax_loss, padded, padded_rows, softmax_loss
from weightserver.torch.margins import MarginKind, margin_of
from weightserver.torch.negatives import Negatives, NegativeSampler, ScheduledRows
from weightserver.torch.ranks import Ranks, gathered
from weightserver.torch.rates import LearningRates
from weightserver.torch.recency import ActiveRows, MostRecent, announced, check_num_active
from weightserver.torch.rows import RowCounters, RowStore
from weightserver.torch.sampler import WindowSampler
from weightserver.torch.served_table import OpenTable, SavedRows, ServedTable, StoreSizes, float32_rates
from weightserver.torch.transfer import to_device
from weightserver.torch.windows import RangesOrder

_MAX_PREFETCH_STEPS = 8
"""Steps in advance at which rows are requested if a sampler knows the classes to come."""
_AHEAD = 2
"""Steps whose batches are loaded in advance if no sampler knows them."""


@dataclass(frozen=True)
class Announced(ActiveRows):
    """The classes of one step that was announced. Rows are those of this rank."""

    ids: Int64Array  # (A, B) or (A, B, P), the classes of each batch of the step, on all ranks together


@dataclass
class _Step:
    """The step in progress."""

    announced: Announced
    labels: Sequence[Tensor]  # A times (B,), on the device
    weight: Tensor | None = None  # (K of this rank, D), padded: a leaf that collects the gradients


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
        momentum, weight_decay: of the rows' SGD.
        correction: how inactive rows move, see `TableSpec`.
        init_std, seed: of the initial rows.
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
        timeout_seconds, retry_seconds, credentials, token, insecure: see `WeightClient`.

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
        )
        if rows not in ("resident", "remote", "dense"):
            raise ValueError(f"rows must be 'resident', 'remote' or 'dense', got {rows!r}")
        if softmax not in ("cosine", "plain"):
            raise ValueError(f"softmax must be 'cosine' or 'plain', got {softmax!r}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive, got {temperature}")
        if rows == "dense" and servers:
            raise ValueError("rows='dense' keeps the rows in this process: omit servers, or use rows='resident'")
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
        chosen_margin = margin_of(margin, margin_size)
        if softmax == "plain" and margin != "none":
            raise ValueError(f"margin {margin!r} is for cosines: choose softmax='cosine', or no margin")
        loss: Callable[..., Tensor] = softmax_loss
        if softmax == "cosine":
            loss = partial(cosine_softmax_loss, temperature=temperature, margin=chosen_margin)
        sampled = NegativeSampler(
            num_negatives,
            num_rows=num_classes,
            rows_per_block=rows_per_block,
            kind=negatives,
            recent_share=recent_share,
            seed=seed,
        )
        order = RangesOrder([num_classes], order_seed)
        self._set_up(spec, negatives=sampled, loss=loss, order=order, table=table, capacity=capacity)

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
        first_step: int = 0,
    ) -> Self:
        """A head over a store that the caller opened and closes, for training loops that manage their own sessions.

        Args:
            rates: those of the store, which its servers know.
            negatives: the classes of a step.
            loss: `cosine_softmax_loss` or `softmax_loss`, with their settings.
            order: the row of each class.
        """
        head = cls.__new__(cls)
        head._set_up(spec, negatives=negatives, loss=loss, order=order)
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
        self._table = table
        self._capacity = capacity
        self._stack = ExitStack()
        self._opened: OpenTable | None = None
        self._opened_on = self.device
        self._store: RowStore | None = None
        self._ranks = Ranks()
        self._saved: SavedRows | None = None
        self._sampler: WindowSampler | None = None
        self._recent = MostRecent(negatives.num_recent)
        self._by_sampler: ScheduledRows | None = None
        self._upcoming: deque[Announced] = deque()
        self._before: deque[tuple[Int64Array, Int64Array]] = deque()  # the recent rows before each of `_upcoming`
        self._current: _Step | None = None

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
            ranks = _ranks(self.device)
            self._use(self._table.open(ranks, self.device, self._saved, self._stack), ranks)
        if self._opened_on != self.device:
            raise ValueError(f"the head's rows are on {self._opened_on}: move the head before its first use")
        assert self._opened is not None
        return self._opened

    def _use(self, opened: OpenTable, ranks: Ranks) -> None:
        self._opened, self._opened_on, self._ranks = opened, self.device, ranks
        self.num_steps = opened.first_step
        self._sharding = Sharding(self.spec.rows_per_block, ranks.world_size)
        on_gpu = self.device.type == "cuda"
        self._padded_rows = padded_rows(self.negatives.num_active, self.spec.rows_per_block, ranks) if on_gpu else 0

    def _open_store(self, step_size: int) -> RowStore:
        """The store; makes it for steps of `step_size` images at the first use."""
        opened = self._open()
        if self._store is None:
            self._store = opened.make_store(self._sizes(step_size))
        self.negatives.check(step_size)
        return self._store

    def _sizes(self, step_size: int) -> StoreSizes:
        if self._sampler is None:
            sampled = (_AHEAD + 1) * self.negatives.num_sampled(step_size)
            capacity = self.negatives.num_active + sampled + 2 * (_AHEAD + 1) * step_size
            capacity = min(self.spec.num_rows, capacity)
            return StoreSizes(self._capacity or capacity, _AHEAD, max(step_size, self.spec.rows_per_block))
        needed, capacity = self.negatives.resident_rows(self._sampler.row_visits, step_size, _MAX_PREFETCH_STEPS)
        if self._capacity is not None and self._capacity < needed:
            raise ValueError(f"capacity is {self._capacity}, the steps that are prefetched need {needed}: raise it")
        return StoreSizes(
            self._capacity or capacity, _MAX_PREFETCH_STEPS, min(self._sampler.schedule.window_stride, 1 << 14)
        )

    def close(self) -> None:
        """Ends the threads, and the servers if the module started them; updates since the last checkpoint or `flush`
        may be lost. Safe to repeat."""
        self._stack.close()
        self._opened = self._table = self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a ClassifierHead holds a session of the weight servers and cannot be copied: copy the encoder")

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
        self._sampler = WindowSampler(
            self.order if classes is None else ClassOrder(classes, self.order),
            batch_size=batch_size,
            window_size=window_size,
            window_stride=window_stride,
            batches_per_step=batches_per_step,
            seed=seed,
            next_step=lambda: self.num_steps,
            ranks=_ranks(self.device),
        )
        self._by_sampler = ScheduledRows(self._sampler.row_visits, self.negatives, batch_size=self._sampler.step_size)
        return self._sampler

    def sampler_of(self, loader: object) -> WindowSampler | None:
        """The sampler that `sampler` made, if the loader uses it."""
        return self._sampler if getattr(loader, "batch_sampler", self) is self._sampler else None

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
        checked = [self._checked_ids(batch) for batch in batches]
        self._open()
        ids = np.stack([self._of_all_ranks(batch) for batch in checked])  # (A, B) or (A, B, P)
        store, pending = self._open_store(ids.size), len(self._upcoming) + (self._current is not None)
        step, rows = self.num_steps + pending, self.order.rows(ids[ids >= 0])
        self._before.append((self._recent.rows, self._recent.last_visit))
        if self._is_sampled(step, ids):
            assert self._by_sampler is not None
            active = self._by_sampler.active(step)
        else:
            if self._recent.num_active:
                self._recent.add(rows, int(self._recent.last_visit.max(initial=-1)) + 1)
            active = self.negatives.active(step, rows, self._recent if self._recent.num_active else None)
        labels = np.full(ids.shape, -1)
        labels[ids >= 0] = active.labels
        active = ActiveRows(active.rows, labels.reshape(-1, *ids.shape[2:]))
        mine = active.share(self._sharding, self._ranks.rank)
        self._upcoming.append(Announced(mine.rows, mine.labels, ids))
        if pending <= store.prefetch_steps:
            with self._naming_classes():
                store.prefetch(mine.rows, step=step)

    def _is_sampled(self, step: int, ids: Int64Array) -> bool:
        """Whether these classes, int64 (A, B) or (A, B, P), are those that the head's sampler draws for the step."""
        sampler = self._sampler
        return sampler is not None and np.array_equal(sampler.classes_of_step(step), ids.reshape(-1, *ids.shape[2:]))

    def forget_announced(self) -> None:
        """Forgets the steps that were announced and not begun, as when the iteration of a loader is left early."""
        if self._before:
            self._recent.rows, self._recent.last_visit = self._before[0]
        self._upcoming.clear()
        self._before.clear()

    def announcements(self, sampler: WindowSampler, steps: range) -> Generator[Announced, None, None]:
        """Announces a sampler's steps, some of them ahead, and yields each in its turn. Close the generator to end its
        thread."""
        store = self._open_store(sampler.step_size)
        scheduled = ScheduledRows(sampler.row_visits, self.negatives, batch_size=sampler.step_size)

        def computed(step: int) -> Announced:
            active = scheduled.active(step).share(self._sharding, self._ranks.rank)
            ids = sampler.classes_of_step(step).reshape(sampler.batches_per_step, -1)
            return Announced(active.rows, active.labels, ids)

        with closing(announced(computed, store, steps)) as coming:
            for _ in steps:
                with self._naming_classes():
                    item = next(coming)
                self._upcoming.append(item)
                self._before.append((self._recent.rows, self._recent.last_visit))
                yield item

    # ---- a step

    def forward(self, embeddings: Tensor, ids: Any, *, update_rows: bool = True) -> Tensor:
        """The mean loss of a batch over the active classes (Equation 1), a scalar.

        Args:
            embeddings: float (b, D), of this rank's images.
            ids: integers (b,), the class of each, or (b, P), up to P classes of each, -1 for fewer: the target
                distribution is then uniform over an image's classes (see `softmax_loss`). Best on the CPU, since
                reading them from a GPU waits for it.
            update_rows: whether the loss's gradient updates the rows too.

        Raises:
            ValueError: shapes, devices or classes that do not fit, or not the classes that were announced.
            WeightServerError: rows could not be fetched, or an earlier update could not be stored.
        """
        checked = self._checked_ids(ids)
        self._check_embeddings(embeddings, len(checked))
        step = self._begin(checked)
        labels = step.labels[self._part(step.announced, checked)]
        weight = self.active_rows()
        loss: Tensor = self._loss(
            embeddings,
            weight if update_rows else weight.detach(),
            labels,
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
        return step.weight

    @property
    def counters(self) -> RowCounters:
        """What the row store has done so far."""
        return self._store.counters if self._store else RowCounters()

    @property
    def labels(self) -> Tensor:
        """The positions of the classes of all ranks' images among `active_rows`, int64 (A · B,); -1 for classes of
        other ranks."""
        return torch.cat(list(self._current.labels)) if self._current else torch.zeros(0, dtype=torch.int64)

    def step(self, learning_rate: float | None = None) -> None:
        """Updates the rows by the gradients since the last step; may return before it is done.

        Raises:
            ValueError: no forward and backward pass precedes, or no learning rate is known.
            WeightServerError: an earlier update could not be stored.
        """
        if (step := self._current) is None or step.weight is None:
            raise ValueError("step() without a forward pass: call head(embeddings, ids) first")
        if step.weight.grad is None:
            raise ValueError("step() without a backward pass: call loss.backward() first")
        rates = self._open().rates
        if learning_rate is not None:
            rates.tell(self.num_steps, float(learning_rate))
        elif self.num_steps >= len(rates):
            raise ValueError(f"the learning rate of step {self.num_steps} is not known: give step(learning_rate=...)")
        rows = step.announced.rows
        assert self._store is not None
        with self._naming_classes():
            self._store.apply_gradients(rows, step.weight.grad[: len(rows)], step=self.num_steps)
        self._current = None
        self.num_steps += 1

    def _begin(self, ids: Int64Array | None) -> _Step:
        """The step in progress; starts the next one that was announced, or one of these classes."""
        if self._current is None:
            if not self._upcoming:
                if ids is None:
                    raise ValueError("no step was announced: call head(embeddings, ids), or announce(ids)")
                self.announce(ids)
            announced = self._upcoming.popleft()
            self._before.popleft()
            labels = to_device(announced.labels, self.device)
            self._current = _Step(announced, torch.split(labels, announced.ids.shape[1]))
        return self._current

    def _part(self, announced: Announced, ids: Int64Array) -> int:
        """The number of the step's batch that has these classes on this rank, int64 (b,)."""
        share = self._ranks.share(announced.ids.shape[1])
        for part, of_all in enumerate(announced.ids):
            if np.array_equal(of_all[share], ids):
                return part
        raise ValueError(
            f"the classes {_first(ids)} are not those that were announced for step {self.num_steps} "
            f"({_first(announced.ids[0, share])}): give each batch in the order of its announcement, call step() after "
            "the last batch of a step, and announce the batches of one step together"
        )

    # ---- checks

    def _checked_ids(self, ids: Any) -> Int64Array:
        array = ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
        if array.dtype.kind not in "iu":
            raise TypeError(f"classes must be integers, got {array.dtype}")
        if array.ndim not in (1, 2) or not array.size:
            raise ValueError(f"classes must have shape (b,), or (b, P) for several of an image, got {array.shape}")
        least = -1 if array.ndim == 2 else 0
        if array.min() < least or array.max() >= self.spec.num_rows:
            bad = array[(array < least) | (array >= self.spec.num_rows)][0]
            raise ValueError(f"class {bad} does not exist: the head has classes 0..{self.spec.num_rows - 1}")
        if array.ndim == 2 and len(without := np.flatnonzero(array.max(axis=1) < 0)):
            raise ValueError(f"image {without[0]} of the batch has no class: give at least one")
        return array.astype(np.int64, copy=False)

    def _check_embeddings(self, embeddings: Tensor, num_ids: int) -> None:
        if tuple(embeddings.shape) != (num_ids, self.spec.dim):
            raise ValueError(
                f"embeddings must have shape ({num_ids}, {self.spec.dim}), one row for each class given, got "
                f"{tuple(embeddings.shape)}"
            )
        if embeddings.device != self.device:
            raise ValueError(
                f"embeddings are on {embeddings.device}, the head is on {self.device}: call head.to() before its "
                "first use"
            )
        if not torch.is_grad_enabled():
            raise ValueError("the head computes the loss of a training step: call it with gradients enabled")

    def _of_all_ranks(self, ids: Int64Array) -> Int64Array:
        """The classes (b,) or (b, P) of every rank, in order."""
        ranks = self._ranks if self._opened else _ranks(self.device)
        if ranks.world_size == 1:
            return ids
        sizes = ids.size, ids.size // len(ids)
        most, most_of_one, least, least_of_one = ranks.max_over_ranks([*sizes, *(-size for size in sizes)])
        if (most, most_of_one) != (-least, -least_of_one):
            raise ValueError(f"every rank must give as many classes in each batch, got {-least:.0f} to {most:.0f}")
        return gathered(torch.from_numpy(ids), len(ids) * ranks.world_size, ranks).numpy()

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
        wanted = self._checked_ids(ids)
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
        self._saved = SavedRows.of(kept, client.table_identity())
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
        return _packed(self._saved, self._recent)

    def set_extra_state(self, state: Tensor) -> None:
        """Rolls the rows back to the checkpoint of a `state_dict`; an unused head's state changes nothing."""
        if not len(state):
            return
        saved, rows, last_visit = _unpacked(state)
        if self._opened is not None:
            assert self._table is not None, "the owner of a store restores it"
            self._stack.close()
            self._opened = self._store = None
        self._saved, self.num_steps = saved, saved.step
        self._recent.rows, self._recent.last_visit = rows, last_visit
        self._upcoming.clear()
        self._before.clear()
        self._current = None


class AnnouncedBatches:
    """The batches of a loader, announced to a head some steps ahead; see `ClassifierHead.announced`."""

    def __init__(
        self,
        head: ClassifierHead,
        loader: Iterable[Any],
        ids_of: Callable[[Any], Any],
        batches_per_step: int,
    ) -> None:
        self._head = head
        self._loader = loader
        self._ids_of = ids_of
        self._batches_per_step = batches_per_step

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self._head.forget_announced()
        sampler = self._head.sampler_of(self._loader)
        return self._by_loading() if sampler is None else self._by_sampler(sampler)

    def _by_sampler(self, sampler: WindowSampler) -> Iterator[Any]:
        first, parts = self._head.num_steps, sampler.batches_per_step
        steps = range(first, first + len(sampler) // parts)
        try:
            with closing(self._head.announcements(sampler, steps)) as announcements:
                for number, batch in enumerate(self._loader):
                    if number % parts == 0:
                        next(announcements)
                    yield batch
        finally:
            self._head.forget_announced()

    def _by_loading(self) -> Iterator[Any]:
        batches, loaded = iter(self._loader), deque[list[Any]]()
        try:
            while True:
                while len(loaded) <= _AHEAD and (step := self._next_step(batches)):
                    self._head.announce(*map(self._ids_of, step))
                    loaded.append(step)
                if not loaded:
                    return
                yield from loaded.popleft()
        finally:
            self._head.forget_announced()

    def _next_step(self, batches: Iterator[Any]) -> list[Any]:
        """The batches of the next step; none if the loader has too few left."""
        step = list(itertools.islice(batches, self._batches_per_step))
        return step if len(step) == self._batches_per_step else []


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


def _first(ids: Int64Array) -> str:
    return ", ".join(map(str, ids[:4].tolist())) + (", ..." if len(ids) > 4 else "")


def _packed(saved: SavedRows, recent: MostRecent) -> Tensor:
    """uint8 [n]: the length of the text, the text, then rows and last visits as int64."""
    text = saved.to_bytes()
    arrays = np.stack([recent.rows, recent.last_visit]).astype("<i8").tobytes()
    return torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text + arrays), dtype=torch.uint8)


def _unpacked(state: Tensor) -> tuple[SavedRows, Int64Array, Int64Array]:
    content = state.cpu().numpy().tobytes()
    end = 8 + int.from_bytes(content[:8], "little")
    rows, last_visit = np.frombuffer(content[end:], "<i8").reshape(2, -1).astype(np.int64)
    return SavedRows.from_bytes(content[8:end]), rows, last_visit
