"""The manifests of deploy/kubernetes: numbers come from one place, commands are those of the programs."""

from __future__ import annotations

import functools
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import kubernetes_validate
import pytest
import torch.distributed.run
import yaml

import trainer.arguments
import trainer.data.__main__
import weightserver
import weightserver.cli
from deploy.runbook import FORMS
from deploy.slo import SECTIONS
from tests.helpers.recorded_programs import RecordedPrograms, Started
from trainer.data.parts import Part
from weightserver.common.addresses import parse_addresses
from weightserver.common.object_store import is_remote
from weightserver.operations.certificates import write_certificates

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
DEPLOYMENT = (ROOT / "docs/deployment.md").read_text()
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
PARTS, PARTS_IN_BUCKET = "../parts", "../parts-in-bucket"
VERSION = "1.32"
Manifest = dict[str, Any]

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="there is no kubectl with Kustomize 5: see kubernetes.io/docs/tasks/tools"
)

CHECKED_AS_KUBERNETES = object()
"""A template of a pod or job, which has a schema of Kubernetes itself."""
LABELS = {"matchLabels": {"*": str}}
RELABELING = {"sourceLabels": [str], "separator": str, "targetLabel": str, "replacement": str}
ENDPOINTS = [{"port": str, "relabelings": [RELABELING]}]
REPLICA = {
    "replicas": int,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template": CHECKED_AS_KUBERNETES,
}
CUSTOM_RESOURCES: dict[tuple[str, str], Any] = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {
        "network": {"enableDNSHostnames": bool, "subdomain": str},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": {"Recreate", "BlockingRecreate"},
            "rules": [
                {
                    "name!": str,
                    "action!": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
                    "onJobFailureReasons": [
                        {
                            "BackoffLimitExceeded",
                            "DeadlineExceeded",
                            "FailedIndexes",
                            "MaxFailedIndexesExceeded",
                            "PodFailurePolicy",
                        }
                    ],
                }
            ],
        },
        "replicatedJobs": [{"name!": str, "replicas": int, "template!": CHECKED_AS_KUBERNETES}],
    },
    ("kubeflow.org/v1", "PyTorchJob"): {
        "runPolicy": {"backoffLimit": int, "cleanPodPolicy": {"All", "Running", "None"}},
        "pytorchReplicaSpecs!": {"Master": REPLICA, "Worker": REPLICA},
    },
    ("cert-manager.io/v1", "Issuer"): {"ca": {"secretName!": str}},
    ("cert-manager.io/v1", "Certificate"): {
        "secretName!": str,
        "issuerRef!": {"name!": str, "kind": {"Issuer", "ClusterIssuer"}},
        "duration": str,
        "renewBefore": str,
        "privateKey": {
            "algorithm": {"RSA", "ECDSA", "Ed25519"},
            "encoding": {"PKCS1", "PKCS8"},
            "rotationPolicy": {"Never", "Always"},
        },
        "usages": [{"digital signature", "key encipherment", "server auth", "client auth"}],
        "dnsNames": [str],
        "ipAddresses": [str],
    },
    ("monitoring.coreos.com/v1", "ServiceMonitor"): {"selector!": LABELS, "endpoints!": ENDPOINTS},
    ("monitoring.coreos.com/v1", "PodMonitor"): {"selector!": LABELS, "podMetricsEndpoints!": ENDPOINTS},
}
"""The fields that we use of resources whose schemas come with their operators, at all levels: a type, the allowed
words, or in a list those of each element. `*` is any name, and a field marked `!` is required.

Compared with the openAPIV3Schema of JobSet v0.7.0 and v0.12.0, Kubeflow's training operator v1.7.0 and v1.9.0,
cert-manager v1.21.1, and the Prometheus operator v0.50.0 and v0.93.0. Words that a schema does not list are those of
the operator's code. Left out are words that JobSet has behind a feature gate, and usages of other certificates."""


