"""The front page's figure: what each method has learnt after so many seconds."""

from __future__ import annotations

from typing import Any

from experiments.cells import KNN, LINEAR, Cell, Claim, Table
from experiments.results import STEPS_SECONDS
from experiments.tables.common import BASE, EPOCH_ORDER, WINDOW

_WHOLE, _VIEWS = "PIC", 2
_EVALUATED: dict[str, Any] = {"num_negatives": 128, "knn_every": 4.0, "knn_fraction": 1.0}


def _pic(row: str, **settings: Any) -> Cell:
    return Cell(row=row, settings=BASE | WINDOW | _EVALUATED | settings)


def _other(row: str, method: str) -> Cell:
    """A method of two views: half as many epochs are as many images seen."""
    halved = {"epochs": BASE["epochs"] / _VIEWS, "knn_every": _EVALUATED["knn_every"] / _VIEWS, "views": _VIEWS}
    return Cell(row=row, method=method, settings=BASE | EPOCH_ORDER | _EVALUATED | halved)


OVER_TIME = Table(
    name="over_time",
    title="kNN over the time of training",
    text=(
        "As many images seen by each encoder; K = B. The plot shows the kNN accuracy of the training images, each "
        "among all others, over the time of the steps, of one seed; each run was alone on the machine, with one core. "
        "Labels are used for this only. A point is the share of 10,000 images, with a standard error of 0.3 to 0.4. "
        "Seconds are those of the runs in the plot. Over seeds, PIC is compared with the other methods in the table "
        "of views and epochs, there with K = 4 B."
    ),
    cells=(
        _pic(_WHOLE),
        _pic("PIC without correction", correction="none"),
        _pic("PIC without window", **EPOCH_ORDER),
        _other("SimCLR", "simclr"),
        _other("MoCo v2", "mocov2"),
    ),
    measures={KNN: "kNN", LINEAR: "linear", STEPS_SECONDS: "seconds"},
    claims=tuple(
        Claim(text=f"PIC is better than {other}", weights={_WHOLE: 1, other: -1}, measure=KNN)
        for other in ("PIC without correction", "PIC without window")
    ),
    over_time=True,
)
