"""Tables about negatives and the correction of rows that are not among them."""

from __future__ import annotations

from experiments.cells import Claim, Table
from experiments.tables.common import IMAGES, in_epoch_order, papers

_CORRECTIONS = {"exact": "with correction", "paper": "with the paper's formula", "none": "without correction"}
_NEGATIVES = (128, 1_024, 4_096)
_FULL = f"K = {IMAGES:,}"

NEGATIVES = Table(
    name="negatives",
    title="Negatives, with and without correction",
    source="Table 2",
    text=(
        "Columns with the same K / B correspond: K = B = 128 to the paper's K = B = 512, 1,024 to 4,096, 4,096 to "
        "16,384, and all images to all images. In epoch order. The paper's formula has one learning rate for all steps "
        "of a gap; the paper reports one line with correction."
    ),
    cells=(
        *(
            in_epoch_order(row, f"K = {number:,}", num_negatives=number, correction=correction)
            for number in _NEGATIVES
            for correction, row in _CORRECTIONS.items()
        ),
        in_epoch_order(_CORRECTIONS["exact"], _FULL, num_negatives=IMAGES),
    ),
    paper=papers(
        {
            "with correction, K = 128": 65.5,
            "with correction, K = 1,024": 66.0,
            "with correction, K = 4,096": 66.1,
            f"with correction, {_FULL}": 66.2,
            "without correction, K = 128": 56.8,
            "without correction, K = 1,024": 61.0,
            "without correction, K = 4,096": 61.6,
        }
    ),
    claims=(
        Claim(
            text="the correction raises accuracy at K = B",
            weights={"with correction, K = 128": 1, "without correction, K = 128": -1},
        ),
        Claim(
            text="the correction raises accuracy at K = 4,096",
            weights={"with correction, K = 4,096": 1, "without correction, K = 4,096": -1},
        ),
        Claim(
            text="the correction gains more at K = B than at K = 4,096",
            weights={
                "with correction, K = 128": 1,
                "without correction, K = 128": -1,
                "with correction, K = 4,096": -1,
                "without correction, K = 4,096": 1,
            },
        ),
        Claim(
            text="with correction, K = B loses nothing against all images",
            weights={"with correction, K = 128": 1, f"with correction, {_FULL}": -1},
            not_below=True,
        ),
        Claim(
            text="each step's own learning rate in the correction loses nothing against the paper's formula at K = B",
            weights={"with correction, K = 128": 1, "with the paper's formula, K = 128": -1},
            not_below=True,
        ),
    ),
)

_DECAYS = (1e-4, 1e-3, 3e-3, 1e-2)
DECAY = Table(
    name="decay",
    title="Weight decay, with and without correction",
    text="What the correction is worth depends on η·λ·T: the same run at K = B, with other weight decays λ.",
    cells=tuple(
        in_epoch_order(row, f"λ = {decay:g}", num_negatives=128, weight_decay=decay, correction=correction)
        for decay in _DECAYS
        for correction, row in _CORRECTIONS.items()
        if correction != "paper"
    ),
    claims=(
        Claim(
            text="the correction gains more at λ = 0.01 than at λ = 0.0001",
            weights={
                "with correction, λ = 0.01": 1,
                "without correction, λ = 0.01": -1,
                "with correction, λ = 0.0001": -1,
                "without correction, λ = 0.0001": 1,
            },
        ),
    ),
)
