"""The Docker engine and its commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.bring_up.report import UnexpectedBehaviour, check, say, wait_until
from deploy.bring_up.settings import CHECKPOINT_EVERY, COMPOSE_FILE, EPOCHS, LISTEN, PROJECT, RANKS, Json
from trainer.data import load_dataset
from trainer.data.in_memory import CACHE_DIRECTORY, SYSTEM_DIRECTORY


@dataclass(frozen=True)
class Docker:
    """The docker commands, and the environment in which they find the engine and the project."""

    docker: str
    compose: tuple[str, ...]
    environment: Mapping[str, str]

    def run(self, *arguments: str, seconds: float = 120, fails: bool = False) -> str:
        """Returns stdout and stderr of a docker command."""
        return self._run([self.docker, *arguments], seconds, fails)

    def up(
        self,
        *arguments: str,
        override: Json | None = None,
        init: bool = False,
        seconds: float = 120,
        fails: bool = False,
    ) -> str:
        """Runs docker compose with `override` merged into the compose file; `init` for a first start."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(override or {}, file)
            file.flush()
            files = ["-f", str(COMPOSE_FILE), *(["-f", file.name] if override else [])]
            return self._run([*self.compose, *files, *arguments], seconds, fails, {"INIT": "--init"} if init else {})

    def paste(self, line: str) -> tuple[int, str]:
        """Runs a shell's line with `docker compose` in it; returns its exit status, and stdout and stderr."""
        compose = shlex.join([*self.compose, "-f", str(COMPOSE_FILE)])
        done = subprocess.run(
            ["bash", "-c", line.replace("docker compose", compose)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout

    def _run(self, command: Sequence[str], seconds: float, fails: bool, more: Mapping[str, str] | None = None) -> str:
        environment = {**self.environment, **(more or {})}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
        )
        if done.returncode and not fails:
            raise UnexpectedBehaviour(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout[-3000:]}")
        return done.stdout

    def has(self, image: str) -> bool:
        return bool(self.run("images", "-q", image).strip())

    def pulls(self, image: str) -> bool:
        self.run("pull", "-q", image, fails=True)
        return self.has(image)

    def container(self, service: str) -> str:
        labels = {"project": PROJECT, "service": service}
        filters = [
            word for key, is_ in labels.items() for word in ("--filter", f"label=com.docker.compose.{key}={is_}")
        ]
        return self.run("ps", "-a", "-q", *filters).strip()

    def inspect(self, service: str) -> Json:
        found: Json = json.loads(self.run("inspect", self.container(service)))[0]
        return found

    def health(self, service: str) -> str:
        state = self.inspect(service)["State"]
        return str(state.get("Health", {}).get("Status", state["Status"]))

    def failed(self, service: str) -> int:
        """The exit status of a service that the engine is about to restart, else 0."""
        state = self.inspect(service)["State"]
        return int(state["ExitCode"]) if state["Status"] == "restarting" else 0

    def last_line(self, service: str) -> str:
        return (self.run("logs", "--tail", "1", self.container(service), fails=True).splitlines() or [""])[-1]

    def kill_process(self, service: str) -> None:
        """Kills the process as a crash would; after `docker kill` the engine would not restart it."""
        os.kill(self.inspect(service)["State"]["Pid"], signal.SIGKILL)


def _answers(*command: str, environment: Mapping[str, str] | None = None) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, env=environment, timeout=60).returncode == 0


def _docker_command() -> str:
    """The first `docker` that builds with BuildKit, by its plugin or because it is old enough to include it."""
    for folder in os.environ["PATH"].split(os.pathsep):
        command = f"{folder}/docker"
        if shutil.which(command) is None:
            continue
        version = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60).stdout
        old = re.search(r"version (\d+)", version)
        if (old and int(old.group(1)) < 23) or _answers(command, "buildx", "version"):
            return command
    raise UnexpectedBehaviour("no docker command with BuildKit found: install docker.io, or Docker's buildx plugin")


@contextmanager
def engine(directory: Path) -> Iterator[Docker]:
    """Yields the running engine, or starts one that keeps its files in `directory` and stops it at the end."""
    check(os.geteuid() == 0, "this needs root")
    docker = _docker_command()
    compose = (docker, "compose") if _answers(docker, "compose", "version") else ("docker-compose",)
    check(_answers(*compose, "version"), "docker compose is missing: install Docker's compose plugin")
    environment = _environment()
    if _answers(docker, "ps"):
        say("using the Docker engine that already runs")
        yield Docker(docker, compose, environment)
        return
    check(shutil.which("dockerd"), "no Docker engine runs, and dockerd is missing: install it")
    environment["DOCKER_HOST"] = f"unix://{directory}/docker.sock"
    with _own_engine(docker, directory, environment):
        say("started a Docker engine, which is stopped at the end")
        yield Docker(docker, compose, environment)


@contextmanager
def _own_engine(docker: str, directory: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Runs dockerd with its files in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["dockerd", "-H", environment["DOCKER_HOST"], "--data-root", f"{directory}/data"]
    command += ["--exec-root", f"{directory}/exec", "--pidfile", f"{directory}/dockerd.pid"]
    with (directory / "dockerd.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(
            lambda: process.poll() is not None or _answers(docker, "ps", environment=environment), "dockerd starts"
        )
        check(process.poll() is None, f"dockerd does not start: {(directory / 'dockerd.log').read_text()[-500:]}")
        yield
    finally:
        process.terminate()
        process.wait(60)
        # dockerd leaves this mounted.
        subprocess.run(["umount", f"{directory}/exec/netns/default"], stderr=subprocess.DEVNULL)


def _environment() -> dict[str, str]:
    return os.environ | {
        "DOCKER_BUILDKIT": "1",
        "COMPOSE_PROJECT_NAME": PROJECT,
        "LISTEN": LISTEN,
        "HOSTS": LISTEN,
        "EPOCHS": str(EPOCHS),
        "RANKS": str(RANKS),
        "CHECKPOINT_EVERY": str(CHECKPOINT_EVERY),
        "OMP_NUM_THREADS": "1",
        "FASHION_MNIST": str(_images()),
    }


def _images() -> Path:
    """A folder with Fashion-MNIST's files, downloaded if necessary."""
    load_dataset("fashion-mnist")
    return SYSTEM_DIRECTORY if SYSTEM_DIRECTORY.is_dir() else CACHE_DIRECTORY / "FashionMNIST/raw"
