"""Clients in processes of their own that search as fast as they can:
python -m tests.helpers.equal_clients ADDRESS CLIENTS ROUNDS. Prints how often each was served, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import sys
from multiprocessing.synchronize import Barrier, Event
from typing import Any

import numpy as np

from weightserver import WeightClient

_QUERY = np.ones((1, 64), np.float32)


def main(address: str, num_clients: int, rounds: int) -> list[int]:
    """How often each client was served, since each was once, until all together were `rounds` times their number."""
    forks = multiprocessing.get_context("fork")  # no channel is open yet
    ready, ended = forks.Barrier(num_clients), forks.Event()
    served = forks.Array(ctypes.c_int64, num_clients)
    before = forks.Array(ctypes.c_int64, num_clients)  # the first to leave the barrier are served before others begin
    arguments = (address, rounds * num_clients, ready, ended, served, before)
    clients = [forks.Process(target=_search, args=(number, *arguments)) for number in range(num_clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if failed := sum(client.exitcode != 0 for client in clients):
        raise SystemExit(f"{failed} clients failed")
    return [last - first for last, first in zip(served[:], before[:], strict=True)]


def _search(number: int, address: str, enough: int, ready: Barrier, ended: Event, served: Any, before: Any) -> None:
    try:
        with WeightClient([address], timeout_seconds=30, retry_seconds=60) as client:
            client.describe()
            ready.wait(60)
            while not ended.is_set():
                client.nearest(_QUERY, k=1)
                with served:
                    served[number] += 1
                    if not any(before) and min(served) > 0:
                        before[:] = served[:]
                    if any(before) and sum(served) - sum(before) >= enough:
                        ended.set()
    finally:
        ended.set()  # for all, if this one fails


if __name__ == "__main__":
    _, shard, *numbers = sys.argv
    print(json.dumps(main(shard, *map(int, numbers))))
