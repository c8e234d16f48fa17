"""Tables that compare with other methods, at equal encoder, images, augmentation and images seen."""

from __future__ import annotations

import math
from typing import Any

from scipy.special import entr

from experiments.baselines.methods import DIET_LABEL_SMOOTHING
from experiments.cells import PIXELS, Cell, Claim, Table
from experiments.tables.common import (
    BASE,
    EPOCH_ORDER,
    IMAGES,
    ONE_PERCENT,
    TEN_PERCENT,
    WINDOW,
    in_windows,
    papers,
)

_WEIGHT_DECAYS = {"": None, ", λ = 0.0001": 1e-4, ", λ = 0.01": 1e-2}
"""What is added to the name of a baseline, to its weight decay: PIC's, a weaker and a stronger one."""
_CONTRASTIVE = {"SimCLR": "simclr", "MoCo v2": "mocov2"}
"""Baselines that are run with the stronger one too."""


def _other(row: str, method: str, views: int, epochs: float, **settings: Any) -> Cell:
    """A baseline, with so many views of each image in an epoch; it visits images in epoch order."""
    return Cell(row=row, method=method, settings=BASE | EPOCH_ORDER | {"epochs": epochs, "views": views} | settings)


def _decays(method: str) -> list[tuple[str, dict[str, Any]]]:
    """What is added to a baseline's name, and its settings."""
    return [
        (added, {} if decay is None else {"weight_decay": decay})
        for added, decay in _WEIGHT_DECAYS.items()
        if method in _CONTRASTIVE.values() or decay != 1e-2
    ]


def _in_words(added: str) -> str:
    return added.replace(",", " with")


def _views(row: str, views: int, epochs: float) -> Cell:
    return Cell(row=row, settings=BASE | WINDOW | {"epochs": epochs, "views": views})


_CLOSE = (
    "Tried: both lengths, and three weight decays of the baselines. This small encoder "
    "learns little more from labels in the linear probe (see the methods): there is less room for a difference than on "
    "ImageNet."
)
VIEWS = Table(
    name="views",
    title="Views and epochs",
    source="Table 5",
    text=(
        "Views of an image in a step × epochs; an epoch stands for five of the paper's. Equal numbers of views are "
        "equal numbers of images seen by the encoder. The baselines are also shown with other weight decays."
    ),
    cells=(
        *(
            _other(f"{row}, 2 × 20{added}", method, 2, 20.0, **decay)
            for row, method in _CONTRASTIVE.items()
            for added, decay in _decays(method)
        ),
        _views("PIC, 2 × 20", 2, 20.0),
        in_windows("PIC, 1 × 40"),
        _other("SimCLR, 2 × 40", "simclr", 2, 40.0),
        _other("MoCo v2, 2 × 40", "mocov2", 2, 40.0),
        _views("PIC, 2 × 40", 2, 40.0),
        in_windows("PIC, 1 × 80", epochs=80.0),
    ),
    paper=papers(
        {
            "SimCLR, 2 × 20": 64.7,
            "MoCo v2, 2 × 20": 64.1,
            "PIC, 2 × 20": 65.0,
            "PIC, 1 × 40": 67.3,
            "SimCLR, 2 × 40": 66.6,
            "MoCo v2, 2 × 40": 67.5,
            "PIC, 2 × 40": 67.6,
            "PIC, 1 × 80": 69.0,
        }
    ),
    claims=(
        *(
            Claim(
                text=f"PIC with one view for {2 * epochs} epochs is at least as good as {other} with two for {epochs}",
                weights={f"PIC, 1 × {2 * epochs}": 1, f"{other}, 2 × {epochs}": -1},
                not_below=True,
            )
            for epochs in (20, 40)
            for other in _CONTRASTIVE
        ),
        *(
            Claim(
                text=f"PIC with one view is better than {other} with two for {epochs} epochs",
                weights={f"PIC, 1 × {2 * epochs}": 1, f"{other}, 2 × {epochs}": -1},
                tried=_CLOSE,
            )
            for epochs in (20, 40)
            for other in (*_CONTRASTIVE, "PIC")
        ),
    ),
)

