"""Selects the versions of blocks that are needed by the newest state and the retained checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from weightserver.core.checkpoints import ShardCheckpoint


def unneeded(generations: Sequence[int], checkpoints: Sequence[ShardCheckpoint]) -> list[int]:
    """The generations of a block's versions, newest first, that neither the newest state nor a checkpoint needs."""
    return [
        older
        for newer, older in itertools.pairwise(generations)
        if not any(older <= checkpoint.generation < newer for checkpoint in checkpoints)
    ]


def released_generations(generation: int, newest: int, checkpoints: Sequence[ShardCheckpoint]) -> range:
    """The generations to sweep after a release of `generation`; `checkpoints` remain, and `newest` is the current one.

    A version becomes unneeded only when the last checkpoint between it and its block's next version is released. That
    next version is then of one of these generations: newer than the released one, not newer than the next retained one.
    """
    retained = [checkpoint.generation for checkpoint in checkpoints if checkpoint.generation >= generation]
    return range(generation + 1, min(retained, default=newest) + 1)
