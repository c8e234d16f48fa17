"""The images and the compose file in deploy/ are valid and consistent; an opt-in test runs them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

import trainer.arguments
import weightserver
import weightserver.cli
from deploy.bring_up import cluster
from tests.helpers.watching import wait_until
from tests.test_installation import CONSTRAINTS, PROJECT, names
from trainer.run.checkpoint_file import saved_steps
from weightserver.operations.certificates import renew_certificates
from weightserver.operations.plan import Workload, plan

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
SHARDS = {name: service for name, service in COMPOSE["services"].items() if name.startswith("shard-")}


def told(command: list[str]) -> Any:
    """Parses a command line of `weightserver`, with no environment variables set."""
    return weightserver.cli._parser().parse_args([re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in command])


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


# ---- docker compose


def test_every_list_of_shards_in_the_compose_file_is_as_long() -> None:
    num_shards = int(COMPOSE["x-num-shards"])
    assert list(SHARDS) == [f"shard-{shard}" for shard in range(num_shards)]
    assert COMPOSE["x-servers"] == ",".join(f"{name}:50051" for name in SHARDS)
    assert {name for name in COMPOSE["volumes"] if name.startswith("shard-") and name[6:].isdigit()} == set(SHARDS)
    config = DEPLOY / "prometheus/prometheus.yml"
    if config.exists():
        assert set(re.findall(r"shard-\d+:9101", config.read_text())) == {f"{name}:9101" for name in SHARDS}


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_of_the_compose_file(name: str) -> None:
    service = SHARDS[name]
    words: list[str] = [*service["entrypoint"], *service["command"]]
    program, *command = words
    arguments = told(command)
    assert (program, arguments.command) == ("weightserver", "serve")
    assert (f"shard-{arguments.shard}", arguments.num_shards) == (name, len(SHARDS))
    assert not arguments.insecure
    assert seconds(service["stop_grace_period"]) > arguments.grace_seconds
    assert not arguments.init
    assert told([word.replace("${INIT:---no-init}", "--init") for word in command]).init
    assert f"{name}:/data" in service["volumes"]
    assert service["ports"] == [f"${{LISTEN:-127.0.0.1}}:{50051 + arguments.shard}:50051"]
    probe, times = service["healthcheck"]["test"][:-1], int(service["healthcheck"]["test"][-1])
    assert probe == ["CMD", "health.sh", "127.0.0.1", str(arguments.metrics_port), "/readyz"]
    assert f"--metrics-port={arguments.metrics_port}" in words, "by which health.sh finds a shard that hangs"
    answers_in = 5 + seconds(service["healthcheck"]["interval"])  # as health.sh waits
    assert (times - 1) * answers_in < 120 <= (times + 1) * answers_in, "docs/deployment.md: two minutes"
    assert service["depends_on"] == {"certificates": {"condition": "service_completed_successfully"}}
    assert service["restart"] == "unless-stopped"


def test_the_trainer_of_the_compose_file() -> None:
    service = COMPOSE["services"]["trainer"]
    assert service["profiles"] == ["trainer"]
    assert set(service["depends_on"]) == set(SHARDS), "they are stopped after it"
    assert service["restart"] == "on-failure"
    (seconds_of_checkpoint,) = re.findall(r"PET_SHUTDOWN_TIMEOUT:-(\d+)", (DEPLOY / "train.sh").read_text())
    assert int(seconds_of_checkpoint) < seconds(service["stop_grace_period"])
    command = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in service["command"]]
    config = trainer.arguments.parse_config(command)
    config.check()
    assert config.servers.addresses == COMPOSE["x-servers"].split(",")


def test_services_run_unprivileged_and_listen_only_on_loopback_by_default() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["init"], name
        for port in service.get("ports", []):
            assert port.startswith(("127.0.0.1:", "${LISTEN:-127.0.0.1}:")), name


def test_the_trainer_can_pin_memory_and_compile() -> None:
    """InfiniBand locks memory, and --compile needs a folder from which programs can be run."""
    service = COMPOSE["services"]["trainer"]
    assert service["cap_add"] == ["IPC_LOCK"]
    assert service["ulimits"] == {"memlock": -1}
    image = (DEPLOY / "trainer.Dockerfile").read_text().rpartition("FROM")[2]
    assert 'ENTRYPOINT ["tini", "--", ' in image
    assert "apt-get install --yes --no-install-recommends g++" in image
    assert "TORCHINDUCTOR_CACHE_DIR=/runs/" in image


def test_certificates_are_renewed_every_day() -> None:
    renewal, made = COMPOSE["services"]["renewal"], COMPOSE["services"]["certificates"]
    assert renewal["entrypoint"] == [*made["entrypoint"], "--daily"]
    assert (renewal["volumes"], renewal["restart"]) == (made["volumes"], "unless-stopped")


def test_certificates_are_made_renewed_and_handed_out(tmp_path: Path) -> None:
    """The script itself, in another folder than /certs."""
    for name in ("bin", "certs/authority", "certs/shards", "certs/clients"):
        (tmp_path / name).mkdir(parents=True)
    script = tmp_path / "bin/certificates.sh"
    script.write_text((DEPLOY / "certificates.sh").read_text().replace("cd /certs", f"cd {tmp_path}/certs"))
    (tmp_path / "bin/weightserver").write_text(f'#!/bin/sh\nexec {sys.executable} -m weightserver "$@"\n')
    for program in (tmp_path / "bin").iterdir():
        program.chmod(0o700)
    own = tmp_path / "certs"
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment |= {"SERVERS": "shard-0:50051,shard-1:50051", "HOSTS": "localhost"}

    def runs() -> dict[str, bytes]:
        subprocess.run([script], env=environment, check=True, capture_output=True)
        assert {path.name for path in (own / "shards").iterdir()} == {"ca.pem", "token", "server.pem", "server-key.pem"}
        assert {path.name for path in (own / "clients").iterdir()} == {"ca.pem", "token"}
        return {path.name: path.read_bytes() for path in (own / "shards").iterdir()}

    first = runs()
    assert runs() == first, "they are valid for a year"
    assert ((own / "shards/server-key.pem").stat().st_mode & 0o777) == 0o600
    for broken_off in (own / "shards/server.pem", own / "clients/token"):
        broken_off.write_bytes(b"")
    assert runs() == first
    assert (own / "clients/token").read_bytes() == first["token"]
    (own / "shards/server-key.pem").write_bytes(b"")
    fails = tmp_path / "bin/cp"
    fails.write_text('#!/bin/sh\ncase "$2" in server-key.pem) exit 1;; esac\nexec /bin/cp "$@"\n')
    fails.chmod(0o700)
    with pytest.raises(subprocess.CalledProcessError):  # as on a full volume, for compose to start it again
        runs()
    fails.unlink()
    assert runs() == first
    renew_certificates(own / "authority", days=20)
    short = (own / "authority/server.pem").read_bytes()
    renewed = runs()
    assert renewed["server.pem"] not in (short, first["server.pem"])
    assert (renewed["ca.pem"], renewed["token"]) == (first["ca.pem"], first["token"])
    environment["HOSTS"] = "localhost ws0.example"
    assert runs()["ca.pem"] != first["ca.pem"], "the names have changed"


def test_a_shard_has_the_memory_that_its_plan_says() -> None:
    limit = re.fullmatch(r"\$\{SHARD_MEMORY:-(\d+)g\}", SHARDS["shard-0"]["mem_limit"])
    assert limit is not None
    arguments = told([*SHARDS["shard-0"]["entrypoint"], *SHARDS["shard-0"]["command"]][1:])
    work = plan(Workload(num_rows=1_000_000, num_shards=len(SHARDS)))["a shard's work"]
    needed = [figure.value for figure in work if figure.name.startswith("memory")]
    assert len(needed) == 2
    program = 512 << 20
    assert (arguments.request_memory_mib << 20) + sum(needed) + program < int(limit[1]) << 30


def test_logs_and_metrics_are_kept_for_a_while_only() -> None:
    for name, service in COMPOSE["services"].items():
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name
    kept = " ".join(COMPOSE["services"]["prometheus"]["command"])
    assert re.search(r"retention\.time=\S+ .*retention\.size=", kept)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool: see Debian's package prometheus")
def test_one_prometheus_takes_a_second_cluster(tmp_path: Path) -> None:
    """As docs/deployment.md says; what tells clusters apart is what dashboards choose by and alerts are grouped by. A
    service's name is that of two containers where Prometheus is in the networks of both clusters."""
    text = (ROOT / "docs/deployment.md").read_text()
    elements = yaml.safe_load("\n".join(re.findall(r"^      ([- ] (?:labels|targets): .*)$", text, re.MULTILINE)))
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (given,) = config["scrape_configs"][0]["static_configs"]
    config["scrape_configs"][0]["static_configs"] = elements
    (first, second) = (each["labels"] for each in elements)
    assert first == given["labels"]
    assert (set(first), set(second)) == ({"cluster"}, {"cluster"})
    assert config["alerting"]["alertmanagers"] == [{"static_configs": [{"targets": ["alertmanager:9093"]}]}]
    assert first != second
    for project, element in zip((DEPLOY.name, "second"), elements, strict=True):
        named = {target.partition(":")[0] for target in element["targets"]}
        assert named == {f"{project}-{name}-1" for name in SHARDS}
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True)
    alertmanager = yaml.safe_load((DEPLOY / "prometheus/alertmanager.yml").read_text())
    assert "cluster" in alertmanager["route"]["group_by"]
    for board in (DEPLOY / "grafana/dashboards").glob("*.json"):
        assert "cluster" in {variable["name"] for variable in json.loads(board.read_text())["templating"]["list"]}
    started = re.search(r"docker compose -p second up -d (.*)", text)
    assert started is not None
    assert set(started[1].split()) == {*SHARDS, "renewal"}


