"""Random calls of clients while shards are killed and paused and the network is faulty: the answers have an order that
the sequential model explains (tests/helpers/linearizability.py defines that).

Each history stays in the test's directory and can be checked again without any server.
"""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightserver.client.transfer
from tests.helpers.faulty_proxy import Faults, FaultyProxy
from tests.helpers.histories import UNKNOWN_OUTCOME, RecordedCall, Recorder, rows_of_shard
from tests.helpers.linearizability import Checked, check
from tests.helpers.watching import wait_until
from weightserver import (
    FencedError,
    InvalidRequestError,
    LocalCluster,
    NoTableError,
    StepError,
    TableSpec,
    WeightClient,
)

SPEC = TableSpec(num_rows=16, dim=2, momentum=0.8, weight_decay=0.05, init_std=1.0, rows_per_block=3)
RATES = np.linspace(0.4, 0.1, 500, dtype=np.float32)
ROWS, NUM_SHARDS = list(range(SPEC.num_rows)), 2
ROWS_OF_SHARD = [rows_of_shard(SPEC, NUM_SHARDS, shard) for shard in range(NUM_SHARDS)]
TIMEOUT_SECONDS = 0.2
PATIENT_SECONDS, IMPATIENT_SECONDS = 60.0, 0.1
FAULTS = Faults(
    refuse=0.02,
    swallow=0.005,
    lose_reply=0.04,
    twin=0.03,
    replay_seconds=0.05,
    delay=0.1,
    delay_seconds=(0.001, 1.5 * TIMEOUT_SECONDS),
    cut_write=0.02,
)
OPERATIONS = ["session", "rollback", "rollback", "checkpoint", "release"]
FAULTS_OF_SHARDS = ["kill", "pause"]
OUTCOMES = [
    *product(("push_gradients", "write_state"), ("done", "unknown", "made again", "FencedError")),
    *product(("fetch", "fetch_state"), ("done", "StepError")),
    *product(("checkpoint", "rollback", "release"), ("done", "unknown")),
    ("write_state", "StepError"),
]
"""Those that many histories have. Some are rare: 40 histories once left no release in doubt, and another time nine."""
LEAST_HISTORIES, MOST_HISTORIES = 40, 120
"""More than the least only while an outcome is missing."""