_BASELINES = (
    ("memory bank", "memory-bank", 1),
    ("DIET", "diet", 1),
    ("SimCLR", "simclr", 2),
    ("MoCo v2", "mocov2", 2),
    ("supervised", "supervised", 1),
)
_SMOOTHED = DIET_LABEL_SMOOTHING / IMAGES
"""The probability of each other image in DIET's targets."""
_DIET_FLOOR = entr(1 - DIET_LABEL_SMOOTHING + _SMOOTHED) + (IMAGES - 1) * entr(_SMOOTHED)
"""The smallest loss: the entropy of the targets."""
_DIET = "DIET, η = 1, λ = 0.0001"
METHODS = Table(
    name="methods",
    title="Methods",
    source="Table 6",
    text=(
        "At 40 epochs of one view or 20 of two. The paper compares runs of different lengths on ImageNet; its "
        "supervised number is that of its section 5. All methods have PIC's augmentation, encoder, learning rate and "
        "SGD (DIET's authors use AdamW), the memory bank its head. They are tuned less than PIC: of the baselines only "
        "the weight decay was varied, and DIET's learning rate (0.1, 1 and 10), while PIC's weight decay is the best "
        "of four by the same test images. A run of two views has half as many updates, of twice as many views. At "
        "PIC's learning rate, 0.1, DIET learns little, and nothing with PIC's weight decay; at ten times that rate it "
        f"learns more, at a hundred times nothing. Label smoothing of {DIET_LABEL_SMOOTHING:g} keeps its loss above "
        f"{_DIET_FLOOR:.2f}; chance is "
        f"{math.log(IMAGES):.2f}."
    ),
    cells=(
        Cell(row="raw pixels", method=PIXELS, settings=BASE | EPOCH_ORDER),
        Cell(row="untrained encoder", method="untrained", settings=BASE | EPOCH_ORDER),
        *(
            _other(f"{row}{added}", method, views, 40.0 / views, **decay)
            for row, method, views in _BASELINES
            for added, decay in _decays(method)
        ),
        _other(_DIET, "diet", 1, 40.0, learning_rate=1.0, weight_decay=1e-4),
        in_windows("PIC"),
    ),
    paper=papers({"memory bank": 54.0, "SimCLR": 69.3, "MoCo v2": 71.1, "PIC": 70.8, "supervised": 77.1}),
    claims=(
        *(
            Claim(
                text=f"PIC is better than a memory bank{_in_words(added)}",
                weights={"PIC": 1, f"memory bank{added}": -1},
            )
            for added, _ in _decays("memory-bank")
        ),
        Claim(text="PIC is better than DIET at the better of two learning rates", weights={"PIC": 1, _DIET: -1}),
        Claim(text="PIC is better than an untrained encoder", weights={"PIC": 1, "untrained encoder": -1}),
        Claim(text="training on the labels is better than PIC", weights={"supervised": 1, "PIC": -1}),
    ),
)

_FEW = (ONE_PERCENT, TEN_PERCENT)
_MEASURES = {f"{evaluation.name}.top1": evaluation.name.replace("labels-", "") + " % labels" for evaluation in _FEW}


def _few(cell: Cell) -> Cell:
    return Cell(row=cell.row, method=cell.method, settings=cell.settings, evaluations=_FEW)


def _papers_few(one: float, ten: float) -> dict[str, float]:
    return dict(zip(_MEASURES, (one, ten), strict=True))


SEMI_SUPERVISED = Table(
    name="semi_supervised",
    title="Fine-tuned on few labels",
    source="Table 7",
    text=(
        "The encoders of the methods, fine-tuned on 1 % and 10 % of the labels of all 60,000 images, the same in every "
        "run. Supervised: the encoder had the labels of its 10,000 images before. Ours are top-1 of ten classes, the "
        "paper's of a thousand, probably top-5, which the paper does not say."
    ),
    cells=(*(_few(cell) for cell in METHODS.cells if cell.row in ("memory bank", "SimCLR", "PIC", "supervised")),),
    measures=_MEASURES,
    draws=len(_MEASURES),
    paper={
        "memory bank": _papers_few(39.2, 77.4),
        "SimCLR": _papers_few(75.5, 87.8),
        "PIC": _papers_few(77.1, 88.7),
    },
    claims=tuple(
        Claim(
            text=f"PIC is better than {other} with {heading}",
            weights={"PIC": 1, other: -1},
            measure=measure,
        )
        for measure, heading in _MEASURES.items()
        for other in ("SimCLR", "memory bank")
    ),
)
