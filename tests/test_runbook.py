"""The commands of the runbook: every alert has some, and those that only look are run beside a cluster."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from deploy.prometheus.local import LocalPrometheus
from deploy.runbook import CHANGES_OR_NEEDS_MORE, COMMANDS, run
from trainer.run.prometheus import TrainerMetrics
from weightserver import LocalCluster, TableSpec, WeightClient


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
    looking = [command for command in commands if not command.startswith(CHANGES_OR_NEEDS_MORE)]
    assert len(looking) >= 15
    for command in looking:
        done = run(command, here)
        filters = "errors_total" in command or " > 0'" in command or " == 0'" in command or "[5m]" in command
        assert done.status == 0, f"{command}: {done.errors}"
        assert done.output or filters, f"{command} says nothing"
