"""Brings the deployment up for real: builds the images, starts the compose file, trains, breaks things and checks.

    python -m deploy.bring_up                # as root; about ten minutes on two cores
    python -m deploy.bring_up --engine DIR   # keeps the engine's files there: the next time takes half as long

If no Docker engine runs, it starts its own and stops it at the end; if the images' base cannot be pulled, it makes a
stand-in from Debian's packages. It needs the commands docker (with BuildKit), docker compose, and if used dockerd and
debootstrap. Exit status 0 if everything behaves as documented, else 1 with a line that says what does not.
"""

from __future__ import annotations

import argparse
import math
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deploy.bring_up.cluster import Shards, report_metrics, reshard, services, serving, start
from deploy.bring_up.engine import Docker, engine
from deploy.bring_up.faults import show_faults, show_hang, show_runbook
from deploy.bring_up.images import base_image, build, look_into_images, pip_secrets
from deploy.bring_up.report import UnexpectedBehaviour, check, hide, say, title
from deploy.bring_up.settings import PROJECT, ROOT
from deploy.bring_up.training import train_from_host, train_from_profile


def bring_up(directory: Path, engine_directory: Path) -> None:
    (wanted,) = set(re.findall(r"ARG BASE_IMAGE=(\S+)", (ROOT / "deploy/weightserver.Dockerfile").read_text()))
    title("engine")
    with engine(engine_directory) as docker:
        title("images")
        base = base_image(docker, wanted)
        with pip_secrets(directory) as secrets:
            for name in ("weightserver", "trainer"):
                build(docker, name, base, secrets)
        look_into_images(docker)
        _clean(docker)
        try:
            title("INIT=--init docker compose up -d")
            names = services(docker)
            start(docker, names, init=True)
            shards = Shards.of(docker, directory)
            for address in shards.addresses:
                say(f"from the host, {address}: {shards.command('health', address, '--timeout-seconds', '20')}")
            report_metrics(docker)
            _train_twice(docker, shards, directory)
            title("the runbook's commands, and a shard that hangs")
            show_runbook(docker)
            show_hang(docker)
            title("stopped, and started again")
            _stop_and_start(docker, names, directory)
            title("invalid settings and a full disk")
            docker.up("stop")
            docker.up("rm", "-f", "shard-0")
            show_faults(docker)
            title("three shards of two")
            say(reshard(docker, directory).rows())
        finally:
            _clean(docker)
    title("done, all as expected")


def _train_twice(docker: Docker, shards: Shards, directory: Path) -> None:
    """Trains from the host and in a container, and compares the losses."""
    title("torchrun on the host, a shard killed")
    from_host = train_from_host(docker, shards, directory / "run")
    say(shards.command("checkpoints", *shards.addresses))
    shards.command("drop", *shards.addresses, "--yes")
    title("the profile `trainer`, a shard and the trainer killed")
    from_profile = train_from_profile(docker)
    say(f"losses: {from_host:.6f} from the host, {from_profile:.6f} from the profile")
    check(math.isclose(from_host, from_profile, rel_tol=1e-3), "the two runs ended differently")


def _stop_and_start(docker: Docker, names: Sequence[str], directory: Path) -> None:
    """Stops all services, starts them again, and compares the rows."""
    before = Shards.of(docker, directory).rows()
    say(before)
    docker.up("stop")
    for name in serving(names):
        code = docker.inspect(name)["State"]["ExitCode"]
        say(f"{name} stopped with {code}: {docker.last_line(name)}")
        check(code == 0, f"{name} did not drain")
    docker.up("--profile", "trainer", "down")
    start(docker, names)
    after = Shards.of(docker, directory).rows()
    say(after)
    check(before == after, "rows were lost")
    check("0 of" not in before.split(",")[0][:4], "no rows were stored")


def _clean(docker: Docker) -> None:
    """Removes containers, networks and volumes of the project, including those of earlier attempts."""
    docker.up("--profile", "trainer", "down", "--volumes", "--remove-orphans", fails=True, seconds=300)
    for volume in docker.run("volume", "ls", "-q", "--filter", f"name={PROJECT}_").split():
        docker.run("volume", "rm", "-f", volume, fails=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.bring_up", description="Builds, starts and breaks the deployment."
    )
    parser.add_argument(
        "--engine", type=Path, help="where a Docker engine that is started keeps its files for the next time"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs the clean-up
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        hide(name, "TMP")
        hide(sys.executable, "python")
        try:
            bring_up(directory, (arguments.engine or directory / "engine").absolute())
        except (UnexpectedBehaviour, subprocess.SubprocessError, OSError) as error:
            say(f"bring_up: {error}")
            sys.exit(1)


if __name__ == "__main__":
    main()
