"""Options of every evaluation: what is evaluated, on which images and where. Importing them loads no library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainer.settings import Settings, check_at_least, flag
from weightserver.common.logs import LogFormat

_KINDS = ("run", "encoder", "pixels")


@dataclass(frozen=True, kw_only=True)
class EncoderOptions(Settings):
    """What to evaluate: exactly one of --run, --encoder and --pixels."""

    run: Path | None = None
    """Directory of a run: its encoder at the end, or that of its newest checkpoint while it trains."""
    checkpoint: str | None = None
    """With --run: step-…, the checkpoint to evaluate instead."""
    encoder: Path | None = None
    """Encoder file that the trainer or 'pic export import' wrote, or an exported file or directory."""
    pixels: bool = False
    """Raw pixels, for comparison."""

    def check(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind)]
        if len(given) != 1:
            found = " and ".join(map(flag, given)) or "none"
            raise ValueError(f"give exactly one of {', '.join(map(flag, _KINDS))}, got {found}")
        if self.checkpoint is not None and self.run is None:
            raise ValueError("--checkpoint is for --run: omit it, or give --run")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Settings):
    """The images, the device, and the name of the result."""

    dataset: str | None = None
    """Labelled images: fashion-mnist, cifar-10, idx, folder or packed. Default: the run's, or fashion-mnist."""
    data_dir: Path | None = None
    """Folder of the images. Default: the run's."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto uses a GPU if there is one. Under torchrun each rank takes its own."""
    bfloat16: bool = False
    """Whether the encoder computes in bfloat16 (autocast)."""
    decode_threads: int | None = None
    """Threads of each rank that decode images. Default: the rank's share of the cores."""
    name: str | None = None
    """Name of the result, NAME.json. Default: the protocol's, followed by --checkpoint if given."""
    log_format: LogFormat = "text"
    """Format of the log."""
    output: Path | None = None
    """Folder of the result. Default: evaluation/ in the run's directory, or beside the encoder's file."""

    def check(self) -> None:
        check_at_least(self, 1, "decode_threads")
        if self.name is not None and not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ValueError(f"--name {self.name!r} is not a file's name: give letters and digits")
