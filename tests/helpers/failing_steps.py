"""A loop of one's own in which one line of a step fails, with a head and with a dense matrix of all classes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.own_loop import NUM_CLASSES, Dense, Encoder, Result, loaded, shuffled
from weightserver.torch import ClassifierHead

RATE, FAILING, MAX_NORM = 0.3, 1, 4.5
"""The learning rate of all steps, the number of the batch that fails at first, and a norm that some steps exceed."""

BATCHES = shuffled(11, 4)
Then = Literal["repeated", "announced, repeated", "left out", "announced, skipped"]
"""What is done with the batch that failed, and whether the batches were announced."""
Point = tuple[str, int]
"""A file, and the number of a line."""


class Failure(Exception):
    """What fails, as if the memory were exhausted."""


class DenseHead:
    """The oracle: all rows in one matrix, of which torch.optim.SGD updates each in each step."""

    def __init__(self, head: ClassifierHead) -> None:
        self.dense = Dense(head)
        self.num_steps = 0
        self._begun = False

    def announced(self, loader: Any) -> Iterator[Any]:
        for self._ids, batch in loader:
            yield self._ids, batch

    def _begin(self, ids: Any) -> None:
        if not self._begun:
            self._before = len(self.dense.visits)
            self.dense.visits += map(int, ids)
            self._begun = True

    def __call__(self, embeddings: Tensor, ids: Any) -> Tensor:
        self._begin(ids)
        return self.dense.loss(embeddings, [int(class_) for class_ in ids])

    def step(self, learning_rate: float, *, max_norm: float | None = None, **scaled: Any) -> None:
        if max_norm is not None:
            (group,) = scaled["optimizer"].param_groups
            torch.nn.utils.clip_grad_norm_([*group["params"], self.dense.weight], max_norm)
        self.dense.update(learning_rate)
        self._begun = False
        self.num_steps += 1

    def skip(self, learning_rate: float) -> None:
        self._begin(self._ids)
        self.dense.weight.grad = None
        self.step(learning_rate)

    def rows(self, ids: Any) -> Tensor:
        return self.dense.weight.detach()[list(ids)]

    def zero_grad(self) -> None:
        self.dense.weight.grad = None
        if self._begun:
            del self.dense.visits[self._before :]
        self._begun = False

    @contextmanager
    def step_of(self, *ids: Any) -> Iterator[None]:
        number = self.num_steps
        try:
            self._begin(ids[0])
            yield
        except BaseException:
            if self.num_steps == number:
                self.zero_grad()
            raise


class TracedEncoder(Encoder):
    """An encoder whose forward and backward passes have lines that can fail.

    Args:
        scale: of its loss, which changes no bit if it is a power of two.
    """

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        self.linear = self.module
        if dist.is_initialized():
            self.linear = DistributedDataParallel(self.module)

    def __call__(self, batch: Tensor) -> Tensor:
        embeddings: Tensor = self.linear(batch)
        embeddings.register_hook(self.receive)
        return embeddings

    def step(self) -> None:
        """Not to be interrupted in the middle, as a step of torch is not."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @staticmethod
    def receive(gradient: Tensor) -> Tensor:
        return gradient


Head = ClassifierHead | DenseHead


def with_zero_grad(head: Head, encoder: TracedEncoder, ids: Any, batch: Tensor) -> float:
    """A step as most loops have it."""
    loss = head(encoder(batch), ids)
    loss.backward()
    encoder.optimizer.step()
    head.step(RATE)
    encoder.optimizer.zero_grad()
    return loss.item()


def with_step(head: Head, encoder: TracedEncoder, ids: Any, batch: Tensor) -> float:
    """A step that drops what it did if it fails."""
    with head.step_of(ids):
        loss = head(encoder(batch), ids)
        loss.backward()
        encoder.optimizer.step()
        head.step(RATE)
    encoder.optimizer.zero_grad()
    return loss.item()


def with_scaler(head: Head, encoder: TracedEncoder, ids: Any, batch: Tensor) -> float:
    """A step of scaled gradients, some of which are clipped."""
    with head.step_of(ids):
        loss = head(encoder(batch), ids)
        encoder.scaler.scale(loss).backward()
        head.step(RATE, scaler=encoder.scaler, optimizer=encoder.optimizer, max_norm=MAX_NORM)
        encoder.step()
    encoder.optimizer.zero_grad()
    return loss.item()


Attempt = Callable[[Head, TracedEncoder, Any, Tensor], float]


class Tracer:
    """Raises `Failure` before a line runs for the first time; without such a point, notes which lines run.

    Args:
        attempt: whose lines are traced, with those of `TracedEncoder`.
        inside: whether the head's lines are traced too.
    """

    def __init__(self, attempt: Attempt, fails_at: Point | None = None, *, inside: bool = False) -> None:
        self.points: list[Point] = []
        self.line: Point | None = None
        """The line of the loop that failed, or in whose call it did."""
        self.made = False
        """Whether the rows' update was made nevertheless."""
        self._codes = [of.__code__ for of in (attempt, TracedEncoder.__call__, TracedEncoder.receive)]
        self._fails_at = fails_at
        self._inside = inside

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            return self._trace if self._is_traced(frame) else None
        if event == "line" and (point := (frame.f_code.co_filename, frame.f_lineno)) not in self.points:
            self.points.append(point)
            if point == self._fails_at:
                while frame.f_code not in self._codes:
                    assert frame.f_back is not None
                    frame = frame.f_back
                self.line = frame.f_code.co_filename, frame.f_lineno
                raise Failure
        return self._trace

    def _is_traced(self, frame: FrameType) -> bool:
        if frame.f_code in self._codes:
            return True
        if not self._inside or "weightserver/torch/" not in frame.f_code.co_filename:
            return False
        within: FrameType | None = frame
        while within is not None and within.f_code not in self._codes:
            if "/torch/optim/" in within.f_code.co_filename:  # the encoder's step: see `TracedEncoder.step`
                return False
            within = within.f_back
        return within is not None


def run(head: Head, batches: Any, attempt: Attempt, then: Then, tracer: Tracer | None = None) -> Result:
    """Trains with all batches, one of which fails at first, and then is repeated, left out or skipped."""
    encoder, result = TracedEncoder(None if isinstance(head, DenseHead) else 256.0), Result()
    for number, (ids, batch) in enumerate(head.announced(batches) if then.startswith("announced") else batches):
        for _ in range(2):
            before = head.num_steps
            try:
                with tracer if tracer is not None and number == FAILING else nullcontext():
                    result.losses.append(attempt(head, encoder, ids, batch))
                break
            except Failure:
                encoder.optimizer.zero_grad()
                if attempt is with_zero_grad:
                    head.zero_grad()
                if tracer is not None:
                    tracer.made = head.num_steps > before
                if head.num_steps > before or then == "left out":
                    break
                if then == "announced, skipped":
                    head.skip(RATE)
                    break
    result.encoder = encoder.weight()
    if not (dist.is_initialized() and isinstance(head, ClassifierHead) and head.client is None):
        result.rows = head.rows(range(NUM_CLASSES))  # dense ones of several ranks cannot be read
    return result


def lines_of(attempt: Attempt, head: Head) -> list[Point]:
    """The lines of the loop that a step runs, those of the encoder included; trains the head."""
    run(head, loaded(BATCHES), attempt, "repeated", tracer := Tracer(attempt))
    return tracer.points
