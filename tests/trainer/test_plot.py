"""The plot of a run, from its metrics.jsonl."""

import json
from pathlib import Path

import pytest
from PIL import Image

from trainer.run.plot import draw_training, read_metrics

RECORDS = [{"step": step, "loss": 7 - 0.01 * step} for step in range(20)]
for _record in RECORDS[::5]:
    _record["knn_top1"] = 70 + _record["step"]


def test_draws_a_png_and_leaves_out_a_line_cut_short(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in RECORDS) + '{"step": 20, "lo')
    assert read_metrics(metrics) == RECORDS
    draw_training(metrics, tmp_path / "training.png", chance_loss=6.93, references={"raw pixels": 84.5})
    with Image.open(tmp_path / "training.png") as image:
        assert image.format == "PNG"
        assert len(image.getcolors(1 << 24) or []) > 10  # not blank


def test_a_missing_or_damaged_file_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*give a run's metrics.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text("no json\n{}\n")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_metrics(tmp_path / "metrics.jsonl")
