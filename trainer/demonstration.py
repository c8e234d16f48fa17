"""The demo: trains on real images with local weight servers, on a CPU.

    python -m trainer.demo [--epochs E] [--data-dir DIR] [--output DIR] [--resume]

Starts two shard processes and trains on Fashion-MNIST; beside it, on the other half of the cores, the same run trains
without weight update correction. Prints the accuracy of both encoders, of an untrained one and of raw pixels, and draws
the training as OUTPUT/training.png.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import torch

from trainer.companion import Companion, stop_with_parent
from trainer.config import PRESETS, TrainConfig
from trainer.display import shown, stage
from trainer.ending import finish
from trainer.loop import train
from trainer.run.directory import CONFIG_FILE
from trainer.run.resume import run_settings
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import to_path
from weightserver.common.command_line import CommandParser
from weightserver.common.logs import LogFormat, asked_format, log_events
from weightserver.common.malloc import keep_large_buffers

_log = logging.getLogger(__name__)

_RUNS = Path("runs")
_UNCORRECTED = "without correction"
"""The second run's name in the table; its directory in the first one's has hyphens."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    output: Path
    epochs: float | None = None
    seed: int | None = None
    data_dir: Path | None = None
    resume: bool = False
    correction: Literal["exact", "none"] = "exact"
    log_format: LogFormat = "text"
    stop_with_parent: bool = False
    """Whether this is the run beside another demo, which shows the results of both."""


def run(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line. Exit status 0; if the demo fails, as `exit_on_error`."""
    parser = CommandParser(prog="pic demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=float, help="length of the training in epochs (default: the demo's)")
    parser.add_argument("--seed", type=int, help="seed of everything random (default 0)")
    parser.add_argument(
        "--data-dir", type=to_path, help="folder with Fashion-MNIST's files (default: search the usual places)"
    )
    parser.add_argument("--output", type=to_path, help="the run's directory (default: runs/demo-1, -2, ...)")
    parser.add_argument(
        "--resume", action="store_true", help="resume the demo in --output (default: the last one in runs/)"
    )
    parser.add_argument(
        "--correction",
        choices=["exact", "none"],
        default="exact",
        help="none: only the run without weight update correction, and nothing to compare it with",
    )
    parser.add_argument("--stop-with-parent", action="store_true", help="stop when stdin is closed")
    arguments = sys.argv[1:] if arguments is None else arguments
    if asked_format(arguments) == "json":
        log_events("json")
    given = vars(parser.parse_args(arguments))
    keep_large_buffers()
    if given["log_format"] == "json" or not sys.stderr.isatty():
        log_events(given["log_format"])  # a terminal shows the progress
    if given["stop_with_parent"]:
        stop_with_parent()
    with exit_on_error("demo"):
        output = given.pop("output") or _output(resume=given["resume"])
        train_and_compare(Options(output, **given))
    sys.exit(0)


def train_and_compare(options: Options) -> None:
    """Trains, and prints and draws the results."""
    config = demo_config(options)
    if options.correction == "none":
        result = train(config)
        if not options.stop_with_parent:
            finish(result)
        return
    with _sharing_threads() as threads, _without_correction(options, config, threads) as companion:
        result = train(config, on_step=lambda step: companion.start())  # the directory is claimed by then
        companion.start()
        with shown(), stage("waiting for the run without correction"):
            failure = companion.failure()
    finish(result, {} if failure else {_UNCORRECTED: _uncorrected(options.output)})
    if failure:
        if options.log_format == "json":
            _log.warning("no comparison without correction: %(reason)s", {"reason": failure})
        else:
            print(f"Note: no comparison without correction: {failure}")


def demo_config(options: Options) -> TrainConfig:
    """The settings of the demo's run. One that is resumed keeps its length, seed and images unless others are given.

    Raises ValueError for a wrong setting, or if there is no run to resume. A run with other settings is refused when
    it is resumed.
    """
    _, preset = PRESETS["demo"]
    begun = preset
    if options.resume:
        if not (options.output / CONFIG_FILE).exists():
            raise ValueError(f"{options.output} holds no demo to resume: start one without --resume")
        begun = run_settings(options.output)
    seed = begun.sampling.seed if options.seed is None else options.seed
    config = preset.with_settings(
        epochs=begun.optimization.epochs if options.epochs is None else options.epochs,
        correction=options.correction,
        seed=seed,
        order_seed=seed,
        data_dir=begun.data.data_dir if options.data_dir is None else options.data_dir,
        output=options.output,
        resume=options.resume,
        log_format=options.log_format,
    )
    config.check()  # before anything is derived from a wrong length
    return config.with_settings(
        knn_every=config.optimization.epochs / 10, knn_fraction=1.0
    )  # for a curve, whatever it takes


def _uncorrected(output: Path) -> Path:
    """The directory of the run without correction."""
    return output / _UNCORRECTED.replace(" ", "-")


def _without_correction(options: Options, config: TrainConfig, threads: int) -> Companion:
    """The run of the same settings without correction, to be started."""
    output = _uncorrected(options.output)
    arguments = ["--correction", "none", "--output", str(output), "--stop-with-parent"]
    arguments += ["--epochs", str(config.optimization.epochs), "--seed", str(config.sampling.seed)]
    arguments += ["--data-dir", str(config.data.data_dir)] if config.data.data_dir is not None else []
    arguments += ["--resume"] if options.resume and (output / CONFIG_FILE).exists() else []
    environment = {"OMP_NUM_THREADS": str(threads)}
    return Companion(["trainer.demo", *arguments], output.with_suffix(".log"), environment)


@contextmanager
def _sharing_threads() -> Iterator[int]:
    """Leaves half of PyTorch's threads to another process meanwhile; yields their number."""
    available = torch.get_num_threads()
    torch.set_num_threads(half := max(1, available // 2))
    try:
        yield half
    finally:
        torch.set_num_threads(available)


def _output(*, resume: bool) -> Path:
    """The directory of the next demo, or of the last one that is to be resumed."""
    numbers = [
        int(match.group(1)) for path in _RUNS.glob("demo-*") if (match := re.fullmatch(r"demo-(\d+)", path.name))
    ]
    last = max(numbers, default=0)
    return _RUNS / f"demo-{max(1, last) if resume else last + 1}"
