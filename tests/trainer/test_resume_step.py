"""A run whose weight servers or directory are older copies: it asks for the step to resume from, and sets newer files
aside instead of removing them.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.small_run import EVERY, ONLY_ROWS, PowerLoss, losses, power_loss_at, small_run
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.run import checkpoint_file
from trainer.run.checkpoint import Checkpoints
from trainer.run.checkpoint_file import saved_steps
from trainer.run.directory import read_settings
from trainer.run.resume import step_to_resume
from weightserver import DataLossError, LocalCluster, WeightClient

pytestmark = pytest.mark.usefixtures("one_thread")


def run(output: Path, **changes: Any) -> TrainConfig:
    """A run whose last checkpoint, that of its end, is due anyway."""
    return small_run(output, **{"encoder": ONLY_ROWS, "keep_checkpoints": 9, "steps": 3 * EVERY} | changes)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, and `older`: its servers as they were between the checkpoints of steps 13 and 26."""
    output = tmp_path_factory.mktemp("ended") / "run"
    with pytest.raises(PowerLoss):
        train(run(output), on_step=power_loss_at(20))
    shutil.copytree(output / "servers", output.parent / "older")
    train(run(output, resume=True))
    assert saved_steps(output / "checkpoints") == [0, EVERY, 2 * EVERY, 3 * EVERY]
    return output


@pytest.fixture
def stale(ended: Path, tmp_path: Path) -> Path:
    """A copy of the run with its older servers."""
    output = shutil.copytree(ended, tmp_path / "run", ignore=shutil.ignore_patterns("servers"))
    shutil.copytree(ended.parent / "older", output / "servers")
    return output


def contents(directory: Path) -> dict[str, bytes]:
    """Contents of all files except the servers'."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and "servers" not in path.parts
    }


def set_aside(output: Path) -> list[dict[str, bytes]]:
    return [contents(path) for path in sorted((output / "checkpoints").glob("set-aside-*"))]


@pytest.mark.guard
def test_older_servers_are_refused_unless_a_step_is_given(stale: Path, ended: Path) -> None:
    before = contents(stale)
    for resume in (True, "auto"):
        with pytest.raises(
            DataLossError, match=r"lacks what it had acknowledged: .*put the newest directory back"
        ) as no:
            train(run(stale, resume=resume))
        assert str(no.value).endswith(f", or give --resume-step {EVERY}, the newest whose checkpoint they have")
    assert contents(stale) == before
    train(run(stale, resume=True, resume_step=EVERY))
    assert losses(stale) == losses(ended)
    assert saved_steps(stale / "checkpoints") == saved_steps(ended / "checkpoints")
    (aside,) = set_aside(stale)
    newer = [f"checkpoints/step-{step:012d}.safetensors" for step in (2 * EVERY, 3 * EVERY)]
    moved = [*newer, "summary.json", "encoder.safetensors", "metrics.jsonl"]
    assert aside == {Path(name).name: before[name] for name in moved}
    assert read_settings(stale) == read_settings(ended) | {"output": str(stale)}, "it is no setting of the run"
    train(run(stale, resume=True))
    assert losses(stale) == losses(ended)


@pytest.mark.guard
def test_a_restarted_command_resumes_its_own_checkpoints(
    stale: Path, ended: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As torchrun or another supervisor does; by hand, after a plain --resume, it returns to the step again."""
    begun: list[int] = []
    with pytest.raises(PowerLoss):
        train(run(stale, resume=True, resume_step=EVERY), on_step=power_loss_at(30))
    train(run(stale, resume="auto", resume_step=EVERY, keep_checkpoints=1), on_step=begun.append)
    assert begun[0] == 2 * EVERY
    assert f"was resumed from step {EVERY} before: resuming from step {2 * EVERY}, its newest" in caplog.text
    assert len(set_aside(stale)) == 1
    assert saved_steps(stale / "checkpoints") == [3 * EVERY]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume_step": 2 * EVERY}, r"cannot be resumed from step 26: only steps \[0, 13\] have both a file in"),
        ({"resume_step": 14}, r"cannot be resumed from step 14: only steps \[0, 13\]"),
        ({"resume_step": -1}, r"cannot be resumed from step -1"),
        ({"resume_step": EVERY, "resume": False}, "--resume-step is for a run that is resumed: give --resume too"),
    ],
)
def test_resume_rejects_impossible_steps(changes: dict[str, Any], message: str, stale: Path) -> None:
    before = contents(stale)
    with pytest.raises(ValueError, match=message):
        train(run(stale, **{"resume": True} | changes))
    assert contents(stale) == before


