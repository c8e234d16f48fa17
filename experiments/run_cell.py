"""Runs one cell: python -m experiments.run_cell DIRECTORY, whose cell.json says what to run.

A repeated call resumes the training from its newest checkpoint, and skips what has finished. SIGTERM, or the end of the
process at the other end of stdin, stops it after a checkpoint.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from experiments.baselines.loop import train_baseline
from experiments.baselines.methods import METHODS
from experiments.cells import PIC, PIXELS, UNTRAINED, Cell, Evaluation
from experiments.results import CELL_FILE, CPU_FILE, EVALUATIONS, RESULT_FILE, read_cpu_seconds
from trainer.config import TrainConfig
from trainer.data import Dataset
from trainer.evaluate import evaluation as evaluations
from trainer.evaluate.command import parse
from trainer.evaluate.encoders import encoder_of
from trainer.evaluate.features import FeatureSet, encoder_features, pixel_features, untrained_encoder
from trainer.evaluate.protocols import function_of
from trainer.evaluate.table import evaluate_features
from trainer.loop import train
from trainer.model import load_encoder, save_encoder
from trainer.run.directory import ENCODER_FILE, METRICS_FILE, read_metrics
from trainer.run_dataset import dataset_of, with_pixel_scale
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import atomic_write, lock_file
from weightserver.common.malloc import keep_large_buffers
from weightserver.torch import Ranks

CIFAR_10 = Path("data/cifar-10")
"""A copy of the images; without it torchvision downloads them."""
_NICENESS = 10
_CHECKPOINT_STEPS = {"cpu": 200, "cuda": 2_000}
"""About a minute or two."""
_CPU_SECONDS = 60.0
_NUM_VALIDATION = 5_000


def write_cell(directory: Path, cell: Cell, seed: int) -> None:
    """Writes the description of a cell's run that this program reads."""
    content = {
        "method": cell.method,
        "preset": cell.preset,
        "settings": cell.settings,
        "evaluations": [asdict(each) for each in cell.evaluations],
        "seed": seed,
    }
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2) + "\n"
    atomic_write(directory / CELL_FILE, lambda path: path.write_text(text))


def main(arguments: list[str] | None = None) -> int:
    """Runs the cell of the directory that is given; returns 0, or exits with 1 or 128 + a signal's number."""
    (directory,) = map(Path, sys.argv[1:] if arguments is None else arguments)
    os.nice(_NICENESS)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a terminal's Ctrl-C stops the runner, which stops this
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # while it evaluates
    torch.set_num_threads(1)
    keep_large_buffers()
    threading.Thread(target=_follow_parent, daemon=True).start()
    with exit_on_error("run_cell"), _alone(directory), _counting_cpu(directory):
        content = json.loads((directory / CELL_FILE).read_text())
        cell = Cell(name="", method=content["method"], preset=content["preset"], settings=content["settings"])
        config = _plain(cell.config(content["seed"])).with_settings(output=directory)
        if config.data.dataset == "cifar-10" and CIFAR_10.is_dir():
            config = config.with_settings(data_dir=CIFAR_10)
        if not (directory / RESULT_FILE).exists():
            _write(directory / RESULT_FILE, _trained(cell, config))
        for each in content["evaluations"]:
            _evaluate(cell.method, Evaluation(**each), config)
    return 0


def _plain(config: TrainConfig) -> TrainConfig:
    """Settings that change no number but by rounding: one process of weight servers, checkpoints, evaluation by this
    module, and on a GPU compiled encoders."""
    device = config.compute.torch_device().type
    return config.with_settings(
        num_shards=1,
        checkpoint_every=_CHECKPOINT_STEPS[device],
        compile=device == "cuda",
        keep_checkpoints=1,
        resume="auto",
        evaluate=False,
    )


