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
from trainer.run.prometheus import TrainerMetrics
from weightserver import LocalCluster, TableSpec, WeightClient

RUNBOOK = (Path(__file__).parent.parent / "docs/runbook.md").read_text()
COMMANDS = {
    section.partition("\n")[0]: re.findall(r"^    (\S.*)$", section, re.MULTILINE)
    for section in RUNBOOK.split("\n## ")[1:]
}
CHANGES_OR_NEEDS_MORE = (
    "pic train ",
    "weightserver verify ",
    "iostat ",
    "dmesg ",
    "openssl ",
    "ps ",
    "df -h runs/",
)
"""Commands that resume a run, need a stopped shard, or look at a machine that a test does not have."""


def test_every_entry_has_commands_to_paste() -> None:
    assert [name for name, commands in COMMANDS.items() if not commands] == []


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
    run = [command for command in commands if not command.startswith(CHANGES_OR_NEEDS_MORE)]
    assert len(run) >= 15
    for command in run:
        pasted = command
        for said, found in here.items():
            pasted = pasted.replace(said, found)
        pasted = re.sub(r"^weightserver ", f"{sys.executable} -m weightserver ", pasted)
        done = subprocess.run(["bash", "-c", pasted], capture_output=True, text=True, timeout=120, check=False)
        filters = "errors_total" in command or " > 0'" in command or " == 0'" in command or "[5m]" in command
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout or filters, f"{command} says nothing"
