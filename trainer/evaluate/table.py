"""The table that judges a trained encoder: beside the untrained one and raw pixels, by kNN and linear probe."""

from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table
from torch import nn

from trainer.data import Dataset
from trainer.evaluate.features import FeatureSet, encoder_features, pixel_features, untrained_encoder
from trainer.evaluate.knn import knn_top1
from trainer.evaluate.linear import linear_top1
from trainer.evaluate.protocol import ProbeResult
from trainer.model import EncoderConfig

PROTOCOLS: dict[str, Callable[[FeatureSet], ProbeResult]] = {"knn": knn_top1, "linear": linear_top1}

Results = dict[str, dict[str, ProbeResult]]
"""Row of the table, then protocol, to result."""


def compare(dataset: Dataset, encoder: nn.Module, config: EncoderConfig, seed: int) -> Results:
    """Evaluates `encoder`, the encoder that training with `seed` started from, and raw pixels, by every protocol.

    The untrained encoder's BatchNorm statistics are calibrated on training images, which makes it the stronger peer.
    """

    def feature_sets() -> Iterator[tuple[str, FeatureSet]]:  # one at a time, to save memory
        yield "trained encoder", encoder_features(encoder, dataset)
        yield "untrained encoder", encoder_features(untrained_encoder(config, dataset, seed), dataset)
        yield "raw pixels", pixel_features(dataset)

    return {
        name: {protocol: probe(features) for protocol, probe in PROTOCOLS.items()} for name, features in feature_sets()
    }


def print_table(results: Results, console: Console | None = None) -> None:
    """Prints top-1 on the test images, and the setting that held-out training images chose."""
    table = Table(title="Top-1 on the test images (%)")
    table.add_column("features")
    table.add_column("kNN", justify="right")
    table.add_column("k", justify="right", style="dim")
    table.add_column("linear probe", justify="right")
    table.add_column("λ", justify="right", style="dim")
    for name, row in results.items():
        knn, linear = row["knn"], row["linear"]
        table.add_row(name, f"{knn.top1:.2f}", f"{knn.setting:g}", f"{linear.top1:.2f}", f"{linear.setting:g}")
    (console or Console()).print(table)
