"""Trains a baseline: python -m experiments.baselines METHOD PRESET --OPTIONS."""

from __future__ import annotations

import sys

from experiments.baselines.training import METHODS, REFERENCES, train_baseline
from trainer.arguments import parse_config
from trainer.stopping import exit_on_error
from weightserver.common.logs import log_events, print_error


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 0, or exits with 2 for invalid arguments, otherwise as `exit_on_error` does."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] not in [*METHODS, *REFERENCES]:
        choices = ", ".join([*METHODS, *REFERENCES])
        print_error(f"baselines: give one of {choices}, a preset, and the options of 'python -m trainer'")
        return 2
    with exit_on_error("baselines"):
        config = parse_config(arguments[1:])
        log_events(config.report.log_format, lambda: {"run": config.run.output.name})
        summary = train_baseline(arguments[0], config, config.run.output)
    print(" ".join(f"{name}={value:g}" for name, value in summary.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
