"""The GPU benchmark at toy size: every section on pretended GPUs, and the results that a failure leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import profiled
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.facts import facts
from benchmarks.gpu.runs import RunFailedError, start_processes
from benchmarks.gpu.sections import SECTIONS, SIZES
from tests.helpers.gpus import Gpus

TOY = SIZES["toy"]


def results(output: Path) -> dict[str, Any]:
    document = json.loads((output / "gpu.json").read_text())
    assert document.keys() == {"command", "machine", "results"}
    sections: dict[str, Any] = document["results"]["sections"]
    return sections


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_section_measures(gpus: Gpus, tmp_path: Path) -> None:
    status = main(["--size", "toy", "--output", str(tmp_path), "--minutes", "10"], start=gpus.start_module)
    sections = results(tmp_path)
    assert [name for name, section in sections.items() if "error" in section] == []
    assert status == 0
    found = {name: section["found"] for name, section in sections.items()}
    assert found.keys() == SECTIONS.keys()

    assert found["rates"].keys() == {"generated", "none"}
    for by_number in found["rates"].values():
        assert by_number.keys() == {"1", "2"}
        for rate in by_number.values():
            assert rate["images_per_second"] == pytest.approx(TOY.batch_size / rate["step"]["p50"])
            assert 0 < rate["data_share"] + rate["rows_share"] < 1
    for compared in found["resident"].values():
        assert compared["ratio"] == pytest.approx(compared["plain"]["p50"] / compared["resident"]["p50"])
    assert found["resident"]["generated"]["resident"] == found["rates"]["generated"]["1"]["step"], "measured twice"

    cases = {(case["images"], case["rows"]): case for case in found["all-rows"]["cases"]}
    assert "refused" in cases.pop(("any", "all N"))
    assert cases.keys() == {("tiny", "all N"), ("tiny", "K"), ("any", "K")}
    for case in cases.values():
        steps = case["num_images"] / TOY.batch_size
        assert case["epoch_seconds"] == pytest.approx(steps * case["step"]["p50"])
        assert case["peak_bytes"] > 0

    for by_number in found["idle"].values():
        for seen in by_number.values():
            assert seen["traced"] == "CPU"
            assert seen["kernels"] > 0
            assert seen["busy_seconds"] > 0
            assert 0 <= seen["idle_share"] < 1
            assert seen["waits"] == pytest.approx(sum(seen["waits_by_line"].values()))
    assert found["idle"]["generated"]["1"]["waits"] > 0, "the logged step waits for its loss"

    assert found["memory"].keys() == {"4", "8"}
    text = (tmp_path / "gpu.md").read_text()
    assert all(f"## {name}\n" in text for name in SECTIONS)
    gib = 4 * (4 * TOY.dim + 2 * TOY.batch_size // 2) * 10**9 / 2**30
    assert f"at least {gib:,.0f} GiB | its tensors alone are larger than a GPU's memory" in text


def told(module: str, arguments: Sequence[str], num_ranks: int, timeout_seconds: float) -> None:
    """Starts nothing: reports two GPUs, and fails otherwise."""
    if module != "benchmarks.gpu.facts":
        raise RunFailedError(f"{module} is broken")
    there = facts() | {"gpus": ["any", "any"], "gpu_bytes": [1 << 34, 1 << 34]}
    Path(arguments[-1]).write_text(json.dumps(there))


def test_what_fails_takes_nothing_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--size", "toy", "--output", str(tmp_path)]
    assert main([*given, "--sections", "rates", "all-rows"], start=told) == 1
    sections = results(tmp_path)
    assert sections["rates"]["error"] == "trainer is broken"
    assert "bench-gpu: rates: trainer is broken" in capsys.readouterr().err
    found = {"4": {"peak_bytes": 1 << 30, "images_per_second": 100.0}}
    sections["memory"] = {"date": "2026-01-01", "commit": "abc", "seconds": 1.0, "found": found}
    document = json.loads((tmp_path / "gpu.json").read_text())
    document["results"]["sections"] = sections
    (tmp_path / "gpu.json").write_text(json.dumps(document))

    assert main([*given, "--sections", "memory", "rates", "--resume"], start=told) == 1
    assert results(tmp_path)["memory"]["found"] == found
    assert "| 4 | 1,024 MiB | 100 |" in (tmp_path / "gpu.md").read_text()
    assert "**Not whole:** trainer is broken" in (tmp_path / "gpu.md").read_text()
    assert main([*given, "--sections", "memory", "--minutes", "0"], start=told) == 1
    assert "the time for this benchmark was over" in capsys.readouterr().err


def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def none(module: str, arguments: Sequence[str], num_ranks: int, timeout_seconds: float) -> None:
        Path(arguments[-1]).write_text(json.dumps(facts() | {"gpus": [], "gpu_bytes": []}))

    assert main(["--output", str(tmp_path / "out")], start=none) == 1
    assert (
        capsys.readouterr().err == "bench-gpu: no GPU that torch can use (see nvidia-smi): run it where there is one\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_run_that_fails_or_takes_too_long_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"ended with status 1: .*No module named nowhere"):
        start_processes("nowhere", [], 1, 30)
    with pytest.raises(RunFailedError, match=r"http.server took more than 1 s"):
        start_processes("http.server", ["0", "--bind", "127.0.0.1"], 1, 1)


def test_overlapping_kernels_count_once() -> None:
    assert profiled.covered([(0, 2), (5, 6), (1, 3), (1.5, 2)]) == pytest.approx(4)
    assert profiled.covered([]) == 0
