"""Brings the deployment up for real, breaks it, and shows what it does: images, compose file, training, bad input.

    python -m deploy.bring_up                # as root; about ten minutes on two cores
    python -m deploy.bring_up --engine DIR   # keeps the engine's files there: the next time takes half as long

Where no Docker engine runs, it starts one for itself and stops it at the end; where the images' base cannot be pulled,
it makes a stand-in of Debian's packages. It needs the commands docker (with BuildKit), docker-compose, and where used
dockerd and debootstrap. Exit status 0 when all is as it should be, else 1 and a line that says what is not.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import http.server
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlparse

import numpy as np
import yaml

from trainer.data.datasets import CACHE_DIRECTORY, SYSTEM_DIRECTORY, load_dataset
from weightserver import ClientSecurity, WeightClient

ROOT = Path(__file__).parent.parent
COMPOSE_FILE = ROOT / "deploy/docker-compose.yml"
PROJECT = "pic-bring-up"
STAND_IN = "pic-stand-in-base:bookworm"
LISTEN = "127.94.0.1"
"""A loopback address that nobody else's shards listen on."""
RANKS, EPOCHS, CHECKPOINT_EVERY = 2, 0.6, 50
Json = dict[str, Any]
Found = TypeVar("Found")


class NotAsItShouldBe(Exception):
    """Something behaves in another way than docs/deployment.md says."""


def check(condition: object, otherwise: str) -> None:
    if not condition:
        raise NotAsItShouldBe(otherwise)


# ---- what is printed


_hidden: dict[str, str] = {str(ROOT): "."}
"""Paths of this machine, and what stands for them in the output."""
_started = time.monotonic()


def tell(text: str) -> None:
    for path, name in _hidden.items():
        text = text.replace(path, name)
    print(text, flush=True)


def title(text: str) -> None:
    tell(f"\n== {text} ({time.monotonic() - _started:.0f} s)")


def wait_until(condition: Callable[[], Found], what: str, *, seconds: float = 120) -> Found:
    """What `condition` returns once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        check(time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s")
        time.sleep(0.2)
    return found


# ---- the engine


@dataclass(frozen=True)
class Docker:
    """The commands, and the environment in which they find engine and project."""

    docker: str
    compose: tuple[str, ...]
    environment: Mapping[str, str]

    def run(self, *arguments: str, seconds: float = 120, fails: bool = False) -> str:
        """stdout and stderr of a docker command."""
        return self._run([self.docker, *arguments], seconds, fails)

    def up(
        self,
        *arguments: str,
        override: Json | None = None,
        init: bool = False,
        seconds: float = 120,
        fails: bool = False,
    ) -> str:
        """docker-compose ARGUMENTS, with other settings for some of its services; `init` for a first start."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(override or {}, file)
            file.flush()
            files = ["-f", str(COMPOSE_FILE), *(["-f", file.name] if override else [])]
            return self._run([*self.compose, *files, *arguments], seconds, fails, {"INIT": "--init"} if init else {})

    def _run(self, command: Sequence[str], seconds: float, fails: bool, more: Mapping[str, str] | None = None) -> str:
        environment = {**self.environment, **(more or {})}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
        )
        if done.returncode and not fails:
            raise NotAsItShouldBe(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout[-3000:]}")
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
        """The exit status of one that the engine is about to start again, else 0."""
        state = self.inspect(service)["State"]
        return int(state["ExitCode"]) if state["Status"] == "restarting" else 0

    def last_line(self, service: str) -> str:
        return (self.run("logs", "--tail", "1", self.container(service), fails=True).splitlines() or [""])[-1]

    def kill_process(self, service: str) -> None:
        """As a crash would: `docker kill` would tell the engine that somebody wanted it."""
        os.kill(self.inspect(service)["State"]["Pid"], signal.SIGKILL)


def _answers(*command: str, environment: Mapping[str, str] | None = None) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, env=environment, timeout=60).returncode == 0


