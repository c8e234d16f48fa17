"""Writes a `version_*` directory: see README.md. Runs in a checkout of that version: python write.py OUTPUT."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from weightserver import LocalCluster, TableSpec, WeightClient

SPEC = TableSpec(num_rows=60, dim=3, rows_per_block=4)
EXTENDED = 70
RUN = {
    "dataset": "synthetic",
    "num_images": 40,
    "steps": 24,
    "batch_size": 4,
    "num_negatives": 8,
    "window_size": 20,
    "window_stride": 5,
    "learning_rate": 0.1,
    "dim": 4,
    "rows_per_block": 3,
    "prefetch_steps": 3,
    "log_every": 1,
    "checkpoint_every": 7,
    "evaluate": False,
}
"""Settings of the run, except its encoder's: see `encoder`."""


def encoder() -> Any:
    from trainer.model import EncoderConfig

    return EncoderConfig(in_channels=3, image_size=16, width=4, stem_stride=2, blocks=(1,))


def table(directory: Path) -> dict[str, Any]:
    """Writes two shards, one of which is killed at the end, and a backup; returns what a client saw of them."""
    seen: dict[str, Any] = {}
    generator = np.random.default_rng(0)

    def values(num_rows: int) -> Any:
        return generator.standard_normal((num_rows, SPEC.dim)).astype(np.float32)

    with LocalCluster(2, directory) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(SPEC)
        client.extend_schedule(0, np.linspace(0.3, 0.1, 20, dtype=np.float32))
        client.open_session("first")
        client.push_gradients(np.arange(0, 60, 2), values(30), step=0)
        client.push_gradients(np.arange(0, 60, 3), values(20), step=2)
        client.checkpoint("one", step=3)
        client.push_gradients(np.arange(20), values(20), step=4)
        client.checkpoint("gone", step=5)
        client.open_session("second")
        client.write_state(np.arange(10, 14), values(4), values(4), 6)
        client.checkpoint("two", step=6)
        client.extend_table(EXTENDED)
        client.extend_schedule(20, np.linspace(0.1, 0.05, 10, dtype=np.float32))
        client.push_gradients(np.arange(55, 67), values(12), step=7)
        client.checkpoint("three", step=8)
        client.release("gone")
        backup = [sys.executable, "-m", "weightserver", "backup", *cluster.addresses]
        subprocess.run([*backup, "--output", directory / "backup", "--checkpoint", "three"], check=True)
        cluster.restart(0)
        client.push_gradients(np.arange(5, EXTENDED, 5), values(13), step=11)

        info, rows = client.describe(), np.arange(EXTENDED)
        for name in ("", "one", "two", "three"):
            for step in (None, 28):
                state = client.fetch_state(rows, step=step, checkpoint=name)
                seen |= {f"{name or 'now'}/{step or 'stored'}/{what}": array for what, array in vars(state).items()}
        seen["learning_rates"] = client.learning_rates()
        seen["numbers"] = np.array([info.epoch, info.clock, info.horizon, info.rows_stored])
        seen["rows_stored"] = np.array([shard.rows_stored for shard in info.shards])
        seen["checkpoints"] = np.array([kept.name for kept in client.checkpoints()])
        seen["steps"] = np.array([kept.step for kept in client.checkpoints()])
        seen["identities"] = np.array([kept.identity.hex() for kept in client.checkpoints()])
        seen["run"] = np.array(info.run)
        if hasattr(client, "marks"):  # version 0.1 has none
            seen["marks"] = np.array(client.marks())
        cluster.processes[1].kill()
        cluster.processes[1].wait()
    return seen


def run(directory: Path, complete: Path) -> dict[str, Any]:
    """Writes a run that is killed when it takes its fourth checkpoint; returns the losses of that run, undisturbed."""
    import json

    from trainer.config import TrainConfig
    from trainer.loop import train

    train(TrainConfig(output=complete, encoder=encoder(), **RUN))
    records = [json.loads(line) for line in (complete / "metrics.jsonl").read_text().splitlines()]
    child = os.fork()
    if not child:
        from trainer.checkpoint import Checkpoints

        save, steps = Checkpoints.save, []

        def save_and_die(self: Checkpoints, step: int, *arguments: Any) -> None:
            steps.append(step)
            if len(steps) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            save(self, step, *arguments)

        Checkpoints.save = save_and_die  # type: ignore[method-assign]
        train(TrainConfig(output=directory, encoder=encoder(), **RUN))
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    time.sleep(3)  # its shards end
    return {"losses": np.array([record["loss"] for record in records])}


def pack(directory: Path, target: Path) -> None:
    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if entry.name.endswith(("lock.mdb", ".log", ".html", ".tfevents")) or "/tensorboard" in entry.name:
            return None
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(target, "w:xz", preset=9) as archive:
        archive.add(directory, directory.name, filter=kept)


def main(output: Path) -> None:
    output.mkdir()
    seen = table(output / "table") | run(output / "run", output / "complete")
    for name in ("table", "run"):
        pack(output / name, output / f"{name}.tar.xz")
    np.savez_compressed(output / "seen.npz", **seen)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
