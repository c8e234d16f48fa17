"""Near-duplicates among a run's images: found by the rows on its weight servers, and shown on its page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.small_run import EVERY, NUM_IMAGES, ONLY_ROWS, small_run
from trainer.__main__ import main
from trainer.data import Dataset
from trainer.loop import train
from trainer.report.duplicates import find_duplicates, read_duplicates
from trainer.report.inspection import show_pairs
from trainer.run.stored_rows import StoredRows
from weightserver import TableSpec, WeightClient
from weightserver.torch import RangesOrder

ORDER = RangesOrder((250, 50), 3)
COPIES = [(7, 260), (8, 9), (8, 299)]
"""Pairs of images whose rows are nearly the same."""


def command(*arguments: object) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, arguments)])
    return stopped.value.code


@pytest.fixture
def stored(client: WeightClient) -> StoredRows:
    """The rows of 300 images, of which some are alike, and rows without images, which are alike too."""
    client.create_table(TableSpec(num_rows=310, dim=16, rows_per_block=7))
    client.extend_schedule(0, np.full(10, 0.1, np.float32))
    client.open_session("run")
    generator = np.random.default_rng(0)
    of_image = generator.standard_normal((310, 16), np.float32)
    for one, other in COPIES:
        of_image[other] = of_image[one] * 3 + 0.1 * generator.standard_normal(16, np.float32)
    of_image[300:] = 1
    rows = np.append(ORDER.rows(np.arange(300)), np.arange(300, 310))
    client.write_state(rows, of_image, np.zeros_like(of_image), 0)
    return StoredRows(client, ORDER, 300)


def test_pairs_of_rows_are_pairs_of_images(stored: StoredRows) -> None:
    found = find_duplicates(stored, threshold=0.98)
    assert {(one, other) for one, other, _ in found.pairs} == {*COPIES, (9, 299)}
    assert (found.num_pairs, found.images_at_limit, found.checkpoint, found.step) == (4, 0, "", 0)
    for one, other, cosine in found.pairs:
        rows = stored.client.fetch(ORDER.rows(np.array([one, other])), step=0)
        assert cosine == pytest.approx(rows[0] @ rows[1] / np.linalg.norm(rows[0]) / np.linalg.norm(rows[1]), abs=1e-5)
    assert [cosine for *_, cosine in found.pairs] == sorted((cosine for *_, cosine in found.pairs), reverse=True)
    fewer = find_duplicates(stored, threshold=0.98, neighbours=1, most_pairs=2)
    assert fewer.pairs == found.pairs[:2]
    assert fewer.images_at_limit == 5


def test_pairs_of_a_checkpoint(stored: StoredRows) -> None:
    stored.client.checkpoint("kept", step=4)
    rows = np.arange(300)
    stored.client.write_state(rows, np.ones((300, 16), np.float32), np.ones((300, 16), np.float32), 5)
    found = find_duplicates(stored, "kept", threshold=0.98)
    assert (found.num_pairs, found.checkpoint, found.step) == (4, "kept", 4)
    now = find_duplicates(stored, threshold=0.98, neighbours=3)
    assert (now.images_at_limit, now.step) == (300, 5)  # all rows are alike


def test_pictures_of_pairs() -> None:
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    labels = torch.tensor([0, 1, 1, 2, 2])
    data = Dataset(train_images=images, train_labels=labels, test_images=images[:0], test_labels=labels[:0])
    alike, other = show_pairs(data, [(1, 2, 0.97), (0, 4, 0.95)])
    assert (alike.one.index, alike.other.index, alike.other.similarity, alike.other.agrees) == (1, 2, 0.97, True)
    assert other.other.agrees is False
    assert alike.one.uri != alike.other.uri
    with pytest.raises(ValueError, match="image 5 is not among its 5 images"):
        show_pairs(data, [(1, 5, 0.9)])


@pytest.mark.guard
def test_the_page_of_a_run_shows_its_duplicates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    run = tmp_path / "run"
    train(small_run(run, steps=EVERY + 1, order_seed=11))
    assert command("duplicates", run, "--threshold", 0.3, "--checkpoint", f"step-{EVERY:012d}") == 0
    found = read_duplicates(run)
    assert found is not None
    assert capsys.readouterr().out == (
        f"{found.num_pairs} pairs with a cosine of at least 0.3: wrote {run / 'duplicates.json'}\n"
    )
    assert len(found.pairs) == found.num_pairs > 24
    assert all(0 <= one < other < NUM_IMAGES for one, other, _ in found.pairs)
    assert command("report", run) == 0
    text = (run / "report.html").read_text()
    assert text.count('<figure class="duplicate">') == 24
    assert f"{found.num_pairs:,} pairs of training images" in text
    content = json.loads((run / "duplicates.json").read_text())
    (run / "duplicates.json").write_text(json.dumps(content | {"pairs": [[1, NUM_IMAGES, 0.9]]}))
    assert command("report", run) == 0
    assert f"not shown: the training images are not available here (image {NUM_IMAGES} is not" in " ".join(
        (run / "report.html").read_text().split()
    )
    (run / "duplicates.json").write_text("{}")
    assert command("report", run) == 1
    assert "is not one that 'pic duplicates' wrote: remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--threshold", 1.5), "--threshold must lie above -1 and not above 1, got 1.5"),
        (("--threshold", "nan"), "--threshold must lie above -1 and not above 1, got nan"),
        (("--neighbours", 0), "--neighbours must lie in 1..4095, got 0"),
        (("--most-pairs", 0), "--most-pairs must be at least 1, got 0"),
        (("--checkpoint", "lost"), "there is no checkpoint 'lost' on all shards"),
    ],
)
def test_bad_input_gives_one_line(
    arguments: tuple[object, ...],
    message: str,
    stored: StoredRows,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, servers = tmp_path / "run", ",".join(shard.address for shard in stored.client.describe().shards)
    config = small_run(run, encoder=ONLY_ROWS)
    run.mkdir()
    (run / "config.json").write_text(config.to_json())
    assert command("duplicates", run, "--servers", servers, *arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert not (run / "duplicates.json").exists()