def test_a_retaken_checkpoint_does_not_match_the_file(ended: Path, tmp_path: Path) -> None:
    """It has the same name and step, but other rows."""
    output, name = shutil.copytree(ended, tmp_path / "run"), f"step-{2 * EVERY:012d}"
    with LocalCluster(2, output / "servers") as cluster, WeightClient(cluster.addresses) as client:
        client.open_session("operator")
        assert step_to_resume(output / "checkpoints", client, 2 * EVERY) == 2 * EVERY
        client.rollback(f"step-{EVERY:012d}")
        client.extend_schedule(EVERY, np.ones(EVERY, np.float32))
        client.checkpoint(name, step=2 * EVERY)
        with pytest.raises(ValueError, match=r"cannot be resumed from step 26: only steps \[0, 13\] have both"):
            step_to_resume(output / "checkpoints", client, 2 * EVERY)


@pytest.mark.parametrize("lacking", [[2 * EVERY, 3 * EVERY], [3 * EVERY]], ids=["two", "one"])
@pytest.mark.guard
def test_servers_with_an_older_directory_discard_nothing_unasked(
    lacking: list[int], ended: Path, tmp_path: Path
) -> None:
    """The directory is an older copy, or lost files: the servers have checkpoints of 39, or of 26 and 39."""
    output, newest = shutil.copytree(ended, tmp_path / "run"), lacking[0] - EVERY
    for step in lacking:
        (output / "checkpoints" / f"step-{step:012d}.safetensors").unlink()
    refused = rf"of steps {re.escape(str(lacking))}, and .* put them there, or give --resume-step {newest} to"
    for _ in range(2):  # a refusal discards nothing
        with pytest.raises(ValueError, match=refused):
            train(run(output, resume=True))
    train(run(output, resume=True, resume_step=newest))
    assert losses(output) == losses(ended)


@pytest.mark.parametrize(
    ("stopped", "rows", "keep"),
    [(EVERY, "resident", 1), (EVERY, "remote", 2), (EVERY + 1, "resident", 9), (EVERY + 1, "remote", 1)],
)
@pytest.mark.guard
def test_a_copy_older_by_one_checkpoint_than_a_stopped_run_is_refused(
    stopped: int, rows: str, keep: int, tmp_path: Path
) -> None:
    """Even if the servers have seen no later step."""
    output, older = tmp_path / "run", tmp_path / "older"

    def copies_and_stops(step: int) -> None:
        if step == 5:
            shutil.copytree(output, older, ignore=shutil.ignore_patterns("servers"))
        power_loss_at(stopped)(step)

    settings = {"rows": rows, "keep_checkpoints": keep}
    with pytest.raises(PowerLoss):
        train(run(output, **settings), on_step=copies_and_stops)
    shutil.move(output / "servers", older)
    before = contents(older)
    refused = "has none of these files; it may be an older copy" if keep > 1 else "do not hold checkpoint"
    with pytest.raises(ValueError, match=refused):
        train(run(older, resume=True, **settings))
    assert contents(older) == before


