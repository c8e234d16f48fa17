"""Logs a run's records to Weights & Biases; needs the extra `wandb`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.config import TrainConfig
from weightserver.common.atomic_files import atomic_write


@contextmanager
def weights_and_biases(config: TrainConfig, project: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that logs a record; a resumed run continues its log. WANDB_MODE=offline keeps all in --output.

    Raises:
        ValueError: wandb cannot start: no API key, no network.
    """
    import wandb  # whether it is installed was checked with the settings

    known = config.run.output / "wandb-id"
    if not known.exists():
        atomic_write(known, lambda path: path.write_text(secrets.token_hex(8) + "\n"))
    try:
        run = wandb.init(
            project=project,
            name=config.run.name,
            id=known.read_text().strip(),
            resume="allow",
            dir=config.run.output,
            config=json.loads(config.to_json()),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise ValueError(f"--wandb-project {project} cannot be used: {' '.join(str(error).split())}") from None
    run.define_metric("*", step_metric="step")  # a resumed run repeats steps after its checkpoint
    with run:
        yield run.log
