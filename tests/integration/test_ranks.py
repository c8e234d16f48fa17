"""Runs on any number of ranks train like one, with real processes over gloo and real weight servers.

tests/head/test_ranks.py compares steps, rows and encoders of two ranks with those of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.helpers.small_run import losses
from trainer.arguments import parse_config
from trainer.loop import train
from weightserver import LocalCluster, WeightClient
from weightserver.torch import (
    ClassifierHead,
    Ranks,
)


def test_several_machines_need_servers_that_all_can_reach(tmp_path: Path) -> None:
    with ClassifierHead(300, 16, num_negatives=8, directory=tmp_path) as head:
        head._table.ranks = Ranks(local_world_size=0)
        with pytest.raises(ValueError, match=r"several machines .* give servers"):
            head.connect()


def launch(num_ranks: int, output: Path, *more: str, kill_after_steps: int | None = None) -> None:
    """Starts a run as users do, including weight servers; optionally kills torchrun and all ranks with -9.

    A single rank that lives runs in this process. GroupNorm: with BatchNorm a rank's statistics are its slice's.
    """
    settings = ["synthetic", "--num-images", "500", "--output", str(output), "--steps", "50", "--batch-size", "16"]
    settings += ["--num-negatives", "64", "--window-size", "96", "--window-stride", "24", "--rows-per-block", "5"]
    settings += ["--dim", "16", "--log-every", "1", "--learning-rate", "0.3", "--encoder.image-size", "16"]
    settings += ["--encoder.width", "8", "--encoder.norm", "group", *more]
    if num_ranks == 1 and kill_after_steps is None:
        train(parse_config(settings))
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["-m", "trainer", *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        if kill_after_steps is not None:
            while num_steps(output) < kill_after_steps:
                assert process.poll() is None, "it ended by itself"
                time.sleep(0.01)
            ranks = psutil.Process(process.pid).children(recursive=True)
            for one in [process, *(rank for rank in ranks if "weightserver" not in rank.cmdline())]:
                one.kill()
        errors = process.communicate(timeout=120)[1]
    assert (process.returncode != 0) == (kill_after_steps is not None), errors


def num_steps(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.mark.parametrize(
    ("num_ranks", "resumed_on", "options"),
    [
        pytest.param(2, 1, "", id="2 ranks, then 1", marks=pytest.mark.slow),
        pytest.param(3, None, "", id="3 ranks", marks=pytest.mark.guard),
        pytest.param(2, 1, "--row-momentum 0.5", id="2 with our option", marks=pytest.mark.slow),
        pytest.param(1, 3, "--views 2 --view-size 12", id="1, then 3", marks=pytest.mark.slow),
    ],
)
def test_a_whole_run_is_the_same_on_any_number_of_ranks(
    num_ranks: int, resumed_on: int | None, options: str, tmp_path: Path
) -> None:
    """Even if it is killed and resumes with another number of ranks."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    launch(1, alone, *options.split())
    if resumed_on is None:
        launch(num_ranks, together, *options.split())
    else:
        launch(num_ranks, together, *options.split(), "--checkpoint-every", "19", kill_after_steps=25)
        launch(resumed_on, together, *options.split(), "--resume")
    for output in (alone, together):
        records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        assert {record["active_rows"] for record in records} == {64}
        assert all(1 <= record["active_rows_share"] < 1.5 for record in records)
        with LocalCluster(2, output / "servers") as cluster, WeightClient(cluster.addresses) as client:
            assert client.describe().clock == 50  # every rank's rows reached the servers
    one, many = (np.array(losses(output)) for output in (alone, together))
    assert one[-5:].mean() < one[:5].mean() - 0.05, "nothing was learned: this shows nothing"
    assert np.abs(many / one - 1).max() <= 1e-4


@pytest.mark.slow
def test_a_run_of_shared_classes_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    """With recent and sampled negatives, and a margin."""
    np.save(tmp_path / "labels.npy", np.random.default_rng(0).permutation(np.arange(500) % 80))
    options = ["--labels", str(tmp_path / "labels.npy"), "--negatives", "both", "--margin", "arcface"]
    for num_ranks in (1, 2):
        launch(num_ranks, tmp_path / str(num_ranks), *options)
    one, two = (np.array(losses(tmp_path / name)) for name in "12")
    assert len(one) == 50
    assert np.abs(two / one - 1).max() <= 1e-4
