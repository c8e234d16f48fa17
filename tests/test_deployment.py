"""The images, the compose file and the manifests in deploy/ are valid and consistent; an opt-in test runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import trainer.arguments
import weightserver
import weightserver.cli

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
SHARDS = {name: service for name, service in COMPOSE["services"].items() if name.startswith("shard-")}
MANIFESTS = [
    document
    for name in ("weightserver.yaml", "trainer.yaml")
    for document in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())
]
KUBERNETES = "1.32"


def manifest(kind: str) -> dict[str, Any]:
    (found,) = (document for document in MANIFESTS if document["kind"] == kind)
    return found


def container(kind: str) -> dict[str, Any]:
    (found,) = manifest(kind)["spec"]["template"]["spec"]["containers"]
    return found


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
    assert service["healthcheck"]["test"] == ["CMD", "health.sh", "127.0.0.1", str(arguments.metrics_port), "/readyz"]
    assert service["depends_on"] == {"certificates": {"condition": "service_completed_successfully"}}
    assert service["restart"] == "unless-stopped"


def test_the_trainer_of_the_compose_file() -> None:
    service = COMPOSE["services"]["trainer"]
    assert service["profiles"] == ["trainer"]
    command = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in service["command"]]
    config = trainer.arguments.parse_config(command)
    config.check()
    assert config.servers.addresses == COMPOSE["x-servers"].split(",")


def test_services_run_unprivileged_and_listen_only_on_loopback_by_default() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        for port in service.get("ports", []):
            assert port.startswith(("127.0.0.1:", "${LISTEN:-127.0.0.1}:")), name


def test_the_trainer_can_pin_memory_and_compile() -> None:
    """InfiniBand locks memory, and --compile needs a folder from which programs can be run."""
    service = COMPOSE["services"]["trainer"]
    assert service["cap_add"] == container("Job")["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert service["ulimits"] == {"memlock": -1}
    image = (DEPLOY / "trainer.Dockerfile").read_text().rpartition("FROM")[2]
    assert "apt-get install --yes --no-install-recommends g++" in image
    assert "TORCHINDUCTOR_CACHE_DIR=/runs/" in image


# ---- images


def test_images_are_pinned_and_of_this_version() -> None:
    images = {service["image"] for service in COMPOSE["services"].values()}
    images |= {container(kind)["image"] for kind in ("StatefulSet", "Job")}
    for image in images:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", image)
    own = {image for image in images if image.startswith("pic-")}
    assert own == {f"pic-{name}:{weightserver.__version__}" for name in ("weightserver", "trainer")}
    for name in ("weightserver", "trainer"):
        text = (DEPLOY / f"{name}.Dockerfile").read_text()
        assert re.search(r"(?m)^USER 10001:10001$", text)
        build, _, final = text.rpartition("FROM ")
        assert "--no-install-recommends gcc libc6-dev" in build, "the compiled kernel is built in the first stage"
        assert "gcc" not in final
        installs = re.findall(r"pip install .*", text)
        assert len(installs) == 2
        assert "-c constraints.txt" in installs[0]
        assert "--no-deps" in installs[1]


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", script], check=True)


# ---- Kubernetes


@pytest.mark.parametrize(
    "document", MANIFESTS, ids=lambda document: f"{document['kind']}-{document['metadata']['name']}"
)
def test_manifests_follow_the_schemas(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_schemas_refuse_unknown_fields() -> None:
    document = manifest("StatefulSet")
    document = document | {"spec": document["spec"] | {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_stateful_set() -> None:
    spec, pod = manifest("StatefulSet")["spec"], manifest("StatefulSet")["spec"]["template"]["spec"]
    served = container("StatefulSet")
    values = {variable["name"]: variable.get("value", "1") for variable in served["env"]}

    def arguments_with(values: dict[str, str]) -> Any:
        return told([re.sub(r"\$\((\w+)\)", lambda match: values[match.group(1)], word) for word in served["args"]])

    arguments = arguments_with(values)
    assert not arguments.init
    assert arguments_with(values | {"INIT": "--init"}).init
    assert (arguments.shard, arguments.num_shards) == (1, spec["replicas"])
    assert not arguments.insecure
    assert pod["terminationGracePeriodSeconds"] > arguments.grace_seconds
    for kind, path in (("startup", "/healthz"), ("readiness", "/readyz"), ("liveness", "/healthz")):
        assert served[f"{kind}Probe"]["httpGet"] == {"path": path, "port": "metrics"}
    selector = spec["selector"]["matchLabels"]
    (service, *_) = MANIFESTS
    assert service["metadata"]["name"] == spec["serviceName"]
    assert service["spec"]["selector"] == selector
    assert manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == selector
    assert spec["template"]["metadata"]["labels"] == selector


def test_the_job() -> None:
    spec, trained = manifest("Job")["spec"], container("Job")
    config = trainer.arguments.parse_config(trained["args"])
    config.check()
    replicas = manifest("StatefulSet")["spec"]["replicas"]
    assert config.servers.addresses == [f"weightserver-{shard}.weightserver:50051" for shard in range(replicas)]
    values = {variable["name"]: variable.get("value") for variable in trained["env"]}
    assert spec["completions"] == spec["parallelism"] == int(values["PET_NNODES"])
    assert (
        values["PET_MASTER_ADDR"] == f"{manifest('Job')['metadata']['name']}-0.{spec['template']['spec']['subdomain']}"
    )


SCRAPED = {
    job["job_name"]: job for job in yaml.safe_load((DEPLOY / "kubernetes/scrape.yaml").read_text())["scrape_configs"]
}


def test_prometheus_finds_all_that_the_rules_know() -> None:
    compose = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert set(SCRAPED) == {job["job_name"] for job in compose} == {"weightserver", "trainer"}


@pytest.mark.parametrize(("name", "kind"), [("weightserver", "StatefulSet"), ("trainer", "Job")])
def test_prometheus_finds_the_pods(name: str, kind: str) -> None:
    job = SCRAPED[name]
    keep = job["relabel_configs"][0]
    assert keep["action"] == "keep"
    assert keep["source_labels"] == ["__meta_kubernetes_pod_label_app", "__meta_kubernetes_pod_container_port_name"]
    label = manifest(kind)["spec"]["template"]["metadata"]["labels"]["app"]
    ports = {port["name"]: port["containerPort"] for port in container(kind)["ports"]}
    assert re.fullmatch(keep["regex"], f"{label};metrics")
    assert not re.fullmatch(keep["regex"], f"{label};grpc")
    assert f"--metrics-port={ports['metrics']}" in container(kind)["args"]
    assert "--metrics-host=0.0.0.0" in container(kind)["args"], "not loopback's alone"


@pytest.mark.parametrize("name", SCRAPED)
def test_prometheus_watches_one_namespace(name: str) -> None:
    """Rules and panels join only on `instance`, and pods of two namespaces can have the same name."""
    (discovery,) = SCRAPED[name]["kubernetes_sd_configs"]
    assert discovery == {"role": "pod", "namespaces": {"own_namespace": True}}
    (instance,) = (step for step in SCRAPED[name]["relabel_configs"] if step.get("target_label") == "instance")
    assert instance["source_labels"][0] == "__meta_kubernetes_pod_name"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool: Debian's package prometheus has it")
def test_prometheus_takes_the_relabelling(tmp_path: Path) -> None:
    """Debian's promtool supports everything except the discovery of pods."""
    jobs = [{key: value for key, value in job.items() if "_sd_" not in key} for job in SCRAPED.values()]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": jobs}))
    done = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- all of it, in containers


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
