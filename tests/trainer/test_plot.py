"""The plot of a run, from its metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from trainer.run.directory import read_metrics
from trainer.run.plot import draw_training


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 7}\n{"step": 20, "lo')
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [{"step": 0, "loss": 7}]
    assert draw_training(tmp_path / "metrics.jsonl").startswith(b"\x89PNG")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn from now on."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: found.append(self))
    return found


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def points(figure: Figure, label: str) -> list[list[tuple[float, float]]]:
    """(x, y) of the lines of this label, from the upper panel to the lower one."""
    lines = [line for axes in figure.axes for line in axes.get_lines() if line.get_label() == label]
    return [[(float(x), float(y)) for x, y in np.asarray(line.get_xydata())] for line in lines]


def test_the_curves_are_those_of_the_records(drawn: list[Figure], tmp_path: Path) -> None:
    """From kNN before the first step, and the first recorded loss instead of a mean with lower ones after it, on."""
    losses = [6.9 - 0.02 * min(step, 80) + 0.02 * max(0, step - 80) for step in range(120)]
    records: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "knn_top1": 70.0} for step, loss in enumerate(losses, start=9)
    ]
    records[0]["initial_knn_top1"] = 60.0
    others = [record | {"loss": 6.95, "knn_top1": 65.0} for record in records]
    metrics, other = written(tmp_path / "metrics.jsonl", records), written(tmp_path / "other.jsonl", others)
    references = {"trained encoder": 85.0, "untrained encoder": 60.0, "raw pixels": 75.0}
    draw_training(metrics, chance_loss=6.93, references=references, others={"without correction": other})
    (figure,) = drawn
    assert points(figure, "during training")[0][0] == (0, 60)
    assert points(figure, "loss, smoothed")[0][0] == pytest.approx((9, 6.9))
    assert figure.axes[0].get_xlim()[0] == 0
    loss, accuracy = ([y for _, y in curve] for curve in points(figure, "without correction"))
    assert loss == pytest.approx([6.95] * 120)
    assert accuracy == [60.0, *[65.0] * 120]
    figure.canvas.draw()
    for axes in figure.axes:
        looks = [(str(line._dash_pattern), line.get_marker(), line.get_linewidth()) for line in axes.get_lines()]  # type: ignore[attr-defined]
        assert len(set(looks)) == len(looks) > 3, "told apart without colour"
        (legend,) = filter(None, [axes.get_legend()])
        box = legend.get_window_extent()
        assert not any(box.overlaps(panel.get_window_extent()) for panel in figure.axes), "it covers a curve"
        assert figure.bbox.containsx(box.x0)
        assert figure.bbox.containsx(box.x1)


@pytest.mark.parametrize(("number", "labels"), [(99, ["loss"]), (100, ["loss", "loss, smoothed"])])
def test_a_short_run_has_the_panels_and_lines_of_what_it_has(
    number: int, labels: list[str], drawn: list[Figure], tmp_path: Path
) -> None:
    """No smoothed loss, which would hide the few points, and no panel of accuracy without any."""
    losses = [7 - 0.01 * step + step % 2 for step in range(number)]
    records = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    draw_training(written(tmp_path / "metrics.jsonl", records))
    (axes,) = drawn[0].axes
    assert [line.get_label() for line in axes.lines] == labels
    assert np.asarray(axes.lines[0].get_ydata()).tolist() == losses
    if len(labels) == 2:
        smoothed = np.asarray(axes.lines[1].get_ydata())
        assert smoothed[0] == losses[0]
        assert smoothed[50] == pytest.approx(np.mean(losses[48:53]))
        assert smoothed[-1] == pytest.approx(np.mean(losses[-3:]))
