"""A shard that answers two fetches at a time, each after 10 ms: python -m tests.helpers.slow_fetches serve ..."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from typing import Any, ClassVar

from weightserver.cli import main
from weightserver.local_cluster import LocalCluster
from weightserver.server.lanes import LANES
from weightserver.server.service import WeightServerService

_PLACES, _SECONDS = 2, 0.01


class SlowFetches(LocalCluster):
    """A LocalCluster of such shards."""

    _program: ClassVar[list[str]] = [sys.executable, "-m", "tests.helpers.slow_fetches"]


def _install() -> None:
    fetch = WeightServerService.Fetch

    def slowly(self: WeightServerService, request: Any, context: Any) -> Generator[Any, None, None]:
        time.sleep(_SECONDS)
        yield from fetch(self, request, context)

    LANES["Fetch"] = _PLACES
    WeightServerService.Fetch = slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    _install()
    main()
