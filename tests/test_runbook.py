"""The commands of the runbook: every alert has some, and those that only look are run beside a cluster."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from deploy.prometheus.local import LocalPrometheus
from deploy.runbook import CHANGES_OR_NEEDS_MORE, COMMANDS, FORMS, ON_THE_MACHINE, run
from trainer.run.prometheus import TrainerMetrics
from weightserver import LocalCluster, TableSpec, WeightClient

ROOT = Path(__file__).parent.parent


def test_every_entry_has_commands_to_paste() -> None:
    assert [name for name, commands in COMMANDS.items() if not commands] == []


def test_every_command_has_a_form_for_containers() -> None:
    """It names nothing outside, and uses only what the images have. docs/deployment.md shows one of each kind."""
    programs = ("weightserver", "health.sh", "df", "promtool")
    shown = [line.strip() for line in (ROOT / "docs/deployment.md").read_text().splitlines()]
    for form in FORMS.values():
        made = [form.of(command) for commands in COMMANDS.values() for command in commands]
        inside = [command for command in made if not command.startswith((*ON_THE_MACHINE, "promtool "))]
        for command in inside:
            words = shlex.split(command.partition("|")[0].replace(" -- ", " ").replace("exec -T", "exec"))
            assert words[words.index("exec") + 2] in programs, command
            assert not re.search(r":5005[2-9]|:910[2-9]|curl|/data/ws", command), command
            wants = "weightserver health" in command or "weightserver checkpoints" in command
            assert ("--tls-ca /certs/ca.pem" in command) is wants
        assert len({*made} & {*shown}) == 8


@pytest.mark.parametrize("service", ["compose", "kubectl"])
def test_the_forms_name_what_the_deployment_has(service: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.runbook", service, "ShardDown"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    health = next(line for line in done.stdout.splitlines() if "weightserver health" in line)
    deployed = "docker-compose.yml" if service == "compose" else "kubernetes/base/weightserver.yaml"
    text = (ROOT / "deploy" / deployed).read_text()
    assert ("shard-0:" if service == "compose" else "name: weightserver") in text
    assert health.endswith("weightserver health 127.0.0.1:50051 --tls-ca /certs/ca.pem")
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