# ---- images


def test_new_shards_take_the_place_of_old_ones_however_often_it_is_tried(tmp_path: Path) -> None:
    """By the command of docs/deployment.md, which the deployment's test runs too; also after it was interrupted."""
    assert f"'{cluster.SWAP}'" in (ROOT / "docs/deployment.md").read_text()
    for volume in ("0/shard", "0/new", "1/old", "1/new", "2/new"):  # shard 1 was interrupted, shard 2 is a new one
        (tmp_path / volume).mkdir(parents=True)
        (tmp_path / volume / volume[2:]).touch()
    for _ in range(2):
        subprocess.run(["sh", "-ec", cluster.SWAP.replace("/data/", f"{tmp_path}/")], check=True)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"0/shard/new", "0/old/shard", "1/shard/new", "1/old/old", "2/shard/new"}


def test_images_are_pinned_and_of_this_version() -> None:
    images = {service["image"] for service in COMPOSE["services"].values()}
    own = {image for image in images if image.startswith("pic-")}
    for image in images - own:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}", image)
    assert own == {f"pic-{name}:{weightserver.__version__}" for name in ("weightserver", "trainer")}
    bases = set()
    for name in ("weightserver", "trainer"):
        text = (DEPLOY / f"{name}.Dockerfile").read_text()
        bases.update(re.findall(r"(?m)^ARG BASE_IMAGE=(\S+@sha256:[0-9a-f]{64})$", text))
        assert re.search(r"(?m)^USER 10001:10001$", text)
        build, _, final = text.rpartition("FROM ")
        assert "--no-install-recommends gcc libc6-dev" in build, "the compiled kernel is built in the first stage"
        assert "gcc" not in final
        assert f'ARG REQUIREMENTS="--require-hashes -r {name}.lock"\n' in text
        dependencies, package = re.findall(r"pip install --no-cache-dir (.*?)(?: &&.*)?\n", text)
        assert dependencies == "$REQUIREMENTS"
        assert {"--no-deps", "--no-build-isolation", "."} <= set(package.split()), "nothing more is downloaded"
    assert len(bases) == 1


