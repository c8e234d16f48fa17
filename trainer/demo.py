"""The demo: trains on real images with local weight servers, on a CPU.

    pic demo [--epochs E] [--data-dir DIR] [--output DIR] [--resume]

Starts two shard processes and trains on Fashion-MNIST, then trains again without weight update correction. Prints the
accuracy of both encoders, of an untrained one and of raw pixels, and draws the training as OUTPUT/training.png.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer.loading import loading_libraries
from weightserver.common.atomic_files import to_path
from weightserver.common.command_line import CommandParser
from weightserver.common.logs import asked_format, log_events

if TYPE_CHECKING:
    from trainer.config import TrainConfig

_RUNS = Path("runs")
_UNCORRECTED = "without correction"
"""The second run's name in the table; its directory in the first one's has hyphens."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line. Exit status 0; if the demo fails, as `exit_on_error`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if asked_format(arguments) == "json" or not sys.stderr.isatty():
        log_events(asked_format(arguments))  # a terminal shows the progress
    options = _parser().parse_args(arguments)
    with loading_libraries("trainer.demo"):
        from trainer.loop import train
        from trainer.results import finish
        from trainer.stopping import exit_on_error
        from weightserver.common.malloc import keep_large_buffers
    keep_large_buffers()
    with exit_on_error("demo"):
        config = demo_config(options)
        result, other = train(config), without_correction(config)
        train(other)
        finish(result, {_UNCORRECTED: other.run.output})
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
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
    return parser


def demo_config(options: argparse.Namespace) -> TrainConfig:
    """The settings of the demo's run. One that is resumed keeps those that are not given.

    Raises ValueError for a wrong setting.
    """
    from trainer.arguments import parse_config

    output = options.output or _output(resume=options.resume)
    arguments = ["demo", "--output", str(output), "--log-format", options.log_format, *["--resume"] * options.resume]
    given = {"epochs": options.epochs, "seed": options.seed, "order-seed": options.seed, "data-dir": options.data_dir}
    arguments += [f"--{name}={value}" for name, value in given.items() if value is not None]
    config = parse_config(arguments)
    config.check()  # before anything is derived from a wrong length
    return config.with_settings(knn_every=config.optimization.epochs / 10)  # a curve


def without_correction(config: TrainConfig) -> TrainConfig:
    """The settings of the same run without weight update correction."""
    output = config.run.output / _UNCORRECTED.replace(" ", "-")
    return config.with_settings(correction="none", output=output, resume="auto" if config.run.resume else False)


def _output(*, resume: bool) -> Path:
    """The directory of the next demo, or of the last one that is to be resumed."""
    numbers = [
        int(match.group(1)) for path in _RUNS.glob("demo-*") if (match := re.fullmatch(r"demo-(\d+)", path.name))
    ]
    last = max(numbers, default=0)
    return _RUNS / f"demo-{max(1, last) if resume else last + 1}"


if __name__ == "__main__":
    main()