def mistakes(found: Any, known: Any, place: str = "spec") -> list[str]:
    """The places of what is not known, not of its type, or missing."""
    if known is CHECKED_AS_KUBERNETES:
        return []
    if isinstance(known, dict) and isinstance(found, dict):
        fields = {name.removesuffix("!"): of for name, of in known.items()}
        missing = [f"{place}.{name}" for name in fields if f"{name}!" in known and name not in found]
        inner = ((f"{place}.{name}", value, fields.get(name, fields.get("*"))) for name, value in found.items())
        wrong = [each for where, value, of in inner for each in (mistakes(value, of, where) if of else [where])]
        return missing + wrong
    if isinstance(known, list) and isinstance(found, list):
        return [each for index, one in enumerate(found) for each in mistakes(one, known[0], f"{place}[{index}]")]
    is_right = found in known if isinstance(known, set) and isinstance(found, str) else type(found) is known
    return [] if is_right else [place]


def rendered(overlay: Path) -> list[Manifest]:
    done = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@functools.cache
def manifests(overlay: str) -> list[Manifest]:
    return rendered(KUBERNETES / "overlays" / overlay)


def the(found: list[Manifest], kind: str, name: str = "") -> Manifest:
    (manifest,) = (each for each in found if each["kind"] == kind and name in ("", each["metadata"]["name"]))
    return manifest


def pods(found: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """The pod templates, by what they are."""
    for each in found:
        spec = each.get("spec", {})
        if each["kind"] == "CronJob":
            yield each["metadata"]["name"], spec["jobTemplate"]["spec"]["template"]
        elif each["kind"] == "JobSet":
            for job in spec["replicatedJobs"]:
                yield f"trainer-{job['name']}", job["template"]["spec"]["template"]
        elif each["kind"] == "PyTorchJob":
            for name, replica in spec["pytorchReplicaSpecs"].items():
                yield f"trainer-{name}", replica["template"]
        elif "template" in spec:
            yield each["metadata"]["name"], spec["template"]


def container(template: Manifest) -> Manifest:
    (found,) = template["spec"]["containers"]
    return dict(found)


def of_trainer(found: list[Manifest]) -> list[Manifest]:
    return [template for name, template in pods(found) if name.startswith("trainer-")]


def run(found: list[Manifest], template: Manifest, folder: Path, **environment: str) -> Started:
    """Runs a container's command with its environment; returns the program that it starts."""
    programs = RecordedPrograms(folder, "weightserver", "train.sh", "pic")
    name = container(template)["envFrom"][0]["configMapRef"]["name"]
    values = dict(the(found, "ConfigMap", name)["data"]) | environment
    values |= {each["name"]: each["value"] for each in container(template).get("env", []) if "value" in each}
    assert container(template)["command"][:2] == ["tini", "--"]
    words = [*container(template)["command"][2:], *container(template)["args"]]
    words = [re.sub(r"\$\((\w+)\)", lambda match: values[match.group(1)], word) for word in words]
    subprocess.run(words, check=True, env=values | {"PATH": programs.path}, timeout=60)
    (started,) = programs.started()
    return started


def addresses(num_shards: int, namespace: str = "default") -> list[str]:
    return [f"weightserver-{shard}.weightserver.{namespace}.svc:50051" for shard in range(num_shards)]


def assert_clients_accept(names: list[str], *, num_shards: int, namespace: str, folder: Path) -> None:
    """A server with a certificate for `names` is every shard for gRPC's client, and not a name of another namespace."""
    write_certificates(folder / "certificates", names)
    ca, chain, key = (
        (folder / "certificates" / file).read_bytes() for file in ("ca.pem", "server.pem", "server-key.pem")
    )
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
    server.start()
    try:
        for address in (*addresses(num_shards, namespace), *addresses(1, "elsewhere")):
            host = address.partition(":")[0]
            credentials, options = grpc.ssl_channel_credentials(ca), [("grpc.ssl_target_name_override", host)]
            with (
                grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel,
                pytest.raises(grpc.RpcError) as raised,
            ):
                channel.unary_unary("/no.such/Method")(b"", timeout=20)
            accepted = raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert accepted == (f".{namespace}." in address), raised.value
    finally:
        server.stop(None)


@pytest.mark.parametrize("overlay", [*OVERLAYS, PARTS, PARTS_IN_BUCKET])
def test_manifests_follow_the_schemas(overlay: str) -> None:
    found = manifests(overlay)
    for each in found:
        if known := CUSTOM_RESOURCES.get((each["apiVersion"], each["kind"])):
            assert mistakes(each["spec"], known) == []
        else:
            kubernetes_validate.validate(each, VERSION, strict=True)
    for name, template in pods(found):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)
    for each in found:
        for job in each["spec"].get("replicatedJobs", []) if each["kind"] == "JobSet" else []:
            document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}} | job["template"]
            kubernetes_validate.validate(document, VERSION, strict=True)