@pytest.mark.parametrize(("image", "extras"), [("weightserver", "s3 otel"), ("trainer", "trainer parquet s3 otel")])
def test_what_images_install_has_hashes_and_the_versions_of_the_constraints(image: str, extras: str) -> None:
    """Only what torch of the default index needs on a GPU, and what other systems need, is in no constraint."""
    text = (DEPLOY / f"{image}.lock").read_text().replace(" \\\n", " ")
    locked = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)(?: ;.*?)?(?: +--hash=sha256:[0-9a-f]{64})+$", text))
    assert len(locked) == len(re.findall(r"(?m)^[^#\s]", text)), "each has a hash"
    pinned = dict(line.lower().replace("_", "-").split("==") for line in CONSTRAINTS if "==" in line)
    wanted = PROJECT["project"]["optional-dependencies"]
    needed = [*PROJECT["project"]["dependencies"], *(one for extra in extras.split() for one in wanted[extra])]
    assert {name.replace("_", "-") for name in names(needed)} | {"setuptools"} <= set(locked), "make locks"
    assert {name: pinned.get(name, version) for name, version in locked.items()} == locked, "make locks"
    unpinned = {name for name in set(locked) - set(pinned) if not re.match(r"(nvidia|cuda)-|triton$", name)}
    assert unpinned <= {"httpx2-jsfetch"}


