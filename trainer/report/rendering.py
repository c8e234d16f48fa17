"""Renders a run's report as one self-contained HTML page.

It shows the curves of training.png, results and settings, and for a dozen training images their nearest neighbours by
cosine of the features. For a run that has not ended it shows what is available, with the encoder of the newest
checkpoint. The page loads nothing from elsewhere; its content security policy forbids it.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from trainer.evaluate.encoders import newest_encoder
from trainer.loss import LossConfig
from trainer.proportions import MEANINGS
from trainer.report.inspection import Inspection, inspect_encoder
from trainer.run.checkpoint_file import saved_steps
from trainer.run.directory import (
    ENCODER_FILE,
    METRICS_FILE,
    PLOT_FILE,
    flat,
    number,
    read_metrics,
    read_settings,
    read_summary,
)
from trainer.run.plot import draw_training
from trainer.run.result_names import in_words
from trainer.run.resume import run_settings
from trainer.run_dataset import dataset_of
from trainer.settings import settings_of

_TEMPLATES = Environment(
    loader=PackageLoader("trainer.report", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render_report(run: Path, *, data_dir: Path | None = None, bank: int = 10_000) -> str:
    """The report as HTML; neighbours are searched among `bank` training images, spread evenly.

    Raises:
        ValueError: no run, one without a single record, or a broken file.
    """
    config, summary = read_settings(run), read_summary(run)
    last, accuracies = dict[str, Any](), list[float]()
    for record in read_metrics(run / METRICS_FILE):
        if "step" in record and "loss" in record:
            last = record
            accuracies += [record["knn_top1"]] if "knn_top1" in record else []
    if not last:
        raise ValueError(f"{run / 'metrics.jsonl'} has no records yet: wait for the run's first one")
    inspection, source, reason = _inspection(run, data_dir, bank)
    done = last["step"] + 1
    results = dict(summary) or {"steps": done, "loss": last["loss"]}
    if not summary and accuracies:
        results["knn_top1"] = accuracies[-1]
    return _TEMPLATES.get_template("report.html").render(
        name=run.resolve().name,
        state="finished" if summary else f"not finished, {done:,} steps so far",
        dataset=config.get("dataset", "?"),
        encoder=(config.get("encoder") or {}).get("name", "?"),
        curves=_curves(run, config),
        results=in_words(results),
        notes=summary.get("warnings", []),
        proportions={
            MEANINGS[name]: f"{value:.3g}"
            for name, value in summary.get("proportions", {}).items()
            if value is not None
        },
        settings={key: number(value) for key, value in flat(config).items() if value is not None},
        inspection=inspection,
        had_labels=config.get("labels") is not None,
        source=source,
        reason=reason,
    )


def _curves(run: Path, config: dict[str, Any]) -> str:
    """The run's training.png, or that of what there is of it, to embed in the page."""
    plot = run / PLOT_FILE
    content = (
        plot.read_bytes()
        if plot.exists()
        else draw_training(
            run / METRICS_FILE, chance_loss=settings_of(LossConfig, config).chance(config["num_negatives"])
        )
    )
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _inspection(run: Path, data_dir: Path | None, bank: int) -> tuple[Inspection | None, str, str]:
    """Neighbours, and the description of their encoder; or None and the reason."""
    if not (run / ENCODER_FILE).exists() and not saved_steps(run / "checkpoints"):
        return None, "", "the run has neither ended nor saved a checkpoint"
    (encoder, encoder_config), checkpoint = newest_encoder(run)
    source = "the encoder at the end of the run"
    if checkpoint:
        source = f"the encoder after {int(checkpoint.removeprefix('step-')):,} steps (the newest checkpoint)"
    try:
        images = dataset_of(run_settings(run), data_dir)
    except (ValueError, OSError, KeyError, IndexError) as error:
        return None, "", f"the training images are not available here ({error})"
    return inspect_encoder(encoder, encoder_config, images, bank=bank), source, ""
