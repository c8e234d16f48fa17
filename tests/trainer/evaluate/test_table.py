"""The table of results."""

import io

from rich.console import Console

from trainer.evaluate.protocol import ProbeResult
from trainer.evaluate.table import print_table


def test_table_shows_every_figure() -> None:
    def result(top1: float, setting: float) -> ProbeResult:
        return ProbeResult(top5=99.0, top1=top1, setting=setting, held_out_top1=0.0)

    results = {
        "trained encoder": {"knn": result(87.125, 20), "linear": result(88.5, 1e-4)},
        "raw pixels": {"knn": result(86.17, 5), "linear": result(84.31, 0.01)},
    }
    output = io.StringIO()
    print_table(results, Console(file=output, width=100))
    lines = output.getvalue().splitlines()
    trained = next(line for line in lines if "trained encoder" in line)
    assert [cell.strip() for cell in trained.split("│")[1:-1]] == ["trained encoder", "87.12", "20", "88.50", "0.0001"]
    assert any("raw pixels" in line and "86.17" in line and "84.31" in line for line in lines)
