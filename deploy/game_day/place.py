"""A cluster of two shards on this machine, with a client that works, on which one fault is tried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from deploy.prometheus.local import running_trainer
from weightserver import LocalCluster
from weightserver.common.processes import end_process
from weightserver.operations.certificates import write_certificates

BROKEN, WHOLE = 0, 1
"""The shard that breaks, and the other one, which an alert could name instead."""
TRAINER = (
    "synthetic --num-images 3000 --steps 1000000 --batch-size 16 --num-negatives 64 --window-size 96 --window-stride "
    "24 --dim 16 --rows-per-block 5 --log-every 5 --checkpoint-every 50 --encoder.name none --no-evaluate"
)
_VALID_SECONDS = 40
"""How long a certificate is valid that is to expire."""
_CLIENT = [sys.executable, "-m", "deploy.game_day.load"]


@dataclass
class Place:
    """A cluster, its client, and where both are."""

    cluster: LocalCluster
    directory: Path
    security: list[str]
    """Options with which clients call the shards."""
    client: str = ""
    """Address of the client's metrics."""
    trainer: subprocess.Popen[bytes] | None = None
    outage_seconds: float = 11.0
    """How long a shard is away that is restarted."""
    until_scrape: Callable[[], float] = float
    """Seconds until the slowest Prometheus scrapes the shard that breaks."""
    is_target: dict[int, bool] = field(default_factory=lambda: {0: True, 1: True})
    """Whether Prometheus knows a shard."""

    @property
    def targets(self) -> dict[str, list[str]]:
        known = [address for shard, address in enumerate(self.cluster.metrics_addresses) if self.is_target[shard]]
        return {"weightserver": known, "trainer": [self.client] if self.client else []}

    @property
    def data(self) -> Path:
        """Where the broken shard keeps its rows."""
        return self.directory / f"shard-{BROKEN}"

    def page(self, path: str, shard: int = BROKEN) -> str:
        """What a shard's metrics port answers, or that it does not."""
        try:
            url = f"http://{self.cluster.metrics_addresses[shard]}{path}"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return str(answer.read().decode().strip())
        except urllib.error.HTTPError as error:
            with error:
                return error.read().decode().strip()
        except (OSError, ValueError):
            return "no answer"


@contextmanager
def place(directory: Path, kind: str) -> Iterator[Place]:
    """Starts a cluster, and a client or, for the kind "trainer", a trainer.

    Args:
        kind: of its shards: "plain", "trainer", "secure" with a token, "expiring" with a certificate that soon ends,
            "small" with a volume of its own for the broken shard, or "slow" with a disk that can be slow.
    """
    directory.mkdir()
    options, security = [], list[str]()
    if kind in ("secure", "expiring"):
        certificates = directory / "certificates"
        begun = datetime.now(UTC) - timedelta(days=1, seconds=-_VALID_SECONDS)
        is_expiring = kind == "expiring"
        write_certificates(
            certificates, ["127.0.0.1"], days=1 if is_expiring else 365, start=begun if is_expiring else None
        )
        options = [f"--tls-cert={certificates}/server.pem", f"--tls-key={certificates}/server-key.pem"]
        options.append(f"--token-file={certificates}/token")
        security = [f"--tls-ca={certificates}/ca.pem", f"--token-file={certificates}/token"]
    with (
        _volume(directory / f"shard-{BROKEN}") if kind == "small" else nullcontext(),
        LocalCluster(2, directory, serve_options=options) as cluster,
    ):
        if kind == "slow":
            _can_be_slow(cluster, directory)
        made = Place(cluster, directory, security)
        if kind == "trainer":
            run = [*TRAINER.split(), "--servers", ",".join(cluster.addresses), "--output", str(directory / "run")]
            with running_trainer(run) as (made.client, made.trainer):
                yield made
        else:
            with client(cluster.addresses, security, directory / "client.log") as made.client:
                yield made


def _can_be_slow(cluster: LocalCluster, directory: Path) -> None:
    """Starts the shard that breaks anew, with a disk that is slow while the file `slow` exists; the other's is not."""
    library, source = directory / "slow_disk.so", Path(__file__).with_name("slow_disk.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    os.environ |= {"LD_PRELOAD": str(library), "SLOW_DISK": str(directory / "slow")}
    try:
        cluster.restart(BROKEN)
    finally:
        del os.environ["LD_PRELOAD"], os.environ["SLOW_DISK"]


@contextmanager
def client(addresses: Sequence[str], security: Sequence[str], log_file: Path) -> Iterator[str]:
    """Runs `deploy.game_day.load`; yields the address of its metrics."""
    command = [*_CLIENT, "--servers", ",".join(addresses), *security]
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["metrics_address"]
        finally:
            end_process(process, seconds=10)


@contextmanager
def _volume(directory: Path) -> Iterator[None]:
    """Mounts a file system in memory of 1.2 GB: a little more than the least that is no alert."""
    directory.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200m,mode=700", "tmpfs", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
