"""Files of a run's directory, and how to read them: settings, results, encoder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from trainer.encoder_config import EncoderConfig

RUN_FORMAT = 5
"""The format of a run's directory, which its config.json names."""
CONFIG_FILE = "config.json"
"""The settings; its existence claims the directory for a run."""
READING_FILE = "images.txt"
"""What the source of the images was read as."""
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
ENCODER_FILE = "encoder.safetensors"
COMPARISON_FILE = "comparison.json"
PLOT_FILE = "training.png"
"""The results exist only after a run has ended, not while it is running."""
RESULT_FILES = (SUMMARY_FILE, ENCODER_FILE, COMPARISON_FILE, PLOT_FILE)


def is_run(directory: Path) -> bool:
    """Whether a directory is a run's, also of another version or damaged; an export for timm has a config.json too."""
    try:
        content = json.loads((directory / CONFIG_FILE).read_bytes())
    except OSError:
        return False
    except ValueError:
        return True
    return not isinstance(content, dict) or "order_seed" in content or "format" in content


def read_settings(run: Path) -> dict[str, Any]:
    """The settings in the run's config.json, those that identify its rows among them.

    Raises:
        ValueError: the directory holds no run, or one of another version, or config.json is damaged.
    """
    path = run / CONFIG_FILE
    damaged = f"{path} is not a run's config.json: restore it, or give the --output of a run"
    try:
        settings: dict[str, Any] = {**json.loads(path.read_text())}
    except OSError as error:
        raise ValueError(f"{run} holds no run ({error.strerror}): give the --output of one") from None
    except (ValueError, TypeError):
        raise ValueError(damaged) from None
    if settings.get("format") != RUN_FORMAT:
        raise ValueError(
            f"{run} is a run of another version of this program: finish and evaluate it with that version (0.2 or "
            "older if it names no format), or begin another run"
        )
    if not all(isinstance(settings.get(name), int) for name in ("order_seed", "seed", "dim")):
        raise ValueError(damaged)
    return settings


def read_summary(run: Path) -> dict[str, Any]:
    """The results of a run that has ended; empty for any other. Raises ValueError for a damaged file."""
    path = run / SUMMARY_FILE
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        raise ValueError(
            f"{path} is not a run's summary.json: remove it, or resume the run to write it again"
        ) from None


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl one by one, in order; a last line that a crash cut off is ignored.

    Raises:
        ValueError: the file is missing, or a line is not a JSON object.
    """
    try:
        lines = path.open()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}): give a run's metrics.jsonl") from error
    with lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                if next(lines, None) is None:
                    return
                raise ValueError(f"{path}, line {number} is not JSON: {error.msg}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number} is not a record: give a run's metrics.jsonl")
            yield record


def read_encoder(run: Path, checkpoint: str = "") -> tuple[nn.Module, EncoderConfig]:
    """The run's encoder at its end or at the checkpoint step-…, in eval mode on the CPU.

    Raises:
        ValueError: the run has no such encoder, or its file is damaged.
    """
    from trainer.model import encoder_from_tensors, load_encoder
    from trainer.run.checkpoint_file import checkpoint_name, encoder_tensors, saved_steps

    if not checkpoint:
        if not (run / ENCODER_FILE).exists() and (steps := saved_steps(run / "checkpoints")):
            newest = checkpoint_name(steps[-1])
            raise ValueError(f"{run} has not ended and has no {ENCODER_FILE}: give --checkpoint {newest}")
        return load_encoder(run / ENCODER_FILE)
    options = read_settings(run).get("encoder")
    return encoder_from_tensors(
        encoder_tensors(run / "checkpoints", checkpoint), options, run / "checkpoints" / checkpoint
    )


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    named: dict[str, Any] = {}
    for name, value in settings.items():
        named |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return named


def number(value: Any) -> str:
    """A setting or result as a table shows it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
