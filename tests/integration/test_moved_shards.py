"""A shard that vanishes without a word and serves again at another address, under the name that clients know."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.helpers.nodes import Node, connected_nodes
from tests.helpers.ports import reserved_ports
from tests.helpers.watching import wait_until
from weightserver import StepError, TableSpec, WeightClient

NAME, PORT = "shard.test", 50051
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


def with_hosts(hosts: Path, inside: Sequence[str]) -> list[str]:
    """The first words of a command for which this file is /etc/hosts."""
    return [*inside, "unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("call", "late_seconds"), [("fetch", 0), ("push", 0), ("checkpoint", 0), ("fetch", 40)])
def test_a_client_follows_a_shard_that_vanished(call: str, late_seconds: int, tmp_path: Path) -> None:
    """Neither FIN nor RST tells of it: the client's own pings do, and then it looks the name up again."""
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
            old.unplug()
            # Packets for it are lost without an answer, as behind a router, instead of failing for want of its address.
            own.run(f"ip neigh replace {old.address} lladdr 02:00:00:00:00:01 nud permanent dev eth0")
            vanishing.kill()
            vanishing.wait()
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


@pytest.mark.guard
@pytest.mark.parametrize("answering", ["the other shard", "another program"])
def test_calls_wait_while_another_one_answers_at_the_address(answering: str, tmp_path: Path) -> None:
    """Two shards exchange addresses, or a foreign gRPC server takes one, until everything is back in its place."""
    rows, ones = np.arange(1000), np.ones((1000, 8), np.float32)

    def serve(stack: ExitStack, shard: int, port: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "weightserver", "serve", "--init", "--data-dir", str(tmp_path / str(shard))]
        command += ["--shard", str(shard), "--num-shards", "2", "--listen", f"127.0.0.1:{port}"]
        process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        stack.callback(process.kill)
        return process

    def end(processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            process.terminate()
            process.wait()

    with reserved_ports(2) as ports, ExitStack() as stack:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        right = [serve(stack, shard, ports[shard]) for shard in range(2)]
        client = stack.enter_context(WeightClient(addresses, retry_seconds=60, connect_seconds=60))
        client.create_table(TableSpec(num_rows=1000, dim=8, rows_per_block=10))
        client.extend_schedule(0, np.full(10, 0.1, np.float32))
        client.open_session("run")
        client.push_gradients(rows, ones, step=0)
        before = client.fetch(rows, step=1)
        end(right)

        def refused() -> float:
            own = (sample for family in WeightClient.metrics().collect() for sample in family.samples)
            of = [sample for sample in own if sample.labels.get("status") == "UNIMPLEMENTED"]
            return sum(sample.value for sample in of if sample.name == "weightserver_client_errors_total")

        refusals = refused()
        if answering == "the other shard":
            wrong = [serve(stack, shard, ports[1 - shard]) for shard in range(2)]
        else:
            program = grpc.server(ThreadPoolExecutor(2))
            program.add_insecure_port(addresses[0])
            program.start()
            wrong = [serve(stack, 1, ports[1])]
        with ThreadPoolExecutor(2) as pool:
            fetch = pool.submit(client.fetch, rows, step=1)
            push = pool.submit(client.push_gradients, rows, ones, step=1)
            wait_until(lambda: refused() >= refusals + 4)
            end(wrong)
            if answering == "another program":
                program.stop(0).wait()
            for shard in range(2):
                serve(stack, shard, ports[shard])
            push.result(60)
            with suppress(StepError):  # it came after the push
                assert np.array_equal(fetch.result(60), before)
        assert (client.fetch_state(rows).last_step == 2).all(), "the push counts once, whatever answered meanwhile"
        assert client.describe().clock == 2
