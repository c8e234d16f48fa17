"""Shards that vanish, move, or have others at their addresses for a while: calls find them, or say what answered."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import shutil
import socketserver
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from tests.helpers.nodes import Node, connected_nodes
from tests.helpers.small_run import losses
from tests.helpers.watching import wait_until
from weightserver import (
    AuthenticationError,
    DataLossError,
    InvalidRequestError,
    LocalCluster,
    NoTableError,
    TableMismatchError,
    TableSpec,
    WeightClient,
    WrongShardError,
)

NAME, PORT = "shard.test", 50051
OF_ANOTHER_VERSION = """
from weightserver.common import version
version.__version__, version.works_with = "9.0.0", lambda caller: False
from weightserver.cli import main
main()
"""
CLIENT = """
import sys, time, numpy as np
from weightserver import TableSpec, WeightClient
rows, ones = np.arange(50), np.ones((50, 8), np.float32)
with WeightClient(sys.argv[1:], insecure=True, retry_seconds=90) as client:
    client.create_table(TableSpec(num_rows=100, dim=8))
    client.extend_schedule(0, np.full(10, 0.1, np.float32))
    client.open_session("run")
    client.push_gradients(rows, ones, step=0)
    before, calls = client.fetch(rows, step=1), {
        "fetch": lambda: client.fetch(rows, step=1),
        "push": lambda: client.push_gradients(rows, ones, step=1),
        "checkpoint": lambda: client.checkpoint("kept", step=1),
    }
    print("ready", flush=True)
    call, began = calls[sys.stdin.readline().strip()], time.monotonic()
    call()
    print(time.monotonic() - began, flush=True)
    assert (client.fetch_state(rows).last_step == (2 if call is calls["push"] else 1)).all()
    assert call is not calls["fetch"] or (client.fetch(rows, step=1) == before).all()
