"""What a run's directory holds, for those who come after the run: settings, results, encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from trainer.model import EncoderConfig, encoder_from_tensors, load_encoder
from trainer.run.checkpoint import encoder_tensors, saved_steps

ENCODER_FILE = "encoder.safetensors"
SUMMARY_FILE = "summary.json"
"""These two are there where a run has ended, and not while it goes on."""


def read_config(run: Path) -> dict[str, Any]:
    """The run's settings; ValueError, in one line, where there are none."""
    path = run / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        for name in ("order_seed", "seed", "dim"):
            int(config[name])
    except OSError as error:
        raise ValueError(f"{run} holds no run ({error.strerror}): give the --output of one") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no run's config.json: give the --output of a run") from None
    return config


def read_summary(run: Path) -> dict[str, Any]:
    """What the run ended with; empty where it has not ended. ValueError, in one line, for a broken file."""
    path = run / SUMMARY_FILE
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        raise ValueError(f"{path} is no run's summary.json: remove it, or resume the run to write it again") from None


def read_encoder(run: Path, checkpoint: str = "") -> tuple[nn.Module, EncoderConfig]:
    """The run's encoder, in eval mode on the CPU: that of its end, or of the checkpoint named step-….

    Raises ValueError, in one line, where there is none, or its file is damaged.
    """
    if not checkpoint:
        if not (run / ENCODER_FILE).exists() and (steps := saved_steps(run / "checkpoints")):
            raise ValueError(f"{run} has not ended and has no {ENCODER_FILE}: give --checkpoint step-{steps[-1]:012d}")
        return load_encoder(run / ENCODER_FILE)
    options = read_config(run).get("encoder")
    return encoder_from_tensors(
        encoder_tensors(run / "checkpoints", checkpoint), options, run / "checkpoints" / checkpoint
    )


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    named: dict[str, Any] = {}
    for name, value in settings.items():
        named |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return named


def number(value: Any) -> str:
    """A setting or result as a table shows it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
