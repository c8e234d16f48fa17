"""Settings of a run's directory: how it starts, its checkpoints, and what it reports."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trainer.settings import SettingError, Settings, check_at_least, check_not_negative, of_one_start, resumable
from weightserver.common.installing import install_advice
from weightserver.common.logs import LogFormat

Resume = bool | Literal["auto"]
_MOST_CHECKPOINTS = 900


def _resume(words: list[str]) -> Resume:
    if words not in ([], ["auto"]):
        raise ValueError(f"--resume stands alone or with 'auto', not with {' '.join(words)!r}")
    return "auto" if words else True


# A flag that an optional word may follow.
_RESUME_OPTION = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="[auto]",
    instance_from_str=_resume,
    is_instance=lambda value: value in (False, True, "auto"),
    str_from_instance=lambda value: [str(value)],
)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """The run's directory, its checkpoints, and how it is resumed."""

    output: Path = resumable(Path("runs/fashion-mnist"))
    """Directory of the run: config.json, metrics.jsonl, summary.json, training.png, tensorboard/,
    encoder.safetensors."""
    resume: Annotated[Resume, _RESUME_OPTION] = of_one_start(False)
    """Resume the run in --output from its newest checkpoint, as if it had never stopped, with all settings that are not
    given; --epochs and --steps may be higher. auto: resume if --output holds a run, otherwise start a new one."""
    resume_step: int | None = of_one_start(None)
    """With --resume: resume from the checkpoint of this step instead of the newest. Files of later steps are moved to
    checkpoints/set-aside-…; later updates and checkpoints of the rows are discarded."""
    extend: bool = of_one_start(False)
    """With --resume: include images that 'pack --extend' has added since. --epochs then counts visits to every image,
    and from now on the learning rates are those of the longer run."""
    checkpoint_every: int = resumable(1_000)
    """Steps between checkpoints. 0: only at step 0 and when the run ends or SIGTERM or SIGINT stops it. A run with
    --rows dense saves no checkpoints."""
    keep_checkpoints: int = resumable(3)
    """Number of newest checkpoints to keep, at most 900."""

    @property
    def name(self) -> str:
        """The name of the run's directory, also if --output is . or ends in ..; servers, logs and metrics show it."""
        return Path(os.path.abspath(self.output)).name

    def check(self) -> None:
        if self.extend and not self.resume:
            raise SettingError("--extend adds images to a run that is resumed: give --resume too, or omit it", "extend")
        if self.resume_step is not None and not self.resume:
            raise SettingError(
                "--resume-step is for a run that is resumed: give --resume too, or omit it", "resume_step"
            )
        check_at_least(self, 0, "checkpoint_every")
        if not 1 <= self.keep_checkpoints <= _MOST_CHECKPOINTS:
            raise SettingError(
                f"--keep-checkpoints must lie in 1..{_MOST_CHECKPOINTS}, got {self.keep_checkpoints}: the weight "
                "servers retain at most 1,000, those of backups included",
                "keep_checkpoints",
            )


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Settings):
    """Records, logs, metrics and evaluations."""

    log_every: int = resumable(10)
    """Steps between records in metrics.jsonl."""
    knn_every: float = resumable(0.0)
    """Epochs between kNN evaluations, of each of 10,000 training images, balanced over classes, among the others; 0 for
    none."""
    wandb_project: str | None = resumable(None)
    """Weights & Biases project to log the run to as well (needs the extra wandb)."""
    log_format: LogFormat = resumable("text")
    """Format of the events logged to stderr, one per line."""
    metrics_port: int | None = resumable(None)
    """Port of the Prometheus metrics of the first rank on each machine; each further rank uses the next port. 0 chooses
    free ports, None serves no metrics."""
    metrics_host: str = resumable("127.0.0.1")
    """Address to serve the metrics on; they reveal no secrets and need no token."""
    evaluate: bool = resumable(True)
    """Whether to evaluate by kNN and linear probe at the end."""

    def check(self) -> None:
        check_at_least(self, 1, "log_every")
        if self.wandb_project is not None and find_spec("wandb") is None:
            raise SettingError(f"--wandb-project needs the package wandb: {install_advice('wandb')}", "wandb_project")
        check_not_negative(self, "knn_every")
        last_port = 2**16 - int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # each rank has its own
        if self.metrics_port is not None and not 0 <= self.metrics_port <= last_port:
            raise SettingError(f"--metrics-port must lie in 0..{last_port}, got {self.metrics_port}", "metrics_port")