print("done", flush=True)
"""


NUM_STEPS = 120
TRAINER = f"synthetic --num-images 500 --steps {NUM_STEPS} --batch-size 16 --num-negatives 64 --window-size 96 "
TRAINER += "--window-stride 24 --rows-per-block 10 --dim 8 --log-every 1 --learning-rate 0.3 --checkpoint-every 10 "
TRAINER += "--encoder.name none --no-evaluate"


@contextmanager
def serving(node: Node, directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [*node.inside, sys.executable, "-m", "weightserver", "serve", "--announce", "--stop-with-parent"]
    command += ["--data-dir", str(directory), "--listen", f"{node.address}:{PORT}", "--insecure", *options]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["address"] == f"{node.address}:{PORT}"
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def training(output: Path, *options: str, inside: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A run of two ranks, whose lines go to `output`.log."""
    command = [*inside, sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "trainer", *TRAINER.split(), "--output", str(output), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (
        output.with_suffix(".log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


def wait_for_line(output: Path, text: str) -> None:
    wait_until(lambda: text in output.with_suffix(".log").read_text(), seconds=120)


def assert_trained(run: subprocess.Popen[bytes], output: Path, expected: npt.NDArray[np.float64]) -> None:
    assert run.wait(240) == 0, output.with_suffix(".log").read_text()[-10_000:]
    assert np.abs(np.array(losses(output)) / expected - 1).max() <= 1e-4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> npt.NDArray[np.float64]:
    """The losses of the run, on one rank."""
    from trainer.arguments import parse_config  # here, as most of these tests need no torch
    from trainer.loop import train

    output = tmp_path_factory.mktemp("undisturbed") / "run"
    train(parse_config([*TRAINER.split(), "--output", str(output)]))
    return np.array(losses(output))


def with_hosts(hosts: Path, inside: Sequence[str]) -> list[str]:
    """The first words of a command for which this file is /etc/hosts."""
    return [*inside, "unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]


def lose(shard: subprocess.Popen[str], node: Node, own: Node | None) -> None:
    """The shard ends. If its node vanishes with it, packets that `own` sends there are lost unanswered, as behind a
    router, instead of failing for want of its address."""
    if own is not None:
        node.unplug()
        own.run(f"ip neigh replace {node.address} lladdr 02:00:00:00:00:01 nud permanent dev eth0")
    shard.kill()
    shard.wait()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("call", "late_seconds", "vanishes"),
    [
        pytest.param(*case, marks=pytest.mark.guard if case == ("push", 0, True) else pytest.mark.slow)
        for case in itertools.product(["fetch", "push", "checkpoint"], [0, 40], [True, False])
    ],
)
def test_a_client_follows_a_shard_to_another_address(
    call: str, late_seconds: int, vanishes: bool, tmp_path: Path
) -> None:
    """If it vanished, neither FIN nor RST tells: the client's own pings do, and then it looks the name up again."""
    hosts, directory = tmp_path / "hosts", tmp_path / "shard"
    with connected_nodes(3) as (own, old, new):
        hosts.write_text(f"{old.address} {NAME}\n")
        command = [*with_hosts(hosts, own.inside), sys.executable, "-c", CLIENT, f"{NAME}:{PORT}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with (
            serving(old, directory, "--init") as vanishing,
            subprocess.Popen(command, **pipes, text=True) as client,  # type: ignore[call-overload]
        ):
            assert client.stdin is not None
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
            lose(vanishing, old, own if vanishes else None)
            with serving(new, directory):
                follow = threading.Timer(late_seconds, hosts.write_text, [f"{new.address} {NAME}\n"])
                follow.start()
                began = time.monotonic()
                client.stdin.write(f"{call}\n")
                client.stdin.flush()
                assert float(client.stdout.readline()) <= late_seconds + 25
                assert time.monotonic() - began >= late_seconds
                assert client.stdout.readline() == "done\n"
                follow.join()
        assert client.returncode == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("late_seconds", "vanishes"),
    [
        pytest.param(*case, marks=pytest.mark.guard if case == (0, True) else pytest.mark.slow)
        for case in itertools.product([0, 40], [True, False])
    ],
)
def test_two_ranks_follow_a_shard_to_another_address(
    late_seconds: int, vanishes: bool, undisturbed: npt.NDArray[np.float64], tmp_path: Path
) -> None:
    hosts, directory, output = tmp_path / "hosts", tmp_path / "shard", tmp_path / "run"
    with connected_nodes(3) as (own, old, new):
        names = f"127.0.0.1 localhost {os.uname().nodename}\n"
        hosts.write_text(f"{names}{old.address} {NAME}\n")
        options = ["--servers", f"{NAME}:{PORT}", "--insecure"]
        with (
            serving(old, directory, "--init") as vanishing,
            training(output, *options, inside=with_hosts(hosts, own.inside)) as run,
        ):
            metrics = output / "metrics.jsonl"
            wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 15, seconds=120)
            lose(vanishing, old, own if vanishes else None)
            with serving(new, directory):
                follow = threading.Timer(late_seconds, hosts.write_text, [f"{names}{new.address} {NAME}\n"])
                follow.start()
                assert_trained(run, output, undisturbed)
                follow.join()


SPEC = TableSpec(num_rows=1000, dim=8, rows_per_block=10)
ROWS, ONES = np.arange(SPEC.num_rows), np.ones((SPEC.num_rows, SPEC.dim), np.float32)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the directories of two other clusters: one has a table of the same spec, one has none."""
    directory = tmp_path_factory.mktemp("others")
    with LocalCluster(2, directory / "stranger") as cluster, WeightClient(cluster.addresses) as client:
        shutil.copytree(directory / "stranger", directory / "empty")
        client.create_table(SPEC)
    return directory


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(2, tmp_path / "cluster") as cluster:
        yield cluster


def trained(cluster: LocalCluster, *, retry_seconds: float) -> WeightClient:
    """A client after one update of all rows, before which shard 0 was copied."""
    client = WeightClient(cluster.addresses, retry_seconds=retry_seconds)
    client.create_table(SPEC)
    client.extend_schedule(0, np.full(10, 0.1, np.float32))
    client.open_session("run")
    shutil.copytree(cluster.directory / "shard-0", cluster.directory / "older")
    client.push_gradients(ROWS, ONES, step=0)
    return client


@contextmanager
def serving_pages(address: str) -> Iterator[None]:
    """Answers every request there by a page without content over HTTP/2, as a proxy may."""

    class Pages(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.read(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
            self.wfile.write(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))  # our settings
            while len(head := self.rfile.read(9)) == 9:
                self.rfile.read(int.from_bytes(head[:3]))
                if head[3] == 1:  # the header of a request: that of its answer ends the stream, with status 200
                    self.wfile.write(bytes([0, 0, 1, 1, 5]) + head[5:] + bytes([0x88]))
                if head[3:5] == bytes([4, 0]):  # its settings
                    self.wfile.write(bytes([0, 0, 0, 4, 1, 0, 0, 0, 0]))

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address, daemon_threads = True, True

        def handle_error(self, *_: object) -> None:
            """The client is gone."""

    host, _, port = address.partition(":")
    with Server((host, int(port)), Pages) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield
        finally:
            server.shutdown()


class Catchall(grpc.GenericRpcHandler):
    """Answers every call by these bytes; without any it refuses it."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(_: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            if self._answer is not None:
                return self._answer
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "log in first")
            raise AssertionError("abort() raises")

        return grpc.stream_unary_rpc_method_handler(answer)