class Clients:
    """Threads that make calls with arguments from a seed until they are stopped, and record the answers.

    Writers join the newest session; when a newer one fences them, they retry once before they join it.
    """

    def __init__(self, recorder: Recorder, direct: Sequence[str], faulty: Sequence[str], seed: int) -> None:
        self._recorder, self._direct, self._faulty, self._seed = recorder, direct, faulty, seed
        self._stop = threading.Event()
        self._may_write = threading.Event()
        self._may_write.set()
        self._step = 0
        """Returns a step close to those of the pushes."""
        self._checkpoints: list[str] = []
        self._given_up: set[tuple[str, int]] = set()
        self._epoch = self._open_session()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Returns when the operator and all callers are done."""
        with ThreadPoolExecutor(6) as threads:
            operator = threads.submit(self._operate, self._random("operator"))
            others = [
                threads.submit(self._write, "writer-0", self._faulty, PATIENT_SECONDS, 2),
                threads.submit(self._write, "writer-1", self._faulty, IMPATIENT_SECONDS, 1),
                threads.submit(self._write, "writer-2", self._direct, IMPATIENT_SECONDS, 1),
                threads.submit(self._read, "reader-0", self._faulty),
                threads.submit(self._read, "reader-1", self._direct),
            ]
            try:
                yield
                operator.result()
            finally:
                self._stop.set()
            for other in others:
                other.result()

    def read_everything(self) -> None:
        with self._client(self._direct) as client:
            self._recorder.begin("last reader", client.fetch_state, rows=ROWS).run()

    def _random(self, name: str) -> random.Random:
        return random.Random(f"{self._seed} {name}")

    def _client(self, addresses: Sequence[str], retry_seconds: float = PATIENT_SECONDS) -> WeightClient:
        client = WeightClient(addresses, timeout_seconds=TIMEOUT_SECONDS, retry_seconds=retry_seconds)
        while True:
            with contextlib.suppress(*UNKNOWN_OUTCOME):
                client.extend_schedule(0, RATES)
                return client

    def _near(self, draw: random.Random, *offsets: int) -> int:
        """Returns a step close to those of the other clients."""
        return min(max(0, self._step + draw.choice(offsets)), len(RATES) - 1)

    # ---- writers

    def _write(self, name: str, addresses: Sequence[str], retry_seconds: float, num_threads: int) -> None:
        draws = [self._random(f"{name} {thread}") for thread in range(num_threads)]
        while not self._stop.is_set():
            epoch = self._epoch
            with self._client(addresses, retry_seconds) as client, ThreadPoolExecutor(num_threads) as threads:
                if self._join(name, client, epoch):
                    list(threads.map(functools.partial(self._write_in, name, client, epoch), draws))
                else:
                    self._stop.wait(0.05)  # a newer one is being opened

    def _join(self, name: str, client: WeightClient, epoch: int) -> bool:
        while True:
            with contextlib.suppress(*UNKNOWN_OUTCOME):
                try:
                    self._recorder.begin(name, client.open_session, epoch, name="run", join=epoch).run()
                except FencedError:
                    return False
                return True

    def _write_in(self, name: str, client: WeightClient, epoch: int, draw: random.Random) -> None:
        fenced = 0
        while fenced < 2 and not self._stop.is_set():
            self._may_write.wait()
            call = self._some_write(name, client, epoch, draw)
            try:
                while True:
                    with contextlib.suppress(*UNKNOWN_OUTCOME):
                        call.run()
                        break
                    if self._stop.is_set():
                        return
                    if (name, epoch) not in self._given_up and draw.random() < 0.5:
                        self._given_up.add((name, epoch))
                        return  # its outcome stays unknown, and another client goes on
            except FencedError:
                fenced += 1
            except StepError:
                pass
            self._stop.wait(draw.uniform(0, 0.005))

    def _some_write(self, name: str, client: WeightClient, epoch: int, draw: random.Random) -> RecordedCall:
        rows = draw.choices(ROWS, k=draw.randrange(1, 7))
        values = np.random.default_rng(draw.getrandbits(32))
        if draw.random() < 0.75:
            self._step += draw.random() < 0.2
            gradients = values.standard_normal((len(rows), SPEC.dim)).astype(np.float32)
            step = self._near(draw, 0, 0, 0, -1, -2, -5)
            return self._recorder.begin(name, client.push_gradients, epoch, rows=rows, gradients=gradients, step=step)
        rows = draw.sample(draw.choice(ROWS_OF_SHARD), draw.randrange(1, 5))  # a refusal leaves no other shard in doubt
        weight, momentum = values.standard_normal((2, len(rows), SPEC.dim)).astype(np.float32)
        last_step = [self._near(draw, -1, 0, 1, 2) for _ in rows]
        return self._recorder.begin(
            name, client.write_state, epoch, rows=rows, weight=weight, momentum_buffer=momentum, last_step=last_step
        )

    # ---- readers

    def _read(self, name: str, addresses: Sequence[str]) -> None:
        draw = self._random(name)
        with self._client(addresses, IMPATIENT_SECONDS) as client:
            while not self._stop.is_set():
                some = draw.choices(ROWS, k=draw.randrange(1, 7))
                how: dict[str, Any] = {"rows": draw.choice([some, ROWS, *ROWS_OF_SHARD])}
                if self._checkpoints and draw.random() < 0.2:
                    how["checkpoint"] = draw.choice(self._checkpoints)
                method: Callable[..., Any] = client.fetch_state
                if draw.random() < 0.6:
                    how["step"] = self._near(draw, -1, 1, 3, 3, 9)
                    method = draw.choice([client.fetch, method])
                with contextlib.suppress(StepError, NoTableError, *UNKNOWN_OUTCOME):
                    self._recorder.begin(name, method, **how).run()
                self._stop.wait(draw.uniform(0, 0.01))

    # ---- the operator

    def _open_session(self) -> int:
        with self._client(self._faulty) as client:
            epoch: int = self._recorder.begin("operator", client.open_session, name="run").run()
        return epoch

    def _operate(self, draw: random.Random) -> None:
        """Opens sessions, and rolls back to checkpoints before others join, while writers of older sessions continue.
        Takes and releases checkpoints at any time."""
        with contextlib.ExitStack() as clients:
            for operation in ["session", "checkpoint", *draw.sample(OPERATIONS, len(OPERATIONS))]:
                if operation in ("session", "rollback"):
                    epoch = self._open_session()
                    client = clients.enter_context(self._client(self._faulty, IMPATIENT_SECONDS))
                    assert self._join("operator", client, epoch), "no other client opens sessions"
                    if operation == "rollback" and self._checkpoints:
                        self._roll_back(client, epoch, draw.randrange(len(self._checkpoints)))
                    self._epoch = epoch
                elif operation == "checkpoint":
                    self._checkpoint(client, epoch)
                elif self._checkpoints:
                    self._release(client, epoch, self._checkpoints.pop(0))
                self._stop.wait(draw.uniform(0.05, 0.15))

    def _checkpoint(self, client: WeightClient, epoch: int) -> None:
        names: list[str] = []

        def take() -> RecordedCall:
            names.append(f"kept {self._recorder.num_calls}")
            return self._recorder.begin("operator", client.checkpoint, epoch, name=names[-1], step=len(RATES))

        self._insist(take)
        self._insist(lambda: self._recorder.begin("operator", client.fetch_state, rows=ROWS, checkpoint=names[-1]))
        self._checkpoints.append(names[-1])

    def _roll_back(self, client: WeightClient, epoch: int, which: int) -> None:
        name = self._checkpoints[which]
        self._insist(lambda: self._recorder.begin("operator", client.rollback, epoch, name=name))
        del self._checkpoints[which + 1 :]

    def _release(self, client: WeightClient, epoch: int, name: str) -> None:
        with contextlib.suppress(NoTableError):  # released by an attempt that failed
            self._insist(lambda: self._recorder.begin("operator", client.release, epoch, name=name))

    def _insist(self, begin: Callable[[], RecordedCall]) -> None:
        """Makes different calls until one is answered; writers begin none meanwhile, so that a checkpoint is taken."""
        pause = TIMEOUT_SECONDS
        self._may_write.clear()
        try:
            while True:
                with contextlib.suppress(InvalidRequestError, *UNKNOWN_OUTCOME):  # rows were written meanwhile
                    begin().run()
                    return
                time.sleep(pause)
                pause *= 2  # so that few are open: the search grows with them
        finally:
            self._may_write.set()


def disturb(cluster: LocalCluster, recorder: Recorder, draw: random.Random) -> None:
    """Kills and pauses shards. A pause lasts until an attempt of some client times out."""
    for fault in draw.sample(FAULTS_OF_SHARDS, len(FAULTS_OF_SHARDS)):
        time.sleep(draw.uniform(0.1, 0.5))
        shard = draw.randrange(len(cluster.processes))
        process = cluster.processes[shard]
        if fault == "kill":
            process.kill()
            process.wait()
            time.sleep(draw.uniform(0, 0.1))
            cluster.restart(shard)
        else:
            num_unknown = recorder.num_unknown
            process.send_signal(signal.SIGSTOP)
            try:
                time.sleep(TIMEOUT_SECONDS)
                wait_until(lambda before=num_unknown: recorder.num_unknown > before)
            finally:
                process.send_signal(signal.SIGCONT)


def history(cluster: LocalCluster, path: Path, seed: int) -> Checked:
    """Records a history and checks it. By every second seed, a write of three rows is two messages, and so is an
    answer."""
    with WeightClient(cluster.addresses) as client:
        client.drop_table()
        client.create_table(SPEC)
        client.extend_schedule(0, RATES)
    with (
        contextlib.ExitStack() as stack,
        pytest.MonkeyPatch.context() as patch,
        Recorder(path, SPEC, NUM_SHARDS, RATES, seed=seed) as recorder,
    ):
        if seed % 2:
            patch.setattr(weightserver.client.transfer, "CHUNK_BYTES", 2 * SPEC.dim * np.float32().nbytes)
        proxies = [
            stack.enter_context(FaultyProxy(address, seed=NUM_SHARDS * seed + shard, faults=FAULTS))
            for shard, address in enumerate(cluster.addresses)
        ]
        clients = Clients(recorder, cluster.addresses, [proxy.address for proxy in proxies], seed)
        with clients.at_work():
            disturb(cluster, recorder, random.Random(seed))
        clients.read_everything()
    return check(path)


@pytest.fixture(scope="module")
def victims() -> Iterator[LocalCluster]:
    with LocalCluster(NUM_SHARDS) as cluster:
        yield cluster


@pytest.mark.guard
def test_histories_are_linearizable(victims: LocalCluster, tmp_path: Path) -> None:
    outcomes = Counter[tuple[str, str]]()
    for seed in range(2):
        outcomes += history(victims, tmp_path / f"history-{seed}.jsonl", seed).outcomes
    for kind in ("push_gradients", "fetch_state", "open_session", "checkpoint", "rollback"):
        assert outcomes[kind, "done"], f"no {kind} was ever answered"
    assert any(outcome in ("unknown", "made again") for _, outcome in outcomes), "no fault was noticed"


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_many_histories_are_linearizable(victims: LocalCluster, tmp_path: Path) -> None:
    outcomes = Counter[tuple[str, str]]()
    for number in range(1, MOST_HISTORIES + 1):
        seed = 999 + number
        outcomes += history(victims, tmp_path / f"history-{seed}.jsonl", seed).outcomes
        missing = [f"{kind}: {outcome}" for kind, outcome in OUTCOMES if not outcomes[kind, outcome]]
        if number >= LEAST_HISTORIES and not missing:
            break
    assert not missing, f"never happened: {missing}"
