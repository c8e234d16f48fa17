"""The cells of experiments/PLAN.md: CIFAR-10 at the paper's own proportions, five seeds each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.cells import LOSS, PIC, Cell, Claim, Evaluation, Table

IMAGES, SEEDS = 1_000, 5
ROW_RATE = 0.24
"""The rows' base learning rate, whatever the encoder's is: their turns do not depend on the trials."""
DECAY = 1e-3
BY_ADAMW = "pic, AdamW"
LEARNING_RATES = {PIC: 0.0125, BY_ADAMW: 0.002, "simclr": 0.025, "mocov2": 0.05, "diet": 0.002}
"""The encoder's, by method: the best of those tried on the validation images, once the trials have run."""
_TRIED_BY_SGD = (0.00625, 0.0125, 0.025, 0.05, 0.1)
_TRIED_BY_ADAMW = (0.00025, 0.0005, 0.001, 0.002, 0.004)
_ADAMW: dict[str, Any] = {"optimizer": "adamw", "weight_decay": 0.05}
LINEAR, KNN = "linear.top1", "knn.top1"
_PROBES = (
    Evaluation(name="linear", arguments=("linear-cached", "--folds", "5"), all_images=True),
    Evaluation(name="knn", arguments=("knn", "--k", "20"), all_images=True),
)
_VALIDATION = tuple(
    Evaluation(name=f"{each.name}-validated", arguments=each.arguments, all_images=True, validation=True)
    for each in _PROBES
)
_EPOCH_ORDER: dict[str, Any] = {"window_size": IMAGES, "window_stride": IMAGES}
_WINDOW: dict[str, Any] = {"window_size": 104, "window_stride": 13}
_CURVE: dict[str, Any] = {"knn_every": 10.0}
"""Evaluations during training, for the picture of accuracy over time."""


def settings(method: str = PIC, learning_rate: float | None = None, **changes: Any) -> dict[str, Any]:
    """Settings of a cell in epoch order: the paper's proportions, apart from what PLAN.md names."""
    rate = learning_rate or LEARNING_RATES.get(method, LEARNING_RATES[PIC])
    base: dict[str, Any] = {
        "num_images": IMAGES,
        "epochs": 200.0,
        "batch_size": 16,
        "learning_rate": rate,
        "warmup_fraction": 0.025,
        "weight_decay": DECAY,
        "encoder": {"blocks": (1, 1, 1, 1)},
    }
    of_rows = {"row_learning_rate": ROW_RATE / rate, "init_std": 0.112, "num_negatives": 51}
    return base | _EPOCH_ORDER | (of_rows if method == PIC else _ADAMW if method == "diet" else {}) | changes


def by_adamw(rate: float) -> dict[str, Any]:
    """PIC whose encoder is trained as DIET's. Its λ is also the rows', which turn as before if λ is multiplied by what
    their η and σ² are divided by."""
    factor = _ADAMW["weight_decay"] / DECAY
    rows = {"row_learning_rate": ROW_RATE / factor / rate, "init_std": 0.112 / math.sqrt(factor)}
    return _ADAMW | rows | {"learning_rate": rate}


def _cell(name: str, method: str = PIC, **changes: Any) -> Cell:
    return Cell(name=name, method=method, preset="cifar-10", settings=settings(method, **changes), evaluations=_PROBES)


def _claims(*claims: tuple[str, ...], beyond: tuple[str, str] | None = None) -> tuple[Claim, ...]:
    """Makes claims on both measures of texts, each with the better cell, the worse one and the paper's accuracies."""
    return tuple(
        Claim(
            text=text,
            better=better,
            worse=worse,
            measure=measure,
            beyond=beyond,
            paper=(*paper, "")[0] if measure == LINEAR else "",
        )
        for text, better, worse, *paper in claims
        for measure in (LINEAR, KNN)
    )


