"""Tables about the order of visits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from experiments.cells import Cell, Claim, Table
from experiments.tables.common import BASE, EPOCH_ORDER, WINDOW, in_epoch_order, in_windows, papers
from trainer.coverage import passes
from trainer.optimization import OptimizationConfig
from trainer.rows_config import RowsConfig

_LENGTHS = {10: (53.3, 60.4), 20: (62.7, 64.8), 40: (66.2, 67.3), 80: (68.5, 69.0), 320: (70.4, 70.8)}
"""Epochs to the paper's numbers in epoch order and in windows, for five times as many epochs."""
_ORDERS = {"epoch order": in_epoch_order, "sliding window": in_windows}
_LONG = (
    "Tried: 80 and 320 epochs of 10,000 images, and 40 with K = B (see kNN over the time of training). In long runs "
    "both orders come close to what the encoder learns from labels (see the methods), and the paper's gain is as small "
    "as our spread."
)
_LONG_OF_ALL = (
    "Tried: half and a quarter of the length, where the window gains more, as in the paper. What the encoder learns "
    "from all labels was not measured."
)


def _gain(epochs: int) -> dict[str, float]:
    return {f"sliding window, {epochs} epochs": 1, f"epoch order, {epochs} epochs": -1}


def _gains_more(short: int, long: int) -> Claim:
    """The claim that the window gains more in the shorter of two runs."""
    weights = _gain(short) | {name: -weight for name, weight in _gain(long).items()}
    return Claim(text=f"the window gains more at {short} epochs than at {long}", weights=weights)


def _papers(lengths: dict[int, tuple[float, float]]) -> dict[str, dict[str, float]]:
    """The paper's numbers of each order, by epochs."""
    return papers(
        {
            f"{row}, {epochs} epochs": number
            for epochs, numbers in lengths.items()
            for row, number in zip(_ORDERS, numbers, strict=True)
        }
    )


def _papers_epochs(lengths: Iterable[int]) -> dict[str, str]:
    """One of our epochs stands for five."""
    return {f"{epochs} epochs": f"{5 * epochs:,} epochs" for epochs in lengths}


LENGTHS = Table(
    name="lengths",
    title="Sliding window and epoch order, at five lengths",
    source="Table 4",
    text="An epoch stands for five of the paper's: 10, 20, 40, 80 and 320 for 50, 100, 200, 400 and 1,600.",
    cells=(
        *(
            Cell(
                row=row,
                column=f"{epochs} epochs",
                settings=cell("", epochs=float(epochs)).settings,
                is_long=epochs > 100,
            )
            for epochs in _LENGTHS
            for row, cell in _ORDERS.items()
        ),
    ),
    paper=_papers(_LENGTHS),
    papers_columns=_papers_epochs(_LENGTHS),
    claims=(
        *(
            Claim(
                text=f"the window raises accuracy at {epochs} epochs",
                weights=_gain(epochs),
                tried=_LONG if epochs >= 80 else "",
            )
            for epochs in _LENGTHS
        ),
        _gains_more(10, 80),
    ),
)

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
_PAPERS_EPOCH_ORDER = 66.2
_DEFAULT, _SMALLEST, _EPOCH_ORDER = "W = 1,024, S = 128", "W = 256, S = 128", "epoch order"
_AT_BATCH = "K = B"
_SETTINGS: dict[str, dict[str, Any]] = {
    _DEFAULT: WINDOW,
    _SMALLEST: {"window_size": 256, "window_stride": 128},
    _EPOCH_ORDER: EPOCH_ORDER,
}
_BEGINNINGS: dict[str, dict[str, Any]] = {
    "rows begin ten times as long": {"init_std": 10 * RowsConfig.init_std},
}
_BATCH_SIZE = OptimizationConfig.batch_size
_TWO_BATCHES = (
    "The loss is above log K, worse than guessing, for a quarter of one run and two fifths of another, and the "
    "embeddings end in few directions. Longer initial rows mend a part of "
    "it, K = B most: K is twice W otherwise, so that rows which have left the window stay active."
)


def _against_epoch_order(window: int, stride: int) -> Claim:
    not_below = _SHAPES[window, stride] <= _PAPERS_EPOCH_ORDER
    return Claim(
        text=(
            f"W = {window:,} with S = {stride} "
            + ("loses nothing against epoch order" if not_below else "is better than epoch order")
        ),
        weights={f"W = {window:,}, S = {stride}": 1, _EPOCH_ORDER: -1},
        not_below=not_below,
        tried=_TWO_BATCHES if window == 2 * _BATCH_SIZE else "",
    )


