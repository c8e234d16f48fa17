"""Trains an encoder.

    pic train FOLDER                                           # your own images; chooses all settings
    pic train fashion-mnist                                    # starts its own weight servers
    pic train fashion-mnist --rows dense --epochs 5            # all rows in this process
    pic train fashion-mnist --epochs 9 --print-config > a.toml # writes the settings
    pic train --config a.toml --seed 1                         # reads them
    torchrun -m trainer FOLDER --output runs/a                 # on several GPUs

`python -m trainer` is the same as `pic train`. `pic train fashion-mnist --help-all` lists every setting.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer.display import shown, stage
from trainer.loading import loading_libraries
from trainer.report.__main__ import main as report

if TYPE_CHECKING:
    from trainer.config import TrainConfig


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line. Exit status 0; 2 for invalid arguments; otherwise as `exit_on_error`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["report"]:
        report(arguments[1:])
    with loading_libraries("trainer"):
        from trainer.stopping import exit_on_error
        from weightserver.common.logs import asked_format, log_events
        from weightserver.common.malloc import keep_large_buffers
    keep_large_buffers()
    log_events(asked_format(arguments))  # for errors of the settings
    with exit_on_error("trainer"):
        config = _settings(arguments)
        with shown(), stage("loading libraries"):
            from trainer.loop import train
            from trainer.results import finish
        log_events(config.report.log_format, lambda: {"run": config.run.name, "rank": int(os.environ.get("RANK", "0"))})
        finish(train(config))
    sys.exit(0)


def _settings(arguments: list[str]) -> TrainConfig:
    """The settings of a command line. Ends the process for --help, --print-config or an error."""
    from trainer.config_file import parse_with_file, to_toml
    from trainer.data.config import DECODED, SIZES
    from trainer.presets import PRESETS
    from trainer.proportions import proportions

    if arguments and not arguments[0].startswith("-") and arguments[0] not in PRESETS and _names_images(arguments[0]):
        has_file = any(argument.partition("=")[0] == "--config" for argument in arguments)  # which names the preset
        arguments = [*([] if has_file else ["images"]), "--data-dir", *arguments]
    only_prints = "--print-config" in arguments
    command = parse_with_file([argument for argument in arguments if argument != "--print-config"])
    if command.preset == "images":
        with shown(), stage("loading libraries"):  # torch, which takes seconds
            from trainer.own_images import images_config
        config = images_config(command, choose_only=only_prints)
    else:
        config = command.config()
    if only_prints:
        config.check()
        num_images = config.data.num_images or SIZES.get(config.data.dataset)
        kept = config.with_settings(num_images=None) if config.data.dataset in DECODED else config  # which run whole
        sys.stdout.write(to_toml(kept, command.preset or "fashion-mnist"))
        if num_images and config.sampling.labels is None:  # how many classes they share only the images tell
            sys.stdout.writelines(f"# {line}\n" for line in proportions(config, num_images).lines())
        sys.exit(0)
    return config


def _names_images(text: str) -> bool:
    """Whether a first argument is a place of images: what is on a disk, numbered archives, or a URL."""
    from trainer.data.bucket_sources import numbered

    return "://" in text or Path(text).exists() or bool(numbered(Path(text)))


if __name__ == "__main__":
    main()
