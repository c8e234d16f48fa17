"""The appendix: the paper's tables on Fashion-MNIST, run before experiments/PLAN.md was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.baselines.methods import DIET_LABEL_SMOOTHING
from experiments.cells import KNN, LINEAR, PIXELS, Cell, Claim, Evaluation, Table
from trainer.optimization import OptimizationConfig
from trainer.rows_config import RowsConfig

IMAGES, ALL_IMAGES = 10_000, 60_000
BASE: dict[str, Any] = {"num_images": IMAGES, "epochs": 40.0, "weight_decay": 3e-3, "num_negatives": 512}
"""40 epochs for the paper's 200."""
EPOCH_ORDER: dict[str, Any] = {"window_size": IMAGES, "window_stride": IMAGES}
WINDOW: dict[str, Any] = {"window_size": 1_024, "window_stride": 128}
_LONGER_ROWS: dict[str, Any] = {"init_std": 10 * RowsConfig.init_std}
_TEN_TIMES = "rows begin ten times as long"
_AT_BATCH = {"num_negatives": OptimizationConfig.batch_size}


def _in_epoch_order(name: str, **settings: Any) -> Cell:
    return Cell(name=name, settings=BASE | EPOCH_ORDER | settings)


def _in_windows(name: str, **settings: Any) -> Cell:
    return Cell(name=name, settings=BASE | WINDOW | settings)


def _other(name: str, method: str, views: int, epochs: float, **settings: Any) -> Cell:
    """A baseline, with `views` views of each image in an epoch; it visits images in epoch order."""
    settings = BASE | EPOCH_ORDER | {"epochs": epochs, "views": views} | settings
    return Cell(name=name, method=method, settings=settings)