_MEASURES = {LINEAR: "linear", KNN: "kNN"}
TRIALS = Table(
    name="cifar_trials",
    title="Learning rates on the validation images of CIFAR-10",
    text="One seed each; 5,000 training images that no run is trained on stand for the test images.",
    cells=tuple(
        Cell(
            name=f"{method}, η = {rate:g}",
            method=PIC if method == BY_ADAMW else method,
            preset="cifar-10",
            settings=settings(**by_adamw(rate)) if method == BY_ADAMW else settings(method, rate),
            evaluations=_VALIDATION,
        )
        for method in LEARNING_RATES
        for rate in (_TRIED_BY_ADAMW if method in {BY_ADAMW, "diet"} else _TRIED_BY_SGD)
    ),
    measures={"linear-validated.top1": "linear", "knn-validated.top1": "kNN"},
)

_BASE, _AT_BATCH, _MANY, _ALL = "epoch order", "K = B", "K = 0.4 N", "K = N"
_BATCH_NORM = "BatchNorm of embeddings"
COMPONENTS = Table(
    name="cifar_components",
    title="CIFAR-10: components",
    source="Table 1",
    text="The learning rate was chosen with all components, and not again without one. The head is reversed here and "
    "does not show on Fashion-MNIST; the reason was not tested.",
    cells=(
        _cell(_BASE),
        _cell("without cosine softmax", softmax="plain"),
        _cell("without two-layer head", head_layers=1),
        _cell("without strong augmentation", augmentation={"strong": False}),
    ),
    measures=_MEASURES,
    claims=_claims(
        ("cosine softmax raises accuracy", _BASE, "without cosine softmax", "+19.7 (66.2 and 46.5)"),
        ("the two-layer head raises accuracy", _BASE, "without two-layer head", "+5.7 (66.2 and 60.5)"),
        ("strong augmentation raises accuracy", _BASE, "without strong augmentation", "+3.9 (66.2 and 62.3)"),
    ),
    seeds=SEEDS,
)
_NEGATIVES = {_AT_BATCH: 16, _BASE: 51, _MANY: 400, _ALL: IMAGES}
_CORRECTED = {
    _AT_BATCH: "+8.7 at 2⁹ = B (65.5 and 56.8); at our K/N, 2¹⁴, +4.5 (66.1 and 61.6)",
    _BASE: "+3.9 at 2¹⁶ (66.2 and 62.3); at our K/B between +8.2 at 2¹⁰ and +5.0 at 2¹²",
    _MANY: "+0.6 at 2¹⁸, the most that is sampled (66.2 and 65.6)",
}
NEGATIVES = Table(
    name="cifar_negatives",
    title="CIFAR-10: negatives, with and without correction",
    source="Table 2",
    text="Predicted before the runs: BatchNorm of embeddings raises accuracy at K = 0.4 N, and by more than at K = "
    "0.051 N (epoch order), and the loss at K = N does not return to chance. By chance losses are ln K, with K = "
    "N 6.91. Seen: the first and the last; that it is worth more at K = 0.4 N does not show. So rows that turn "
    "as the paper's at first do not collapse at any K here, and BatchNorm's gain is no evidence for the reason "
    "why others did. A row without correction lacks the decay of its idle steps; with K/B = 3.2 most of its "
    "momentum also waits for its next visits, with the paper's 128 none. With correction rows are "
    "those of dense SGD, to rounding: where accuracy is lower with it, dense SGD is the worse training at these "
    "settings. The learning rates were chosen with correction, in epoch order; the reason was not tested.",
    cells=(
        *(_cell(name, num_negatives=number) for name, number in _NEGATIVES.items()),
        *(
            _cell(f"{name}, without correction", num_negatives=number, correction="none")
            for name, number in _NEGATIVES.items()
            if name != _ALL
        ),
        *(
            _cell(f"{name}, {_BATCH_NORM}", num_negatives=_NEGATIVES[name], embedding_norm="batch")
            for name in (_BASE, _MANY)
        ),
    ),
    measures=_MEASURES | {LOSS: "loss"},
    claims=(
        *_claims(
            *(
                (
                    f"the correction raises accuracy: {name}",
                    name,
                    f"{name}, without correction",
                    _CORRECTED.get(name, ""),
                )
                for name in _NEGATIVES
                if name != _ALL
            ),
            (
                "K = N is better than K = B",
                _ALL,
                _AT_BATCH,
                "+0.7 to 2⁹ = B (66.2 and 65.5); at our K/N, 2¹⁴, +0.1 (66.1)",
            ),
            ("K = N is better than K = 0.051 N", _ALL, _BASE, "0.0 (66.2 and 66.2 at 2¹⁶)"),
            *(
                (f"BatchNorm of embeddings raises accuracy: {name}", f"{name}, {_BATCH_NORM}", name)
                for name in (_BASE, _MANY)
            ),
        ),
        *_claims(
            ("BatchNorm of embeddings is worth more at K = 0.4 N", f"{_MANY}, {_BATCH_NORM}", _MANY),
            beyond=(f"{_BASE}, {_BATCH_NORM}", _BASE),
        ),
    ),
    seeds=SEEDS,
)
_LENGTHS = {
    25.0: "",
    50.0: "+7.1 (60.4 and 53.3)",
    100.0: "+2.1 (64.8 and 62.7)",
    200.0: "+1.1 (67.3 and 66.2)",
    400.0: "+0.5 (69.0 and 68.5)",
}


