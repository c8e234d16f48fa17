"""Training runs against the containers, while processes are killed."""

from __future__ import annotations

import functools
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

from deploy.bring_up.cluster import Shards, compose_file
from deploy.bring_up.engine import Docker
from deploy.bring_up.report import check, say, wait_until
from deploy.bring_up.settings import CHECKPOINT_EVERY, EPOCHS, RANKS, ROOT, Json


def _steps(lines: str) -> list[Json]:
    """The records of metrics.jsonl, without a line that is being written."""
    return [json.loads(line) for line in lines.splitlines() if line.endswith("}")]


def _killed_and_back(docker: Docker, service: str) -> None:
    before = docker.inspect(service)["RestartCount"]
    docker.kill_process(service)
    begun = time.monotonic()
    wait_until(lambda: docker.inspect(service)["RestartCount"] > before, f"{service} is restarted")
    wait_until(lambda: docker.health(service) in ("healthy", "running"), f"{service} is healthy again")
    say(f"killed {service}: restarted, {docker.health(service)} after {time.monotonic() - begun:.0f} s")


def train_from_host(docker: Docker, shards: Shards, output: Path) -> float:
    """Trains on the host while a shard is killed; returns the last loss."""
    arguments = ["--nproc-per-node", str(RANKS), "-m", "trainer", "fashion-mnist"]
    arguments += ["--servers", ",".join(shards.addresses), *shards.options(), "--output", str(output)]
    arguments += ["--epochs", str(EPOCHS), "--checkpoint-every", str(CHECKPOINT_EVERY), "--no-evaluate"]
    say(f"$ torchrun {' '.join(arguments)}")
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
        say(f"at step {at}:")
        _killed_and_back(docker, "shard-1")
        check(process.wait(1200) == 0, f"training failed: {log.read_text()[-2000:]}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(120)
    for line in log.read_text().splitlines():
        if "has not answered" in line:  # absent if no call failed
            say(f"the trainer said: {line}")
    last = steps()[-1]
    check(last["step"] > at, "training did not continue")
    say(f"training continued to step {last['step']}, loss {last['loss']:.6f}")
    return float(last["loss"])


def train_from_profile(docker: Docker) -> float:
    """Trains in the compose file's profile while a shard and the trainer are killed; returns the last loss."""
    say("$ docker compose --profile trainer up -d --no-deps trainer")
    command = [*compose_file()["services"]["trainer"]["command"], "--no-evaluate"]  # the evaluation takes minutes
    trainer: Json = {"command": command}
    _, locked_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked_bytes != resource.RLIM_INFINITY:  # it cannot be raised, and only InfiniBand needs more
        trainer["ulimits"] = {"memlock": locked_bytes}
        say(f"memlock: {locked_bytes}, as much as this machine allows")
    override = {"services": {"trainer": trainer}}
    docker.up("--profile", "trainer", "up", "-d", "--no-deps", "trainer", override=override)

    def steps() -> list[Json]:
        run = ("exec", docker.container("trainer"), "cat", "/runs/fashion-mnist/metrics.jsonl")
        lines = docker.run(*run, fails=True)
        return _steps(lines) if lines.startswith("{") else []

    def ended() -> bool:
        return bool(docker.inspect("trainer")["State"]["Status"] == "exited")

    def advanced(reached: int) -> bool:
        return ended() or len(steps()) > reached + 10

    reached = 0
    for service in ("shard-0", "trainer"):
        wait_until(functools.partial(advanced, reached), "training continues", seconds=600)
        reached = len(steps())
        check(not ended(), f"training ended: {docker.run('logs', '--tail', '20', docker.container('trainer'))}")
        say(f"at step {steps()[-1]['step']}:")
        _killed_and_back(docker, service)
    wait_until(ended, "training ends", seconds=1800)
    state = docker.inspect("trainer")["State"]
    log = docker.run("logs", docker.container("trainer"))
    check(state["ExitCode"] == 0, f"the trainer ended with {state['ExitCode']}: {log[-2000:]}")
    summary = re.findall(r"(?m)^.*\bloss=[\d.]+.*$", log)[-1]
    say(f"the trainer's last line: {summary}")
    return float(summary.partition("loss=")[2].split()[0])
