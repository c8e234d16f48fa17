"""The softmax over the active classes of each step, whichever way their rows are opened and stored."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from weightserver import TableSpec
from weightserver.core.arrays import Int64Array, checked_integer
from weightserver.core.sharding import Sharding
from weightserver.torch.announced_batches import AnnouncedBatches, first_element
from weightserver.torch.arguments import check_embeddings, check_ended_everywhere, checked_ids, ids_of_all_ranks
from weightserver.torch.class_order import ClassOrder
from weightserver.torch.coming_steps import Announced, ComingSteps
from weightserver.torch.looking import Comparison, Evaluation, evaluation_of
from weightserver.torch.loss import SoftmaxLoss, checked_temperature, padded_rows
from weightserver.torch.negatives import NegativeSampler
from weightserver.torch.opened_rows import OpenedRows
from weightserver.torch.ranks import Ranks, gathered_parts, ranks_of_process
from weightserver.torch.recency import announced, check_num_active
from weightserver.torch.rows import RowCounters, RowStore
from weightserver.torch.sampler import WindowSampler
from weightserver.torch.scaling import check_scaling, clipped, unscaled
from weightserver.torch.step import Step
from weightserver.torch.windows import RangesOrder


class SampledSoftmax(nn.Module, ABC):
    """The steps of a training loop, from their announcement to the update of their rows. Subclasses open the rows.

    Args:
        spec: of the rows.
        negatives: the classes of a step.
        loss: its settings.
        order: the row of each class.
        init_norm: length of rows that begin at their image's embedding; None if rows begin at random.
    """

    num_steps: int
    """Number of finished updates."""

    def __init__(
        self,
        spec: TableSpec,
        *,
        negatives: NegativeSampler,
        loss: SoftmaxLoss,
        order: RangesOrder,
        init_norm: float | None,
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
        self._opened: OpenedRows | None = None
        self._ranks = Ranks()  # those of the rows that were opened last
        self._known_ranks: Ranks | None = None
        self._coming = ComingSteps(negatives, order)
        self._current: Step | None = None
        self._iteration = 0  # number of the current iteration over announced batches
        self._announced_in_vain = False  # the store may hold rows ready for steps that were forgotten
        # Dynamo would trace the calls of the servers. Not a decorator: it would import dynamo, which takes longer than
        # all of torch, into every command.
        self._untraced_loss = torch.compiler.disable(SampledSoftmax._loss_of)  # type: ignore[no-untyped-call]

    # ---- rows

    @property
    def device(self) -> torch.device:
        """The device of embeddings and rows."""
        where: Tensor = self._where  # type: ignore[assignment]
        return where.device

    @abstractmethod
    def _open(self) -> OpenedRows:
        """The rows; opens them at the first use and then calls `_use`."""

    def _use(self, opened: OpenedRows) -> None:
        self._opened, self._ranks = opened, opened.ranks
        self.num_steps = opened.table.first_step
        self._coming.use(opened.ranks, Sharding(self.spec.rows_per_block, opened.ranks.world_size))

    def _own_ranks(self) -> Ranks:
        """This process among those of torch.distributed; asked for once, since it may make a process group."""
        if self._known_ranks is None or self._known_ranks.device != self.device:
            self._known_ranks = ranks_of_process(self.device)
        return self._known_ranks

    def _open_store(self, step_size: int) -> RowStore:
        """The store; makes it for steps of `step_size` images at the first use."""
        store = self._open().open_store(step_size)
        if self._announced_in_vain:
            in_progress = self._current is not None and self._current.weight is not None
            store.forget_announced(in_progress=in_progress)
            self._announced_in_vain = False
        return store

    # ---- what comes

    def sampler(
        self,
        *,
        batch_size: int,
        window_size: int | None = None,
        window_stride: int | None = None,
        batches_per_step: int = 1,
        seed: int = 0,
        classes: npt.ArrayLike | None = None,
    ) -> WindowSampler:
        """A `batch_sampler` over all images that continues after the head's finished steps.

        The other arguments are those of `WindowSampler`.

        Args:
            classes: class of each image, integers [number of images] (an array, list or tensor), for classes that
                images share: the window then slides over neighbouring classes, see `ClassOrder`. Without it each image
                is its own class.

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
        ids_of: Callable[[Any], Any] = first_element,
        batches_per_step: int = 1,
    ) -> AnnouncedBatches:
        """The batches of a loader, whose rows are requested before they are needed; may be iterated repeatedly.

        If the loader's batch_sampler is that of `sampler`, the classes to come are known; otherwise the batches of two
        further steps are loaded in advance.

        Args:
            ids_of: returns the classes of a batch, integers (b,); by default its first element.
            batches_per_step: number of batches whose gradients are accumulated in one step; batches at the end of the
                loader that make no whole step are left out.

        Raises:
            TypeError: `batches_per_step` is no integer; without `ids_of`, while iterating: a batch is no tuple or list.
            ValueError: `batches_per_step` is not positive, or not that of the sampler.
        """
        if checked_integer(batches_per_step, "batches_per_step") < 1:
            raise ValueError(f"batches_per_step must be at least 1, got {batches_per_step}")
        sampler = self.sampler_of(loader)
        if sampler is not None and batches_per_step not in (1, sampler.batches_per_step):
            raise ValueError(
                f"batches_per_step is {batches_per_step}, that of the loader's sampler {sampler.batches_per_step}: "
                "give it to sampler() alone"
            )
        return AnnouncedBatches(self, loader, ids_of, batches_per_step)

    def begin_iteration(self) -> int:
        """Returns the number of a new iteration over announced batches. It ends the iteration before, whose steps are
        forgotten, those in progress too."""
        self.forget_announced(in_progress=True)
        self._iteration += 1
        return self._iteration

    def check_iteration(self, number: int) -> None:
        """Raises ValueError if an iteration has ended."""
        if number != self._iteration:
            raise ValueError(
                "the iteration over announced(...) has ended, since another one began, or the head was closed or "
                "loaded a state: begin a new one"
            )

    def end_iteration(self, number: int) -> None:
        """Forgets what an iteration announced in vain; one that has ended before changes nothing."""
        if number == self._iteration:
            self.forget_announced()

    def announce(self, *batches: Any) -> None:
        """Announces the classes of the next step that was not announced, those of `forward` for each of its batches;
        their rows are requested. Without it a step's first forward pass announces its own classes.

        Raises:
            ValueError: classes that do not exist, or not as many on every rank.
        """
        if not batches:
            raise ValueError("a step needs at least one batch: call announce(ids)")
        checked = [checked_ids(batch, self.spec.num_rows) for batch in batches]
        opened = self._open()
        ids = ids_of_all_ranks(checked, opened.ranks)  # (A, B) or (A, B, P)
        self.negatives.check(ids.size)
        store, pending = self._open_store(ids.size), len(self._coming) + (self._current is not None)
        step = self.num_steps + pending
        announced = self._coming.add_batches(step, ids)
        if pending <= store.prefetch_steps:
            try:
                with opened.naming_classes():
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
        if current is not None:
            current.end()
            self._current = None
        self._announced_in_vain = True

    def announcements(self, sampler: WindowSampler, steps: range) -> Generator[Announced, None, None]:
        """Announces a sampler's steps, some of them ahead, and yields each in its turn. Close the generator to end its
        thread."""
        opened = self._open()
        self.negatives.check(sampler.step_size)
        store = self._open_store(sampler.step_size)
        with closing(announced(self._coming.of_sampler(sampler), store, steps)) as coming:
            for _ in steps:
                with opened.naming_classes():
                    step = next(coming)
                self._coming.add_sampled(step, sampler)
                yield step

    # ---- a step

    def forward(
        self,
        embeddings: Tensor,
        ids: Any,
        *,
        view: int = 0,
        update_rows: bool = True,
        temperature: float | None = None,
    ) -> Tensor:
        """The mean loss of a batch over the active classes (Equation 1): a scalar, float32, also under autocast.

        Args:
            embeddings: float (b, D) of any precision, of this rank's images.
            ids: integers (b,), the class of each, or (b, P), up to P classes of each, -1 for fewer: the target
                distribution is then uniform over an image's classes (see `softmax_loss`). Best on the CPU, since
                reading them from a GPU waits for it.
            view: number of a further view of the batch, each of which may have a backward pass of its own.
            update_rows: whether the loss's gradient updates the rows too.
            temperature: τ of this pass, on every rank the same, for schedules; by default the head's.

        Raises:
            ValueError: shapes, devices or classes that do not fit, not the classes that were announced, or an
                impossible temperature.
            WeightServerError: rows could not be fetched, or an earlier update could not be stored.
        """
        loss: Tensor = self._untraced_loss(self, embeddings, ids, view, update_rows, temperature)
        return loss

    def _loss_of(self, embeddings: Tensor, ids: Any, view: int, update_rows: bool, temperature: float | None) -> Tensor:
        self._require_training()
        temperature = None if temperature is None else checked_temperature(temperature)
        checked = checked_ids(ids, self.spec.num_rows)
        check_embeddings(embeddings, len(checked), self.spec.dim, self.device)
        if not torch.is_grad_enabled():
            raise ValueError(
                "the head computes the loss of a training step: call it with gradients enabled, or evaluate(...)"
            )
        step = self._begin(checked)
        part = step.part_of(checked)
        weight = step.rows_for(part, embeddings, view=view, update_rows=update_rows)
        loss: Tensor = self._loss(
            embeddings.float(),
            weight,
            step.labels[part],
            ranks=self._ranks,
            num_rows=len(step.announced.rows),
            temperature=temperature,
        )
        return loss

    @contextmanager
    def step_of(self, *batches: Any) -> Iterator[Step]:
        """Begins the step of these classes, those of `forward` for each of its batches; all its passes and its `step()`
        are made inside. If an exception leaves the block before `step()`, the gradients are dropped and the rows are as
        before: give the same batch again, or (if it was not announced) another one, or `skip()`.

        Raises:
            ValueError: as `announce` and `forward` do, or the step before has not ended.
        """
        self._require_training()
        if not batches:
            raise ValueError("a step needs at least one batch: call step_of(ids)")
        checked = [checked_ids(batch, self.spec.num_rows) for batch in batches]
        if self._current is not None:
            self._current.check_without_pass(checked[0])
        number = self.num_steps
        try:
            step = self._begin(*checked)
            step.check_classes(checked)
            yield step
        except BaseException:
            if self._current is not None and self.num_steps == number:
                if self._may_be_forgotten(self._current):
                    self.forget_announced(in_progress=True)
                else:
                    self._current.restart()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the step in progress; its batches may be given again. Of a step that was not
        announced, the next forward pass may be that of another batch."""
        super().zero_grad(set_to_none)
        if self._current is not None:
            self._current.clear_gradients()

    def _may_be_forgotten(self, step: Step) -> bool:
        """Whether other classes may be given instead of those of a step that was begun."""
        return not step.is_announced and not self._coming

    @torch.inference_mode(mode=False)  # its tensors are used in training also if evaluation begins the step
    def _begin(self, *batches: Int64Array) -> Step:
        """The step in progress; starts the next one that was announced, or one of these classes."""
        if self._current is not None and self._current.is_cleared and batches and self._may_be_forgotten(self._current):
            self.forget_announced(in_progress=True)
        if self._current is None:
            is_announced, before = bool(self._coming), self._coming.visited()
            if not (is_announced or batches):
                raise ValueError("no step was announced: call head(embeddings, ids), or announce(ids)")
            try:
                if not is_announced:
                    self.announce(*batches)
                step = self._next_step(is_announced)
                self._current, _ = step, self._coming.take()
            except BaseException:
                if not is_announced:
                    self._coming.forget(before)
                    self._announced_in_vain = True
                raise
        return self._current

    def _next_step(self, is_announced: bool) -> Step:
        assert self._opened is not None
        return Step(
            self._opened,
            self._coming.first,
            number=self.num_steps,
            is_announced=is_announced,
            num_padded=self._num_padded(),
            init_norm=self._init_norm,
        )

    def _num_padded(self) -> int:
        """Number of rows that a rank's active rows are padded to; only a GPU needs them."""
        if self.device.type != "cuda":
            return 0
        return padded_rows(self.negatives.num_active, self.spec.rows_per_block, self._ranks)

    def active_rows(self) -> Tensor:
        """The rows of the step in progress, or of the next one that was announced, before its update: float32
        (K of this rank, D), padded with zeros on several GPUs. Waits for them."""
        return self._begin().active_rows()

    @property
    def counters(self) -> RowCounters:
        """What the row store has done so far."""
        store = self._opened.store if self._opened else None
        return store.counters if store else RowCounters()

    @property
    def labels(self) -> Tensor:
        """The positions of the classes of all ranks' images among `active_rows`, int64 (A · B,); -1 for classes of
        other ranks."""
        return torch.cat(list(self._current.labels)) if self._current else torch.zeros(0, dtype=torch.int64)

    def step(
        self,
        learning_rate: float | None = None,
        *,
        gradient_scale: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        max_norm: float | None = None,
    ) -> Tensor | None:
        """Updates the rows by the gradients since the last step; may return before it is done.

        Args:
            learning_rate: of this update, on every rank the same; may be omitted if it was given in advance.
            gradient_scale: what the loss was multiplied by, if there is no `scaler`. If then a gradient overflowed, the
                step is one without gradients, as in `skip`.
            scaler: which scaled the loss; call its update() afterwards. If a gradient of the rows or the encoder
                overflowed, the step is one without gradients, and the scaler leaves out that of the encoder.
            optimizer: the encoder's, whose step follows: it is needed for `max_norm`, and with a scaler, so that an
                overflow in the rows leaves out the encoder's step. Without it, call scaler.step(...) before.
            max_norm: what the norm of all gradients, of the encoder and the rows together, is clipped to.

        Returns:
            With `max_norm`, the norm before clipping, a scalar; infinite if a gradient overflowed.

        Raises:
            ValueError: no forward and backward pass of each of the step's batches precedes, no learning rate is known,
                or (without a scale, on a CPU) a gradient is infinite or NaN.
            WeightServerError: an earlier update could not be stored.
        """
        self._require_training()
        if (step := self._current) is None:
            raise ValueError("step() without a forward pass: call head(embeddings, ids) first")
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        check_scaling(gradient_scale, scaler, optimizer, max_norm)
        gradients, norm = step.gradients(), None
        if not (is_scaled := scaler is not None or gradient_scale is not None):
            step.require_finite(gradients)
        self._tell(learning_rate)
        if is_scaled:
            valid = unscaled(gradients, self._ranks, gradient_scale=gradient_scale, scaler=scaler, optimizer=optimizer)
            if valid is None:
                self._finish(step, step.no_gradients())
                return gradients.new_tensor(math.inf) if max_norm is not None else None
            gradients = valid
        if optimizer is not None and max_norm is not None:
            gradients, norm = clipped(gradients, self._ranks, optimizer=optimizer, max_norm=max_norm)
        self._finish(step, gradients)
        return norm

    def skip(self, learning_rate: float | None = None) -> None:
        """Ends the step in progress, or the next one that was announced, as one whose gradients are zero: its rows
        move by their momentum and weight decay. For batches that failed or are left out."""
        self._require_training()
        step = self._begin()
        self._tell(learning_rate)
        self._finish(step, step.no_gradients())

    def _tell(self, learning_rate: float | None) -> None:
        """Sets the learning rate of the step in progress. Raises ValueError if it is unknown, or known as another."""
        table = self._open().table
        if learning_rate is not None:
            table.tell(self.num_steps, float(learning_rate))
        elif self.num_steps >= len(table.rates):
            raise ValueError(f"the learning rate of step {self.num_steps} is not known: give step(learning_rate=...)")

    def _finish(self, step: Step, gradients: Tensor) -> None:
        step.update(gradients)
        step.end()
        self._current = None
        self.num_steps += 1

    def _require_training(self) -> None:
        """Raises ValueError in eval mode."""
        if not self.training:
            raise ValueError("the head is in eval mode, in which it does not train: call train(), or evaluate(...)")

    # ---- looking

    @torch.no_grad()
    def evaluate(self, embeddings: Tensor, ids: Any, *, classes: Any = "all") -> Evaluation:
        """The loss and the accuracy of embeddings by the rows as they are after the finished updates. Changes nothing.

        All ranks call it, each with any number of its own images; each returns the means over all of them. It reads
        the rows of all the classes that it compares, some at a time: give all images at once.

        Args:
            embeddings: float (b, D).
            ids: integers (b,), the class of each, or (b, P) as in `forward`.
            classes: among which an image's own is to be found: "all", the most "recent" ones that a step would have
                (with those of all images), or integers (n,), the same on every rank.

        Raises:
            ValueError: shapes, devices or classes that do not fit.
        """
        checked = checked_ids(ids, self.spec.num_rows)
        check_embeddings(embeddings, len(checked), self.spec.dim, self.device)
        comparison, own = self._comparison(classes, checked.reshape(len(checked), -1))
        return evaluation_of(comparison.compare(embeddings, own, k=min(5, comparison.num_classes)), own)

    @torch.no_grad()
    def predict(self, embeddings: Tensor, k: int = 1, *, classes: Any = "all") -> Tensor:
        """The `k` classes whose rows have the largest logits with each embedding, float (b, D): int64 (b, k), on the
        CPU, in descending order. All ranks call it, each with any number of its own images. Changes nothing.

        Args:
            classes: those to choose among, as in `evaluate`.

        Raises:
            ValueError: shapes or devices that do not fit, or fewer than `k` classes.
        """
        check_embeddings(embeddings, len(embeddings), self.spec.dim, self.device)
        comparison, own = self._comparison(classes, np.zeros((len(embeddings), 0), np.int64))
        if not 1 <= k <= comparison.num_classes:
            raise ValueError(
                f"k must lie in 1..{comparison.num_classes}, the number of classes to choose among, got {k}"
            )
        lengths = [len(part) for part in gathered_parts(embeddings, self._ranks)]
        nearest = comparison.compare(embeddings, own, k=k).nearest
        mine = nearest[sum(lengths[: self._ranks.rank]) :][: len(embeddings)]
        return torch.from_numpy(self.order.images(mine.reshape(-1)).reshape(mine.shape))

    def _comparison(self, classes: Any, ids: Int64Array) -> tuple[Comparison, Int64Array]:
        """The rows of these classes, and those of all ranks' images, int64 (B, P), of ids int64 (b, P)."""
        opened = self._open()
        everyone = torch.cat(gathered_parts(torch.from_numpy(ids), opened.ranks)).numpy()
        own = np.full(everyone.shape, -1)
        own[everyone >= 0] = self.order.rows(everyone[everyone >= 0])
        rows: Int64Array | None = None
        if isinstance(classes, str):
            if classes not in ("all", "recent"):
                raise ValueError(f"classes must be 'all', 'recent', or integers (n,), got {classes!r}")
            if classes == "recent" and not self.negatives.takes_all:
                recent, _ = self._coming.visited_before(self.num_steps)
                rows = np.union1d(recent, own[own >= 0])
        else:
            given = checked_ids(classes, self.spec.num_rows)
            if given.ndim != 1:
                raise ValueError(f"classes must have shape (n,), got {given.shape}")
            if len(other := np.setdiff1d(ids[ids >= 0], given)):
                raise ValueError(
                    f"class {other[0]} of an image is not among the classes given: add it, or leave it out"
                )
            rows = np.unique(self.order.rows(given))
        return Comparison(opened, self._loss, step=self.num_steps, rows=rows), own