def _lengths(table: Table, papers: Mapping[float, str], images: int = IMAGES) -> Table:
    """The table with both orders at the lengths for which it has the paper's words, and warm-ups of 5 epochs."""
    whole: dict[str, Any] = {"num_images": images, "window_size": images, "window_stride": images}
    orders = {_BASE: whole, "window": whole | _WINDOW}
    return replace(
        table,
        cells=tuple(
            _cell(f"{order}, {length:g} epochs", epochs=length, warmup_fraction=5 / length, **order_settings)
            for order, order_settings in orders.items()
            for length in papers
        ),
        measures=_MEASURES,
        claims=_claims(
            *(
                (
                    f"the window raises accuracy at {length:g} epochs",
                    f"window, {length:g} epochs",
                    f"{_BASE}, {length:g} epochs",
                    paper,
                )
                for length, paper in papers.items()
            )
        ),
        seeds=SEEDS,
    )


LENGTHS = _lengths(
    Table(
        name="cifar_lengths",
        title="CIFAR-10: sliding window and epoch order, at five lengths",
        source="Table 4",
        text="A gain of the window shows at no length, and the linear probe's intervals exclude gains as large as "
        "the paper's at 50 and 100 epochs. The paper's reason for a window is that on large data a row is "
        "visited too seldom in epoch order: every N/B = 2,502 steps there, and every 62 here. Whether that "
        "makes the difference was not tested beyond 375 steps, in the table of six times as many images. Warm-ups are "
        "of 5 epochs. With W/B = 6.5 for the paper's 256 most visits of a row in a window are less than ten "
        "steps apart, within the reach of momentum.",
        cells=(),
    ),
    _LENGTHS,
)
_SHAPES = {(208, 13): 67.3, (104, 13): 67.3, (52, 13): 66.8, (26, 13): 66.2, (104, 26): 66.9, (104, 7): 67.1}
"""W and S to the paper's number; its 131072 and 16384 are 104 and 13 here."""
SHAPES = Table(
    name="cifar_windows",
    title="CIFAR-10: window and stride",
    source="Table 3",
    text="A gain shows at no window and no stride. It is no evidence against the paper's gains: these are of up to 1.1 "
    "points, and each lies within the linear probe's interval, as zero does. Five seeds of 1,000 images cannot tell "
    "them apart.",
    cells=(
        _cell(_BASE),
        *(_cell(f"W = {w}, S = {s}", window_size=w, window_stride=s) for w, s in _SHAPES),
    ),
    measures=_MEASURES,
    claims=_claims(
        *(
            (f"W = {w}, S = {s} is better than epoch order", f"W = {w}, S = {s}", _BASE, f"{number - 66.2:+.1f}")
            for (w, s), number in _SHAPES.items()
        )
    ),
    seeds=SEEDS,
)
_OURS, _TWO_VIEWS, _PIC_BY_ADAMW, _UNTRAINED = "PIC", "PIC, two views", "PIC, AdamW", "untrained"
METHODS = Table(
    name="cifar_methods",
    title="CIFAR-10: views and methods, at equal views",
    source="Table 5",
    text="All at B = 16, which the proportions of PIC's rows ask for: SimCLR has 30 negatives, MoCo v2 a queue of 500 "
    "keys, in which one query of eight meets its own image, and BatchNorm of 8 images. Learning rates of the encoder "
    "are the best of five each on validation images, PIC's with one view in epoch order, all on seed 0, which is also "
    "one of the five; nothing else was varied: not λ, which is 0.001 with SGD because PIC's rows ask for it, nor "
    "τ, 0.2 for PIC and MoCo v2 and 0.5 for SimCLR, nor the head. So effects hold for these settings, not for methods "
    "at their best. DIET has its authors' AdamW and λ; so that not only optimizers are compared, PIC's encoder has "
    "them in one cell, too.",
    cells=(
        _cell(_OURS, **_WINDOW, **_CURVE),
        _cell(_TWO_VIEWS, views=2, epochs=100.0, **_WINDOW | {"warmup_fraction": 0.05} | _CURVE),
        _cell(_PIC_BY_ADAMW, **by_adamw(LEARNING_RATES[BY_ADAMW]), **_WINDOW, **_CURVE),
        _cell("SimCLR", "simclr", **_CURVE),
        _cell("MoCo v2", "mocov2", **_CURVE),
        _cell("DIET", "diet", **_CURVE),
        _cell(_UNTRAINED, "untrained"),
    ),
    measures=_MEASURES,
    claims=_claims(
        ("one view is better than two", _OURS, _TWO_VIEWS, "+2.3 (67.3 and 65.0)"),
        ("PIC is better than SimCLR at B = 16", _OURS, "SimCLR", "+2.6 (67.3 and 64.7)"),
        ("PIC is better than MoCo v2 at B = 16", _OURS, "MoCo v2", "+3.2 (67.3 and 64.1)"),
        ("PIC is better than DIET", _OURS, "DIET"),
        ("PIC is better than DIET, both by AdamW", _PIC_BY_ADAMW, "DIET"),
        ("PIC is better than an untrained encoder", _OURS, _UNTRAINED),
    ),
    seeds=SEEDS,
)
_BEYOND: dict[str, dict[str, Any]] = {
    _BATCH_NORM: {"embedding_norm": "batch"},
    "rows turn four times as far at first": {"init_std": 0.056},
    "rows without momentum": {"row_momentum": 0.0, "row_learning_rate": 10 * ROW_RATE / LEARNING_RATES[PIC]},
}
BEYOND = Table(
    name="cifar_beyond",
    title="CIFAR-10: beyond the paper",
    cells=(
        _cell(_OURS, **_WINDOW, **_CURVE),
        *(_cell(name, **_WINDOW | changes) for name, changes in _BEYOND.items()),
    ),
    measures=_MEASURES,
    claims=_claims(*((f"{name}: raises accuracy", name, _OURS) for name in _BEYOND)),
    seeds=SEEDS,
)
_LARGER = {25.0: "+8.35 (30.73 and 22.38)", 50.0: "+0.94 (31.97 and 31.03)", 100.0: "+0.92 (32.94 and 32.02)"}
LARGER = _lengths(
    Table(
        name="cifar_larger",
        title="CIFAR-10: six times as many images",
        source="Appendix, ImageNet-11K",
        text="With the settings of 1,000 images, as in the paper, whose ImageNet-11K has 5.8 times as many as "
        "ImageNet-1K. In epoch order a row is visited every N/B = 375 steps here, and every 14,590 there. A gain "
        "of the window shows at no length. The linear probe's interval at 25 epochs excludes one as large as the "
        "paper's, of 8.35 points. Those at 50 and 100 epochs are no evidence against the paper's, of 0.9 points, "
        "which lie within them as zero does. By kNN the window is behind at 50 epochs, which does not show either "
        "once it is corrected.",
        cells=(),
    ),
    _LARGER,
    6 * IMAGES,
)
CIFAR_10 = (TRIALS, NEGATIVES, METHODS, LENGTHS, COMPONENTS, BEYOND, SHAPES, LARGER)
"""In the order in which they are run."""