def test_the_pod_for_commands_has_what_a_shard_has() -> None:
    """Its data and programs; and a shard lets it call."""
    pod, found = yaml.safe_load((KUBERNETES / "tools.yaml").read_text()), manifests("small")
    kubernetes_validate.validate(pod, VERSION, strict=True)
    stateful = the(found, "StatefulSet")["spec"]["template"]
    assert pod["spec"]["securityContext"] == stateful["spec"]["securityContext"]
    for part in ("image", "securityContext", "volumeMounts"):
        assert container(pod)[part] == container(stateful)[part]
    claim = the(found, "StatefulSet")["spec"]["volumeClaimTemplates"][0]["metadata"]["name"]
    assert f"'claimName': '{claim}-weightserver-0'" in str(pod)
    callers = the(found, "NetworkPolicy", "weightserver")["spec"]["ingress"][0]["from"][0]["podSelector"]
    assert pod["metadata"]["labels"]["app"] in callers["matchExpressions"][0]["values"]
    inside = FORMS["kubectl"].aside
    assert inside.startswith(f"kubectl exec {pod['metadata']['name']} ")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_numbers_are_in_one_place(overlay: str, tmp_path: Path) -> None:
    """Seventy shards and thirty nodes of the trainer in another namespace, by a change of the ConfigMap alone."""
    copy = shutil.copytree(KUBERNETES, tmp_path / "kubernetes") / "overlays" / overlay
    text = (copy / "cluster.yaml").read_text()
    changed = {"NUM_SHARDS": '"70"', "MORE_NODES": '"29"', "RANKS_PER_NODE": '"2"', "NAMESPACE": "pic"}
    for name, value in changed.items():
        text, changes = re.subn(rf'{name}: ("\d+"|default)', f"{name}: {value}", text)
        assert changes == 1
    (copy / "cluster.yaml").write_text(text)
    found = rendered(copy)

    assert {each["metadata"]["namespace"] for each in found} == {"pic"}
    stateful = the(found, "StatefulSet")["spec"]
    assert stateful["replicas"] == 70
    served = weightserver.cli._parser().parse_args(run(found, stateful["template"], tmp_path, SHARD="69").arguments)
    assert (served.shard, served.num_shards) == (69, 70)
    if jobs := [each for each in found if each["kind"] == "JobSet"]:
        assert [job["replicas"] for job in jobs[0]["spec"]["replicatedJobs"]] == [1, 29]
    else:
        replicas = the(found, "PyTorchJob")["spec"]["pytorchReplicaSpecs"]
        assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 29)
    for template in of_trainer(found):
        started = run(found, template, tmp_path)
        assert started.environment["PET_NPROC_PER_NODE"] == "2"
        assert started.environment.get("PET_NNODES") == (
            None if overlay == "pytorchjob" else "30"
        )  # the operator sets it
        assert trainer.arguments.parse_config(started.arguments).servers.addresses == addresses(70, "pic")
    started = run(found, dict(pods(found))["weightserver-backup"], tmp_path)
    backup = weightserver.cli._parser().parse_args(started.arguments)
    assert parse_addresses(*backup.addresses) == addresses(70, "pic")
    assert (backup.output.parent, backup.keep) == (Path("/backups"), 7)
    for certificate in (each["spec"] for each in found if each["kind"] == "Certificate"):
        assert_clients_accept(certificate["dnsNames"], num_shards=70, namespace="pic", folder=tmp_path)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_and_backups_may_be_in_a_bucket(overlay: str, tmp_path: Path) -> None:
    """As docs/deployment.md says: named in the ConfigMap, with the credentials of a secret that no manifest has."""
    found = manifests(overlay)
    settings = dict(re.findall(r"^      ([A-Z]+): (.*)$", DEPLOYMENT, re.MULTILINE))
    assert "kubectl create secret generic bucket --from-literal=AWS_REGION=" in DEPLOYMENT
    backup = dict(pods(found))["weightserver-backup"]
    tools = {"spec": yaml.safe_load((KUBERNETES / "tools.yaml").read_text())["spec"]}
    for template in (*of_trainer(found), backup, dict(pods(manifests(PARTS)))["parts"], tools):
        assert {"secretRef": {"name": "bucket", "optional": True}} in container(template)["envFrom"]
    assert "Secret" not in {each["kind"] for each in found}
    for template in of_trainer(found):
        config = trainer.arguments.parse_config(run(found, template, tmp_path, **settings).arguments)
        config.check()
        assert config.data.data_dir == Path("s3://images/packed")
        assert config.data.cache_dir is not None
        mounts = {mount["mountPath"] for mount in container(template)["volumeMounts"]}
        assert str(config.data.cache_dir.parent) in mounts
    (tmp_path / "programs/date").write_text('#!/bin/sh\nPATH=/usr/bin:/bin exec date -d "$TODAY" "$@"\n')
    (tmp_path / "programs/date").chmod(0o755)
    for today, is_increment in (("2026-11-28", True), ("2026-11-29", False), ("2026-11-30", True)):  # a Sunday
        started = run(found, backup, tmp_path, TODAY=today, **settings)
        arguments = weightserver.cli._parser().parse_args(started.arguments)
        assert arguments.output.parent == Path(settings["BACKUPS"])
        assert arguments.output.name.startswith(f"{today}T")
        assert arguments.incremental is is_increment


