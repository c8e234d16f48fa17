"""Runs on several nodes: torchrun on each, weight servers on another, and the loss of one of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from tests.helpers.image_tree import plain_tree
from tests.helpers.nodes import Node, connected_nodes
from tests.helpers.object_store import credentials, s3_server, url_to_make_bucket
from tests.helpers.secure_shards import served
from tests.helpers.small_run import losses
from tests.helpers.watching import wait_until
from trainer.data.pack import PackOptions, pack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
TRAINER = "-m trainer synthetic --num-images 500 --steps 60 --batch-size 16 --num-negatives 64 --window-size 96 "
TRAINER += "--window-stride 24 --rows-per-block 5 --dim 16 --log-every 1 --learning-rate 0.3 --checkpoint-every 10 "
TRAINER += "--encoder.image-size 16 --encoder.width 8 --encoder.norm group"  # BatchNorm would see a rank's slice alone

SMALL_SEGMENTS = """
from trainer.data import pack_files, survey

pack_files.SEGMENT_BYTES = 5_000  # about two images
survey.sample.__defaults__ = (4,)  # images that rank 0 looks at first: 256 would be a third of all
from trainer.__main__ import main

main()
"""


@dataclass(frozen=True)
class Cluster:
    """Two nodes for ranks, and weight servers that require TLS and a token on a third."""

    nodes: list[Node]
    third: Node
    servers: list[str]
    """Settings by which a trainer reaches them."""
    trainer: list[str]
    """A run on them."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    certificates = tmp_path / "certificates"
    with connected_nodes(3) as (*nodes, third):
        certify = [sys.executable, "-m", "weightserver", "certs", str(certificates), "--host", third.address]
        subprocess.run(certify, check=True, capture_output=True)
        serve = ["--listen", f"{third.address}:0", "--token-file", f"{certificates}/token", "--num-shards", "2"]
        serve += ["--tls-cert", f"{certificates}/server.pem", "--tls-key", f"{certificates}/server-key.pem"]
        shards = {str(shard): [*serve, "--shard", str(shard)] for shard in range(2)}
        with served(shards, inside=third.inside) as serving:
            servers = ["--servers", ",".join(shard.address for shard in serving.values())]
            servers += ["--tls-ca", f"{certificates}/ca.pem", "--token-file", f"{certificates}/token"]
            trainer = [*TRAINER.split(), *servers, "--output", str(tmp_path / "run")]
            yield Cluster(nodes, third, servers, trainer)


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory: pytest.TempPathFactory) -> npt.NDArray[np.float64]:
    """The losses of two ranks."""
    output = tmp_path_factory.mktemp("one") / "run"
    command = [*TORCHRUN, "2", "--standalone", *TRAINER.split(), "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return np.array(losses(output))


class Torchrun:
    """Runs torchrun on one of several nodes; `host` holds the rendezvous. Ranks follow the order of addresses."""

    def __init__(self, cluster: Cluster, index: int, number: str, host: int, log: Path, *more: str) -> None:
        node, meeting = cluster.nodes[index], cluster.nodes[host].address
        command = [*node.inside, *TORCHRUN, "1", "--nnodes", number, "--rdzv-backend", "c10d", "--rdzv-id", "run"]
        command += ["--rdzv-endpoint", f"{meeting}:29400", "--local-addr", node.address, "--max-restarts", "3"]
        # Both nodes have the host's name, by which torchrun looks who shall hold the rendezvous.
        command += ["--rdzv-conf", f"is_host={int(index == host)},last_call_timeout=10,keep_alive_interval=1"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see docs/deployment.md
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [*command, *cluster.trainer, *more], stdout=file, stderr=file, env=environment
            )
        self.log = log

    def kill(self) -> None:
        """Kills it and its ranks with -9."""
        if self.process.poll() is None:
            torchrun = psutil.Process(self.process.pid)
            for process in [torchrun, *torchrun.children(recursive=True)]:
                process.kill()

    def wait(self) -> None:
        assert self.process.wait(240) == 0, self.log.read_text()[-10_000:]


@contextmanager
def on_all_nodes(
    cluster: Cluster, number: str, directory: Path, *more: str, host: int = 0, cache: Path | None = None
) -> Iterator[list[Torchrun]]:
    """`cache-0`, …, if `cache` is given, are the nodes' directories for images of a bucket."""
    started: list[Torchrun] = []
    try:
        for index in range(len(cluster.nodes)):
            own = ["--cache-dir", f"{cache}-{index}"] if cache else []
            started.append(Torchrun(cluster, index, number, host, directory / f"node-{index}.log", *more, *own))
        yield started
    finally:
        for torchrun in started:
            torchrun.kill()
            torchrun.process.wait()


def assert_same(output: Path, expected: npt.NDArray[np.float64]) -> None:
    assert expected[-5:].mean() < expected[:5].mean() - 0.05, "nothing was learned: this shows nothing"
    assert np.abs(np.array(losses(output)) / expected - 1).max() <= 1e-4


@pytest.mark.parametrize(
    ("loss", "lost", "num_ranks"), [("killed", 0, 1), ("unplugged", 1, 1), ("killed and started again", 0, 2)]
)
def test_a_run_resumes_by_itself_when_a_node_is_lost(
    loss: str, lost: int, num_ranks: int, cluster: Cluster, on_one_node: npt.NDArray[np.float64], tmp_path: Path
) -> None:
    """torchrun restarts the other node's rank, alone or with a new one; the run resumes from the last checkpoint."""
    options, other = ["--resume", "auto", "--rank-timeout-seconds", "5", "--retry-seconds", "5"], 1 - lost
    with on_all_nodes(cluster, "1:2", tmp_path, *options, host=other) as running:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 25, seconds=120)
        if loss == "unplugged":
            cluster.nodes[lost].unplug()
        else:
            running[lost].kill()
        if loss == "killed and started again":
            running.append(Torchrun(cluster, lost, "1:2", other, running[lost].log, *options))
            running[-1].wait()
        running[other].wait()
        said = running[other].log.read_text()
    assert "trainer: another rank failed or does not answer" in said
    logs = "".join(log.read_text() for log in tmp_path.glob("node-*.log"))
    begun = sorted(re.findall(r"^\S+Z \[info\] training begins .*", logs, re.MULTILINE))
    first, again = (dict(re.findall(r"(\w+)=(\d+)", line)) for line in begun)
    assert (first["step"], first["ranks"]) == ("0", "2")
    assert again["ranks"] == str(num_ranks)
    assert int(again["step"]) in (20, 30, 40, 50)
    assert_same(tmp_path / "run", on_one_node)


