"""Disk errors at every write and sync of a commit: nothing acknowledged is lost, nothing counts twice."""

from __future__ import annotations

import errno
import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.failing_disk import META, FailingDisk
from tests.integration.tables import begin
from weightserver import LocalCluster, TableSpec, WeightClient, WeightServerError

SPEC = TableSpec(num_rows=60, dim=8, rows_per_block=10, momentum=0.0, weight_decay=0.0, init_std=0.0)
"""Without momentum and decay a row is the sum of its gradients."""
ROWS = np.arange(SPEC.num_rows)
ONES = np.ones((SPEC.num_rows, SPEC.dim), np.float32)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    disk = FailingDisk(tmp_path)
    disk.install(monkeypatch)
    return disk


@pytest.fixture
def cluster(disk: FailingDisk, tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(1, tmp_path / "servers") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[WeightClient]:
    with WeightClient(cluster.addresses, timeout_seconds=60, retry_seconds=0) as client:
        begin(client, SPEC, np.ones(1000, np.float32))
        yield client


def push(client: WeightClient, step: int) -> None:
    client.push_gradients(ROWS, ONES, step=step)


def sums(client: WeightClient) -> set[float]:
    """The value of all rows: one number, if each gradient counts once for each row."""
    return set(-client.fetch_state(ROWS).weight.ravel())


def test_a_commit_ends_with_the_meta_page(disk: FailingDisk, client: WeightClient) -> None:
    """The order that the tests below assume: pages, a sync, the meta page through a descriptor that syncs."""
    disk.watch()
    push(client, 0)
    calls = disk.calls()
    assert [call.is_meta for call in calls] == [False] * (len(calls) - 1) + [True], calls
    assert len(calls) >= 3
    assert calls[-2].name in ("fdatasync", "fsync"), calls


@pytest.mark.guard
def test_a_failed_write_of_a_meta_page_ends_the_shard(
    disk: FailingDisk, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    """LMDB refuses everything from then on; whether the write is durable shows afterwards: here it is."""
    push(client, 0)
    push(client, 1)
    disk.fail(META, 2, errno.EIO, lands=True)  # and LMDB cannot put the old page back
    with WeightClient(cluster.addresses, retry_seconds=60) as patient, ThreadPoolExecutor(1) as pool:
        patient.extend_schedule(0, np.ones(1000, np.float32))
        patient.open_session("run", join=1)
        waiting = pool.submit(push, patient, 2)
        assert cluster.processes[0].wait(10) == 1
        disk.heal()
        cluster.restart(0)
        waiting.result(60)  # the same call continued, with the same number
    log = (tmp_path / "servers/shard-0.log").read_text()
    assert re.search("^weightserver serve: .*: LMDB cannot continue after .*$", log, re.MULTILINE), log
    assert "Traceback" not in log
    assert sums(client) == {3}
    push(client, 3)
    assert sums(client) == {4}


@pytest.mark.guard
@pytest.mark.parametrize(
    ("error", "lands"),
    [pytest.param(errno.EIO, True, id="EIO, landed"), pytest.param(errno.ENOSPC, False, id="ENOSPC, lost")],
)
def test_errors_at_each_write_and_sync(
    error: int, lands: bool, disk: FailingDisk, cluster: LocalCluster, client: WeightClient
) -> None:
    """One write fails, and with it all later ones until the disk is healed."""
    steps = itertools.count()
    push(client, next(steps))
    ends = 0
    for count in (1, 1000):
        for position in itertools.chain([META], itertools.count(1)):
            step = next(steps)
            disk.fail(position, count, error, lands=lands)
            failed = False
            try:
                push(client, step)
            except WeightServerError:
                failed = True
            faults = [call for call in disk.calls() if call.error]
            disk.heal()
            if not faults:  # it takes fewer calls
                assert position > 3
                break
            if any(call.is_meta for call in faults):
                assert failed
                assert cluster.processes[0].wait(10) == 1
                ends += 1
                cluster.restart(0)
            else:
                assert cluster.processes[0].poll() is None
            if failed:
                assert sums(client) <= {step, step + 1}
                push(client, step)
            assert sums(client) == {step + 1}, (position, faults)
    assert ends >= 2
