"""The cells of experiments/PLAN.md: CIFAR-10 at the paper's own proportions, five seeds each."""

from __future__ import annotations

from typing import Any

from experiments.cells import PIC, Cell, Claim, Evaluation, Table

IMAGES, SEEDS = 1_000, 5
ROW_RATE = 0.24
"""The rows' base learning rate, whatever the encoder's is: their turns do not depend on the trials."""
DECAY = 1e-3
LEARNING_RATES = {PIC: 0.025, "simclr": 0.025, "mocov2": 0.025, "diet": 0.001}
"""The encoder's, by method: the best of those tried on the validation images, once the trials have run."""
_TRIED = (0.00625, 0.0125, 0.025, 0.05, 0.1)
_DIET: dict[str, Any] = {"optimizer": "adamw", "weight_decay": 0.05}
_TRIED_FOR_DIET = (0.00025, 0.0005, 0.001, 0.002, 0.004)
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


def settings(method: str = PIC, learning_rate: float | None = None, **changes: Any) -> dict[str, Any]:
    """Those of a cell in epoch order: the paper's proportions, apart from K/B and η·N/B."""
    rate = learning_rate or LEARNING_RATES[method]
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
    return base | _EPOCH_ORDER | (of_rows if method == PIC else _DIET if method == "diet" else {}) | changes


def _cell(name: str, method: str = PIC, **changes: Any) -> Cell:
    return Cell(name=name, method=method, preset="cifar-10", settings=settings(method, **changes), evaluations=_PROBES)


def _claims(*pairs: tuple[str, str, str]) -> tuple[Claim, ...]:
    return tuple(
        Claim(text=text, better=better, worse=worse, measure=measure)
        for text, better, worse in pairs
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
            method=method,
            preset="cifar-10",
            settings=settings(method, rate),
            evaluations=_VALIDATION,
        )
        for method in LEARNING_RATES
        for rate in (_TRIED_FOR_DIET if method == "diet" else _TRIED)
    ),
    measures={"linear-validated.top1": "linear", "knn-validated.top1": "kNN"},
)

_BASE, _AT_BATCH, _MANY, _ALL = "epoch order", "K = B", "K = 0.4 N", "K = N"
_BATCH_NORM = "BatchNorm of embeddings"
COMPONENTS = Table(
    name="cifar_components",
    title="CIFAR-10: components",
    source="Table 1",
    cells=(
        _cell(_BASE),
        _cell("without cosine softmax", softmax="plain"),
        _cell("without two-layer head", head_layers=1),
        _cell("without strong augmentation", augmentation={"strong": False}),
    ),
    measures=_MEASURES,
    claims=_claims(
        ("cosine softmax raises accuracy", _BASE, "without cosine softmax"),
        ("the two-layer head raises accuracy", _BASE, "without two-layer head"),
        ("strong augmentation raises accuracy", _BASE, "without strong augmentation"),
    ),
    seeds=SEEDS,
)
_NEGATIVES = {_AT_BATCH: 16, _BASE: 51, _MANY: 400, _ALL: IMAGES}
NEGATIVES = Table(
    name="cifar_negatives",
    title="CIFAR-10: negatives, with and without correction",
    source="Table 2",
    cells=(
        *(_cell(name, num_negatives=number) for name, number in _NEGATIVES.items()),
        *(
            _cell(f"{name}, without correction", num_negatives=number, correction="none")
            for name, number in _NEGATIVES.items()
            if name != _ALL
        ),
        _cell(f"{_MANY}, {_BATCH_NORM}", num_negatives=400, embedding_norm="batch"),
    ),
    measures=_MEASURES,
    claims=_claims(
        *(
            (f"the correction raises accuracy: {name}", name, f"{name}, without correction")
            for name in _NEGATIVES
            if name != _ALL
        ),
        ("K = N is better than K = B", _ALL, _AT_BATCH),
        ("BatchNorm of embeddings raises accuracy at K = 0.4 N", f"{_MANY}, {_BATCH_NORM}", _MANY),
    ),
    seeds=SEEDS,
)
_LENGTHS = (50.0, 100.0, 200.0)
WINDOWS = Table(
    name="cifar_windows",
    title="CIFAR-10: sliding window and epoch order, at three lengths",
    source="Table 4",
    cells=tuple(
        _cell(f"{order}, {length:g} epochs", epochs=length, warmup_fraction=5 / length, **window)
        for order, window in ((_BASE, _EPOCH_ORDER), ("window", _WINDOW))
        for length in _LENGTHS
    ),
    measures=_MEASURES,
    claims=_claims(
        *(
            (
                f"the window raises accuracy at {length:g} epochs",
                f"window, {length:g} epochs",
                f"{_BASE}, {length:g} epochs",
            )
            for length in _LENGTHS
        )
    ),
    seeds=SEEDS,
)
_OURS, _TWO_VIEWS = "PIC", "PIC, two views"
METHODS = Table(
    name="cifar_methods",
    title="CIFAR-10: views and methods, at equal views",
    source="Table 5",
    cells=(
        _cell(_OURS, **_WINDOW),
        _cell(_TWO_VIEWS, views=2, epochs=100.0, **_WINDOW),
        _cell("SimCLR", "simclr"),
        _cell("MoCo v2", "mocov2"),
        _cell("DIET", "diet"),
    ),
    measures=_MEASURES,
    claims=_claims(
        *((f"PIC is better than {name}", _OURS, name) for name in (_TWO_VIEWS, "SimCLR", "MoCo v2", "DIET"))
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
    cells=(_cell(_OURS, **_WINDOW), *(_cell(name, **_WINDOW | changes) for name, changes in _BEYOND.items())),
    measures=_MEASURES,
    claims=_claims(*((f"{name}: raises accuracy", name, _OURS) for name in _BEYOND)),
    seeds=SEEDS,
)
CIFAR_10 = (TRIALS, NEGATIVES, WINDOWS, METHODS, COMPONENTS, BEYOND)
"""In the order in which they are run."""
