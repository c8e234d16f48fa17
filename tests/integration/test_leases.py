"""One job at a time: a session that a live run holds is not taken by accident."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.watching import metric, wait_until
from weightserver import FencedError, LocalCluster, SessionInUseError, TableSpec, WeightClient
from weightserver.client import lease
from weightserver.client.connection import ShardConnection
from weightserver.common import processes
from weightserver.shard.lease import LEASE_SECONDS, Lease

SPEC = TableSpec(num_rows=60, dim=4, rows_per_block=4)
ROWS = np.arange(SPEC.num_rows)
ONES = np.ones((60, 4), np.float32)
PATIENCE_SECONDS = 60

MakeClient = Callable[[], WeightClient]


@pytest.fixture
def make_client(cluster: LocalCluster, client: WeightClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeClient]:
    """Makes clients, each as if in a process of its own."""
    monkeypatch.setattr(processes, "process_id", lambda: os.urandom(16))
    client.create_table(SPEC)
    with ExitStack() as stack:
        yield lambda: stack.enter_context(WeightClient(cluster.addresses, retry_seconds=PATIENCE_SECONDS))


def is_lost(client: WeightClient) -> bool:
    try:
        client.require_session()
    except FencedError:
        return True
    return False


def test_a_second_run_is_refused_until_the_first_has_ended(make_client: MakeClient) -> None:
    first, second = make_client(), make_client()
    first.open_session("first")
    for options in ({}, {"hold": False}, {"force": True}):
        with pytest.raises(SessionInUseError, match="run 'first' uses these weight servers") as refused:
            second.open_session("second", **options)
        assert f"process {os.getpid()} on {socket.gethostname()}" in str(refused.value)
    first.require_session()
    first.write_state(ROWS, ONES, ONES, 0)
    first.close()
    second.open_session("second")


def test_a_run_that_was_taken_over_is_told(make_client: MakeClient) -> None:
    first, second = make_client(), make_client()
    first.open_session("first")
    second.open_session("second", take_over=True)
    wait_until(lambda: is_lost(first))
    with pytest.raises(FencedError, match="superseded"):
        first.require_session()
    with pytest.raises(FencedError):
        first.write_state(ROWS, ONES, ONES, 0)
    first.close()  # ends no lease of another run
    with pytest.raises(SessionInUseError, match="'second'"):
        make_client().open_session("third")


def test_a_token_that_cannot_be_read_for_a_while_does_not_end_the_lease(
    cluster: LocalCluster, make_client: MakeClient
) -> None:
    failures: list[OSError] = []

    def token() -> str:
        if failures:
            raise failures.pop()
        return "secret"

    with WeightClient(cluster.addresses, token=token) as first:
        first.open_session("first")
        failures.append(OSError("the disk of the token is away"))
        wait_until(lambda: not failures)
        make_client().open_session("second", take_over=True)
        wait_until(lambda: is_lost(first), seconds=10)


@pytest.mark.usefixtures("make_client")
@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_a_client_closes_although_its_token_cannot_be_read(cluster: LocalCluster, error: type[Exception]) -> None:
    is_away = False

    def token() -> str:
        if is_away:
            raise error("what has the token is away")
        return "secret"

    with WeightClient(cluster.addresses, token=token) as client:
        client.open_session("first")
        is_away = True
    with pytest.raises(ValueError, match="the client is closed"):
        client.describe()


def test_a_client_that_opens_its_next_session_is_refused_nothing(
    cluster: LocalCluster, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the lease of the one before, which is superseded by then."""
    monkeypatch.setattr(lease, "_RENEWAL_SECONDS", 60.0)
    client, address = make_client(), cluster.metrics_addresses[0]
    before = metric(address, "weightserver_fenced_writes_total")
    client.open_session("first")
    client.open_session("second", take_over=True)  # by a process with an id of its own, as this fixture has it
    assert metric(address, "weightserver_fenced_writes_total") == before


