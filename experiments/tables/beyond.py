"""Comparisons of this trainer's own options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.cells import KNN, LINEAR, Cell, Claim, Table
from experiments.data import SIMILAR_ORDER
from experiments.tables.common import in_windows

_SMALL: dict[str, Any] = {"num_images": 10_000, "num_negatives": 512}
_WINDOWS_OF_20_EPOCHS = _SMALL | {"epochs": 20.0, "window_size": 2_048, "window_stride": 256}

ROW_PRECISION = Table(
    name="row_precision",
    title="Rows stored in float32 or bfloat16 (`--row-precision`)",
    text=(
        "20 epochs of 10,000 images, in windows of W = 2,048 and S = 256. Resident rows are stored as they leave, "
        "remote ones in each step."
    ),
    cells=tuple(
        Cell(row=f"{rows} rows", column=precision, settings=_WINDOWS_OF_20_EPOCHS | stored | precise)
        for rows, stored in (("resident", {}), ("remote", {"rows": "remote"}))
        for precision, precise in (("float32", {}), ("bfloat16", {"row_precision": "bfloat16"}))
    ),
    claims=tuple(
        Claim(
            text=f"{rows} rows in bfloat16 lose nothing in {name}",
            weights={f"{rows} rows, bfloat16": 1, f"{rows} rows, float32": -1},
            measure=measure,
            not_below=True,
        )
        for rows in ("resident", "remote")
        for name, measure in (("kNN", KNN), ("the linear probe", LINEAR))
    ),
    seeds=3,
)

_OPTIONS: dict[str, dict[str, Any]] = {
    "label smoothing 0.1": {"label_smoothing": 0.1},
    "τ from 0.2 to 0.1": {"final_temperature": 0.1},
    "τ = 0.1": {"temperature": 0.1},
    "row momentum 0.5": {"row_momentum": 0.5},
    "row momentum 0.95": {"row_momentum": 0.95},
}
_DEFAULT = in_windows("PIC")
_SIMILAR = "window over an order of similar images"
BEYOND = Table(
    name="beyond",
    title="Options that the paper does not have",
    text=(
        "The default run with one change each: `--label-smoothing`, `--final-temperature`, "
        "`--temperature`, `--row-momentum`, and `--image-order` with the order that "
        "`python -m experiments.image_order` makes from the features of the default run. K that rises or falls "
        "during the run was tried with one seed (between 128 and 1,024, in windows and in epoch order); it did "
        "not help, and is not offered."
    ),
    cells=(
        _DEFAULT,
        *(in_windows(row, **settings) for row, settings in _OPTIONS.items()),
        replace(in_windows(_SIMILAR, image_order=SIMILAR_ORDER), after=_DEFAULT),
    ),
    claims=(
        *(Claim(text=f"{row} raises accuracy", weights={row: 1, _DEFAULT.row: -1}) for row in (*_OPTIONS, _SIMILAR)),
        Claim(
            text="a temperature that falls to 0.1 is better than one of 0.1",
            weights={"τ from 0.2 to 0.1": 1, "τ = 0.1": -1},
        ),
    ),
    seeds=3,
)
