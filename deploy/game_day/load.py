"""Writes and fetches a few rows again and again, by a thread each as a trainer does, and serves the client's metrics.

python -m deploy.game_day.load --servers ADDRESS,ADDRESS [--tls-ca ... --token-file ...]

Prints its metrics' address as a line of JSON, and ends with the program that started it, which closes its stdin.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from prometheus_client import REGISTRY

from weightserver import ClientSecurity, TableSpec, WeightClient, WeightServerError
from weightserver.common.metrics_http import serve_metrics
from weightserver.common.options import add_options, given_options
from weightserver.core.arrays import Int64Array

NUM_ROWS, DIM = 4096, 16
_PAUSE_SECONDS = 0.2


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


class _Run:
    """Steps of a run, whatever fails, as an operator's supervisor makes of a trainer."""

    def __init__(self, client: WeightClient) -> None:
        self._client, self._is_open, self._step = client, False, 0
        self._next: int | None = None
        """The step of the next push, if it is known."""

    def open(self) -> None:
        if not self._is_open:
            self._client.create_table(TableSpec(num_rows=NUM_ROWS, dim=DIM))
            self._client.open_session("load")
            self._is_open = True
        self._step = self._client.describe().clock

    @property
    def _rows(self) -> Int64Array:
        return np.arange(self._step % 64, NUM_ROWS, 64)

    def fetch(self) -> None:
        self._client.fetch(self._rows, step=self._step)

    def push(self) -> None:
        """Asks for the step only after a failure: otherwise no write would wait for a shard that is away."""
        if not self._is_open:
            return
        step, self._next = self._client.describe().clock if self._next is None else self._next, None
        self._client.extend_schedule(step, np.full(1, 0.1, np.float32))
        self._client.push_gradients(self._rows, np.ones((len(self._rows), DIM), np.float32), step=step)
        self._next = step + 1


def _repeat(*calls: Callable[[], None]) -> None:
    for call in itertools.cycle(calls):
        try:
            call()
        except WeightServerError as error:
            print(f"{call.__name__}: {error}", file=sys.stderr, flush=True)
        time.sleep(_PAUSE_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", required=True)
    add_options(parser, ClientSecurity)
    arguments = parser.parse_args()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    port, _ = serve_metrics(REGISTRY, "127.0.0.1", 0)
    print(json.dumps({"metrics_address": f"127.0.0.1:{port}"}), flush=True)
    security = given_options(arguments, ClientSecurity).client_arguments()
    with WeightClient(arguments.servers.split(","), **security) as client:
        run = _Run(client)
        threading.Thread(target=_repeat, args=(run.push,), daemon=True).start()
        _repeat(run.open, run.fetch)


if __name__ == "__main__":
    main()