@pytest.mark.guard
def test_a_copy_made_during_a_checkpoint_is_refused_if_the_run_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks as if the run had died there, and could be resumed if nothing had come later."""
    output, older = tmp_path / "run", tmp_path / "older"
    write = Checkpoints._write

    def copies_and_writes(self: Checkpoints, step: int, *rest: Any) -> None:
        if step == EVERY:
            shutil.copytree(output, older, ignore=shutil.ignore_patterns("servers"))
        write(self, step, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "_write", copies_and_writes)
        with pytest.raises(PowerLoss):
            train(run(output, rows="remote"), on_step=power_loss_at(EVERY + 2))
    shutil.move(output / "servers", older)
    with pytest.raises(ValueError, match=r"have checkpoints of steps \[13\], and .* may be an older copy"):
        train(run(older, resume=True))


@pytest.mark.guard  # seconds
def test_files_that_are_not_the_runs_stay(ended: Path, tmp_path: Path) -> None:
    """Files of an older and a newer step, of a step that the run reaches, and unreadable ones are ignored and kept."""
    output, theirs = shutil.copytree(ended, tmp_path / "run"), {}
    files = output / "checkpoints"
    other = (files / f"step-{EVERY:012d}.safetensors").read_bytes()
    shutil.rmtree(output)

    def put(step: int) -> None:
        if step == 10:
            for name in ("step-000000000005", "step-000000000026", "step-000000000999", "notes"):
                theirs[files / f"{name}.safetensors"] = other
            theirs[files / "step-000000000007.safetensors"] = b"cut off"
            theirs[files / "mine.partial"] = b""
            for path, content in theirs.items():
                path.write_bytes(content)

    with LocalCluster(2) as cluster, WeightClient(cluster.addresses) as client:
        settings = {"servers": ",".join(cluster.addresses), "keep_checkpoints": 1}
        train(run(output, **settings), on_step=put)
        assert [kept.name for kept in client.checkpoints()] == ["step-000000000039"]
        taken = files / "step-000000000026.safetensors"  # the run's own took its place, and went in its turn
        assert set_aside(output) == [{taken.name: theirs.pop(taken)}]
        assert not taken.exists()
        with pytest.raises(
            ValueError, match=r"step-0+999\.safetensors: .* another table than that of .*, or give --resume-step 39,"
        ):
            train(run(output, resume=True, **settings))
        (files / "step-000000000999.safetensors").rename(files / "other.safetensors")
        theirs[files / "other.safetensors"] = theirs.pop(files / "step-000000000999.safetensors")
        train(run(output, resume=True, **settings))
    assert {path: path.read_bytes() for path in theirs} == theirs
    assert losses(output) == losses(ended)


def test_files_set_aside_survive_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each renamed file's old and new directory are synced after the last rename, copies before the first."""
    files = tmp_path / "checkpoints"
    files.mkdir()
    moved, copied, done = [files / "newer", tmp_path / "summary.json"], tmp_path / "metrics.jsonl", list[Path]()
    for path in (*moved, copied):
        path.write_text(path.name)
    rename = Path.rename
    monkeypatch.setattr(checkpoint_file, "sync", done.append)
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append(Path("renamed")), rename(path, to)))
    checkpoint_file.set_aside(files, moved, [copied])
    (aside,) = files.iterdir()
    assert contents(aside) == {path.name: path.name.encode() for path in (*moved, copied)}
    assert done[:3] == [aside / copied.name, Path("renamed"), Path("renamed")]
    assert set(done[3:]) == {aside, files, tmp_path}


@pytest.mark.parametrize(
    "left", ["metrics.jsonl", "summary.json", "encoder.safetensors", "training.png", "checkpoints"]
)
def test_a_directory_with_a_runs_files_starts_no_run(left: str, ended: Path, tmp_path: Path) -> None:
    """Its config.json is lost, or it was copied only in part."""
    output = tmp_path / "run"
    output.mkdir()
    if left == "training.png":  # of which the demo makes one
        (output / left).write_text("mine")
    else:
        (shutil.copytree if left == "checkpoints" else shutil.copy)(ended / left, output / left)
    before = contents(output)
    with pytest.raises(ValueError, match=f"holds {left} of a run whose config.json is missing: restore it to resume"):
        train(run(output))
    assert contents(output) == before