def test_a_release_says_what_it_consists_of(tmp_path: Path) -> None:
    """With what pip itself reports: here, of a wheel and a package that it needs, from a folder."""
    for name, needs in (("first", "Requires-Dist: second"), ("second", "Summary: none")):
        with zipfile.ZipFile(tmp_path / f"{name}-1.2-py3-none-any.whl", "w") as wheel:
            info = f"{name}-1.2.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n{needs}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    report = tmp_path / "report.json"
    asked = ["--dry-run", "--ignore-installed", "--quiet", "--no-index", "--find-links", str(tmp_path)]
    asked += ["--report", str(report), str(tmp_path / "first-1.2-py3-none-any.whl")]
    subprocess.run([sys.executable, "-m", "pip", "install", *asked], check=True, capture_output=True)
    subprocess.run([ROOT / ".ci/bill_of_materials", report, tmp_path], check=True)
    sums = {
        name: hashlib.sha256((tmp_path / f"{name}-1.2-py3-none-any.whl").read_bytes()).hexdigest()
        for name in ("first", "second")
    }
    bill = json.loads((tmp_path / "sbom.cdx.json").read_text())
    found = {component["purl"]: component["hashes"][0]["content"] for component in bill["components"]}
    assert found == {f"pkg:pypi/{name}@1.2": sums[name] for name in sums}
    assert (tmp_path / "requirements.txt").read_text() == f"second==1.2 --hash=sha256:{sums['second']}\n"
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    assert "--report" in workflow
    assert ".ci/bill_of_materials" in workflow


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", script], check=True)


@pytest.mark.guard
def test_the_trainers_script_ends_with_its_ranks_status(tmp_path: Path) -> None:
    """143 after SIGTERM and a checkpoint, 2 for a wrong argument; torchrun itself ends with 1."""
    output = tmp_path / "run"
    environment = os.environ | {"OUTPUT": str(output), "OMP_NUM_THREADS": "1", "PET_NPROC_PER_NODE": "2"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = ROOT / "deploy/train.sh"
    wrong = subprocess.run([script, "synthetic", "--no-such"], env=environment, capture_output=True)
    assert wrong.returncode == 2
    command = "synthetic --num-images 300 --encoder.name none --steps 1000000 --batch-size 16 --num-negatives 64"
    command += " --window-size 96 --window-stride 24 --log-every 1000000 --checkpoint-every 18"
    with subprocess.Popen([script, *command.split()], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: process.poll() is not None or len(saved_steps(output / "checkpoints")) > 1, seconds=200)
            process.terminate()
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143
    stopped = saved_steps(output / "checkpoints")[-1]
    assert errors.count(f"interrupted after {stopped} steps: --resume continues from there") == 1, "a line from both"


# ---- all of it, in containers


def test_bring_up_waits_for_what_has_a_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = set[str]()

    def health(name: str) -> str:
        checked.add(name)
        return "healthy" if "healthcheck" in COMPOSE["services"][name] else "running"

    def now(condition: Callable[[], bool], what: str) -> None:
        assert condition(), what

    monkeypatch.setattr(cluster, "wait_until", now)
    cluster.start(Mock(health=health), list(COMPOSE["services"]))
    assert {*SHARDS, "prometheus"} <= checked


@pytest.mark.docker
@pytest.mark.timeout(3600)
def test_the_deployment_can_be_brought_up() -> None:
    """It prints its progress."""
    docker = shutil.which("docker")
    runs = docker and subprocess.run([docker, "ps"], capture_output=True).returncode == 0
    composes = docker and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0
    if os.geteuid() != 0 or not (composes or shutil.which("docker-compose")) or not (runs or shutil.which("dockerd")):
        pytest.skip("needs root, docker compose, and a Docker engine or dockerd to start one")
    done = subprocess.run([sys.executable, "-m", "deploy.bring_up"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
