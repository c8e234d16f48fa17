"""CIFAR-10 with ResNet-18 on a GPU, in pieces of minutes: `python -m experiments gpu`."""

from __future__ import annotations

from typing import Any

from experiments.cells import KNN, LINEAR, PIC, Cell, Table

_IMAGES = 50_000
_ROW_RATE = 0.307
_BASE: dict[str, Any] = {
    "epochs": 200.0,
    "batch_size": 512,
    "learning_rate": 0.1,
    "warmup_fraction": 0.025,
    "weight_decay": 5e-4,
    "encoder": {"width": 64},  # with the preset's blocks ResNet-18, for 32 px
    "precision": "bfloat16",
    "log_every": 100,
    "init_std": 0.02246,
    "num_negatives": 2_560,
    "window_size": 5_120,
    "window_stride": 640,
}


def _cell(name: str, method: str = PIC, **changes: Any) -> Cell:
    settings = _BASE | changes  # other methods have no rows, and make nothing of those of rows
    settings["row_learning_rate"] = _ROW_RATE / settings["learning_rate"]  # theirs does not depend on the encoder's
    return Cell(name=name, method=method, preset="cifar-10", settings=settings)


GPU = Table(
    name="cifar_gpu",
    title="CIFAR-10 on a GPU: ResNet-18, 200 epochs",
    text="`python -m experiments gpu` runs the next of them on a machine with a GPU, one seed each, all 50,000 images, "
    "bfloat16. Solo-learn's table for ResNet-18 at 1,000 epochs has 90.7 for SimCLR, 92.9 for MoCo v2+ and 93.1 for "
    "MoCo v3 (online linear), with two views an image; one view of PIC at 200 epochs sees a tenth of their views. "
    "The aim is 90.7 at 200 epochs. SimCLR sees as many views as PIC, ten million: two of each image in half as many "
    "steps. Neither comes near the aim with them, and one seed each tells nothing of a point's difference. The probes "
    "choose λ and k on 5,000 training images. Images were JPEG copies (quality about 75).",
    cells=(
        _cell("K = 0.05 N, window"),
        _cell("η = 0.03", learning_rate=0.03),
        _cell("SimCLR", "simclr", learning_rate=0.5, weight_decay=1e-4),
        _cell("BatchNorm of embeddings", embedding_norm="batch"),
        _cell("without correction", correction="none"),
        _cell("epoch order", window_size=_IMAGES, window_stride=_IMAGES),
        _cell("K = B", num_negatives=512),
        _cell("K = N", num_negatives=_IMAGES),
    ),
    measures={LINEAR: "linear", KNN: "kNN"},
)