def _papers(numbers: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The paper's linear evaluation, top-1, by cell's name."""
    return {name: {LINEAR: number} for name, number in numbers.items()}


# ---- Table 1

_ALL, _POOLED, _LONGER = "all three", "features of one position", "80 epochs"
_POOL: dict[str, Any] = {"encoder": {"pool_size": 1}}
COMPONENTS = Table(
    name="components",
    title="Components",
    source="Table 1",
    text="Without one component each: an inner product instead of the cosine, a linear head instead of two layers, no "
    "jitter and grey (images of one channel have no colour, so this is brightness and contrast). The preset's features "
    "are averages over 3 × 3 parts of the image; those of one position, as ResNet-50's, over the whole of it.",
    cells=(
        _in_epoch_order(_ALL),
        _in_epoch_order("without cosine softmax", softmax="plain"),
        _in_epoch_order("without two-layer head", head_layers=1),
        _in_epoch_order("without strong augmentation", augmentation={"strong": False}),
        _in_epoch_order(_POOLED, **_POOL),
        _in_epoch_order(f"{_POOLED}, without two-layer head", **_POOL, head_layers=1),
        _in_epoch_order(_LONGER, epochs=80.0),
        _in_epoch_order(f"{_LONGER}, without two-layer head", epochs=80.0, head_layers=1),
    ),
    paper=_papers(
        {
            _ALL: 66.2,
            "without cosine softmax": 46.5,
            "without two-layer head": 60.5,
            "without strong augmentation": 62.3,
            _POOLED: 66.2,
            f"{_POOLED}, without two-layer head": 60.5,
        }
    ),
    claims=(
        *(
            Claim(text=f"{name} raises accuracy", better=_ALL, worse=f"without {name}")
            for name in ("cosine softmax", "two-layer head", "strong augmentation")
        ),
        *(
            Claim(text=f"{cell}: two-layer head raises accuracy", better=cell, worse=f"{cell}, without two-layer head")
            for cell in (_POOLED, _LONGER)
        ),
    ),
)

# ---- Table 2

_CORRECTIONS = {"exact": "with correction", "paper": "with the paper's formula", "none": "without correction"}
_LONGER_CORRECTIONS = {"exact": (128, 1_024, 4_096, IMAGES), "none": (128, 4_096)}
"""K of the runs whose rows begin ten times as long."""


def _negatives(correction: str, number: int, *, longer: bool = False) -> Cell:
    row = _CORRECTIONS[correction] + (f", {_TEN_TIMES}" if longer else "")
    corrected = {"correction": correction} if correction != "exact" else {}
    of_rows = _LONGER_ROWS if longer else {}
    return _in_epoch_order(f"{row}, K = {number:,}", **corrected | of_rows | {"num_negatives": number})


NEGATIVES = Table(
    name="negatives",
    title="Negatives, with and without correction",
    source="Table 2",
    text="In epoch order, beside the paper's numbers at the same K / N. The paper's formula has one learning rate for "
    "all steps of a gap. With K far above B runs with correction collapse: their losses are near chance, ln K. A first "
    "visit turns these rows eight times as far as the paper's; rows that begin ten times as long turn by a hundredth "
    "of that, and do not collapse. Even so, at K = 4,096 and 10,000 their mean accuracies are lower than at K = 128, "
    "with two seeds each; nothing is claimed of it.",
    cells=(
        *(_negatives(correction, number) for number in (128, 512, 1_024, 4_096) for correction in _CORRECTIONS),
        _negatives("exact", IMAGES),
        *(
            _negatives(correction, number, longer=True)
            for correction, numbers in _LONGER_CORRECTIONS.items()
            for number in numbers
        ),
    ),
    paper=_papers(
        {
            "with correction, K = 128": 66.1,
            "with correction, K = 512": 66.2,
            "with correction, K = 10,000": 66.2,
            "without correction, K = 128": 61.6,
            "without correction, K = 512": 62.3,
        }
    ),
    claims=tuple(
        Claim(
            text=f"the correction raises accuracy at K = {number:,}{begun and f' if {begun}'}",
            better=f"with correction{begun and f', {begun}'}, K = {number:,}",
            worse=f"without correction{begun and f', {begun}'}, K = {number:,}",
        )
        for begun, numbers in (("", (128, 512, 1_024, 4_096)), (_TEN_TIMES, _LONGER_CORRECTIONS["none"]))
        for number in numbers
    ),
)

# ---- Tables 3 and 4

_SHAPES = {
    (2_048, 128): 67.3,
    (1_024, 128): 67.3,
    (512, 128): 66.8,
    (256, 128): 66.2,
    (1_024, 256): 66.9,
    (1_024, 64): 67.1,
    (1_024, 32): 66.5,
}
"""W and S to the paper's number, for 128 times as large a window and stride."""
_SMALLEST: dict[str, Any] = {"window_size": 256, "window_stride": 128}
WINDOWS = Table(
    name="windows",
    title="Window and stride",
    source="Table 3",
    text="W and S are the paper's divided by 128, as is the number of images. A window of 256 images has two batches, "
    "the paper's smallest 64; with K twice as large as such a window accuracies are about the untrained encoder's, "
    "with K = B they are not.",
    cells=(
        *(_in_windows(f"W = {w:,}, S = {s}", window_size=w, window_stride=s) for w, s in _SHAPES),
        _in_epoch_order("epoch order"),
        _in_windows(f"W = 1,024, S = 128, {_TEN_TIMES}", **_LONGER_ROWS),
        _in_windows(f"W = 256, S = 128, {_TEN_TIMES}", **_SMALLEST, **_LONGER_ROWS),
        _in_epoch_order(f"epoch order, {_TEN_TIMES}", **_LONGER_ROWS),
        _in_windows("W = 256, S = 128, K = B", **_SMALLEST, **_AT_BATCH),
        _in_epoch_order("epoch order, K = B", **_AT_BATCH),
    ),
    paper=_papers({f"W = {w:,}, S = {s}": number for (w, s), number in _SHAPES.items()} | {"epoch order": 66.2}),
    claims=tuple(
        Claim(text=f"{shape} is better than epoch order", better=shape, worse="epoch order")
        for shape in (f"W = {w:,}, S = {s}" for (w, s), number in _SHAPES.items() if number > 66.2)
    ),
)

_LENGTHS = {10: (53.3, 60.4), 20: (62.7, 64.8), 40: (66.2, 67.3), 80: (68.5, 69.0), 320: (70.4, 70.8)}
"""Epochs to the paper's numbers in epoch order and in windows, for five times as many epochs."""
_LARGER = {5: (22.38, 30.73), 10: (31.03, 31.97), 20: (32.02, 32.94)}
"""Epochs to the paper's numbers on ImageNet-11K, likewise."""


def _lengths(table: Table, lengths: dict[int, tuple[float, float]], images: int) -> Table:
    """The table with both orders at these lengths."""
    whole: dict[str, Any] = {"window_size": images, "window_stride": images}
    orders = {"epoch order": whole, "sliding window": WINDOW}
    return replace(
        table,
        cells=tuple(
            Cell(
                name=f"{order}, {epochs} epochs",
                settings=BASE | settings | {"num_images": images, "epochs": float(epochs)},
            )
            for epochs in lengths
            for order, settings in orders.items()
        ),
        paper=_papers(
            {
                f"{order}, {epochs} epochs": number
                for epochs, numbers in lengths.items()
                for order, number in zip(orders, numbers, strict=True)
            }
        ),
        claims=tuple(
            Claim(
                text=f"the window raises accuracy at {epochs} epochs",
                better=f"sliding window, {epochs} epochs",
                worse=f"epoch order, {epochs} epochs",
            )
            for epochs in lengths
        ),
    )


LENGTHS = _lengths(
    Table(
        name="lengths",
        title="Sliding window and epoch order, at five lengths",
        source="Table 4",
        text="An epoch stands for five of the paper's: 10, 20, 40, 80 and 320 for 50, 100, 200, 400 and 1,600.",
        cells=(),
    ),
    _LENGTHS,
    IMAGES,
)
LARGER = _lengths(
    Table(
        name="larger",
        title="Six times as many images",
        source="Appendix, ImageNet-11K",
        text="All 60,000 images with the settings of 10,000, as the paper trains on 5.8 times as many images as in "
        "ImageNet-1K with unchanged settings. 5, 10 and 20 epochs stand for 25, 50 and 100. The paper's numbers are on "
        "ImageNet-11K, where training on the labels for 100 epochs reaches 38.10.",
        cells=(),
    ),
    _LARGER,
    ALL_IMAGES,
)

# ---- Tables 5 to 7

_CONTRASTIVE = {"SimCLR": "simclr", "MoCo v2": "mocov2"}
_DECAYS: dict[str, dict[str, float]] = {
    "": {},
    ", λ = 0.0001": {"weight_decay": 1e-4},
    ", λ = 0.01": {"weight_decay": 1e-2},
}
"""Added to a baseline's name: PIC's weight decay, a weaker one, and for the contrastive ones a stronger one."""
VIEWS = Table(
    name="views",
    title="Views and epochs",
    source="Table 5",
    text="Views of an image in a step × epochs; an epoch stands for five of the paper's. Equal numbers of views are "
    "equal numbers of images seen by the encoder. The baselines are also shown with other weight decays.",
    cells=(
        *(
            _other(f"{name}, 2 × 20{added}", method, 2, 20.0, **decay)
            for name, method in _CONTRASTIVE.items()
            for added, decay in _DECAYS.items()
        ),
        _in_windows("PIC, 2 × 20", epochs=20.0, views=2),
        _in_windows("PIC, 1 × 40"),
        *(_other(f"{name}, 2 × 40", method, 2, 40.0) for name, method in _CONTRASTIVE.items()),
        _in_windows("PIC, 2 × 40", epochs=40.0, views=2),
        _in_windows("PIC, 1 × 80", epochs=80.0),
    ),
    paper=_papers(
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
    claims=tuple(
        Claim(
            text=f"PIC with one view for {2 * epochs} epochs is better than {other} with two for {epochs}",
            better=f"PIC, 1 × {2 * epochs}",
            worse=f"{other}, 2 × {epochs}",
        )
        for epochs in (20, 40)
        for other in (*_CONTRASTIVE, "PIC")
    ),
)

_BASELINES = (
    ("memory bank", "memory-bank", 1),
    ("DIET", "diet", 1),
    ("SimCLR", "simclr", 2),
    ("MoCo v2", "mocov2", 2),
    ("supervised", "supervised", 1),
)
_DIET = "DIET, η = 1, λ = 0.0001"
METHODS = Table(
    name="methods",
    title="Methods",
    source="Table 6",
    text="At 40 epochs of one view or 20 of two. The paper compares runs of different lengths on ImageNet. All methods "
    "have PIC's augmentation, encoder, learning rate and SGD (DIET's authors use AdamW), the memory bank its head. "
    "They are tuned less than PIC: of the baselines only the weight decay was varied, and DIET's learning rate, while "
    "PIC's weight decay is the best of four by the same test images. DIET has a label smoothing of "
    f"{DIET_LABEL_SMOOTHING:g}.",
    cells=(
        Cell(name="raw pixels", method=PIXELS, settings=BASE | EPOCH_ORDER),
        Cell(name="untrained encoder", method="untrained", settings=BASE | EPOCH_ORDER),
        *(
            _other(f"{name}{added}", method, views, 40.0 / views, **decay)
            for name, method, views in _BASELINES
            for added, decay in _DECAYS.items()
            if name in _CONTRASTIVE or added != ", λ = 0.01"
        ),
        _other(_DIET, "diet", 1, 40.0, learning_rate=1.0, weight_decay=1e-4),
        _in_windows("PIC"),
    ),
    paper=_papers({"memory bank": 54.0, "SimCLR": 69.3, "MoCo v2": 71.1, "PIC": 70.8, "supervised": 77.1}),
    claims=tuple(
        Claim(text=f"PIC is better than {name}", better="PIC", worse=worse)
        for name, worse in (("a memory bank", "memory bank"), ("an untrained encoder", "untrained encoder"))
    ),
)

_FEW = tuple(
    Evaluation(
        name=f"labels-{percent}",
        arguments=("semi-supervised", "--labels", str(percent / 100), "--batch-size", "32", "--epochs", str(epochs)),
        quick=("--epochs", "1", "--learning-rates", "0.01"),
        all_images=True,
    )
    for percent, epochs in ((1, 30), (10, 20))
)
"""540 and 3,740 updates, where the paper has 500 and 10,000. Its batches and epochs would be 20 and 460 of ours."""
_FEW_MEASURES = {"labels-1.top1": "1 % labels", "labels-10.top1": "10 % labels"}
_PAPERS_FEW = {"memory bank": (39.2, 77.4), "SimCLR": (75.5, 87.8), "PIC": (77.1, 88.7)}
SEMI_SUPERVISED = Table(
    name="semi_supervised",
    title="Fine-tuned on few labels",
    source="Table 7",
    text="The encoders of the methods, fine-tuned on 1 % and 10 % of the labels of all 60,000 images, the same in "
    "every run. Supervised: the encoder had the labels of its 10,000 images before. Ours are top-1 of ten classes, the "
    "paper's of a thousand, probably top-5, which the paper does not say.",
    cells=tuple(replace(cell, evaluations=_FEW) for cell in METHODS.cells if cell.name in (*_PAPERS_FEW, "supervised")),
    measures=_FEW_MEASURES,
    paper={name: dict(zip(_FEW_MEASURES, numbers, strict=True)) for name, numbers in _PAPERS_FEW.items()},
    claims=tuple(
        Claim(text=f"PIC is better than {other} with {heading}", better="PIC", worse=other, measure=measure)
        for measure, heading in _FEW_MEASURES.items()
        for other in ("SimCLR", "memory bank")
    ),
)

# ---- beyond the paper

_IDEAS: dict[str, dict[str, Any]] = {
    "BatchNorm of embeddings": {"embedding_norm": "batch"},
    "rows turn four times as far at first": {"init_std": RowsConfig.init_std / 2},
    "rows without momentum": {"row_momentum": 0.0, "row_learning_rate": 10.0},
}
BEYOND = Table(
    name="beyond",
    title="Beyond the paper",
    text="The ideas of the table on CIFAR-10, by the same plan: five seeds, decided before they ran.",
    cells=(_in_windows("PIC"), *(_in_windows(name, **changes) for name, changes in _IDEAS.items())),
    claims=tuple(
        Claim(text=f"{name}: raises accuracy", better=name, worse="PIC", measure=measure)
        for name in _IDEAS
        for measure in (LINEAR, KNN)
    ),
    seeds=5,
)

FASHION_MNIST = (COMPONENTS, NEGATIVES, WINDOWS, LENGTHS, LARGER, VIEWS, METHODS, SEMI_SUPERVISED, BEYOND)
