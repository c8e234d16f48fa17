"""`ClassifierHead`: the cosine softmax over the K most recent of any number of classes, as a torch module.

head = ClassifierHead(num_classes=N, dim=128, num_negatives=65_536, servers="ws0:50051,ws1:50051", run="a")
loader = DataLoader(images, batch_sampler=head.sampler(window_size=131_072, window_stride=16_384, batch_size=512))
for ids, batch in head.announced(loader):
    loss = head(encoder(batch), ids)
    loss.backward()
    optimizer.step(); head.step(learning_rate=optimizer.param_groups[0]["lr"]); optimizer.zero_grad()
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, Unpack
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from weightserver import Checkpoint, TableSpec, WeightClient
from weightserver.core.arrays import Int64Array, checked_integer, checked_number
from weightserver.torch.agreement import Agreement, Doing
from weightserver.torch.announced_batches import AnnouncedBatches, first_element
from weightserver.torch.arguments import check_embeddings, check_finite, checked_ids, class_counts
from weightserver.torch.class_order import ClassOrder
from weightserver.torch.looking import Comparison, Evaluation, evaluation_of
from weightserver.torch.loss import Loss
from weightserver.torch.margins import distinct
from weightserver.torch.negatives import Negatives, NegativeSampler
from weightserver.torch.ranks import gathered_parts
from weightserver.torch.recency import check_num_active
from weightserver.torch.rows import RowCounters
from weightserver.torch.sampler import WindowSampler
from weightserver.torch.saved_rows import SavedRows, from_tensor, to_tensor
from weightserver.torch.scaling import (
    Optimizers,
    ScalerUse,
    Scaling,
    checked_optimizers,
    moment,
    norm_over_ranks,
    watch_optimizers,
)
from weightserver.torch.settings import Rows, Servers, Settings, group_of, refuse_unknown
from weightserver.torch.step import Announced, Step
from weightserver.torch.steps import Steps
from weightserver.torch.table import Table
from weightserver.torch.windows import RangesOrder

_OF_A_STEP = ("announce", "forward", "_enter", "_leave", "_abort", "zero_grad", "active_rows", "step", "skip")
_CALLS = (*_OF_A_STEP, "evaluate", "predict")
"""Methods that call the servers, or torch.distributed."""


@functools.cache
def _leave_out_of_graphs() -> None:
    """Lets torch.compile leave a head's methods as they are: Dynamo would trace the calls of the servers.

    Done when the first head is made: it imports Dynamo, which takes longer than all of torch.
    """
    for name in _CALLS:
        outside = torch.compiler.disable(getattr(ClassifierHead, name))  # type: ignore[no-untyped-call]
        setattr(ClassifierHead, name, outside)


class ClassifierHead(nn.Module):
    """A linear classifier without bias whose rows, one for each class, live on weight servers.

    A step is: any number of forward and backward passes, then `step`. Its classes are the K most recently visited ones,
    those of its own images included. The module has no parameter for the rows: `step` updates them by SGD, exactly as
    torch.optim.SGD would update a dense matrix, those of inactive classes included.

    With torch.distributed, every rank calls the same methods in the same order, with its own images; each rank holds a
    share of the rows, and DistributedDataParallel averages the encoder's gradients as usual. The module follows
    `to(device)` until its first use. A context manager; `close` ends threads and servers.

    Args:
        num_classes: N; or the numbers of classes that were added one after another, [N, m], with which a state of the
            first N can be loaded: the rows of the others begin as if they had been there from the start.
        dim: D, the length of an embedding.
        num_negatives: K, the number of classes of a step.
        servers: addresses "host:port,host:port" of all weight servers, a list of them, or `Servers`. Without addresses
            the module starts `num_shards` of its own on this machine, which keep the rows in `directory`.
        run: name of the run, which the servers show.
        directory: by default rows/RUN in the current directory.
        rows: "resident", "remote" or "dense", where they are, or `Rows`.
        negatives: which classes are active besides a step's own: the most "recent" ones, "uniform" ones sampled in
            whole blocks of rows, or "both"; see `NegativeSampler`.
        recent_share: with "both", the share of K that recent classes have; by default half.
        softmax: "cosine", "plain" for inner products, or `Loss`.
        order_seed: seed of the random order in which rows are stored, and of the sampler's order.
        learning_rates: float32 [n], those of the first n steps if they are known in advance: `step` then needs none.
        settings: fields of `Servers`, `Rows` and `Loss`, such as momentum=0.9 or temperature=0.1.

    Raises:
        TypeError: a setting of the wrong type, or an unknown one.
        ValueError: settings that are out of range or contradict each other.
    """

    def __init__(
        self,
        num_classes: int | Sequence[int],
        dim: int,
        *,
        num_negatives: int,
        servers: str | Sequence[str] | Servers | None = None,
        run: str = "head",
        directory: str | Path | None = None,
        rows: Literal["resident", "remote", "dense"] | Rows = "resident",
        negatives: Negatives = "recent",
        recent_share: float | None = None,
        softmax: Literal["cosine", "plain"] | Loss = "cosine",
        order_seed: int = 0,
        learning_rates: npt.ArrayLike | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__()
        refuse_unknown(settings)
        of_servers = group_of(Servers, servers, settings)
        of_rows, of_loss = group_of(Rows, rows, settings), group_of(Loss, softmax, settings)
        if of_servers.addresses and of_rows.where == "dense":
            raise ValueError("rows='dense' keeps the rows in this process: omit servers, or use rows='resident'")
        if of_servers.addresses and (directory is not None or of_servers.num_shards != 1):
            raise ValueError(
                "servers are given, but directory and num_shards are of a head's own ones: omit one of them"
            )
        if not isinstance(run, str) or not isinstance(directory, str | os.PathLike | None):
            raise TypeError(f"run must be a text and directory a path, got {run!r} and {directory!r}")
        if recent_share is not None and negatives != "both":
            raise ValueError(f"recent_share is for negatives both, got negatives {negatives}: omit it")
        ranges = class_counts(num_classes)
        self.order = RangesOrder(ranges, checked_integer(order_seed, "order_seed"))
        spec = of_rows.spec(self.order.num_rows, dim)
        self.negatives = NegativeSampler(
            checked_integer(num_negatives, "num_negatives"),
            num_rows=spec.num_rows,
            rows_per_block=of_rows.rows_per_block,
            kind=negatives,
            recent_share=0.5 if recent_share is None else recent_share,
            seed=of_rows.seed,
        )
        check_num_active(self.negatives.num_active, spec.num_rows, 1)
        self.register_buffer("_where", torch.zeros(0), persistent=False)  # follows `to(device)`
        self._loss = of_loss
        self._table = Table(
            spec,
            self.order,
            of_servers,
            of_rows,
            self.negatives,
            run=run,
            directory=(Path("rows") / run if directory is None else Path(directory)).absolute(),
            learning_rates=of_rows.learning_rates([] if learning_rates is None else learning_rates),
        )
        self._steps = Steps(self._table, self.negatives, self.order)
        classes = {"num_classes": ranges, "dim": dim, "order_seed": order_seed}
        active = {"num_negatives": num_negatives, "negatives": negatives, "recent_share": recent_share}
        self._settings: dict[str, object] = {**asdict(of_rows), **asdict(of_loss), **classes, **active}
        self._scaler_use = ScalerUse()
        self._passed_at = 0  # see `moment`
        self._saved: SavedRows | None = None
        _leave_out_of_graphs()
        watch_optimizers()
        weakref.finalize(self, self._table.close).atexit = False  # the shards end with the process

    @property
    def spec(self) -> TableSpec:
        """The table; once it is open, with its blocks."""
        return self._table.spec

    @property
    def num_steps(self) -> int:
        """Number of finished updates."""
        return self._steps.number

    @property
    def device(self) -> torch.device:
        """The device of embeddings and rows."""
        where: Tensor = self._where  # type: ignore[assignment]
        return where.device

    # ---- opening

    @property
    def client(self) -> WeightClient | None:
        """The client of the weight servers; None for dense rows, and before `connect` or the first use."""
        return self._table.client

    @property
    def epoch(self) -> int:
        """Number of the session on the weight servers; 0 for dense rows, and before the table is opened."""
        return self._table.epoch

    def connect(self) -> WeightClient:
        """The client of the weight servers, without a session: to look at what they hold, before a state is loaded or
        the head is used. Starts the head's own servers. All ranks call it.

        Raises:
            ValueError: dense rows, or a head that was closed.
        """
        return self._table.connect(self.device)

    def open(self) -> None:
        """Opens the table now, which otherwise the first step does: a new run's, or that of the state that was loaded.
        If a sampler was made, also the store of its steps. All ranks call it.

        Raises:
            ValueError: the servers hold rows of another run, or not those of the state.
            SessionInUseError: a live run uses the servers.
            WeightServerError: servers that are unreachable or refuse.
        """
        table = self._open()
        if (sampler := self._steps.sampler) is not None:
            table.open_store(sampler.step_size, sampler)

    def _open(self) -> Table:
        table = self._table
        if not table.is_open:
            table.open(self.device, self._saved, self._steps.sampler, settings=self._settings)
        table.require_usable()
        if table.ranks.device != self.device:
            raise ValueError(f"the head's rows are on {table.ranks.device}: move the head before its first use")
        return table

    def _reader(self) -> Callable[[Int64Array], Tensor]:
        """How to read this rank's rows as they are after the finished updates. Opens no table: as long as the head has
        not trained, looking at it leaves the servers, and whoever else uses them, alone."""
        if not self._table.is_open:
            return self._table.reader(self.device, self._saved, settings=self._settings)
        return functools.partial(self._open().peek, step=self.num_steps)

    def close(self) -> None:
        """Ends the threads, and the servers if the module started them; updates since the last checkpoint or `flush`
        may be lost. Safe to repeat. A head that is garbage-collected closes itself."""
        self._steps.reset()
        self._table.close()

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
        classes: npt.ArrayLike | ClassOrder | None = None,
    ) -> WindowSampler:
        """A `batch_sampler` over all images that continues after the head's finished steps.

        The other arguments are those of `WindowSampler`.

        Args:
            classes: class of each image, integers [number of images] (an array, list or tensor), for classes that
                images share, or the `ClassOrder` made of it: the window then slides over neighbouring classes. Without
                it each image is its own class.

        Raises:
            ValueError: a window that does not fit, or a class map of other classes.
        """
        if classes is not None and not isinstance(classes, ClassOrder):
            classes = ClassOrder(classes, self.order)
        steps = self._steps  # not the head, which would then be part of a circle, and outlive its last name
        sampler = WindowSampler(
            self.order if classes is None else classes,
            batch_size=batch_size,
            window_size=window_size,
            window_stride=window_stride,
            batches_per_step=batches_per_step,
            seed=seed,
            next_step=lambda: steps.number,
            ranks=self._table.ranks_on(self.device),
        )
        self.negatives.check(sampler.step_size)
        self._steps.sampler = sampler
        return sampler

    def announced(
        self,
        loader: Iterable[Any],
        *,
        ids_of: Callable[[Any], Any] = first_element,
        batches_per_step: int = 1,
    ) -> AnnouncedBatches:
        """The batches of a loader, whose rows are requested before they are needed; may be iterated repeatedly.

        If the loader's batch_sampler is that of `sampler`, the classes to come are known; otherwise the batches of two
        further steps are loaded in advance. If a step is skipped, the batches that are left of it are left out.

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
        announced = AnnouncedBatches(self._open, self._steps, loader, ids_of, batches_per_step)
        if (sampler := announced.sampler) is not None and batches_per_step not in (1, sampler.batches_per_step):
            raise ValueError(
                f"batches_per_step is {batches_per_step}, that of the loader's sampler {sampler.batches_per_step}: "
                "give it to sampler() alone"
            )
        return announced

    def announce(self, *batches: Any) -> None:
        """Announces the classes of the next step that was not announced, those of `forward` for each of its batches;
        their rows are requested. Without it a step's first forward pass announces its own classes.

        Raises:
            ValueError: classes that do not exist, or not as many on every rank.
        """
        self._open()
        self._steps.announce(*batches)

    def announcements(self, steps: range) -> Iterator[Announced]:
        """Announces the sampler's steps, some of them ahead, and yields each in its turn."""
        self._open()
        return self._steps.announcements(steps)

    def forget_announced(self, *, in_progress: bool = False) -> None:
        """Forgets the steps that were announced and not begun, as when the iteration of a loader is left early; with
        `in_progress` also the one in progress, with its gradients."""
        self._steps.forget(in_progress=in_progress)

    # ---- a step

    def forward(self, embeddings: Tensor, ids: Any, *, view: int = 0) -> Tensor:
        """The mean loss of a batch over the active classes (Equation 1): a scalar, float32, also under autocast.

        Args:
            embeddings: float (b, D) of any precision, of this rank's images.
            ids: integers (b,), the class of each, or (b, P), up to P classes of each, -1 for fewer: the target
                distribution is then uniform over an image's classes (see `Loss`). Best on the CPU, since
                reading them from a GPU waits for it.
            view: number of a further view of the batch, each of which may have a backward pass of its own.

        Raises:
            ValueError: shapes, devices or classes that do not fit, or not the classes that were announced.
            WeightServerError: rows could not be fetched, or an earlier update could not be stored.
        """
        self._require_training()
        checked = checked_ids(ids, self.spec.num_rows)
        check_embeddings(embeddings, len(checked), self.spec.dim, self.device)
        if not torch.is_grad_enabled():
            raise ValueError(
                "the head computes the loss of a training step: call it with gradients enabled (outside of a "
                "checkpoint with use_reentrant=True), or evaluate(...)"
            )
        self._open()
        step = self._steps.begin(checked)
        part = step.part_of(checked, view)
        self._scaler_use.note_forward(self._steps.attempt)
        self._passed_at = moment()
        weight = step.rows_for(part, view=view)
        loss: Tensor = self._loss(
            embeddings.float(),
            weight,
            step.labels[part],
            ranks=self._table.ranks,
            num_rows=len(step.announced.rows),
        )
        return loss

    @contextmanager
    def step_of(self, *batches: Any) -> Iterator[int]:
        """Begins the step of these classes, those of `forward` for each of its batches; all its passes and its `step()`
        are made inside. If an exception leaves the block before `step()`, or nothing was done in it, the gradients are
        dropped and the rows are as before: give the same batch again, or (if it was not announced) another one, or
        `skip()`. The batches of a step that was announced may have a block each: if one fails, all begin anew.

        Yields:
            The number of the step, that of the updates before it.

        Raises:
            ValueError: as `announce` and `forward` do, or the step before has not ended; at the end of a block with
                passes of all batches of the step, neither `step()` nor `skip()` was called in it.
        """
        step = self._enter(batches)
        try:
            yield step.number
        except BaseException:
            self._abort(step.number)
            raise
        self._leave(step, len(batches))

    def _enter(self, batches: Sequence[Any]) -> Step:
        self._require_training()
        if not batches:
            raise ValueError("a step needs at least one batch: call step_of(ids)")
        checked = [checked_ids(batch, self.spec.num_rows) for batch in batches]
        self._open()
        if self._steps.current is not None and self._steps.current.has_passes:
            self._steps.current.check_classes(checked)
        try:
            step = self._steps.begin(*checked, anew=True)
            step.check_classes(checked)
        except BaseException:
            self._steps.abort(self.num_steps)
            raise
        return step

    def _leave(self, step: Step, num_batches: int) -> None:
        """Ends a block that did not fail, with passes of that number of batches."""
        if step is not self._steps.current or (step.has_passes and num_batches < len(step.announced.ids)):
            return
        forgotten = step.has_passes
        self._abort(step.number)
        if forgotten:
            raise ValueError(
                f"step() was not called in the block of step {step.number}, whose gradients are dropped: call "
                "head.step() at the end of the block, or skip()"
            )

    def _abort(self, number: int) -> None:
        self._steps.abort(number)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the step in progress; its batches may be given again. Of a step that was not
        announced, the next forward pass may be that of another batch."""
        super().zero_grad(set_to_none)
        self._steps.clear_gradients()

    def active_rows(self) -> Tensor:
        """The rows of the step in progress, or of the next one that was announced, before its update: float32
        (K of this rank, D), padded with zeros on several GPUs. Waits for them."""
        return self._steps.begin().active_rows()

    @property
    def counters(self) -> RowCounters:
        """What the row store has done so far."""
        store = self._table.store
        return store.counters if store else RowCounters()

    @property
    def labels(self) -> Tensor:
        """The positions of the classes of all ranks' images among `active_rows`, int64 (A · B,); -1 for classes of
        other ranks."""
        return torch.cat(list(self._steps.current.labels)) if self._steps.current else torch.zeros(0, dtype=torch.int64)

    def step(
        self,
        learning_rate: float | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: Optimizers | None = None,
        max_norm: float | None = None,
    ) -> Tensor | None:
        """Updates the rows by the gradients since the last step; may return before it is done.

        Args:
            learning_rate: of this update, on every rank the same; may be omitted if it was given in advance.
            scaler: which scaled the loss; call its update() afterwards. If a gradient of the rows or the encoder
                overflowed, the step is one without gradients, as in `skip`, and the scaler leaves out the encoder's.
            optimizer: the encoder's, or all of several, whose step follows; needed with `scaler` and `max_norm`.
            max_norm: what the norm of all gradients, of the encoder and the rows together, is clipped to. Call the
                encoder's optimizer.step() afterwards.

        Returns:
            With `max_norm`, the norm before clipping, a scalar; infinite if a gradient overflowed.

        Raises:
            ValueError: no forward and backward pass of each of the step's batches precedes, no learning rate is known,
                (without a scale, on a CPU or with `max_norm`) a gradient is infinite or NaN, or another rank does
                something else.
            WeightServerError: an earlier update could not be stored.
        """
        self._require_training()
        scaled, scaler_use = scaler if scaler is not None and scaler.is_enabled() else None, self._scaler_use
        with self._agreement(Doing.ENDS) as agreement:
            if (step := self._steps.current) is None:
                raise ValueError("step() without a forward pass: call head(embeddings, ids) first")
            scaling = Scaling(scaled, checked_optimizers(optimizer), max_norm)
            scaling.require_order(self._passed_at)
            gradients, norms, bad = step.gradients(), None, None
            self._tell(learning_rate, agreement)
            agreement.same("max_norm must be the same on every rank, got {} to {} (-1: none)", float(max_norm or -1))
            agreement.same(
                "the ranks' losses have different scales, {} to {} (0: none): share one scaler's", scaling.scale
            )
            if scaled is not None:
                agreement.found = scaler_use.unscale(scaling, self._steps.attempt)
                gradients = gradients / scaling.scale
            if max_norm is not None:
                norms = scaling.norms(gradients)
                agreement.found |= not bool(norms.isfinite().all())
                agreement.same(
                    "the gradients of the ranks' encoders have norms from {} to {}: max_norm needs the same on every "
                    "rank, by DistributedDataParallel or fully_shard",
                    float(norms[0].nan_to_num()),
                    tolerance=1e-3,  # their GPUs may round differently
                )
            if scaled is not None or norms is not None or gradients.device.type == "cpu":  # else a GPU need not wait
                bad = None if math.isfinite(gradients.sum()) else step.bad_class(gradients)
                agreement.found |= bad is not None
        if scaled is not None:
            scaler_use.note(agreement.found, gradients.device)
        if agreement.found and scaled is None:
            whose = "of the encoder or of another rank" if bad is None else f"of class {bad}"
            raise ValueError(
                f"the gradient {whose} is infinite or NaN in step {step.number}, nothing was updated: lower the "
                "learning rate (the trainer's --learning-rate), or skip() the step in a loop of your own"
            )
        if agreement.found:
            self._steps.finish(step, step.no_gradients())
            return None if max_norm is None else gradients.new_tensor(math.inf)
        if max_norm is None or norms is None:
            self._steps.finish(step, gradients)
            return None
        norm = norm_over_ranks(norms, self._table.ranks)
        self._steps.finish(step, gradients * torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        torch.nn.utils.clip_grads_with_norm_(scaling.parameters(), max_norm, norm)  # since nothing fails any more
        return norm

    def skip(self, learning_rate: float | None = None) -> None:
        """Ends the step in progress, or the next one that was announced, as one whose gradients are zero: its rows
        move by their momentum and weight decay. For batches that failed or are left out; a step that failed in
        `step_of` is in progress until another batch is given."""
        self._require_training()
        with self._agreement(Doing.SKIPS) as agreement:
            step = self._steps.begin()
            self._tell(learning_rate, agreement)
            gradients = step.no_gradients()
        self._steps.finish(step, gradients)

    def _agreement(self, doing: Doing) -> Agreement:
        return Agreement(self._table.ranks, doing, *self._steps.attempt)

    def _tell(self, learning_rate: float | None, agreement: Agreement) -> None:
        """Sets the learning rate of the step in progress, on all ranks the same one. Raises ValueError if it is
        unknown, or known as another."""
        table = self._open()
        if learning_rate is not None:
            table.tell(self.num_steps, checked_number(learning_rate, "learning_rate"))
        elif self.num_steps >= len(table.rates):
            raise ValueError(f"the learning rate of step {self.num_steps} is not known: give step(learning_rate=...)")
        agreement.same(
            f"the learning rate of step {self.num_steps} must be the same on every rank, got {{}} to {{}}: a schedule "
            "that watches the loss must watch its mean over the ranks",
            table.rates.of_step(self.num_steps),
        )

    def _require_training(self) -> None:
        """Raises ValueError in eval mode."""
        if not self.training:
            raise ValueError("the head is in eval mode, in which it does not train: call train(), or evaluate(...)")

    @torch.no_grad()
    def evaluate(self, embeddings: Tensor, ids: Any, *, classes: Any = "all") -> Evaluation:
        """The loss and the accuracy of embeddings by the rows as they are after the finished updates. Changes nothing:
        until the head trains, they are read from the checkpoint of the state that was loaded, without a session.

        All ranks call it, each with any number of its own images, also none; each returns the means over all of them.
        It reads the rows of all the classes that it compares, some at a time: give all images at once.

        Args:
            embeddings: float (b, D).
            ids: integers (b,), the class of each, or (b, P) as in `forward`.
            classes: among which an image's own is to be found: "all", the most "recent" ones that a step would have
                (with those of all images, without sampled ones), or integers (n,), the same on every rank.

        Raises:
            ValueError: shapes, devices or classes that do not fit.
        """
        table, read = self._table, self._reader()
        with self._agreement(Doing.EVALUATES) as agreement:
            checked = checked_ids(ids, self.spec.num_rows, may_be_none=table.ranks.world_size > 1)
            check_embeddings(embeddings, len(checked), self.spec.dim, self.device)
            check_finite(embeddings)
            among = self._among(classes, checked, agreement)
        own = self._rows_of_all_ranks(checked if checked.ndim == 2 else checked[:, None])
        own = distinct(torch.from_numpy(own)).numpy()
        if not len(own):
            raise ValueError("no rank has an image: give at least one")
        if isinstance(classes, str) and among is not None:
            among = np.union1d(among, own[own >= 0])
        comparison = Comparison(table, self._loss, read, among, self._agreement(Doing.EVALUATES))
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
        table, read = self._table, self._reader()
        with self._agreement(Doing.PREDICTS) as agreement:
            check_embeddings(embeddings, len(embeddings), self.spec.dim, self.device)
            check_finite(embeddings)
            among = self._among(classes, np.zeros(0, np.int64), agreement)
            comparison = Comparison(table, self._loss, read, among, self._agreement(Doing.PREDICTS))
            if not 1 <= checked_integer(k, "k") <= comparison.num_classes:
                raise ValueError(
                    f"k must lie in 1..{comparison.num_classes}, the number of classes to choose among, got {k}"
                )
            agreement.same("k must be the same on every rank, got {} to {}", k)
        compared = comparison.compare(embeddings, k=k)
        mine = compared.nearest[compared.mine]
        return torch.from_numpy(self.order.images(mine.reshape(-1)).reshape(mine.shape))

    def _among(self, classes: Any, ids: Int64Array, agreement: Agreement) -> Int64Array | None:
        """The rows of the classes that are compared, on every rank the same; None for all. `ids` are among them."""
        rows: Int64Array | None = None
        if isinstance(classes, str):
            if classes not in ("all", "recent"):
                raise ValueError(f"classes must be 'all', 'recent', or integers (n,), got {classes!r}")
            if classes == "recent" and not self.negatives.takes_all:
                rows = self._steps.visited.settled().rows
        else:
            given = checked_ids(classes, self.spec.num_rows)
            if given.ndim != 1:
                raise ValueError(f"classes must have shape (n,), got {given.shape}")
            if len(other := np.setdiff1d(ids[ids >= 0], given)):
                raise ValueError(
                    f"class {other[0]} of an image is not among the classes given: add it, or leave it out"
                )
            rows = np.unique(self.order.rows(given))
        content = b"" if rows is None else rows.tobytes()
        agreement.same("the classes to compare must be the same on every rank (checksums {} to {})", crc32(content))
        return rows

    def _rows_of_all_ranks(self, ids: Int64Array) -> Int64Array:
        """The rows of all ranks' images, int64 (B, P), of ids int64 (b, P), -1 for none; P may differ."""
        ranks = self._table.ranks
        (places,) = ranks.max_over_ranks([ids.shape[1]])
        ids = np.pad(ids, [(0, 0), (0, int(places) - ids.shape[1])], constant_values=-1)
        everyone = torch.cat(gathered_parts(torch.from_numpy(ids), ranks)).numpy()
        own = np.full(everyone.shape, -1)
        own[everyone >= 0] = self.order.rows(everyone[everyone >= 0])
        return own

    # ---- states

    def flush(self) -> None:
        """Returns once this rank's updates are durable on the servers, for which resident rows of bfloat16 are rounded;
        dense rows are not stored."""
        self._table.flush()

    def rows(self, ids: Any) -> Tensor:
        """The rows of classes (integers (n,), any order) after all updates so far: float32 (n, D), on the CPU.

        All ranks call it, with any classes; it makes every rank's updates durable, for which resident rows of bfloat16
        are rounded: later steps then differ by this rounding. Until the head trains, it changes nothing, as `evaluate`.
        """
        read = None if self._table.is_open else self._reader()
        with self._agreement(Doing.READS):
            wanted = checked_ids(ids, self.spec.num_rows)
            if wanted.ndim != 1:
                raise ValueError(f"classes must have shape (n,), got {wanted.shape}")
            if read is None:
                self._open().flush()
        with self._agreement(Doing.READS):  # before it ends no rank writes rows of later steps, or stops the servers
            if read is None:
                return self._table.read(wanted, step=self.num_steps)
            return read(self.order.rows(wanted)).cpu()

    def checkpoint(self, name: str | None = None) -> Checkpoint:
        """Keeps the rows as they are after the finished updates, on the servers, under `name`; takes no copy.

        All ranks call it; a step in progress goes on. `state_dict` then contains what identifies the checkpoint.

        Args:
            name: by default made from the step.

        Raises:
            ValueError: dense rows, or bfloat16 ones that a forward pass of the step in progress has read before they
                are rounded: a run that resumes there would not be the one that goes on.
            InvalidRequestError: the name was used for another state.
        """
        table, step = self._open(), self._steps.current
        with self._agreement(Doing.SAVES):
            if step is not None and step.weight is not None and table.is_rounded:
                raise ValueError(
                    "rows of bfloat16 are saved between steps: call checkpoint() and state_dict() after step(), or "
                    "forget_announced(in_progress=True) before"
                )
            table.flush()
        kept, self._saved = table.checkpoint(name, step=self.num_steps)
        return kept

    def get_extra_state(self) -> Tensor:
        """What identifies the rows, for `state_dict`: uint8 [n], followed by the recently visited classes.

        A single rank takes a checkpoint for it if none was taken after the last step.

        Raises:
            ValueError: `checkpoint` was not called after the last step, on several ranks or before `close`.
        """
        if not self._table.is_open and self._saved is None and not self.num_steps:
            return torch.zeros(0, dtype=torch.uint8)
        if self._saved is None or self._saved.step != self.num_steps:
            if self._table.ranks.world_size > 1:
                raise ValueError(
                    f"the rows have no checkpoint of step {self.num_steps}: call head.checkpoint() on all ranks "
                    "before state_dict()"
                )
            self.checkpoint()
        assert self._saved is not None
        return to_tensor(self._saved, self._steps.visited)

    def set_extra_state(self, state: Tensor) -> None:
        """Rolls the rows back to the checkpoint of a `state_dict`. The state of a head before its first use names
        none: loading it changes nothing, and is refused after the first step.

        Raises:
            ValueError: a damaged state, one of rows in another order or of dense rows, or, if the head is open, none of
                its rows; nothing is changed.
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
        self._table.leave_for(saved)
        self._saved = saved
        self._steps.reset(saved.step, recent)
