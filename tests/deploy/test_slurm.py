"""The batch scripts of deploy/slurm, run by bash with the tasks that Slurm would start."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import trainer.arguments
import trainer.data.__main__
import weightserver.cli
from tests.helpers.recorded_programs import RecordedPrograms, Started
from trainer.data.parts import Part
from weightserver.common.addresses import parse_addresses

SLURM = Path(__file__).parents[2] / "deploy/slurm"
SRUN = """#!/bin/bash
# srun: starts the command once for each task, one after another; ends with the highest status.
while [[ $1 == --* ]]; do shift; done
highest=0
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_NODEID=$((task * SLURM_JOB_NUM_NODES / SLURM_NTASKS)) "$@"
    status=$?
    highest=$((status > highest ? status : highest))
done
exit $highest
"""
TRAINER = ["fashion-mnist", "--checkpoint-every", "50"]


def tasks(
    script: str, folder: Path, *arguments: str, status: int = 0, nodes: int = 2, each: int = 1, given: str = ""
) -> list[Started]:
    """What the tasks of a job start, with `given`, NAME=VALUE ..., in its environment; programs end with `status`."""
    programs = RecordedPrograms(folder, "weightserver", "train.sh", status=status)
    folder = folder / "programs"
    (folder / "srun").write_text(SRUN)
    (folder / "scontrol").write_text('#!/bin/sh\n[ "$1" = show ] && printf "a1\\na2\\n" || echo "$@"\n')
    for name in ("srun", "scontrol"):
        (folder / name).chmod(0o755)
    environment = {"SLURM_NTASKS": str(nodes * each), "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_ID": "71"}
    environment |= {"SLURM_JOB_NODELIST": "a[1-2]", "TRAIN": "train.sh", "CERTIFICATES": "/certs", "OUTPUT": "runs/a"}
    environment |= {"SERVERS": "ws{0..3}:50051", "SLURM_SUBMIT_DIR": "/", "PATH": programs.path, "HOME": "/"}
    environment |= dict(setting.split("=") for setting in given.split())
    done = subprocess.run(
        ["bash", SLURM / f"{script}.sbatch", *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, done.stderr
    assert ("requeue 71" in done.stdout) == (status == 143), "the job starts again after a checkpoint, and only then"
    return programs.started()


def test_the_scripts_ask_for_what_they_use() -> None:
    for script, wanted in (
        ("shards", {"ntasks-per-node=1", "requeue", "open-mode=append"}),
        ("parts", {"ntasks=1", "requeue", "open-mode=append"}),
        ("trainer", {"ntasks-per-node=1", "requeue", "open-mode=append", "exclusive", "signal=TERM@300"}),
    ):
        text = (SLURM / f"{script}.sbatch").read_text()
        assert wanted <= set(re.findall(r"(?m)^#SBATCH --(.*)$", text))
        assert os.access(SLURM / f"{script}.sbatch", os.X_OK)


def test_each_task_is_a_shard_with_ports_of_its_own(tmp_path: Path) -> None:
    """Two on each of two nodes; the addresses by pattern are in the shards' order."""
    parsed = [weightserver.cli._parser().parse_args(started.arguments) for started in tasks("shards", tmp_path, each=2)]
    assert [(one.shard, one.num_shards) for one in parsed] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [one.listen for one in parsed] == ["0.0.0.0:50051", "0.0.0.0:50052"] * 2
    assert [one.metrics_port for one in parsed] == [9101, 9102] * 2
    assert [str(one.data_dir) for one in parsed] == [f"/local/weightserver/shard-{shard}" for shard in range(4)]
    assert not any(one.init or one.insecure for one in parsed)


@pytest.mark.parametrize(("restarts", "is_first"), [("", True), (" SLURM_RESTART_COUNT=1", False)])
def test_a_job_that_starts_again_begins_no_shard(restarts: str, is_first: bool, tmp_path: Path) -> None:
    """Slurm starts it in the environment in which it was submitted."""
    started = tasks("shards", tmp_path, given=f"INIT=--init{restarts}")
    assert [weightserver.cli._parser().parse_args(one.arguments).init for one in started] == [is_first] * 2


@pytest.mark.parametrize("status", [0, 143, 1])
def test_the_trainer_starts_again_only_after_a_checkpoint(status: int, tmp_path: Path) -> None:
    started = tasks("trainer", tmp_path, *TRAINER, status=status)
    settings = [{name: one.environment[f"PET_{name}"] for name in ("NNODES", "NODE_RANK")} for one in started]
    assert settings == [{"NNODES": "2", "NODE_RANK": str(node)} for node in range(2)]
    for one in started:
        assert (one.environment["PET_MASTER_ADDR"], one.environment["PET_NPROC_PER_NODE"]) == ("a1", "1")
        config = trainer.arguments.parse_config(one.arguments)
        config.check()
        assert config.servers.addresses == parse_addresses("ws{0..3}:50051")


def test_the_first_of_very_many_nodes_is_found(tmp_path: Path) -> None:
    """The script ends if `scontrol` cannot write all of their names."""
    script = (SLURM / "trainer.sbatch").read_text().partition("\nexport ")[0]
    many = "scontrol() { seq --format node-%06g 20000; }\n" + script + '\necho "$first"'
    given = {"OUTPUT": "runs/a", "SERVERS": "ws:50051", "SLURM_JOB_NODELIST": "", "HOME": "/"}
    environment = given | {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", many], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "node-000001\n")


def test_each_job_of_an_array_is_a_part(tmp_path: Path) -> None:
    """Also one that is submitted again alone."""
    programs = RecordedPrograms(tmp_path, "pic")
    given = {"PATH": programs.path, "SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "1"}
    command = ["bash", str(SLURM / "parts.sbatch"), "pack", "images", "packed"]
    subprocess.run(command, check=True, env=given | {"PARTS": "64"}, timeout=60)
    (started,) = programs.started()
    assert trainer.data.__main__._parser().parse_args(started.arguments).part == Part(7, 64)
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "PARTS: set it to the number of parts" in done.stderr


@pytest.mark.parametrize("missing", ["OUTPUT", "SERVERS"])
def test_what_is_missing_is_said(missing: str) -> None:
    given = {"OUTPUT": "runs/a", "SERVERS": "ws:50051", "PATH": os.environ["PATH"]}
    del given[missing]
    done = subprocess.run(["bash", SLURM / "trainer.sbatch"], env=given, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"{missing}: set it to" in done.stderr


def test_a_job_of_another_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no /another/deploy/train\.sh: submit from"):
        tasks("trainer", tmp_path, *TRAINER, given="SLURM_SUBMIT_DIR=/another TRAIN=")