@pytest.mark.guard
def test_a_run_that_was_killed_is_resumed_after_two_renewals(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it was alive a moment ago."""
    monkeypatch.setattr(lease, "_RENEWAL_SECONDS", 3600.0)
    first = make_client()
    first.open_session("run")
    began = time.monotonic()
    make_client().open_session("run", force=True)
    assert time.monotonic() - began < LEASE_SECONDS / 2
    with pytest.raises(FencedError, match="superseded"):
        first.write_state(ROWS, ONES, ONES, 0)


@pytest.mark.parametrize("force", [False, True])
def test_a_run_that_lives_is_not_opened_again_under_its_name(make_client: MakeClient, force: bool) -> None:
    """As when a command with --resume auto is submitted twice."""
    first = make_client()
    first.open_session("run")
    with pytest.raises(SessionInUseError, match=r"run 'run' uses .*, for \d+ s, alive \d+ s ago.* \(--take-over") as no:
        make_client().open_session("run", force=force)
    assert f"process {os.getpid()} on {socket.gethostname()}" in str(no.value)
    first.write_state(ROWS, ONES, ONES, 0)
    first.require_session()


def test_a_session_that_nobody_holds_is_superseded(make_client: MakeClient) -> None:
    make_client().open_session("first", hold=False)
    make_client().open_session("second")


def test_a_process_is_not_kept_out_by_itself(client: WeightClient, cluster: LocalCluster) -> None:
    """As where a notebook makes a head again, or after a loss of data."""
    client.create_table(SPEC)
    client.open_session("first")
    client.open_session("first")
    client.require_session()
    client.open_session("second")
    client.require_session()
    client.write_state(ROWS, ONES, ONES, 0)
    with WeightClient(cluster.addresses) as another:
        another.open_session("third")


@pytest.mark.parametrize("hold", [False, True])
def test_a_run_that_joins_its_own_session_keeps_its_lease(make_client: MakeClient, hold: bool) -> None:
    first = make_client()
    epoch = first.open_session("first")
    first.open_session("first", join=epoch, hold=hold)
    with pytest.raises(SessionInUseError, match="run 'first'"):
        make_client().open_session("second")


def test_a_process_keeps_its_session_while_one_of_its_clients_holds_it(
    client: WeightClient, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_RENEWAL_SECONDS", 3600.0)
    client.create_table(SPEC)
    epoch = client.open_session("first")
    with WeightClient(cluster.addresses) as second:
        second.open_session("first", join=epoch)
    monkeypatch.setattr(processes, "process_id", lambda: os.urandom(16))
    with WeightClient(cluster.addresses) as other, pytest.raises(SessionInUseError, match="run 'first'"):
        other.open_session("other")


def test_an_opening_that_was_interrupted_may_still_arrive(
    client: WeightClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the repeated call's look at the shards and its own request."""
    client.create_table(SPEC)
    call, late = ShardConnection.call, []

    def interrupted(self: ShardConnection, method: str, request: Any, **options: Any) -> Any:
        if method == "OpenSession":
            late.append(request)
            raise KeyboardInterrupt
        return call(self, method, request, **options)

    def overtaken(self: ShardConnection, method: str, request: Any, **options: Any) -> Any:
        if method == "OpenSession" and late:
            call(self, method, late.pop())
        return call(self, method, request, **options)

    monkeypatch.setattr(ShardConnection, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.open_session("run")
    monkeypatch.setattr(ShardConnection, "call", overtaken)
    epoch = client.describe().epoch
    assert client.open_session("run") == epoch + 1
    assert not late
    client.write_state(ROWS, ONES, ONES, 0)
    assert client.open_session("run") == epoch + 2, "one that was opened is not opened again"


def test_a_dropped_table_ends_the_run_that_holds_it(make_client: MakeClient) -> None:
    first = make_client()
    first.open_session("first")
    make_client().drop_table()
    wait_until(lambda: is_lost(first))
    with pytest.raises(FencedError, match="dropped the table"):
        first.require_session()


def test_a_script_may_be_started_again(client: WeightClient, cluster: LocalCluster) -> None:
    """Without being closed it ends its lease if Python ends."""
    client.create_table(SPEC)
    script = (
        "import sys; from weightserver import WeightClient\n"
        "client = WeightClient(sys.argv[1:]); client.open_session('script')\n"
    )
    subprocess.run([sys.executable, "-c", script, *cluster.addresses], check=True)
    client.open_session("next")


def test_a_run_of_the_same_name_is_refused_once_it_is_heard_of_again(make_client: MakeClient) -> None:
    first, second = make_client(), make_client()
    first.open_session("run")
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(second.open_session, "run")
        try:
            with pytest.raises(SessionInUseError, match="run 'run' uses these weight servers"):
                opening.result(PATIENCE_SECONDS)
        finally:
            first.close()


@pytest.mark.guard
def test_a_killed_script_that_is_started_again_at_once_waits(tmp_path: Path) -> None:
    """As by a supervisor, which would start it over and over. Here it waits seconds, not the minute of a real lease."""
    short = "from weightserver.shard import lease; lease.LEASE_SECONDS = 4.0; from weightserver.cli import main; main()"

    class WithShortLeases(LocalCluster):
        _program = [sys.executable, "-c", short]  # noqa: RUF012 - read only

    script = (
        "import os, sys; from weightserver import WeightClient\n"
        "client = WeightClient(sys.argv[1:]); client.open_session('script'); os.kill(os.getpid(), 9)\n"
    )
    with WithShortLeases(1, tmp_path) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(SPEC)
        killed = subprocess.run([sys.executable, "-c", script, *cluster.addresses], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert client.open_session("script") == 2
        client.write_state(ROWS, ONES, ONES, 0)


def test_a_silent_run_loses_its_lease() -> None:
    now = 100.0
    lease = Lease(lambda: now)
    lease.require_free(b"a", "run", b"other")
    lease.renew(b"a", b"own", "process 1 on here", held_seconds=40)
    now += LEASE_SECONDS
    with pytest.raises(SessionInUseError, match=r"process 1 on here, for 100 s, alive 60 s ago"):
        lease.require_free(b"a", "run", b"other")
    lease.require_free(b"b", "run", b"other")  # a newer session
    now += 0.1
    lease.require_free(b"a", "run", b"other")


def test_the_first_holder_of_a_session_keeps_it_when_a_second_one_leaves() -> None:
    lease = Lease()
    for holder in (b"first", b"second"):
        lease.renew(b"session", holder, f"process of {holder.decode()}", held_seconds=0)
    lease.release(b"session", b"second")
    with pytest.raises(SessionInUseError, match="process of first"):
        lease.require_free(b"session", "run", b"other")
    lease.release(b"session", b"first")
    lease.require_free(b"session", "run", b"other")
