"""What ranks must do alike in a step: exchanged before anything else is, so that ranks that differ all say so."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Self

import numpy as np
import torch

from weightserver.core.arrays import Int64Array
from weightserver.torch.ranks import Ranks, gathered

_MOST_VALUES = 4
_NOTHING = (-float("inf"), -float("inf"))
"""The values of a rank that failed: those of any other one agree with them."""


class Doing(StrEnum):
    """What a rank does, followed by a step: first what concerns the step itself."""

    ANNOUNCES = "announces"
    HAS_NONE = "has no batch for"
    PASSES = "gives a batch of"
    ENDS = "ends"
    SKIPS = "skips"
    EVALUATES = "evaluates before"
    PREDICTS = "predicts before"
    SAVES = "takes a checkpoint before"
    READS = "reads rows before"
    OPENS = "opens the rows before"


_DOINGS = list(Doing)


class Agreement:
    """A block in which a rank checks what it is to do in an attempt at a step; all ranks exchange it when it ends.

    Raises:
        ValueError: on every rank, at the end of the block, if the ranks do not do the same in the same attempt at the
            same step, or have other values. An exception in the block is raised by this rank; the others say that one
            failed. After an interrupt nothing is exchanged.
    """

    def __init__(self, ranks: Ranks, doing: Doing, step: int, attempt: int) -> None:
        self.found = False
        """Whether this rank found what is to concern all of them; after the block, whether one did."""
        self._ranks = ranks
        self._here = _Place(step, attempt, _DOINGS.index(doing))
        self._same: list[tuple[float, float, str, float]] = []

    def same(self, message: str, *values: float, tolerance: float = 0.0) -> None:
        """All these values, and those of every other rank, must be the same, up to a part of the largest; the message
        says what to do otherwise, and has places for the least and the largest one."""
        self._same.append((max(values), -min(values), message, tolerance))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None and (self._ranks.world_size == 1 or not isinstance(error, Exception)):
            return
        pairs = [_NOTHING if error else (most, least) for most, least, *_ in self._same]
        pairs += [_NOTHING] * (_MOST_VALUES - len(pairs))
        values = [self._here.number, -self._here.number, error is not None, self.found, *sum(pairs, ())]
        most, least, failed, found, *values = self._ranks.max_over_ranks(values)
        if error is not None:
            return
        if failed:
            raise ValueError(
                f"another rank failed where this one {self._here.phrase}: its own error says why; repeat the call on "
                "all of them, or leave it out"
            )
        if most != -least:
            raise _disagreement(self._here, _Place.of(int(most)), _Place.of(int(-least)))
        for (*_, message, tolerance), highest, lowest in zip(self._same, values[::2], values[1::2], strict=False):
            if highest + lowest > tolerance * highest:
                raise ValueError(message.format(f"{0 - lowest:g}", f"{highest:g}"))
        self.found = bool(found)


class _Place(NamedTuple):
    """Where a rank is."""

    step: int
    attempt: int
    doing: int
    """What the rank does: a position in `Doing`."""

    @property
    def number(self) -> int:
        """Exact as a float64 up to step 2³³."""
        return (self.step << 16 | min(self.attempt, (1 << 16) - 1)) << 4 | self.doing

    @classmethod
    def of(cls, number: int) -> _Place:
        return cls(number >> 20, number >> 4 & (1 << 16) - 1, number & 15)

    @property
    def phrase(self) -> str:
        return f"{_DOINGS[self.doing]} step {self.step} after {self.attempt} failed attempts"


def _disagreement(here: _Place, *extremes: _Place) -> ValueError:
    ended = [(other.step, _DOINGS[other.doing]) for other in extremes]
    if ended == [(here.step, Doing.HAS_NONE), (here.step, Doing.ANNOUNCES)]:
        whose = "another rank have ended before this one's"
        if _DOINGS[here.doing] == Doing.HAS_NONE:
            whose = "this rank have ended before those of another"
        return ValueError(
            f"the batches of {whose}: give every rank as many (drop_last=True in the DataLoader and in its "
            "DistributedSampler)"
        )
    there = next(other for other in extremes if other != here)
    told = "a step that fails on one rank must be repeated, skipped or left out on all of them"
    if max(here.doing, there.doing) > _DOINGS.index(Doing.SKIPS):
        told = "all ranks make the same calls in the same order"
    return ValueError(f"this rank {here.phrase}, another one {there.phrase}: {told}")


def ids_of_all_ranks(batches: list[Int64Array], ranks: Ranks, *, step: int, attempt: int) -> Int64Array:
    """The classes of every rank, in order: A times int64 (b,) or (b, P) to (A, B) or (A, B, P). All ranks call it.

    Raises:
        ValueError: the batches are of several sizes, or not as many and of one size on all ranks.
    """
    with Agreement(ranks, Doing.ANNOUNCES, step, attempt) as agreement:
        agreement.same(
            "the batches of a step must be equally large, on every rank, got {} to {} classes: leave out the last "
            "batch (drop_last=True), also on the rank whose loader has the fewest",
            *map(len, batches),
        )
        agreement.same(
            "a step must have as many batches on every rank, got {} to {}: give every rank the same batches_per_step",
            len(batches),
        )
        agreement.same(
            "the batches of a step must have places for as many classes an image, on every rank, got {} to {} (0: one "
            "class without a place): fill with -1",
            *(batch.shape[1] if batch.ndim == 2 else 0 for batch in batches),
        )
    ids = torch.from_numpy(np.stack(batches))
    return gathered(ids, ids.shape[1] * ranks.world_size, ranks, dim=1).numpy()
