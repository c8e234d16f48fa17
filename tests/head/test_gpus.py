"""On a GPU, which may be a pretended one, a head takes the steps and gives the answers that it gives on a CPU."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.gpus import Gpus
from tests.helpers.own_loop import DIM, INPUTS, NUM_CLASSES, SETTINGS, Encoder, shuffled
from weightserver.torch import ClassifierHead


def looked_at(device: str, rows: Any, directory: Path) -> None:
    """A step that fails, one whose rows overflow, and clipped ones; writes what the head is then."""
    encoder, scaler, norms = Encoder(), torch.amp.GradScaler(torch.device(device).type, init_scale=1.0), []
    encoder.module.to(device)
    encoder.optimizer = torch.optim.SGD(encoder.module.parameters(), lr=0.1, momentum=0.9)
    given: dict[str, Any] = SETTINGS | {"directory": directory / "rows", "rows": rows}
    with ClassifierHead(NUM_CLASSES, DIM, **given) as head:
        head.to(device)
        for number, ids in enumerate(shuffled(2, 5)):
            batch = INPUTS[ids].to(device)
            if number == 1:
                with suppress(MemoryError), head.step_of(ids):
                    scaler.scale(head(encoder.module(batch), ids)).backward()
                    raise MemoryError
                encoder.optimizer.zero_grad()
            with head.step_of(ids):
                scale = float("inf") if number == 3 else 1.0
                scaler.scale(head(encoder.module(batch), ids) * scale).backward()
                norm = head.step(0.3, scaler=scaler, optimizer=encoder.optimizer, max_norm=4.0)
            assert norm is not None
            norms.append(norm.item())
            scaler.step(encoder.optimizer)
            scaler.update()
            encoder.optimizer.zero_grad()
        head.eval()
        with torch.no_grad():
            embeddings = encoder.module(INPUTS.to(device))
            everyone = list(range(NUM_CLASSES))
            found = [tuple(head.evaluate(embeddings, everyone, classes=classes)) for classes in ("all", "recent")]
            results = {
                "norms": norms,
                "found": found,
                "nearest": head.predict(embeddings, 3),
                "rows": head.rows(everyone),
            }
    torch.save(results | {"scale": scaler.get_scale()}, directory / "found")


@pytest.mark.guard
@pytest.mark.parametrize("rows", ["dense", "resident"])
def test_a_gpu_does_what_a_cpu_does(gpus: Gpus, tmp_path: Path, one_thread: None, rows: str) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "gpu").mkdir()
    looked_at("cpu", rows, tmp_path / "cpu")
    gpus.run(looked_at, "cuda:0", rows, tmp_path / "gpu", directory=tmp_path / "logs")
    cpu, gpu = (torch.load(tmp_path / name / "found", weights_only=True) for name in ("cpu", "gpu"))
    assert torch.equal(cpu["nearest"], gpu["nearest"])
    torch.testing.assert_close(cpu["rows"], gpu["rows"])
    assert cpu["norms"] == pytest.approx(gpu["norms"], rel=1e-5)
    assert [*map(pytest.approx, cpu["found"])] == gpu["found"]
    assert cpu["scale"] == gpu["scale"] == 0.5
