"""Comparisons of this trainer's own options."""

from __future__ import annotations

from typing import Any

from experiments.cells import Cell, Claim, Table

_SMALL: dict[str, Any] = {"num_images": 10_000, "num_negatives": 512}
_ORDERS: dict[str, dict[str, Any]] = {
    "epoch order": {"window_size": 10_000, "window_stride": 10_000},
    "windows": {"window_size": 2_048, "window_stride": 256},
}
_BEGINNINGS = ("random", "embedding")

BEGINNINGS = Table(
    name="beginnings",
    title="Rows that begin at random, or at the embedding of their image (`--init`)",
    text="The preset's weight decay, W = 2,048 and S = 256.",
    cells=tuple(
        Cell(
            row=f"{order}, {init}",
            column=f"{epochs} epochs",
            settings=_SMALL | settings | {"epochs": float(epochs), "init": init},
        )
        for epochs in (2, 6, 20)
        for order, settings in _ORDERS.items()
        for init in _BEGINNINGS
    ),
    claims=tuple(
        Claim(
            text=f"beginning at the embedding is better in {order} of 2 epochs",
            weights={f"{order}, embedding, 2 epochs": 1, f"{order}, random, 2 epochs": -1},
        )
        for order in _ORDERS
    ),
    seeds=3,
)

ROW_PRECISION = Table(
    name="row_precision",
    title="Rows stored in float32 or bfloat16 (`--row-precision`), in the preset's run",
    cells=tuple(
        Cell(row=rows, column=precision, settings={"rows": rows, "row_precision": precision})
        for rows in ("resident", "remote")
        for precision in ("float32", "bfloat16")
    ),
    claims=tuple(
        Claim(
            text=f"{rows} rows in bfloat16 lose nothing",
            weights={f"{rows}, bfloat16": 1, f"{rows}, float32": -1},
            not_below=True,
        )
        for rows in ("resident", "remote")
    ),
)
