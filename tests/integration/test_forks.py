"""What a forked process inherits: clients and clusters of its parent, which it can neither use nor harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.helpers.watching import frozen, wait_until
from tests.integration.tables import SLOW, begin
from weightserver import LocalCluster, TableSpec, WeightClient, WeightServerError
from weightserver.client.calls import WATCH

SPEC = TableSpec(num_rows=100, dim=8)
A_CHILD_ENDS = """
import os, sys
from weightserver import LocalCluster, TableSpec, WeightClient
with LocalCluster(1) as cluster:
    if (child := os.fork()) == 0:
        try:
            cluster.restart(0)
        except ValueError as error:
            sys.exit(print(str(error).replace(str(os.getppid()), "PARENT")))
    os.waitpid(child, 0)
    with WeightClient(cluster.addresses) as client:
        print(client.create_table(TableSpec(num_rows=100, dim=8)).num_rows)
print(cluster.directory.exists())
"""
ROWS, ONES = np.arange(100), np.ones((100, 8), np.float32)


def in_fork(call: Callable[[], object]) -> tuple[float, str]:
    """Seconds that the call takes in a forked process, and the line that it raises there, if it does.

    gRPC's own code in a fork aborts some processes before they come here, more often on newer Pythons: then another one
    is forked.
    """
    for _ in range(20):
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                began, line = time.monotonic(), ""
                try:
                    call()
                except (ValueError, WeightServerError) as error:
                    line = f"{type(error).__name__}: {error}"
                os.write(writing, f"{time.monotonic() - began}\n{line}".encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            said = answer.read()
        if (status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) != -signal.SIGABRT:
            break
    assert status == 0, f"the process ended by {status}"
    seconds, line = said.split("\n")
    return float(seconds), line


@pytest.mark.guard
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_cannot_use_an_inherited_client(cluster: LocalCluster, client: WeightClient) -> None:
    """As workers of a data loader are forked: one line at once, whatever the call, and the parent goes on."""
    begin(client, SPEC)
    client.push_gradients(ROWS, ONES, step=0)
    before = client.fetch(ROWS, step=1)
    calls: list[Callable[[], object]] = [
        lambda: client.fetch(ROWS, step=1),
        lambda: client.fetch_state(ROWS),
        lambda: client.push_gradients(ROWS, ONES, step=1),
        lambda: client.write_state(ROWS, ONES, ONES, 1),
        lambda: client.checkpoint("child", step=1),
        lambda: client.rollback("child"),
        lambda: client.release("child"),
        lambda: client.open_session("child"),
        lambda: client.extend_table(200),
        lambda: client.drop_table(),
        client.describe,
        client.checkpoints,
        client.marks,
        lambda: client.extend_schedule(len(SLOW), [0.1]),
    ]
    with client._writer._turn:  # as another thread of the parent may hold it
        for call in calls:
            seconds, line = in_fork(call)
            assert line.startswith(f"ValueError: this client was made in another process ({os.getpid()}) and"), line
            assert "multiprocessing_context='forkserver'" in line
            assert seconds < 1
    assert client._lease is not None
    with client._lease._turn:  # as while it is renewed
        seconds, line = in_fork(client.close)
    assert (line, seconds < 1) == ("", True)

    def use_an_own_client() -> None:
        with WeightClient(cluster.addresses) as own:
            assert np.array_equal(own.fetch(ROWS, step=1), before)

    assert in_fork(use_an_own_client)[1] == ""
    assert np.array_equal(client.fetch(ROWS, step=1), before)
    client.push_gradients(ROWS, ONES, step=1)
    assert client.describe().clock == 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_process_forked_while_others_call_makes_no_channel(cluster: LocalCluster, client: WeightClient) -> None:
    """gRPC's locks may be taken there: without the line some of such processes hung, and some aborted."""
    client.create_table(SPEC)
    with ThreadPoolExecutor(1) as pool:
        with frozen(cluster, 0):
            fetched = pool.submit(client.fetch, ROWS, step=0)
            wait_until(lambda: bool(WATCH.waiting))
            _, line = in_fork(lambda: WeightClient(cluster.addresses, connect_seconds=1).describe())
        assert line.startswith("ValueError: this process was forked while other threads called weight servers"), line
        assert fetched.result(60).shape == (100, 8)


def test_a_forked_process_neither_restarts_nor_closes_the_cluster() -> None:
    """Neither does its end, which leaves the cluster's directory."""
    done = subprocess.run([sys.executable, "-c", A_CHILD_ENDS], capture_output=True, text=True, check=True)
    refused, *there = done.stdout.splitlines()
    assert refused == "this cluster was started by process PARENT: restart its shards there"
    assert there == ["100", "False"]