@contextmanager
def misplaced(cluster: LocalCluster, what: str, others: Path) -> Iterator[None]:
    """At shard 0's address there is something else, or nothing, until the end of the block."""

    def end() -> None:
        for process in cluster.processes:
            process.kill()
            process.wait()

    end()
    own, kept, serving = cluster.directory / "shard-0", cluster.directory / "kept", [1]
    command, options = cluster._program, cluster._serve_options
    with ExitStack() as stack:
        if what in ("exchanged", "sibling"):
            cluster._reserved_ports.reverse()
            stack.callback(cluster._reserved_ports.reverse)
        elif what == "another program" or what in ANSWERS:
            program = grpc.server(ThreadPoolExecutor(2))
            program.add_generic_rpc_handlers([Catchall(ANSWERS[what])] if what in ANSWERS else [])
            program.add_insecure_port(cluster.addresses[0])
            program.start()
            stack.callback(lambda: program.stop(0).wait())
        elif what == "an HTTP server":
            host, _, port = cluster.addresses[0].partition(":")
            web = stack.enter_context(
                http.server.ThreadingHTTPServer((host, int(port)), http.server.BaseHTTPRequestHandler)
            )
            threading.Thread(target=web.serve_forever).start()
            stack.callback(web.shutdown)
        elif what == "an HTTP/2 server":
            stack.enter_context(serving_pages(cluster.addresses[0]))
        elif what in ("stranger", "older copy", "empty", "another token", "another version"):
            stack.callback(own.rename(kept).rename, own)
            source = others / ("empty" if what == "empty" else "stranger") / "shard-0"
            if what == "older copy":
                source = cluster.directory / "older"
            stack.callback(shutil.rmtree, shutil.copytree(source, own))
        if what in ("exchanged", "stranger", "older copy", "empty", "another token", "another version"):
            serving.append(0)
        (token := others / "token").write_text("the-token-of-another-cluster")
        for shard in serving:
            if shard == 0 and what == "another token":
                cluster._serve_options = ["--token-file", str(token)]
            if shard == 0 and what == "another version":
                cluster._program = [sys.executable, "-c", OF_ANOTHER_VERSION]
            cluster.restart(shard)
        cluster._program, cluster._serve_options = command, options
        yield
        end()
    for shard in range(2):
        cluster.restart(shard)


def calls_of(client: WeightClient) -> dict[str, Callable[[], Any]]:
    return {
        "fetch": lambda: client.fetch(ROWS, step=1),
        "push": lambda: client.push_gradients(ROWS, ONES, step=1),
        "checkpoint": lambda: client.checkpoint("kept", step=1),
    }


def failed(status: str) -> float:
    """Number of attempts that failed so."""
    own = (sample for family in WeightClient.metrics().collect() for sample in family.samples)
    of = (sample for sample in own if sample.labels.get("status") == status)
    return sum(sample.value for sample in of if sample.name == "weightserver_client_errors_total")


def wrong_answers() -> Counter[str]:
    """What answered in the place of shard 0 of 2."""
    own = (sample for family in WeightClient.metrics().collect() for sample in family.samples)
    of = (sample for sample in own if sample.name == "weightserver_client_wrong_answers_total")
    of = (sample for sample in of if (sample.labels["shard"], sample.labels["expected"]) == ("0", "0/2"))
    return Counter({sample.labels["answered"]: int(sample.value) for sample in of})