def _docker_command() -> str:
    """The first `docker` that builds with BuildKit: by its plugin, or old enough to do without."""
    for folder in os.environ["PATH"].split(os.pathsep):
        command = f"{folder}/docker"
        if shutil.which(command) is None:
            continue
        version = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60).stdout
        old = re.search(r"version (\d+)", version)
        if (old and int(old.group(1)) < 23) or _answers(command, "buildx", "version"):
            return command
    raise NotAsItShouldBe("there is no docker command with BuildKit: install docker.io, or Docker's buildx plugin")


@contextmanager
def engine(directory: Path) -> Iterator[Docker]:
    """An engine that runs already, or one of our own that keeps its files in `directory` and ends with us."""
    check(os.geteuid() == 0, "this needs root")
    docker = _docker_command()
    compose = ("docker-compose",) if shutil.which("docker-compose") else (docker, "compose")
    check(_answers(*compose, "version"), "there is no docker-compose: install it, or Docker's compose plugin")
    environment = os.environ | {
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
    if _answers(docker, "ps"):
        tell("a Docker engine runs already: it is used")
        yield Docker(docker, compose, environment)
        return
    check(shutil.which("dockerd"), "no Docker engine runs, and there is no dockerd to start")
    directory.mkdir(parents=True, exist_ok=True)
    environment["DOCKER_HOST"] = f"unix://{directory}/docker.sock"
    command = ["dockerd", "-H", environment["DOCKER_HOST"], "--data-root", f"{directory}/data"]
    command += ["--exec-root", f"{directory}/exec", "--pidfile", f"{directory}/dockerd.pid"]
    with (directory / "dockerd.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(
            lambda: process.poll() is not None or _answers(docker, "ps", environment=environment), "dockerd starts"
        )
        check(process.poll() is None, f"dockerd does not start: {(directory / 'dockerd.log').read_text()[-500:]}")
        tell("no Docker engine ran: one was started, and is stopped at the end")
        yield Docker(docker, compose, environment)
    finally:
        process.terminate()
        process.wait(60)
        subprocess.run(["umount", f"{directory}/exec/netns/default"], stderr=subprocess.DEVNULL)  # dockerd leaves it


# ---- the images


def base_image(docker: Docker, wanted: str) -> str:
    """The image to build from: `wanted`, or a stand-in with the same Python where it cannot be had."""
    if docker.has(STAND_IN):
        tell("the stand-in for the base image is there already")
    elif docker.has(wanted) or docker.pulls(wanted):
        return wanted
    else:
        tell(f"{wanted} cannot be pulled: a stand-in is made of Debian's packages")
        with tempfile.TemporaryDirectory() as directory:
            packages = "--include=python3,python3-venv,ca-certificates,g++"
            subprocess.run(
                ["debootstrap", "--variant=minbase", packages, "bookworm", f"{directory}/root"],
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=600,
            )
            subprocess.run(["tar", "-C", f"{directory}/root", "-cf", f"{directory}/root.tar", "."], check=True)
            docker.run("import", f"{directory}/root.tar", STAND_IN)
    return STAND_IN


class _QuietFiles(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def pip_secrets(directory: Path) -> Iterator[list[str]]:
    """Options of `docker build` that give it this machine's settings of pip; its local folders are served meanwhile."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(re.findall(r"(?m)^(?:global|:env:)\.([\w-]+)='(.*)'$", listed.stdout))
    lines, options = ["[global]"], []
    with ExitStack() as stack:

        def reachable(place: str) -> str:
            if urlparse(place).scheme not in ("", "file"):
                return place
            path = Path(unquote(urlparse(place).path))
            handler = functools.partial(_QuietFiles, directory=str(path.parent))  # an index links to folders beside it
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}/{path.name}/"

        for name in ("index-url", "extra-index-url", "find-links", "trusted-host", "proxy", "timeout"):
            if value := settings.get(name):
                places = value.replace("\\n", " ").split()
                is_place = name in ("extra-index-url", "find-links", "index-url")
                lines.append(f"{name} = {' '.join(map(reachable, places)) if is_place else value}")
        if certificates := settings.get("cert"):
            lines.append("cert = /run/secrets/pip-ca")
            options += ["--secret", f"id=pip-ca,src={certificates}"]
        (directory / "pip.conf").write_text("\n".join(lines) + "\n")
        yield ["--secret", f"id=pip,src={directory}/pip.conf", *options]


def build(docker: Docker, name: str, base: str, secrets: Sequence[str]) -> None:
    begun = time.monotonic()
    docker.run(
        *("build", "--network", "host", "--build-arg", f"BASE_IMAGE={base}", *secrets),
        *("-f", str(ROOT / f"deploy/{name}.Dockerfile"), "-t", f"pic-{name}:0.2.0", str(ROOT)),
        seconds=1800,
    )
    size = int(docker.run("image", "inspect", "-f", "{{.Size}}", f"pic-{name}:0.2.0"))
    tell(f"pic-{name}:0.2.0: {size / 1e6:.0f} MB in {time.monotonic() - begun:.0f} s")


def look_into_images(docker: Docker) -> None:
    def inside(image: str, script: str) -> str:
        return docker.run("run", "--rm", "--entrypoint", "sh", image, "-c", script, fails=True).strip()

    for name in ("weightserver", "trainer"):
        image = f"pic-{name}:0.2.0"
        user, secrets, torch = inside(
            image,
            "id -u; ls -d /etc/pip.conf /run/secrets 2>/dev/null | wc -l; "
            "python -c 'import importlib.util as u; print(u.find_spec(\"torch\") is not None)'",
        ).splitlines()
        history = docker.run("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
        tell(f"{image}: user {user}, torch {torch}, {secrets} of pip's secrets")
        check(user == "10001", f"{image} runs as user {user}")
        check(torch == str(name == "trainer"), f"{image}: torch {torch}")
        check(secrets == "0" and "secrets" not in history, f"{image} holds pip's settings")


# ---- the services


def compose_file() -> Json:
    found: Json = yaml.safe_load(COMPOSE_FILE.read_text())
    return found


def services(docker: Docker) -> list[str]:
    """Those of the compose file whose images are here or can be pulled, the trainer's left out."""
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
        tell(f"left out, because their images cannot be pulled here: {', '.join(absent)}")
    return found


def wait_healthy(docker: Docker, names: Sequence[str]) -> None:
    wait_until(lambda: all(docker.health(name) == "healthy" for name in names), f"{' and '.join(names)} are healthy")


def start(docker: Docker, names: Sequence[str], *, init: bool = False) -> None:
    docker.up("up", "-d", *names, init=init)
    wait_healthy(docker, [name for name in names if name != "certificates"])
    tell(", ".join(f"{name}: {docker.health(name)}" for name in names))


def tell_metrics(docker: Docker) -> None:
    """From where Prometheus would ask, in the containers' network."""
    for name in ("shard-0", "shard-1"):
        code = f"import urllib.request as u; print(u.urlopen('http://{name}:9101/metrics', timeout=20).read().decode())"
        page = docker.up("exec", "-T", "shard-0", "python", "-c", code)
        names = set(re.findall(r"(?m)^# TYPE (weightserver_\w+)", page))
        tell(f"http://{name}:9101/metrics: {len(names)} metrics of the weight server")
        check(names, f"{name} tells no metrics")


@dataclass(frozen=True)
class Shards:
    """How a client on the host calls them."""

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
        """How many rows are stored, and a digest of the state of each one, stored or not."""
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


def _images() -> Path:
    """A folder with Fashion-MNIST's files; they are downloaded where there is none."""
    load_dataset("fashion-mnist")
    return SYSTEM_DIRECTORY if SYSTEM_DIRECTORY.is_dir() else CACHE_DIRECTORY / "FashionMNIST/raw"


def _steps(lines: str) -> list[Json]:
    """metrics.jsonl, but for a line that is being written."""
    return [json.loads(line) for line in lines.splitlines() if line.endswith("}")]


def _killed_and_back(docker: Docker, service: str) -> None:
    before = docker.inspect(service)["RestartCount"]
    docker.kill_process(service)
    begun = time.monotonic()
    wait_until(lambda: docker.inspect(service)["RestartCount"] > before, f"{service} is started again")
    wait_until(lambda: docker.health(service) in ("healthy", "running"), f"{service} is healthy again")
    tell(f"killed {service}: started again, {docker.health(service)} after {time.monotonic() - begun:.0f} s")


def train_from_host(docker: Docker, shards: Shards, output: Path) -> float:
    """The last loss of a run in which a shard dies."""
    arguments = ["--nproc-per-node", str(RANKS), "-m", "trainer", "fashion-mnist"]
    arguments += ["--servers", ",".join(shards.addresses), *shards.options(), "--output", str(output)]
    arguments += ["--epochs", str(EPOCHS), "--checkpoint-every", str(CHECKPOINT_EVERY), "--no-evaluate"]
    tell(f"$ torchrun {' '.join(arguments)}")
    metrics, log = output / "metrics.jsonl", output.with_suffix(".log")

    def steps() -> list[Json]:
        return _steps(metrics.read_text()) if metrics.exists() else []

    with log.open("w") as file:
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=docker.environment, stdout=file, stderr=file)
    try:
        wait_until(lambda: process.poll() is not None or len(steps()) > 10, "training begins", seconds=600)
        check(process.poll() is None, f"training failed: {log.read_text()[-2000:]}")
        at = steps()[-1]["step"]
        tell(f"at step {at}:")
        _killed_and_back(docker, "shard-1")
        check(process.wait(1200) == 0, f"training failed: {log.read_text()[-2000:]}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(120)
    for line in log.read_text().splitlines():
        if "trying again" in line:  # it may not have called meanwhile
            tell(f"the trainer said: {line}")
    last = steps()[-1]
    check(last["step"] > at, "training did not go on")
    tell(f"training went on to step {last['step']}, loss {last['loss']:.6f}")
    return float(last["loss"])


def train_from_profile(docker: Docker) -> float:
    """The last loss of a run in which a shard dies, and then the trainer."""
    tell("$ docker-compose --profile trainer up -d trainer")
    command = [*compose_file()["services"]["trainer"]["command"], "--no-evaluate"]  # which would take minutes
    trainer: Json = {"command": command}
    _, locked_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked_bytes != resource.RLIM_INFINITY:  # nothing here may raise it; without InfiniBand nothing needs to
        trainer["ulimits"] = {"memlock": locked_bytes}
        tell(f"memlock: {locked_bytes}, as much as this machine allows")
    override = {"services": {"trainer": trainer}}
    docker.up("--profile", "trainer", "up", "-d", "--no-deps", "trainer", override=override)

    def steps() -> list[Json]:
        run = ("exec", docker.container("trainer"), "cat", "/runs/fashion-mnist/metrics.jsonl")
        lines = docker.run(*run, fails=True)
        return _steps(lines) if lines.startswith("{") else []

    def ended() -> bool:
        return bool(docker.inspect("trainer")["State"]["Status"] == "exited")

    def went_on(reached: int) -> bool:
        return ended() or len(steps()) > reached + 10

    reached = 0
    for service in ("shard-0", "trainer"):
        wait_until(functools.partial(went_on, reached), "training goes on", seconds=600)
        reached = len(steps())
        check(not ended(), f"training ended: {docker.run('logs', '--tail', '20', docker.container('trainer'))}")
        tell(f"at step {steps()[-1]['step']}:")
        _killed_and_back(docker, service)
    wait_until(ended, "training ends", seconds=1800)
    state = docker.inspect("trainer")["State"]
    log = docker.run("logs", docker.container("trainer"))
    check(state["ExitCode"] == 0, f"the trainer ended with {state['ExitCode']}: {log[-2000:]}")
    summary = re.findall(r"(?m)^.*\bloss=[\d.]+.*$", log)[-1]
    tell(f"the trainer's last line: {summary}")
    return float(summary.partition("loss=")[2].split()[0])


# ---- bad input


def _volume(docker: Docker, name: str, *files: str) -> str:
    """A new volume with some of the shards' certificates."""
    script = f"cp {' '.join(f'/certs/shards/{file}' for file in files)} /certs/clients/"
    mounts = ("-v", f"{PROJECT}_shard-certificates:/certs/shards:ro", "-v", f"{PROJECT}_{name}:/certs/clients")
    docker.run("run", "--rm", *mounts, "--entrypoint", "sh", "pic-weightserver:0.2.0", "-c", script)
    return name


def _memory_volume(size: str) -> Json:
    options = f"size={size},uid=10001,gid=10001,mode=0700"
    return {"driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": options}}


def bad_input(docker: Docker) -> None:
    """Every container here is shard 0's, with one thing wrong; the engine starts it again and again."""
    certificates = "shard-certificates:/certs:ro"
    without_token = _volume(docker, "without-token", "ca.pem", "server.pem", "server-key.pem")
    without_certificate = _volume(docker, "without-certificate", "ca.pem", "token", "server-key.pem")
    cases: dict[str, tuple[Json, str]] = {
        "the volume of another shard": (
            {"volumes": ["shard-1:/data", certificates]},
            r"/data/shard holds shard 1 of 2, not shard 0 of 2",
        ),
        "another number of shards": (
            {"command": ["--shard=0", "--num-shards=3"]},
            r"/data/shard holds shard 0 of 2, not shard 0 of 3",
        ),
        "a shard beyond the number": ({"command": ["--shard=2"]}, r"--shard must lie in"),
        "no token": (
            {"volumes": ["shard-0:/data", f"{without_token}:/certs:ro"]},
            r"--token-file /certs/token cannot be read",
        ),
        "no certificate": (
            {"volumes": ["shard-0:/data", f"{without_certificate}:/certs:ro"]},
            r"--tls-cert /certs/server.pem cannot be read",
        ),
        "an empty volume": ({"volumes": ["empty:/data", certificates]}, r"/data/shard is missing: is its disk mounted"),
        "no room on the volume": (
            {"volumes": ["full:/data", certificates], "command": ["--shard=0", "--init"]},
            r"No space left on device",
        ),
    }
    volumes = {"full": _memory_volume("4k"), "small": _memory_volume("300m")}
    volumes |= {name: {} for name in ("empty", without_token, without_certificate)}
    for what, (service, wanted) in cases.items():
        override = {"services": {"shard-0": service}, "volumes": volumes}
        docker.up("up", "-d", "--no-deps", "shard-0", override=override)
        status = wait_until(lambda: docker.failed("shard-0"), f"{what}: the shard fails")
        line = docker.last_line("shard-0")
        tell(f"{what}: exit status {status}\n    {line}")
        check(re.search(wanted, line), f"{what}: the last line is {line!r}")
        docker.up("rm", "-sf", "shard-0", override=override)

    override = {"services": {"shard-0": {"volumes": ["small:/data", certificates]}}, "volumes": volumes}
    docker.up("up", "-d", "--no-deps", "shard-0", override=override, init=True)
    wait_until(lambda: docker.health("shard-0") == "healthy", "a shard on a small volume is healthy")
    docker.up("exec", "-T", "shard-0", "sh", "-c", "dd if=/dev/zero of=/data/other bs=1M 2>/dev/null", fails=True)
    wait_until(lambda: docker.health("shard-0") == "unhealthy", "a shard on a full volume is unhealthy")
    reason = docker.inspect("shard-0")["State"]["Health"]["Log"][-1]["Output"].strip()
    tell(f"a volume that fills up: unhealthy\n    {reason}")
    check("nearly full" in reason, f"the health check says {reason!r}")
    docker.up("exec", "-T", "shard-0", "rm", "/data/other")
    wait_until(lambda: docker.health("shard-0") == "healthy", "a shard with room again is healthy")
    tell("room again: healthy")
    docker.up("rm", "-sf", "shard-0", override=override)


# ---- another number of shards


def three_shards(docker: Docker) -> Json:
    """What the compose file would say of three; its own anchors cannot be changed from another file."""
    service = compose_file()["services"]["shard-1"]
    entrypoint = service["entrypoint"]
    entrypoint[entrypoint.index("--num-shards") + 1] = "3"
    third = service | {"command": ["--shard=2"], "ports": [f"{LISTEN}:50053:50051"]}
    third["volumes"] = ["shard-2:/data", "shard-certificates:/certs:ro"]
    servers = {"environment": {"SERVERS": "shard-0:50051,shard-1:50051,shard-2:50051"}}
    changed = {"shard-0": {"entrypoint": entrypoint}, "shard-1": {"entrypoint": entrypoint}, "shard-2": third}
    return {"services": changed | {"certificates": servers}, "volumes": {"shard-2": {}}}


def reshard(docker: Docker, directory: Path) -> Shards:
    """docs/deployment.md, "Another number of shards"."""
    override, names = three_shards(docker), [f"shard-{shard}" for shard in range(3)]
    docker.up("up", "--no-start", "--no-deps", *names, override=override)
    mounts = [word for shard in range(3) for word in ("-v", f"{PROJECT}_shard-{shard}:/data/{shard}")]
    command = ["reshard", "--source", "/data/0/shard", "/data/1/shard", "--target"]
    command += [f"/data/{shard}/new" for shard in range(3)]
    tell(f"$ docker run ... pic-weightserver:0.2.0 {' '.join(command)}")
    tell(docker.run("run", "--rm", *mounts, "pic-weightserver:0.2.0", *command).strip())
    swap = "for v in /data/[0-9]; do if [ -e $v/shard ]; then mv $v/shard $v/old; fi; mv $v/new $v/shard; done"
    docker.run("run", "--rm", *mounts, "--entrypoint", "sh", "pic-weightserver:0.2.0", "-c", swap)
    docker.up("up", "-d", *names, override=override)
    wait_healthy(docker, names)
    return Shards.of(docker, directory, 3)


# ---- all of it


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
            title("INIT=--init docker-compose up -d")
            names = services(docker)
            start(docker, names, init=True)
            shards = Shards.of(docker, directory)
            for address in shards.addresses:
                tell(f"from the host, {address}: {shards.command('health', address, '--timeout-seconds', '20')}")
            tell_metrics(docker)

            title("torchrun on the host, a shard killed")
            from_host = train_from_host(docker, shards, directory / "run")
            tell(shards.command("checkpoints", *shards.addresses))
            shards.command("drop", *shards.addresses, "--yes")

            title("the profile `trainer`, a shard and the trainer killed")
            from_profile = train_from_profile(docker)
            tell(f"losses: {from_host:.6f} from the host, {from_profile:.6f} from the profile")
            check(math.isclose(from_host, from_profile, rel_tol=1e-3), "the two runs ended differently")

            title("stopped, and started again")
            before = shards.rows()
            tell(before)
            docker.up("stop")
            for name in names:
                code = docker.inspect(name)["State"]["ExitCode"]
                tell(f"{name} stopped with {code}: {docker.last_line(name)}")
                check(code == 0, f"{name} did not drain")
            docker.up("--profile", "trainer", "down")
            start(docker, names)
            after = Shards.of(docker, directory).rows()
            tell(after)
            check(before == after, "rows were lost")
            check("0 of" not in before.split(",")[0][:4], "no rows were stored")

            title("bad input")
            docker.up("stop")
            docker.up("rm", "-f", "shard-0")
            bad_input(docker)

            title("three shards of two")
            tell(reshard(docker, directory).rows())
        finally:
            _clean(docker)
    title("done, all as it should be")


def _clean(docker: Docker) -> None:
    """Containers, networks and volumes of the project, those of earlier attempts too."""
    docker.up("--profile", "trainer", "down", "--volumes", "--remove-orphans", fails=True, seconds=300)
    for volume in docker.run("volume", "ls", "-q", "--filter", f"name={PROJECT}_").split():
        docker.run("volume", "rm", "-f", volume, fails=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.bring_up", description="Bring the deployment up for real.")
    parser.add_argument("--engine", type=Path, help="where an engine of our own keeps its files for the next time")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and leave nothing behind
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _hidden[name] = "TMP"
        _hidden[sys.executable] = "python"
        try:
            bring_up(directory, (arguments.engine or directory / "engine").absolute())
        except (NotAsItShouldBe, subprocess.SubprocessError, OSError) as error:
            tell(f"bring_up: {error}")
            sys.exit(1)


if __name__ == "__main__":
    main()
