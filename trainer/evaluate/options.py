"""Options of every evaluation: what is evaluated, on which images and where. Importing them loads no library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainer.settings import Settings, check_at_least, flag
from weightserver.common.logs import LogFormat

_KINDS = ("run", "encoder", "model", "pixels")
_NEEDS = {
    "checkpoint": "run",
    "image_size": "model",
    "in_channels": "model",
    "encoder_seed": "model",
}
"""Options that need another one."""


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(Settings):
    """What to evaluate: exactly one of --run, --encoder, --model and --pixels."""

    run: Path | None = None
    """Directory of a run: its encoder at the end, or that of its newest checkpoint while it trains."""
    checkpoint: str | None = None
    """With --run: step-…, the checkpoint to evaluate instead."""
    encoder: Path | None = None
    """Encoder file that the trainer or 'pic export import' wrote, or an exported file or directory."""
    model: str | None = None
    """torchvision:NAME or timm:NAME, with random weights, for comparison."""
    image_size: int | None = None
    """With --model: side of its images, in pixels; 224 if omitted."""
    in_channels: int | None = None
    """With --model: 1 for grey images, 3 for colour; 3 if omitted."""
    encoder_seed: int | None = None
    """With --model: seed of its weights; 0 if omitted."""
    pixels: bool = False
    """Raw pixels, for comparison."""

    def check(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind)]
        if len(given) != 1:
            found = " and ".join(map(flag, given)) or "none"
            raise ValueError(f"give exactly one of {', '.join(map(flag, _KINDS))}, got {found}")
        for name, needed in _NEEDS.items():
            if getattr(self, name) is not None and not getattr(self, needed):
                raise ValueError(f"{flag(name)} is for {flag(needed)}: omit it, or give {flag(needed)}")
        check_at_least(self, 1, "image_size")
        check_at_least(self, 0, "encoder_seed")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Settings):
    """The images, the device, and the name of the result."""

    dataset: str | None = None
    """Labelled images: fashion-mnist, idx, folder or packed. Default: the run's, or fashion-mnist."""
    data_dir: Path | None = None
    """Folder of the images. Default: the run's."""
    background: str | None = None
    """What transparent pixels show: a colour, or none for the colours that they hide. Default: as in the run, or
    white."""
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