WINDOWS = Table(
    name="windows",
    title="Window and stride",
    source="Table 3",
    text=(
        "W and S are the paper's divided by 128, as is the number of images. The paper's default corresponds to "
        "W = 1,024 and S = 128. A window of 256 images has two batches, the paper's smallest 64. With K "
        "twice as large as such a window, the encoder collapses as it does for K far above B (see Table 2)."
    ),
    cells=(
        *(in_windows(f"W = {w:,}, S = {s}", window_size=w, window_stride=s) for w, s in _SHAPES),
        in_epoch_order(_EPOCH_ORDER),
        *(
            in_windows(f"{order}, {begun}", **of_order, **of_rows)
            for begun, of_rows in _BEGINNINGS.items()
            for order, of_order in _SETTINGS.items()
        ),
        in_windows(f"{_SMALLEST}, {_AT_BATCH}", **_SETTINGS[_SMALLEST], num_negatives=_BATCH_SIZE),
        in_epoch_order(  # all as in the table of negatives, which has these runs
            f"{_EPOCH_ORDER}, {_AT_BATCH}", num_negatives=_BATCH_SIZE, correction="exact"
        ),
    ),
    paper=papers(
        {f"W = {w:,}, S = {s}": number for (w, s), number in _SHAPES.items()} | {_EPOCH_ORDER: _PAPERS_EPOCH_ORDER}
    ),
    claims=(
        *(_against_epoch_order(w, s) for w, s in _SHAPES),
        *(
            Claim(
                text=f"W = 256 with S = 128 loses nothing against epoch order if {begun}",
                weights={f"{_SMALLEST}, {begun}": 1, f"{_EPOCH_ORDER}, {begun}": -1},
                not_below=True,
                tried=_TWO_BATCHES,
            )
            for begun in (*_BEGINNINGS, _AT_BATCH)
        ),
        *(
            Claim(
                text=f"the default window is better than W = 256 with S = 128 if {begun}",
                weights={f"{_DEFAULT}, {begun}": 1, f"{_SMALLEST}, {begun}": -1},
            )
            for begun in _BEGINNINGS
        ),
    ),
    seeds=2,  # runs with small windows nearly collapse, and differ more than others
)

_ALL = 60_000
_LARGER = {5: (22.38, 30.73), 10: (31.03, 31.97), 20: (32.02, 32.94)}
"""Epochs to the paper's numbers, for five times as many epochs on ImageNet-11K."""


def _larger(row: str, epochs: int) -> Cell:
    order = WINDOW if row == "sliding window" else {"window_size": _ALL, "window_stride": _ALL}
    settings = BASE | order | {"num_images": _ALL, "epochs": float(epochs)}
    return Cell(row=row, column=f"{epochs} epochs", settings=settings, is_long=epochs > 10)


def _passes(epochs: int) -> float:
    """How often the window moves over all images."""
    return passes(_larger("sliding window", epochs).config(0), _ALL)


LARGER = Table(
    name="larger",
    title="Six times as many images",
    source="Appendix, ImageNet-11K",
    text=(
        "All 60,000 images with the settings of 10,000, as the paper trains on 5.8 times as many images as in "
        "ImageNet-1K with unchanged settings. 5, 10 and 20 epochs for 25, 50 and 100: in 5 the window reaches "
        f"{100 * _passes(5):.0f} % of the images, and no row that has left it comes back; in 10 it passes over them "
        f"{_passes(10):.1f} times (the paper's 3.1 and 6.3). The paper's numbers are on ImageNet-11K, where "
        "training on the labels for 100 epochs reaches 38.10."
    ),
    cells=tuple(_larger(row, epochs) for epochs in _LARGER for row in _ORDERS),
    paper=_papers(_LARGER),
    papers_columns=_papers_epochs(_LARGER),
    claims=(
        *(
            Claim(
                text=f"the window raises accuracy at {epochs} epochs",
                weights=_gain(epochs),
                tried=_LONG_OF_ALL if epochs > 10 else "",
            )
            for epochs in _LARGER
        ),
        _gains_more(5, 20),
    ),
)

TRIALS = Table(
    name="trials",
    title="Spread of five trials",
    source="Appendix, Experimental results on multiple trials",
    text="The same run with five seeds, of the encoder, the rows, the order and the augmentation. The paper's standard "
    "deviations over five trials are 0.11 in epoch order and 0.08 in windows.",
    cells=(in_epoch_order("epoch order"), in_windows("sliding window")),
    paper=papers({"epoch order": 66.24, "sliding window": 67.32}),
    claims=(Claim(text="the window is better than epoch order", weights={"sliding window": 1, "epoch order": -1}),),
    seeds=5,
    gives_spread=True,
)