PLACES = {
    "rebooted": "",
    "an HTTP server": "",  # gRPC cannot tell it from a connection that breaks
    "sibling": "1/2",
    "an HTTP/2 server": "another program",
    "another program": "another program",
    "a mock": "another program",
    "a page": "another program",
    "a gate": "another program",
    "stranger": "another table",
    "older copy": "another state",
    "empty": "no table",
    "another token": "another token",
    "another version": "another version",
}
"""What may be in the place of shard 0, and its name in the metric if it answers."""
STATUS = {"rebooted": "UNAVAILABLE", "an HTTP server": "UNAVAILABLE", "an HTTP/2 server": "UNKNOWN"}
STATUS |= {"a mock": "UNKNOWN", "a page": "UNKNOWN", "a gate": "PERMISSION_DENIED"}
STATUS |= {"older copy": "DATA_LOSS", "another token": "UNAUTHENTICATED", "another version": "INVALID_ARGUMENT"}
ANSWERS = {"a mock": b"", "a page": b"<html>", "a gate": None}
"""Of a gRPC server that answers every call."""


@pytest.mark.parametrize(
    ("what", "call"),
    [
        pytest.param(what, call, marks=pytest.mark.guard if is_guard else pytest.mark.slow)
        for what in PLACES
        for call, is_guard in (
            ("fetch", what in ("rebooted", "empty")),
            ("push", what != "rebooted"),  # "older copy" is what a backup restored elsewhere is, too
            ("checkpoint", what == "stranger"),
        )
    ],
)
def test_calls_wait_until_the_shard_is_in_its_place(what: str, call: str, others: Path, cluster: LocalCluster) -> None:
    status, answered = STATUS.get(what, "UNIMPLEMENTED"), PLACES[what]
    with trained(cluster, retry_seconds=60) as client, ThreadPoolExecutor(1) as pool:
        before = client.fetch(ROWS, step=1)
        with misplaced(cluster, what, others):
            failures, before_answers = failed(status), wrong_answers()
            made = pool.submit(calls_of(client)[call])
            wait_until(lambda: failed(status) >= failures + 3 or made.done())
            assert not made.done()
            assert list(wrong_answers() - before_answers) == [answered] * bool(answered)
        found = made.result(60)
        assert call != "fetch" or np.array_equal(found, before)
        counted = 2 if call == "push" else 1
        assert (client.fetch_state(ROWS).last_step == counted).all(), "whatever answered, it counts once"
        assert client.describe().clock == counted
        assert [kept.name for kept in client.checkpoints()] == (["kept"] if call == "checkpoint" else [])


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("push", marks=pytest.mark.guard),
        *(pytest.param(call, marks=pytest.mark.slow) for call in ("fetch", "checkpoint")),
    ],
)
def test_shards_that_exchanged_their_addresses_are_found(call: str, others: Path, cluster: LocalCluster) -> None:
    """Before names follow, and again when they have."""
    with trained(cluster, retry_seconds=60) as client:
        before, wrong = client.fetch(ROWS, step=1), wrong_answers()
        with misplaced(cluster, "exchanged", others):
            found = calls_of(client)[call]()
            assert call != "fetch" or np.array_equal(found, before)
            assert set(wrong_answers() - wrong) == {"1/2"}
        assert (client.fetch_state(ROWS).last_step == (2 if call == "push" else 1)).all()
        # a renewal of the session that failed meanwhile may have changed one again, until a call is refused there
        wait_until(lambda: [shard.address for shard in client.describe().shards] == cluster.addresses)


@pytest.mark.guard
def test_three_shards_that_exchanged_their_addresses_are_found(tmp_path: Path) -> None:
    """By what each of them says, also if only one is called."""
    with LocalCluster(3, tmp_path) as cluster, trained(cluster, retry_seconds=60) as client:
        before = client.fetch(ROWS, step=1)
        for process in cluster.processes:
            process.kill()
            process.wait()
        cluster._reserved_ports.append(cluster._reserved_ports.pop(0))
        for shard in range(3):
            cluster.restart(shard)
        assert np.array_equal(client.fetch(ROWS[:10], step=1), before[:10])
        assert np.array_equal(client.fetch(ROWS, step=1), before)


@pytest.mark.guard
def test_a_client_that_connects_while_shards_are_exchanged_keeps_them(others: Path, cluster: LocalCluster) -> None:
    with trained(cluster, retry_seconds=60) as client:
        before = client.fetch(ROWS, step=1)
    with WeightClient(cluster.addresses, retry_seconds=60) as client:
        with misplaced(cluster, "exchanged", others):
            assert [shard.address for shard in client.describe().shards] == cluster.addresses[::-1]
        assert np.array_equal(client.fetch_state(ROWS).weight, before)