def _trained(cell: Cell, config: TrainConfig) -> dict[str, Any]:
    """Trains and evaluates by kNN and linear probe; returns the measures and where they were taken."""
    summary: dict[str, Any] = {}
    if cell.method == PIC:
        summary = {name: value for name, value in train(config).summary.items() if name != "warnings"}
    elif cell.method in METHODS:
        summary = train_baseline(cell.method, config)
    elif cell.method == UNTRAINED:
        images = dataset_of(config)
        untrained = with_pixel_scale(config, images, Ranks()).model.encoder
        encoder = untrained_encoder(untrained, images, config.sampling.seed)
        save_encoder(encoder, untrained, config.run.output / ENCODER_FILE)
    images = dataset_of(config)
    probes = evaluate_features(_features(cell.method, config, images))
    return {
        "measures": summary | {f"{protocol}_top1": result.top1 for protocol, result in probes.items()},
        "curve": _curve(config.run.output / METRICS_FILE),
        "images": images.digests[0],
        "processor": processor(),
        "date": date.today().isoformat(),
        "commit": evaluations.source_commit(),
    }


def _curve(metrics: Path) -> list[tuple[float, float]]:
    """The evaluations by kNN while it trained, if there are any: share of the steps, top-1 in percent."""
    records = list(read_metrics(metrics)) if metrics.exists() else []
    begun = [(0.0, record["initial_knn_top1"]) for record in records if "initial_knn_top1" in record]
    steps = 1 + max((record["step"] for record in records), default=0)
    return begun + [((record["step"] + 1) / steps, record["knn_top1"]) for record in records if "knn_top1" in record]


def _features(method: str, config: TrainConfig, images: Dataset) -> FeatureSet:
    """Features of the images that encoders are trained on: probes have no other labels, as in the paper."""
    if method == PIXELS:
        return pixel_features(images)
    encoder, encoder_config = load_encoder(config.run.output / ENCODER_FILE)
    return encoder_features(encoder.to(config.compute.torch_device()), images, encoder_config.pixels)


def _evaluate(method: str, evaluation: Evaluation, config: TrainConfig) -> None:
    """Evaluates the run's encoder by one protocol, unless that has finished."""
    file = config.run.output / EVALUATIONS / f"{evaluation.name}.json"
    if file.exists():
        return
    encoder_options = ["--pixels"] if method == PIXELS else ["--encoder", str(config.run.output / ENCODER_FILE)]
    command = parse([*evaluation.arguments, *encoder_options])
    images = dataset_of(config.with_settings(num_images=None) if evaluation.all_images else config)
    if evaluation.validation:
        images = _validated(images)
    encoder = encoder_of(command.encoder)
    identity = {"weights": encoder.digest, "settings": asdict(command.settings), "images": images.digests}
    state = evaluations.state_directory(file.parent, evaluation.name, identity)
    ranks = Ranks(device=config.compute.torch_device())
    made = evaluations.Evaluation(encoder=encoder, dataset=images, ranks=ranks, state=state)
    evaluations.evaluate(made, command.name, function_of(command.protocol), command.settings, file)


def _validated(images: Dataset) -> Dataset:
    """The last 5,000 training images in place of the test images."""
    return replace(
        images,
        train_images=images.train_images[:-_NUM_VALIDATION],
        train_labels=images.train_labels[:-_NUM_VALIDATION],
        test_images=images.train_images[-_NUM_VALIDATION:],
        test_labels=images.train_labels[-_NUM_VALIDATION:],
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, default=float) + "\n"
    atomic_write(path, lambda partial: partial.write_text(text))


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Raises ValueError if another process runs the cell."""
    path = directory / ".cell-lock"
    with path.open("w") as lock:
        if not lock_file(lock.fileno(), path):
            raise ValueError(f"another process runs the cell in {directory}: wait for its end")
        yield


@contextmanager
def _counting_cpu(directory: Path) -> Iterator[None]:
    """Adds this process's processor time, and that of its weight servers, to the time of earlier ones.

    It is saved once a minute, as a process that is killed saves nothing more.
    """
    before, ended = read_cpu_seconds(directory), threading.Event()

    def save() -> None:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        total = before + sum(each.ru_utime + each.ru_stime for each in used)
        atomic_write(directory / CPU_FILE, lambda partial: partial.write_text(f"{total:.1f}\n"))

    def save_often() -> None:
        while not ended.wait(_CPU_SECONDS):
            save()

    saving = threading.Thread(target=save_often, daemon=True)
    saving.start()
    try:
        yield
    finally:
        ended.set()
        saving.join()
        save()


def _follow_parent() -> None:
    """Stops this process when the one that holds the other end of stdin ends."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    sys.exit(main())