def test_shards_start_empty_only_if_told(tmp_path: Path) -> None:
    """A lost volume is not replaced by an empty one, unless the ConfigMap of the first start exists."""
    found = manifests("small")
    template = the(found, "StatefulSet")["spec"]["template"]
    assert {"configMapRef": {"name": "weightserver-first-start", "optional": True}} in container(template)["envFrom"]
    parse = weightserver.cli._parser().parse_args
    assert not parse(run(found, template, tmp_path, SHARD="1").arguments).init
    assert parse(run(found, template, tmp_path, SHARD="1", INIT="--init").arguments).init
    first = "kubectl create configmap weightserver-first-start --from-literal=INIT=--init"
    assert first in DEPLOYMENT


def test_a_shard_is_found_probed_and_stopped_as_it_serves(tmp_path: Path) -> None:
    found = manifests("small")
    spec = the(found, "StatefulSet")["spec"]
    served, labels = container(spec["template"]), spec["template"]["metadata"]["labels"]
    started = run(found, spec["template"], tmp_path, SHARD="1")
    arguments = weightserver.cli._parser().parse_args(started.arguments)
    assert not arguments.insecure
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > arguments.grace_seconds
    for kind, path in (("startup", "/healthz"), ("readiness", "/readyz"), ("liveness", "/healthz")):
        assert served[f"{kind}Probe"]["httpGet"] == {"path": path, "port": "metrics"}
    assert {port["name"]: port["containerPort"] for port in served["ports"]} == {
        "grpc": int(arguments.listen.rpartition(":")[2]),
        "metrics": arguments.metrics_port,
    }
    service = the(found, "Service", "weightserver")
    assert (service["metadata"]["name"], service["spec"]["selector"]) == (spec["serviceName"], labels)
    assert spec["selector"]["matchLabels"] == labels
    assert the(found, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels


def test_certificates_are_renewed_by_a_schedule() -> None:
    """Well before CertificateExpires, under the names of the files that a shard reads."""
    found = manifests("large")
    certificate, stateful = the(found, "Certificate")["spec"], the(found, "StatefulSet")["spec"]
    assert certificate["issuerRef"] == {"kind": "Issuer", "name": the(found, "Issuer")["metadata"]["name"]}
    days_ahead = SECTIONS["CertificateExpires"]["stages"][0]["threshold"]
    assert int(certificate["renewBefore"].removesuffix("h")) / 24 > days_ahead + 7
    volume = next(each for each in stateful["template"]["spec"]["volumes"] if each["name"] == "certificates")
    clients, server = (source["secret"] for source in volume["projected"]["sources"])
    assert server["name"] == certificate["secretName"]
    assert clients == {"name": "weightserver-clients"}
    assert "weightserver-clients --from-file=certs/ca.pem --from-file=certs/token" in DEPLOYMENT
    assert "weightserver certs certs/ --host '*.weightserver.default.svc' localhost 127.0.0.1" in DEPLOYMENT
    assert "kubectl create secret tls weightserver-ca --cert=certs/ca.pem --key=certs/ca-key.pem" in DEPLOYMENT
    files = {f"/certs/{name}" for name in ("token", *(item["path"] for item in server["items"]))}
    assert files == {word.partition("=")[2] for word in container(stateful["template"])["args"] if "=/certs/" in word}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_trainers_command_is_one(overlay: str, tmp_path: Path) -> None:
    found = manifests(overlay)
    for template in of_trainer(found):
        started = run(found, template, tmp_path)
        config = trainer.arguments.parse_config(started.arguments)
        config.check()
        assert config.servers.tls_ca is not None
        ports = {port["name"]: port["containerPort"] for port in container(template)["ports"]}
        assert (config.report.metrics_port, config.report.metrics_host) == (ports["metrics"], "0.0.0.0")
        if overlay != "pytorchjob":
            jobs = the(found, "JobSet")
            first = f"{jobs['metadata']['name']}-{jobs['spec']['replicatedJobs'][0]['name']}-0-0"
            assert started.environment["PET_MASTER_ADDR"] == f"{first}.{jobs['spec']['network']['subdomain']}"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_volume_is_written_by_two_nodes(overlay: str) -> None:
    """Rank 0 alone has the run's directory."""
    found = manifests(overlay)
    claims = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "PersistentVolumeClaim"}
    assert {mode for spec in claims.values() for mode in spec["accessModes"]} <= {"ReadWriteOnce", "ReadOnlyMany"}
    first, node = of_trainer(found)
    mounted = [{volume["name"]: volume for volume in each["spec"]["volumes"]} for each in (first, node)]
    assert mounted[0]["runs"]["persistentVolumeClaim"]["claimName"] == "runs"
    assert mounted[1]["runs"] == {"name": "runs", "emptyDir": {}}
    assert mounted[0] | {"runs": 0} == mounted[1] | {"runs": 0}
    used = re.findall(r"'claimName': '([\w-]+)'", str(found))
    assert set(used) == set(claims)