def first_attempts(status: str = "") -> float:
    """Number of attempts at shards whose number is not known yet; of those that failed so."""
    own = (sample for family in WeightClient.metrics().collect() for sample in family.samples)
    of = (one for one in own if one.labels.get("shard") == "unknown" and one.labels.get("status", "") == status)
    name = f"weightserver_client_{'errors' if status else 'attempts'}_total"
    return sum(sample.value for sample in of if sample.name == name)


@pytest.mark.guard
def test_a_first_connection_waits_until_a_shard_answers(others: Path, cluster: LocalCluster) -> None:
    with WeightClient(cluster.addresses, connect_seconds=60) as client, ThreadPoolExecutor(1) as pool:
        with misplaced(cluster, "another program", others):
            before = first_attempts("UNIMPLEMENTED")
            made = pool.submit(client.create_table, SPEC)
            wait_until(lambda: first_attempts("UNIMPLEMENTED") >= before + 3 or made.done())
            assert not made.done()
        assert made.result(60) == SPEC


@pytest.mark.guard
def test_a_first_connection_waits_while_two_names_lead_to_one_shard(tmp_path: Path, cluster: LocalCluster) -> None:
    with (
        LocalCluster(2, tmp_path / "twin") as twin,
        WeightClient(cluster.addresses, connect_seconds=60) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        for process in (cluster.processes[1], *twin.processes):
            process.kill()
            process.wait()
        for port in twin._reserved_ports[0]:
            port.close()
        twin._reserved_ports[0] = cluster._reserved_ports[1]
        twin.restart(0)  # at the address of the other's shard 1
        before = first_attempts()
        made = pool.submit(client.create_table, SPEC)
        wait_until(lambda: first_attempts() >= before + 6 or made.done())
        assert not made.done()
        twin.processes[0].kill()
        twin.processes[0].wait()
        cluster.restart(1)
        assert made.result(60) == SPEC


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=pytest.mark.guard if what == "stranger" else pytest.mark.slow)
        for what in (*(name for name in PLACES if name != "older copy"), "exchanged")
    ],
)
def test_two_ranks_wait_until_the_shard_is_in_its_place(
    what: str, others: Path, cluster: LocalCluster, undisturbed: npt.NDArray[np.float64], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with training(output, "--servers", ",".join(cluster.addresses)) as run:
        metrics = output / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 15, seconds=120)
        with misplaced(cluster, what, others):
            if what == "exchanged":  # it is found before that is told
                num_lines = metrics.read_text().count("\n")
                wait_until(lambda: metrics.read_text().count("\n") > num_lines + 10, seconds=120)
            else:
                wait_for_line(output, "has not answered")
        assert_trained(run, output, undisturbed)


@pytest.mark.guard
@pytest.mark.parametrize(
    ("what", "error", "told"),
    [
        (
            "stranger",
            WrongShardError,
            r"shard 0 at .* \(shard 0/2 of table \w{32} answers, the call is for that of table",
        ),
        ("empty", DataLossError, r"shard 0 at .* \(shard 0/2 of no table answers, .*put the newest directory back"),
        ("older copy", DataLossError, r"shard 0 at \S+, for \d+\.\d s.*: shard 0 lacks what it had acknowledged"),
        (
            "another token",
            AuthenticationError,
            r"^shard 0 at \S+ has refused this client's token for \d+\.\d s.*: the call has no token",
        ),
        (
            "another version",
            InvalidRequestError,
            r"^shard 0 at \S+ has refused this client's version for .*: this shard has version 9\.0\.0, the caller ",
        ),
    ],
)
def test_what_stays_in_the_place_of_a_shard_is_named(
    what: str, error: type[Exception], told: str, others: Path, cluster: LocalCluster
) -> None:
    """After `retry_seconds`. A table that another client has replaced on purpose is told at once."""
    with trained(cluster, retry_seconds=1.5) as client:
        before = client.fetch(ROWS, step=1)
        with misplaced(cluster, what, others):
            began = time.monotonic()
            with pytest.raises(error, match=told):
                client.fetch(ROWS, step=1)
            assert time.monotonic() - began >= 1.5
        assert np.array_equal(client.fetch(ROWS, step=1), before)
        with WeightClient(cluster.addresses) as other:
            other.drop_table()
            with pytest.raises(NoTableError):
                client.fetch(ROWS, step=1)
            other.create_table(SPEC)
            failures = failed("UNIMPLEMENTED")
            with pytest.raises(TableMismatchError, match="the table was replaced"):
                client.fetch(ROWS, step=1)
            assert failed("UNIMPLEMENTED") == failures
