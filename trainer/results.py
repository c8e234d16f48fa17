"""The end of a run: its results, whether it was worth it, what was written, and what to do next."""

from __future__ import annotations

import json
import logging
import math
import shlex
import signal
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.classes import classes_of
from trainer.command_line import pic
from trainer.config import TrainConfig
from trainer.coverage import coverage_warnings
from trainer.data import Dataset
from trainer.display import shown, stage
from trainer.evaluate.features import PIXELS_SIDE, FeatureSet, encoder_features, pixel_features, untrained_encoder
from trainer.evaluate.protocol import ProbeResult, split_tests, with_held_out
from trainer.evaluate.table import TITLES, Results, evaluate_features, print_table
from trainer.model import PICModel, save_encoder
from trainer.proportions import proportions
from trainer.run.directory import (
    COMPARISON_FILE,
    ENCODER_FILE,
    METRICS_FILE,
    PLOT_FILE,
    SUMMARY_FILE,
    read_metrics,
    read_summary,
)
from trainer.run.plot import draw_training
from trainer.run.totals import Totals
from trainer.stopping import Interrupted
from weightserver.common.atomic_files import atomic_write
from weightserver.common.interrupts import interruption
from weightserver.common.logs import Remark, say

_log = logging.getLogger(__name__)

_AT_CHANCE = 0.02
"""A loss that is less than this below chance, in nats, is that of guessing."""
_TRAINED, _UNTRAINED, _PIXELS = "trained encoder", "untrained encoder", "raw pixels"
_MOST_PIXELS = 50_000_000
"""Numbers in the training images of which raw pixels are compared: a probe of more takes minutes."""
_MOST_UNTRAINED = 100_000
"""Training images of which the untrained encoder is compared."""


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run: the contents of its summary.json and encoder.safetensors, and more."""

    config: TrainConfig
    dataset: Dataset
    model: PICModel
    summary: dict[str, Any] = field(default_factory=dict)
    """Empty on ranks other than 0."""
    results: dict[str, ProbeResult] = field(default_factory=dict)
    """Protocol to result; empty without --evaluate, on ranks other than 0, and for a run that had ended before."""
    is_first: bool = True
    """Whether this is rank 0, which prints the results."""


def write_results(config: TrainConfig, dataset: Dataset, model: PICModel, totals: Totals) -> TrainResult:
    """Evaluates the encoder of a run that has ended and writes its results; keeps those that it has."""
    output, summary = config.run.output, read_summary(config.run.output)
    if summary and (not config.report.evaluate or "knn_top1" in summary):  # nothing was trained since
        _log.info("the run had ended before", extra={"steps": summary["steps"]})
        return TrainResult(config, dataset, model, summary)
    started = time.perf_counter()
    metadata = config.data.metadata(knows_labels=config.sampling.labels is not None)
    save_encoder(model.encoder, config.model.encoder, output / ENCODER_FILE, metadata)
    results: dict[str, ProbeResult] = {}
    if config.report.evaluate:
        with _results_can_wait(config):
            results = _evaluated(
                _TRAINED, lambda: encoder_features(model.encoder, _tested(dataset), config.model.encoder.pixels)
            )
        _write_comparison(output, {_TRAINED: results})
    num_images = len(dataset.train_images)
    num_steps = config.optimization.num_steps(num_images)
    losses = _losses(output)
    summary = {
        "steps": num_steps,
        "epochs": num_steps * config.optimization.batch_size / num_images,
        **({"loss": losses[-1], "mean_loss": _final_losses(losses)[0]} if losses else {}),
        **asdict(totals),
        **{f"{protocol}_top1": result.top1 for protocol, result in results.items()},
        "seconds": totals.train_seconds + time.perf_counter() - started,
        "proportions": asdict(
            proportions(config, len(dataset.train_images), classes_of(config.sampling, dataset).number)
        ),
    }
    result = TrainResult(config, dataset, model, summary, results)
    summary["warnings"] = [str(warning) for warning in warnings_of(result)]
    _write_json(output / SUMMARY_FILE, summary)
    return result


def finish(result: TrainResult, others: Mapping[str, Path] | None = None) -> None:
    """Compares the encoder with an untrained one and raw pixels, draws the training, and prints all of it on rank 0.

    `others` are the directories of further runs that have ended on the same images, by name: they are compared.
    """
    if not result.is_first:
        return
    config, summary, others = result.config, result.summary, others or {}
    output = config.run.output
    with shown(wanted=config.report.log_format == "text"), _results_can_wait(config):
        compared = _compared(result, others)
        tested = "test images" if len(result.dataset.evaluated.test_images) else "held-out images"
        with stage("drawing the training"):
            plot = draw_training(
                output / METRICS_FILE,
                chance_loss=config.loss.chance(config.rows.num_negatives),
                references={
                    f"{tested}: {name}": row["knn"].top1
                    for name, row in compared.items()
                    if "knn" in row and name not in others
                },
                others={name: other / METRICS_FILE for name, other in others.items()},
            )
            atomic_write(output / PLOT_FILE, lambda path: path.write_bytes(plot))
    if config.report.log_format != "text":  # every line is JSON then
        for warning in warnings_of(result):
            _log.warning("%(line)s", warning.fields())
        _log.info("training ended", extra=summary)
        return
    if compared:
        evaluated = result.dataset.evaluated
        held_out = f"{len(split_tests(evaluated.train_labels)[1]):,} training images, held out by class"
        print_table(compared, images="the test images" if len(evaluated.test_images) else held_out)
        if (whole := result.dataset.whole) is not None:
            num_images, num_labels = len(result.dataset.train_images), len(whole.train_images)
            how = "without labels" if config.sampling.labels is None else "with labels"
            print(f"Trained on {num_images:,} images {how}; both probes use all {num_labels:,} and their labels.")
        for name, most in _most_compared(evaluated).items():
            if name in compared and most < (every := len(evaluated.train_images)):
                print(f"{name.capitalize()}: of {most:,} of the {every:,} training images, to save minutes.")
        if verdict := _verdict({name: row for name, row in compared.items() if name not in others}):
            print(verdict)
    for name, other in others.items():
        print(_difference(name, other, output, compared))
    if summary.get("corrected_rows"):
        print(_gaps(summary))
    for warning in warnings_of(result):
        print(f"Note: {warning}")
    numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    print(" ".join(f"{name}={value if isinstance(value, int) else f'{value:g}'}" for name, value in numbers.items()))
    print(_written(config, summary))
    print("Next:", *next_commands(config), sep="\n  ")


@contextmanager
def _results_can_wait(config: TrainConfig) -> Iterator[None]:
    """Says how to make the results later if the user interrupts them."""
    run = shlex.quote(str(config.run.output))
    later = f"{pic()} train --resume --output {run}"
    if config.rows.rows == "dense":  # which cannot be resumed
        later = f"{pic()} evaluate knn --run {run}"
    try:
        yield
    except KeyboardInterrupt:
        message = interruption("after the training, which is complete and saved", f"its results come from {later}")
        raise Interrupted(signal.SIGINT, message) from None


def warnings_of(result: TrainResult) -> list[Remark]:
    """Reasons for which the results of a run may disappoint."""
    config, num_images = result.config, len(result.dataset.train_images)
    warnings = coverage_warnings(config, num_images)
    (last, before), chance = _final_losses(_losses(config.run.output)), config.loss.chance(config.rows.num_negatives)
    if last > chance - _AT_CHANCE:
        more = "--epochs" if config.optimization.steps is None else "--steps"
        advice = f"Try more {more}, a smaller --num-negatives or another --learning-rate"
        if before - last > _AT_CHANCE:
            advice = f"It was still falling: more {more} may be all that it needs"
        at = "which is chance" if last < chance + _AT_CHANCE else "which is above chance"
        line = (
            f"the loss ended at {last:.2f}, {at} ({chance:.2f}): in the end the encoder did not tell its images apart. "
            f"{advice}"
        )
        warnings.append(Remark(line, loss=last, chance=chance))
    return warnings


def _losses(output: Path) -> array[float]:
    """The losses of a run's records."""
    return array("d", (record["loss"] for record in read_metrics(output / METRICS_FILE) if "loss" in record))