@pytest.mark.parametrize("overlay", ["small", "large"])
def test_a_preemption_does_not_use_up_the_restarts(overlay: str) -> None:
    """A pod that is taken away, and its peers, which end with 143 after a checkpoint, fail by the policy."""
    spec = the(manifests(overlay), "JobSet")["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    for job in spec["replicatedJobs"]:
        job = job["template"]["spec"]
        assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
        taken, peers = job["podFailurePolicy"]["rules"]
        assert taken == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        assert peers["onExitCodes"] == {"containerName": "trainer", "operator": "In", "values": [128 + signal.SIGTERM]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_that_is_stopped_has_time_for_a_checkpoint(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun kills its ranks sooner than Kubernetes the pod, but not after its own default of 30 s."""
    programs = RecordedPrograms(tmp_path, "python3")
    environment = {"PATH": programs.path, "OUTPUT": "runs/a"}
    subprocess.run([ROOT / "deploy/train.sh", "synthetic"], check=True, env=environment)
    (started,) = programs.started()
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", started.environment["PET_SHUTDOWN_TIMEOUT"])
    torchrun = torch.distributed.run.parse_args(started.arguments[2:])  # after -c and the program
    for template in of_trainer(manifests(overlay)):
        assert 100 < torchrun.shutdown_timeout < template["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("overlay", [*OVERLAYS, PARTS, PARTS_IN_BUCKET])
def test_pods_run_unprivileged(overlay: str) -> None:
    for name, template in pods(manifests(overlay)):
        spec, own = template["spec"], container(template)["securityContext"]
        assert spec["securityContext"]["runAsUser"] == 10001, name
        assert not spec["automountServiceAccountToken"], name
        assert own["readOnlyRootFilesystem"], name
        assert own["capabilities"]["drop"] == ["ALL"], name
        allowed = ["IPC_LOCK"] if name.startswith("trainer") else None  # InfiniBand locks memory
        assert own["capabilities"].get("add") == allowed, name
        image, _, version = container(template)["image"].rpartition(":")
        assert (image.rpartition("/")[2], version) in {
            (f"pic-{program}", weightserver.__version__) for program in ("weightserver", "trainer")
        }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_policies_let_through_what_calls(overlay: str) -> None:
    found = manifests(overlay)
    labels = {name: template["metadata"]["labels"]["app"] for name, template in pods(found)}
    ports = {
        template["metadata"]["labels"]["app"]: {port["name"] for port in container(template).get("ports", [])}
        for _, template in pods(found)
    }
    shards, trainers = the(found, "NetworkPolicy", "weightserver"), the(found, "NetworkPolicy", "trainer")
    callers, anyone = shards["spec"]["ingress"]
    (expression,) = callers["from"][0]["podSelector"]["matchExpressions"]
    assert set(expression["values"]) == set(labels.values())
    for policy, app in ((shards, "weightserver"), (trainers, "trainer")):
        assert policy["spec"]["podSelector"]["matchLabels"] == {"app": app}
        named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}
        assert named <= ports[app]
    assert anyone == {"from": [{"namespaceSelector": {}}], "ports": [{"port": "metrics"}]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_prometheus_finds_what_the_rules_know(overlay: str) -> None:
    """Rules and panels join on `cluster` and `instance`; the jobs have the names of the compose file's."""
    found = manifests(overlay)
    compose = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    monitors = {"weightserver": the(found, "ServiceMonitor"), "trainer": the(found, "PodMonitor")}
    assert set(monitors) == {job["job_name"] for job in compose} - {"prometheus"}
    selected = {
        "weightserver": the(found, "Service", "weightserver")["metadata"]["labels"],
        "trainer": of_trainer(found)[0]["metadata"]["labels"],
    }
    for name, monitor in monitors.items():
        assert monitor["spec"]["selector"]["matchLabels"] == selected[name]
        (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] == "metrics"
        steps = {step["targetLabel"]: step for step in endpoint["relabelings"]}
        assert set(steps) == {"instance", "cluster", "job"}
        assert steps["instance"]["sourceLabels"][0] == "__meta_kubernetes_pod_name"
        assert steps["cluster"]["sourceLabels"] == ["__meta_kubernetes_namespace"]
        assert steps["job"]["replacement"] == name


def test_each_index_is_a_part_and_another_job_joins_them(tmp_path: Path) -> None:
    """As many as the ConfigMap says; what is taken away counts as no failure."""
    copy = shutil.copytree(KUBERNETES / "parts", tmp_path / "parts")
    text = (copy / "parts.yaml").read_text()
    (copy / "parts.yaml").write_text(text.replace('PARTS: "64"', 'PARTS: "5"'))
    found = rendered(copy)
    parts, join = (the(found, "Job", name)["spec"] for name in ("parts", "join"))
    assert (parts["completions"], parts["parallelism"], parts["completionMode"]) == (5, 5, "Indexed")
    for job in (parts, join):
        (rule,) = job["podFailurePolicy"]["rules"]
        assert rule == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert join["suspend"], "until all parts are there"
    parser = trainer.data.__main__._parser()
    started = run(found, parts["template"], tmp_path, JOB_COMPLETION_INDEX="4")
    packing = parser.parse_args(started.arguments)
    assert (packing.command, packing.part) == ("pack", Part(4, 5))
    started = run(found, join["template"], tmp_path / "join")
    assert started.arguments == ["pack", "merge", str(packing.output)]


def test_parts_in_a_bucket_need_no_file_system_that_nodes_share(tmp_path: Path) -> None:
    """But each pod a disk, which has room for what --cache-dir may hold."""
    found = manifests(PARTS_IN_BUCKET)
    assert not [each for each in found if each["kind"] == "PersistentVolumeClaim"]
    parts, join = (the(found, "Job", name)["spec"]["template"] for name in ("parts", "join"))
    parser = trainer.data.__main__._parser()
    packing = parser.parse_args(run(found, parts, tmp_path / "parts", JOB_COMPLETION_INDEX="4").arguments)
    pack, merge, *arguments = run(found, join, tmp_path / "join").arguments
    merging = parser.parse_args([f"{pack} {merge}", *arguments])
    assert (packing.part, merging.directory, merging.cache_dir) == (Part(4, 64), packing.output, packing.cache_dir)
    assert is_remote(packing.source)
    assert is_remote(packing.output)
    for template in (parts, join):
        (disk,) = (volume for volume in template["spec"]["volumes"] if "ephemeral" in volume)
        claim = disk["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert claim["accessModes"] == ["ReadWriteOnce"]
        assert packing.cache_gib < int(claim["resources"]["requests"]["storage"].removesuffix("Gi"))
        (mount,) = (each for each in template["spec"]["containers"][0]["volumeMounts"] if each["name"] == disk["name"])
        assert str(packing.cache_dir) == mount["mountPath"]
