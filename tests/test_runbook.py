"""The commands of the runbook: every alert has some, and those that only look are run beside a cluster."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from deploy.prometheus.local import LocalPrometheus
from deploy.runbook import CHANGES_OR_NEEDS_MORE, COMMANDS, FORMS, MAY_BE_DOWN, ON_THE_MACHINE, run
from trainer.run.prometheus import TrainerMetrics
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.operations.certificates import write_certificates

ROOT = Path(__file__).parent.parent


def test_every_entry_has_commands_to_paste() -> None:
    assert [name for name, commands in COMMANDS.items() if not commands] == []


def test_no_command_waits_for_ever_for_a_process_that_stands_still() -> None:
    asked = [command for commands in COMMANDS.values() for command in commands if command.startswith("curl")]
    assert asked
    assert [command for command in asked if not command.startswith("curl -s -m 10 ")] == []


@pytest.mark.parametrize("form", FORMS)
def test_every_command_has_a_form_for_containers(form: str) -> None:
    """It names nothing outside, and uses only what the images have. docs/deployment.md shows one of each kind."""
    programs = ("weightserver", "health.sh", "df", "openssl")
    made = [FORMS[form].of(command, alert) for alert, commands in COMMANDS.items() for command in commands]
    shown = [line.strip() for line in (ROOT / "docs/deployment.md").read_text().splitlines()]
    starts = {word for word in vars(FORMS[form]).values() if word.endswith(" ") and "prometheus" not in word}
    for command in made:
        assert not re.search(r"127\.0\.0\.1:(?!9090)|curl|/data/ws|runs/a|[^/]certs/", command), command
        if command.startswith((*ON_THE_MACHINE, FORMS[form].prometheus + "promtool ", FORMS[form].resume)):
            continue
        asked = command.removeprefix(FORMS[form].stop.format(0) + " && ")
        rest = {asked.removeprefix(start.format(0)) for start in starts if asked.startswith(start.format(0))}
        assert rest
        assert min(rest, key=len).split()[0] in programs, command
        wants = "weightserver health" in command or "weightserver checkpoints" in command
        assert ("--tls-ca /certs/ca.pem" in command) is wants
    assert len({*made} & {*shown}) == 9


@pytest.mark.parametrize("form", FORMS)
def test_no_form_needs_a_shard_that_may_be_down(form: str) -> None:
    """Calls are made from elsewhere, data are read beside the shard, and `verify` stops it first."""
    inside = FORMS[form].inside.format(0)
    for alert, commands in COMMANDS.items():
        for command in commands:
            made = FORMS[form].of(command, alert)
            calls = re.search(r"weightserver (health|checkpoints|top) ", command) is not None
            reads = re.search(r" (inspect|df -h) /data", command) is not None and alert in MAY_BE_DOWN
            if calls or reads or " verify " in command:
                assert inside not in made, made
            if " verify " in command:
                assert made.startswith(FORMS[form].stop.format(0) + " && ")
    assert FORMS[form].aside.format(0) + "weightserver inspect /data/shard" in shard_down(form)


def shard_down(form: str) -> list[str]:
    """What the command prints for ShardDown."""
    command = [sys.executable, "-m", "deploy.runbook", form, "ShardDown"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize(("form", "deployed"), [("compose", "docker-compose.yml"), ("kubectl", "kubernetes/base")])
def test_the_forms_name_what_the_deployment_has(form: str, deployed: str) -> None:
    place = ROOT / "deploy" / deployed
    text = "\n".join(path.read_text() for path in ([place] if place.is_file() else place.glob("*.yaml")))
    health = next(line for line in shard_down(form) if "weightserver health" in line)
    name = FORMS[form].shard.format(0)
    assert health.endswith(f"weightserver health {name}:50051 --tls-ca /certs/ca.pem")
    assert ("shard-0:" if form == "compose" else "name: weightserver") in text
    assert "/data/shard" in text
    assert "/certs" in text


def test_the_probe_prints_a_whole_page(tmp_path: Path) -> None:
    """It stands for curl, which the images do not have."""
    with LocalCluster(1, tmp_path) as cluster:
        host, _, port = cluster.metrics_addresses[0].rpartition(":")
        probe = [str(ROOT / "deploy/health.sh"), host, port, "/metrics"]
        told = subprocess.run(probe, capture_output=True, text=True, check=True).stdout
    assert told.startswith("# HELP ")
    assert 'weightserver_serving{shard="0"} 1.0' in told


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Two shards with rows, a trainer's metrics and a Prometheus: what the runbook says to what is here."""
    directory = tmp_path_factory.mktemp("cluster")
    write_certificates(directory / "certs", ["127.0.0.1"])
    with LocalCluster(2, directory) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(TableSpec(num_rows=1000, dim=8, rows_per_block=10))
        client.extend_schedule(0, np.full(10, 0.1, np.float32))
        client.open_session("run")
        client.push_gradients(np.arange(100), np.ones((100, 8), np.float32), step=0)
        client.fetch(np.arange(100), step=1)
        client.checkpoint("kept", step=1)
        trainer = TrainerMetrics(
            run="run", rank=0, window_size=96, batch_size=16, num_steps=9, device=torch.device("cpu")
        )
        address, close = trainer.serve(0)
        targets = {"weightserver": cluster.metrics_addresses, "trainer": [address]}
        with LocalPrometheus({"default": targets}) as prometheus:
            yield {
                "127.0.0.1:50051": cluster.addresses[0],
                "127.0.0.1:50052": cluster.addresses[1],
                "127.0.0.1:9101": cluster.metrics_addresses[0],
                "127.0.0.1:9102": cluster.metrics_addresses[1],
                "127.0.0.1:9200": address,
                "http://127.0.0.1:9090": prometheus.url,
                "/data/ws0": str(directory / "shard-0"),
                "certs/": f"{directory}/certs/",
            }
        close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool: see Debian's package prometheus")
def test_the_commands_run(here: dict[str, str]) -> None:
    commands = sorted({command for found in COMMANDS.values() for command in found})
    looking = [command for command in commands if not command.startswith(CHANGES_OR_NEEDS_MORE)]
    assert len(looking) >= 15
    for command in looking:
        done = run(command, here)
        filters = "errors_total" in command or " > 0'" in command or " == 0'" in command or "[5m]" in command
        assert done.status == 0, f"{command}: {done.errors}"
        assert done.output or filters, f"{command} says nothing"
