"""The main effects on a second data set: characters in colour."""

from __future__ import annotations

from typing import Any

from experiments.cells import KNN, LINEAR, PIC, PIXELS, Cell, Claim, Table
from experiments.data import GLYPHS as RENDERED
from experiments.glyphs import CHARACTERS, SIDE, SPLITS
from trainer.rows_config import RowsConfig

_IMAGES, _TESTS = (SPLITS[name] * len(CHARACTERS) for name in ("train", "test"))
_EPOCHS = 14.0
_BASE: dict[str, Any] = {
    "dataset": "folder",
    "data_dir": RENDERED,
    "encoder": {"in_channels": 3, "image_size": SIDE},
    "augmentation": {"flip_probability": 0.0},
    "epochs": _EPOCHS,
    "batch_size": 256,
    "learning_rate_batch": 128,
    "weight_decay": 3.6e-3,
    "num_negatives": 1_024,
}
_WINDOW: dict[str, Any] = {"window_size": 2_400, "window_stride": 300}
_EPOCH_ORDER: dict[str, Any] = {"window_size": _IMAGES, "window_stride": _IMAGES}
_AT_BATCH: dict[str, Any] = {"num_negatives": _BASE["batch_size"]}
_MARGIN = 2.0
"""Points; runs differ more from seed to seed than those on Fashion-MNIST."""
_OURS, _LONGER = "sliding window", "rows begin ten times as long"


def _in_epoch_order(row: str, method: str = PIC, **settings: Any) -> Cell:
    return Cell(row=row, method=method, settings=_BASE | _EPOCH_ORDER | settings)


GLYPHS = Table(
    name="glyphs",
    title="Characters in colour",
    text=(
        f"{_IMAGES:,} images of {SIDE} × {SIDE} pixels, rendered from fonts by `python -m experiments.glyphs`: "
        f"{len(CHARACTERS)} classes, and {_TESTS:,} test images whose fonts no training image has. W / N, K / N, K / B "
        f"and λ · Σ η are about those above, at twice the batch and for fewer epochs: B = {_BASE['batch_size']}, "
        f"K = {_BASE['num_negatives']:,}, W = {_WINDOW['window_size']:,}, S = {_WINDOW['window_stride']}, "
        f"λ = {_BASE['weight_decay']:g}, {_EPOCHS:g} epochs. Images are not flipped, since mirrored characters are "
        "others. SimCLR and MoCo v2 have two views and half of the epochs. In epoch order with K = 4 B runs can "
        "collapse, which K = 4 B does not cause on Fashion-MNIST; rows that begin ten times as long do not prevent it "
        "here. So epoch order is compared at K = B. Without labels all methods learn little of these images in such "
        "short runs: compare the nearest neighbours of raw pixels, and the supervised encoder."
    ),
    cells=(
        Cell(row=_OURS, settings=_BASE | _WINDOW),
        _in_epoch_order("epoch order"),
        _in_epoch_order("epoch order, K = B", **_AT_BATCH),
        _in_epoch_order("epoch order, K = B, without correction", **_AT_BATCH, correction="none"),
        Cell(row=f"{_OURS}, K = B", settings=_BASE | _WINDOW | _AT_BATCH),
        _in_epoch_order(f"epoch order, {_LONGER}", init_std=10 * RowsConfig.init_std),
        _in_epoch_order("SimCLR", "simclr", epochs=_EPOCHS / 2, views=2),
        _in_epoch_order("MoCo v2", "mocov2", epochs=_EPOCHS / 2, views=2),
        _in_epoch_order("supervised", "supervised"),
        _in_epoch_order("untrained encoder", "untrained"),
        _in_epoch_order("raw pixels", PIXELS),
    ),
    claims=(
        Claim(
            text="the correction raises accuracy at K = B",
            weights={"epoch order, K = B": 1, "epoch order, K = B, without correction": -1},
        ),
        Claim(text="the window raises accuracy at K = B", weights={f"{_OURS}, K = B": 1, "epoch order, K = B": -1}),
        Claim(
            text=f"the window is better than epoch order whose {_LONGER}",
            weights={_OURS: 1, f"epoch order, {_LONGER}": -1},
        ),
        Claim(
            text="K = 4 B loses nothing against K = B in windows",
            weights={_OURS: 1, f"{_OURS}, K = B": -1},
            not_below=True,
            margin=_MARGIN,
        ),
        *(
            Claim(
                text=f"PIC with {number} is at least as good as {other} at equal views{in_measure}",
                weights={ours: 1, other: -1},
                not_below=True,
                margin=_MARGIN,
                measure=measure,
            )
            for ours, number in ((_OURS, "K = 4 B"), (f"{_OURS}, K = B", "K = B"))
            for measure, in_measure in ((LINEAR, ""), (KNN, " in kNN"))
            for other in ("SimCLR", "MoCo v2")
        ),
        Claim(text="PIC is better than an untrained encoder", weights={_OURS: 1, "untrained encoder": -1}),
        Claim(
            text="PIC with K = B is better than raw pixels in kNN",
            weights={f"{_OURS}, K = B": 1, "raw pixels": -1},
            measure=KNN,
        ),
        Claim(text="training on the labels is better than PIC", weights={"supervised": 1, _OURS: -1}),
    ),
    seeds=2,
)