def test_a_node_reads_its_share_of_a_pack_in_a_bucket(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 1.3 times half of the bytes that both fetch, most of the pack; with the losses of one process."""
    images, packed, bucket, program = (tmp_path / name for name in ("images", "packed", "bucket", "program.py"))
    program.write_text(SMALL_SEGMENTS)
    bucket.mkdir()
    pack(plain_tree(images, 768), packed, PackOptions())
    settings = "--steps 16 --batch-size 64 --num-negatives 64 --window-size 512 --window-stride 128 --dim 16 "
    settings += "--rows-per-block 5 --log-every 1 --learning-rate 0.3 --no-evaluate --knn-every 0 "
    settings += "--encoder.image-size 16 --encoder.width 8 --encoder.norm group"
    alone = [sys.executable, str(program), str(packed), *settings.split(), "--output", str(tmp_path / "alone")]
    subprocess.run(alone, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})

    with s3_server(bucket, address=cluster.third.address, inside=cluster.third.inside) as port:
        for name, value in credentials(f"http://{cluster.third.address}:{port}").items():
            monkeypatch.setenv(name, value)
        python = [*cluster.third.inside, sys.executable]
        put = "import sys, urllib.request as r; r.urlopen(r.Request(sys.argv[1], method='PUT'), timeout=60)"
        subprocess.run([*python, "-c", put, url_to_make_bucket("images")], check=True)
        upload = ["-m", "trainer.data", "pack", str(images), "s3://images/packed", "--cache-dir", str(tmp_path / "own")]
        subprocess.run([*python, *upload], check=True)
        run = [str(program), "s3://images/packed", *settings.split(), *cluster.servers]
        of_node = replace(cluster, trainer=[*run, "--output", str(tmp_path / "run")])
        with on_all_nodes(of_node, "2", tmp_path, cache=tmp_path / "cache") as running:
            for torchrun in running:
                torchrun.wait()
    assert np.array(losses(tmp_path / "run")) == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    pieces = [list((tmp_path / f"cache-{index}/pieces").iterdir()) for index in range(2)]
    fetched = [{path.name: path.stat().st_size for path in each} for each in pieces]
    share = sum((fetched[0] | fetched[1]).values()) / 2
    assert share > 0.4 * sum(path.stat().st_size for path in packed.glob("*.tar"))
    assert max(sum(each.values()) for each in fetched) <= 1.3 * share
