"""The compose file's services, and the shards in them."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from deploy.bring_up.engine import Docker
from deploy.bring_up.images import WEIGHTSERVER_IMAGE
from deploy.bring_up.report import check, say, wait_until
from deploy.bring_up.settings import COMPOSE_FILE, LISTEN, PROJECT, ROOT, Json
from weightserver import ClientSecurity, WeightClient

SWAP = (
    "for v in /data/*; do [ -e $v/new ] || continue; [ ! -e $v/shard ] || mv $v/shard $v/old; mv $v/new $v/shard; done"
)
"""Gives new shards the place of old ones."""


def compose_file() -> Json:
    found: Json = yaml.safe_load(COMPOSE_FILE.read_text())
    return found


def services(docker: Docker) -> list[str]:
    """Services of the compose file, except the trainer, whose images exist or can be pulled."""
    found, absent = [], []
    for name, service in compose_file()["services"].items():
        image = service["image"]
        if name == "trainer":
            continue
        if docker.has(image) or docker.pulls(image):
            found.append(name)
        else:
            absent.append(f"{name} ({image})")
    if absent:
        say(f"omitted, because their images cannot be pulled: {', '.join(absent)}")
    return found


def serving(names: Sequence[str]) -> list[str]:
    """The services that a health check looks at, which are not those that make and renew certificates."""
    known = compose_file()["services"]
    return [name for name in names if "healthcheck" in known[name]]


def wait_healthy(docker: Docker, names: Sequence[str]) -> None:
    wait_until(lambda: all(docker.health(name) == "healthy" for name in names), f"{' and '.join(names)} are healthy")


def start(docker: Docker, names: Sequence[str], *, init: bool = False) -> None:
    docker.up("up", "-d", *names, init=init)
    wait_healthy(docker, serving(names))
    say(", ".join(f"{name}: {docker.health(name)}" for name in names))


def report_metrics(docker: Docker) -> None:
    """Scrapes the shards from within the containers' network, as Prometheus does."""
    for name in ("shard-0", "shard-1"):
        code = f"import urllib.request as u; print(u.urlopen('http://{name}:9101/metrics', timeout=20).read().decode())"
        page = docker.up("exec", "-T", "shard-0", "python", "-c", code)
        names = set(re.findall(r"(?m)^# TYPE (weightserver_\w+)", page))
        say(f"http://{name}:9101/metrics: {len(names)} metrics of the weight server")
        check(names, f"{name} serves no metrics")


@dataclass(frozen=True)
class Shards:
    """The shards as a client on the host calls them."""

    addresses: list[str]
    security: ClientSecurity

    @classmethod
    def of(cls, docker: Docker, directory: Path, num_shards: int = 2) -> Shards:
        for name in ("ca.pem", "token"):
            (directory / name).write_text(docker.up("exec", "-T", "shard-0", "cat", f"/certs/{name}"))
            (directory / name).chmod(0o600)
        addresses = [f"{LISTEN}:{50051 + shard}" for shard in range(num_shards)]
        return cls(addresses, ClientSecurity(tls_ca=directory / "ca.pem", token_file=directory / "token"))

    def options(self) -> list[str]:
        return ["--tls-ca", str(self.security.tls_ca), "--token-file", str(self.security.token_file)]

    def command(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "weightserver", *arguments, *self.options()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        check(done.returncode == 0, f"weightserver {arguments[0]}: {done.stderr}")
        return done.stdout.strip()

    def rows(self) -> str:
        """The number of stored rows, and a digest of the state of all rows, stored or not."""
        with WeightClient(self.addresses, **self.security.client_arguments()) as client:
            info, digest = client.describe(), hashlib.sha256()
            for first in range(0, info.spec.num_rows, 10_000):
                state = client.fetch_state(np.arange(first, min(first + 10_000, info.spec.num_rows)))
                for values in (state.weight, state.momentum_buffer, state.last_step):
                    digest.update(values.tobytes())
            return (
                f"{info.rows_stored:,} of {info.spec.num_rows:,} rows stored, clock {info.clock}, "
                f"SHA-256 {digest.hexdigest()[:16]}"
            )


def three_shards() -> Json:
    """An override that makes the compose file one of three shards; its anchors cannot be overridden."""
    service = compose_file()["services"]["shard-1"]
    entrypoint = service["entrypoint"]
    entrypoint[entrypoint.index("--num-shards") + 1] = "3"
    third = service | {"command": ["--shard=2"], "ports": [f"{LISTEN}:50053:50051"]}
    third["volumes"] = ["shard-2:/data", "shard-certificates:/certs:ro"]
    servers = {"environment": {"SERVERS": "shard-0:50051,shard-1:50051,shard-2:50051"}}
    changed = {"shard-0": {"entrypoint": entrypoint}, "shard-1": {"entrypoint": entrypoint}, "shard-2": third}
    return {"services": changed | {"certificates": servers}, "volumes": {"shard-2": {}}}


def reshard(docker: Docker, directory: Path) -> Shards:
    """Follows docs/deployment.md, "Another number of shards"."""
    override, names = three_shards(), [f"shard-{shard}" for shard in range(3)]
    start(docker, names[:2])
    docker.up("up", "--no-start", "--no-recreate", "--no-deps", names[2], override=override)
    shared = ["--rm", "--network", f"{PROJECT}_default", "-v", f"{PROJECT}_client-certificates:/certs:ro"]
    for shard in range(3):
        command = ["reshard", "--from", "shard-0:50051,shard-1:50051", "--shard", f"{shard}/3", "--target", "/data/new"]
        command += ["--tls-ca", "/certs/ca.pem", "--token-file", "/certs/token"]
        say(f"$ docker run ... {WEIGHTSERVER_IMAGE} {' '.join(command)}")
        volume = ("-v", f"{PROJECT}_shard-{shard}:/data")
        say(docker.run("run", *shared, *volume, WEIGHTSERVER_IMAGE, *command).strip())
    docker.up("stop", *names[:2])
    mounts = [word for shard in range(3) for word in ("-v", f"{PROJECT}_shard-{shard}:/data/{shard}")]
    docker.run("run", "--rm", *mounts, "--entrypoint", "sh", WEIGHTSERVER_IMAGE, "-ec", SWAP)
    docker.up("up", "-d", *names, override=override)
    wait_healthy(docker, names)
    return Shards.of(docker, directory, 3)