def _final_losses(losses: Sequence[float]) -> tuple[float, float]:
    """The mean losses of the last tenth of a run's records, and of the two tenths before; NaN without any."""
    tenth = max(1, len(losses) // 10)
    last, before = losses[-tenth:], losses[-3 * tenth : -tenth]
    return statistics.fmean(last or [math.nan]), statistics.fmean(before or [math.nan])


def next_commands(config: TrainConfig) -> list[str]:
    """At most three commands that make sense after a run, to paste into a shell."""
    run = shlex.quote(str(config.run.output))
    length = (
        f"--epochs {2 * config.optimization.epochs:g}"
        if config.optimization.steps is None
        else f"--steps {2 * config.optimization.steps}"
    )
    encoder = config.model.encoder.name
    library = "timm" if encoder == "small" or encoder.startswith("timm:") else "torchvision"
    possible = {
        f"report {run}": True,
        f"train --resume --output {run} {length}": config.rows.rows != "dense",
        f"export encoder {run} --format {library} --output {run}/exported": encoder != "none"
        and not (config.run.output / "exported").exists(),
        f"evaluate knn --run {run}": config.report.evaluate and encoder != "none",
    }
    return [f"{pic()} {command}" for command, makes_sense in possible.items() if makes_sense][:3]


def _written(config: TrainConfig, summary: dict[str, Any]) -> str:
    parts = f" in {summary['parts']} parts" if summary.get("parts", 1) > 1 else ""
    kept = "" if config.rows.rows == "dense" else ", checkpoints/ (to resume it)"
    output = config.run.output
    return (
        f"{summary['epochs']:g} epochs in {summary['train_seconds']:.0f} s{parts}. Plot: {output / PLOT_FILE}\n"
        f"Written to {output}: {ENCODER_FILE}, {SUMMARY_FILE} (results), {PLOT_FILE} (loss and accuracy), "
        f"{METRICS_FILE}{kept}"
    )


def _gaps(summary: dict[str, Any]) -> str:
    corrected, missed = summary["corrected_rows"], summary["missed_steps"]
    return (
        f"{corrected:,} rows were corrected when they came back, for gaps of {missed / corrected:,.0f} steps on "
        f"average and {summary['largest_gap']:,} at most."
    )


def _difference(name: str, other: Path, output: Path, compared: Results) -> str:
    """How another run's final loss and accuracy differ from those of the run in `output`."""
    (loss, _), (other_loss, _) = (_final_losses(_losses(run)) for run in (output, other))
    gains = (
        f"{TITLES[protocol]} {compared[_TRAINED][protocol].top1 - result.top1:+.1f} points"
        for protocol, result in compared.get(name, {}).items()
        if protocol in compared[_TRAINED]
    )
    text = ", ".join(gains)
    accuracy = f" (trained encoder over that: {text})" if text else ""
    return f"The loss ends at {loss:.2f}; {name} at {other_loss:.2f}{accuracy}."


def _verdict(compared: Results) -> str:
    """Whether training was worth it: the gain in kNN; empty without any."""
    known = {name: row["knn"].top1 for name, row in compared.items() if "knn" in row}
    if len(known) < 2 or _TRAINED not in known:
        return ""
    trained = known.pop(_TRAINED)
    gains = {name: trained - top1 for name, top1 in known.items()}
    text = " and ".join(f"{gain:+.1f} points over {name}" for name, gain in gains.items())
    best = all(gain > 0 for gain in gains.values())
    return f"kNN of the trained encoder: {text}." + ("" if best else " Training was not worth it yet.")


def _compared(result: TrainResult, others: Mapping[str, Path]) -> Results:
    """The results of the trained encoder, of those of other runs, of the one that training began with, and of raw
    pixels; empty without any. Those that were found before are read. Ctrl-C leaves out the references that are missing.
    """
    config, pixels = result.config, result.config.model.encoder.pixels
    if not config.report.evaluate:
        return {}
    most, tested = _most_compared(result.dataset.evaluated), cache(partial(_tested, result.dataset))
    features: dict[str, Callable[[], FeatureSet]] = {
        _TRAINED: lambda: encoder_features(result.model.encoder, tested(), pixels),
        _UNTRAINED: lambda: encoder_features(_untrained(result), _part(tested(), most[_UNTRAINED]), pixels),
        _PIXELS: lambda: pixel_features(_part(tested(), most[_PIXELS])),
    }
    known = _read_comparison(config.run.output) | ({_TRAINED: result.results} if result.results else {})
    known |= {name: _read_comparison(run).get(_TRAINED, {}) for name, run in others.items()}
    compared: Results = {}
    for name in (_TRAINED, *others, _UNTRAINED, _PIXELS):
        try:
            compared[name] = known[name] if name in known else _evaluated(name, features[name])
        except KeyboardInterrupt:
            if name == _TRAINED:
                raise
            say(Remark("interrupted: the comparison is left out from here on; --resume makes it", features=name))
            break
    _write_comparison(config.run.output, compared)
    return compared


def _most_compared(dataset: Dataset) -> dict[str, int]:
    """How many training images each reference is computed of, at most."""
    _, channels, _, width = dataset.train_images.shape
    side = min(dataset.evaluated_side or width, PIXELS_SIDE)
    return {_UNTRAINED: _MOST_UNTRAINED, _PIXELS: max(1000, _MOST_PIXELS // (channels * side**2))}


def _tested(dataset: Dataset) -> Dataset:
    """The images that the end of a run evaluates, some of the training images standing for missing test images: an
    encoder that learned without labels has seen them, but not their classes. A broken test image is an error.

    Raises:
        ValueError: as `Dataset.strict`.
    """
    evaluated = dataset.evaluated
    return evaluated.strict() if len(evaluated.test_images) or not evaluated.labelled else with_held_out(evaluated)


def _part(dataset: Dataset, most: int) -> Dataset:
    """Draws `most` training images at random, and keeps all test images; only these are decoded."""
    if len(dataset.train_images) <= most:
        return dataset
    chosen = torch.randperm(len(dataset.train_images), generator=torch.Generator().manual_seed(0))[:most].sort().values
    return replace(dataset, train_images=dataset.images(chosen), train_labels=dataset.train_labels[chosen])


def _untrained(result: TrainResult) -> nn.Module:
    """The encoder that training began with, on the device of the trained one."""
    config = result.config
    with stage(f"making the {_UNTRAINED}"):
        encoder = untrained_encoder(config.model.encoder, result.dataset.evaluated, config.sampling.seed)
        return encoder.to(next(result.model.parameters()).device)


def _read_comparison(output: Path) -> Results:
    path = output / COMPARISON_FILE
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {
        name: {protocol: ProbeResult(**found) for protocol, found in results.items()} for name, results in rows.items()
    }


def _write_comparison(output: Path, compared: Results) -> None:
    rows = {
        name: {protocol: asdict(found) for protocol, found in results.items()} for name, results in compared.items()
    }
    _write_json(output / COMPARISON_FILE, rows)


def _evaluated(name: str, features: Callable[[], FeatureSet]) -> dict[str, ProbeResult]:
    """The results of features, or a line that says why there are none: training is complete without them."""
    try:
        with stage(f"features of the {name}"):
            found = features()
    except (ValueError, OSError) as error:
        say(Remark(f"no results of the {name}: {error}", features=name, reason=str(error)), logging.WARNING)
        return {}
    return evaluate_features(found, name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    atomic_write(path, lambda partial: partial.write_text(text))
