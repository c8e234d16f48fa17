"""A shard with two threads, each of whose fetches takes 10 ms: python -m tests.helpers.narrow_shard serve ..."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from typing import Any, ClassVar

from weightserver.cli import main
from weightserver.local_cluster import LocalCluster
from weightserver.server import admission, process
from weightserver.server.service import WeightServerService

NUM_THREADS = 2
MAX_CALLS = 16
"""Running and waiting ones, with `--max-calls`."""
_SECONDS = 0.01


class NarrowShard(LocalCluster):
    """A LocalCluster of such shards."""

    _program: ClassVar[list[str]] = [sys.executable, "-m", "tests.helpers.narrow_shard"]


class CrowdedShard(NarrowShard):
    """One that refuses calls beyond `MAX_CALLS`."""

    _program: ClassVar[list[str]] = [*NarrowShard._program, "--max-calls"]


def _install(*, max_calls: int) -> None:
    fetch = WeightServerService.Fetch

    def slowly(self: WeightServerService, request: Any, context: Any) -> Generator[Any, None, None]:
        time.sleep(_SECONDS)
        yield from fetch(self, request, context)

    admission.MAX_THREADS = process.MAX_THREADS = NUM_THREADS  # type: ignore[attr-defined]
    process.MAX_CALLS = max_calls  # type: ignore[attr-defined]
    WeightServerService.Fetch = slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    crowded = "--max-calls" in sys.argv
    if crowded:
        sys.argv.remove("--max-calls")
    _install(max_calls=MAX_CALLS if crowded else admission.MAX_CALLS)
    main()
