"""A run that was stopped, killed or failed at any point resumes as if nothing had happened: every loss, bit for bit
between two runs on one machine with as many threads.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import trainer.run.checkpoint
import trainer.run.checkpoint_file
from tests.helpers.dying_run import POINTS
from tests.helpers.ports import reserved_ports
from tests.helpers.power_loss import PowerLoss
from tests.helpers.small_run import EVERY, NUM_STEPS, ONLY_ROWS, losses, small_run
from trainer.loop import train
from trainer.model import EncoderConfig, load_encoder
from trainer.run.checkpoint import Checkpoints
from trainer.run.checkpoint_file import HEAD, checkpoint_name, saved_steps, set_newer_aside
from trainer.run.claim import DirectoryClaim
from trainer.run.directory import read_encoder, read_settings, read_summary
from trainer.run.recorder import Recorder
from trainer.stopping import Interrupted
from weightserver import FencedError, LocalCluster, SessionInUseError, WeightClient, WeightServerError
from weightserver.client.connection import ShardConnection
from weightserver.common import processes
from weightserver.common.atomic_files import sync
from weightserver.operations.inspect import inspect_directory

pytestmark = pytest.mark.usefixtures("one_thread")
GUARDED = ("in the first file", "between two shards", "in the file", "between two shards of the release")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    train(small_run(output))
    return output


def assert_same(output: Path, undisturbed: Path) -> None:
    assert losses(output) == losses(undisturbed)
    assert_same_encoder(output, undisturbed)


def assert_same_end(output: Path, undisturbed: Path) -> None:
    """For a run that logged its last step alone."""
    assert json.loads((output / "metrics.jsonl").read_text())["loss"] == losses(undisturbed)[-1]
    assert_same_encoder(output, undisturbed)


def assert_same_encoder(output: Path, undisturbed: Path) -> None:
    ours, theirs = (load_encoder(path / "encoder.safetensors")[0].state_dict() for path in (output, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.guard
@pytest.mark.parametrize("rows", ["resident", pytest.param("remote", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=[] if point in GUARDED else pytest.mark.slow) for point in POINTS]
)
def test_a_run_that_is_killed_at_any_point_of_a_checkpoint_can_be_resumed(
    point: str, rows: str, tmp_path: Path, undisturbed: Path
) -> None:
    command = [sys.executable, "-m", "tests.helpers.dying_run", str(tmp_path / "run"), rows, point]
    assert subprocess.run(command, timeout=120, check=False).returncode == -signal.SIGKILL
    assert_resumes(tmp_path / "run", undisturbed, rows=rows)


def assert_resumes(output: Path, undisturbed: Path, **changes: Any) -> None:
    """Resumes to the undisturbed run's end; no shard keeps a checkpoint except the last."""
    assert not (output / "metrics.jsonl").exists() or len(losses(output)) == EVERY
    train(small_run(output, **{"keep_checkpoints": 1, "resume": True} | changes))
    assert_same(output, undisturbed)
    last = [f"step-{saved_steps(output / 'checkpoints')[-1]:012d}"]
    assert [inspect_directory(shard)["checkpoints"] for shard in (output / "servers").glob("shard-*/")] == [last, last]


@pytest.mark.parametrize("after", [pytest.param(False, id="before"), pytest.param(True, id="after")])
@pytest.mark.guard
def test_a_shard_that_is_killed_during_a_checkpoint_changes_nothing(
    after: bool, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at each checkpoint, in turn, restarted as by a supervisor."""
    call = ShardConnection.call
    restarts = []
    with LocalCluster(2, tmp_path / "servers") as cluster:

        def die_and_call(self: ShardConnection, method: str, request: Any, **options: Any) -> Any:
            dies = method == "Checkpoint" and cluster.addresses.index(self.address) == request.header.step // EVERY % 2
            answer = call(self, method, request, **options) if dies and after else None
            if dies:
                shard = cluster.addresses.index(self.address)
                cluster.processes[shard].kill()
                cluster.processes[shard].wait()
                restarts.append(threading.Thread(target=cluster.restart, args=(shard,)))
                restarts[-1].start()
            return answer or call(self, method, request, **options)

        monkeypatch.setattr(ShardConnection, "call", die_and_call)
        train(small_run(tmp_path / "run", servers=",".join(cluster.addresses)))
        for restart in restarts:
            restart.join()
    assert len(restarts) == 2 + NUM_STEPS // EVERY
    assert_same(tmp_path / "run", undisturbed)


@pytest.mark.guard  # seconds
def test_a_signal_ends_a_run_after_a_checkpoint(tmp_path: Path, undisturbed: Path) -> None:
    """Also between logged steps; its servers get SIGTERM too, as from systemd and Slurm."""
    output, settings = tmp_path / "run", {"checkpoint_every": 0, "log_every": NUM_STEPS, "retry_seconds": 1}
    others = psutil.Process().children()  # of other tests

    def stop(step: int) -> None:
        if step == 20:
            for process in [*psutil.Process().children(), psutil.Process()]:
                if process not in others:
                    process.terminate()

    with pytest.raises(Interrupted, match="after 21 steps: --resume continues from there") as stopped:
        train(small_run(output, **settings), on_step=stop)
    assert stopped.value.exit_status == 128 + signal.SIGTERM
    assert saved_steps(output / "checkpoints") == [0, 21]
    train(small_run(output, **settings, resume=True))
    assert_same_end(output, undisturbed)


@pytest.mark.guard
def test_a_signal_after_the_last_step_ends_the_run_too(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, write = tmp_path / "run", Recorder.write

    def write_and_signal(self: Recorder, record: dict[str, Any]) -> None:
        write(self, record)
        stop_this_process()

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "write", write_and_signal)
        with pytest.raises(Interrupted, match="after the last step: --resume ends the run"):
            train(small_run(output, log_every=NUM_STEPS))
    train(small_run(output, log_every=NUM_STEPS, resume=True))
    assert_same_end(output, undisturbed)


def test_a_signal_in_the_last_step_of_dense_rows_leaves_the_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which no checkpoint is saved, so that the run could not be resumed."""
    monkeypatch.setattr(Recorder, "write", lambda *_: stop_this_process())
    train(small_run(tmp_path, rows="dense", steps=2, log_every=2, encoder=ONLY_ROWS))
    assert (tmp_path / "encoder.safetensors").exists()


@pytest.mark.parametrize(
    "changes",
    [
        *({"optimizer": name} for name in ("sgd", "adamw", "lars", "lamb")),
        pytest.param(
            {"encoder": EncoderConfig(name="mobilenet_v3_small", in_channels=3, image_size=32)},
            id="dropout",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_an_optimizer_and_dropout_are_resumed_exactly(changes: dict[str, Any], tmp_path: Path) -> None:
    """Four steps and four more are eight: each loss, weight and value of the optimizer."""
    settings = {"learning_rate": 0.02, "steps": 8, "checkpoint_every": 4, "num_shards": 1}
    output = tmp_path / "run"
    train(run := small_run(output, **settings, **changes))
    ended, before = output / "checkpoints" / f"{checkpoint_name(8)}.safetensors", losses(output)
    assert len(set(before)) == 8, "something moves"
    expected = load_file(ended)
    train(run.with_settings(resume=True, resume_step=4))
    found = load_file(ended)
    assert losses(output) == before
    assert found.keys() == expected.keys()
    assert [name for name in found if name != HEAD and not torch.equal(found[name], expected[name])] == []


@pytest.mark.guard  # seconds
def test_a_resumed_run_has_not_ended(tmp_path: Path, undisturbed: Path) -> None:
    """It is killed in its first step, and resumed to the same end."""
    output = shutil.copytree(undisturbed, tmp_path / "run")
    with pytest.raises(OSError, match="power"):
        train(small_run(output, resume=True, resume_step=3 * EVERY), on_step=fail)
    assert read_summary(output) == {}
    with pytest.raises(ValueError, match=r"has not ended and has no encoder\.safetensors"):
        read_encoder(output)
    train(small_run(output, resume=True))
    assert_same(output, undisturbed)
    assert read_summary(output)["steps"] == NUM_STEPS


def test_a_resumed_run_updates_its_settings(tmp_path: Path, undisturbed: Path) -> None:
    """One from before a setting existed has its default."""
    output = shutil.copytree(undisturbed, tmp_path / "run")
    settings = read_settings(output)
    assert settings.pop("optimizer") == "sgd"
    (output / "config.json").write_text(json.dumps(settings))
    train(small_run(output, resume=True, keep_checkpoints=9))
    assert losses(output) == losses(undisturbed)
    assert read_settings(output) == settings | {"output": str(output), "keep_checkpoints": 9}


def test_the_umask_decides_who_may_read_files(undisturbed: Path) -> None:
    files = [path for path in undisturbed.rglob("*") if path.is_file() and "servers" not in path.parts]
    assert {path.suffix for path in files} >= {".json", ".jsonl", ".safetensors"}
    assert {path.stat().st_mode for path in files} == {(undisturbed / "config.json").stat().st_mode}


def fail(*_: Any, **__: Any) -> NoReturn:
    raise OSError("the power went out")


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def begun(output: Path, num_lines: int, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own that has recorded so many steps."""
    code = (
        "import json, sys; from pathlib import Path; import tests.trainer.test_resume as t; t.torch.set_num_threads(1);"
        "t.train(t.small_run(Path(sys.argv[1]), **json.loads(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(output), json.dumps(settings)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        metrics = output / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < num_lines:
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.005)
        yield process


@pytest.mark.guard
def test_a_killed_run_can_be_resumed(tmp_path: Path, undisturbed: Path) -> None:
    """kill -9 of the trainer at an arbitrary point after that many steps; resumed with other stores and settings."""
    output = tmp_path / "run"
    for num_lines, rows in ((15, "resident"), (20, "remote"), (30, "resident")):
        with begun(output, num_lines, rows=rows, resume="auto") as process:
            process.kill()
    train(small_run(output, resume=True, prefetch_steps=0, capacity=64))
    assert_same(output, undisturbed)


@pytest.mark.slow
def test_a_paused_trainer_is_fenced(tmp_path: Path, undisturbed: Path) -> None:
    """SIGSTOP, another trainer resumes the run, SIGCONT: every write of the first is refused, and it says so."""
    output = tmp_path / "run"
    with LocalCluster(2) as cluster, WeightClient(cluster.addresses) as client:
        servers = ",".join(cluster.addresses)
        with begun(output, 20, servers=servers) as first:
            first.send_signal(signal.SIGSTOP)
            train(small_run(output, servers=servers, resume=True))
            before = client.fetch_state(range(300)).weight
            first.send_signal(signal.SIGCONT)
            _, errors = first.communicate(timeout=60)
        assert first.returncode != 0
        assert re.search(r"FencedError: .*session 1 was superseded by epoch 2 \(run 'run'\): this writer must", errors)
        assert (client.fetch_state(range(300)).weight == before).all()
    assert_same(output, undisturbed)


def test_a_checkpoint_survives_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything needed to resume; parts of metrics.jsonl and similar files may be lost."""
    power_loss, output = PowerLoss(monkeypatch), tmp_path / "new/run"
    sync(tmp_path)
    take, begun = WeightClient.checkpoint, list[bool]()

    def take_begun(self: WeightClient, name: str, *, step: int) -> None:
        path = output / "checkpoints" / f"{name}.begun.partial"
        begun.append(path.exists() and str(path.relative_to(tmp_path)) not in power_loss.lost(tmp_path))
        take(self, name, step=step)

    monkeypatch.setattr(WeightClient, "checkpoint", take_begun)
    train(small_run(output, encoder=ONLY_ROWS, steps=EVERY + 1, num_shards=1))
    assert saved_steps(output / "checkpoints") == [0, EVERY, EVERY + 1]
    assert begun == [True, True, True], "the directory says so before any shard is asked"
    kinds = {Path(path).relative_to("new/run").parts[0] for path in power_loss.lost(tmp_path)}
    assert kinds <= {"servers", "metrics.jsonl", "tensorboard"}


@pytest.mark.parametrize(
    ("changes", "there", "message"),
    [
        ({}, False, r"holds no run to resume: omit --resume"),
        ({"resume": "auto", "resume_step": 0}, False, "holds no run to resume: omit --resume-step"),
        ({"resume": "auto", "margin_size": 0.3}, False, "--margin-size 0.3 is for --margin cosface"),
        (
            {"temperature": 0.3, "resume": "auto"},
            True,
            r"whose --temperature is 0\.2, not 0\.3: give the same settings",
        ),
        ({"optimizer": "lamb"}, True, r"whose --optimizer is sgd, not lamb: give the same settings"),
        (
            {"steps": 39},
            True,
            r"a length of 40 updates, not 39: it can become longer, not shorter: give --steps 40",
        ),
        ({"steps": None, "epochs": 2.0}, True, r"40 updates, not 38: .* not shorter: give --steps 40"),
        (
            {"steps": None, "epochs": 2.0, "batch_size": 32},
            True,
            r"whose --batch-size is 16, not 32: give the same settings",
        ),
        ({"num_shards": 3}, True, r"servers holds 2 shards: give --num-shards 2"),
        ({"rows": "dense"}, True, r"--rows dense saves no checkpoints: omit --resume"),
    ],
)
def test_resume_rejects_other_runs(
    changes: dict[str, Any], there: bool, message: str, undisturbed: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(small_run(undisturbed if there else tmp_path / "none", **{"resume": True} | changes))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("is_written", [False, True])
def test_a_run_that_is_interrupted_in_its_first_checkpoint_can_be_resumed(
    is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, settings = Checkpoints._write, {"steps": 2, "num_shards": 1, "encoder": ONLY_ROWS}

    def interrupted(*arguments: Any) -> None:
        if is_written:
            write(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(small_run(tmp_path / "run", **settings))
    assert train(small_run(tmp_path / "run", resume=True, **settings)).summary["steps"] == 2


@pytest.mark.guard
def test_one_command_starts_and_resumes_a_run(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(tmp_path / "run", resume="auto", keep_checkpoints=1)
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "_forget_old", fail)
        for _ in range(2):  # at the checkpoint of step 0, which is not taken again, and at the next
            with pytest.raises(OSError, match="power"):
                train(run)
    assert_resumes(tmp_path / "run", undisturbed, resume="auto")


def test_resume_auto_overwrites_nothing(tmp_path: Path, undisturbed: Path) -> None:
    with pytest.raises(ValueError, match=r"holds another run: choose another --output"):
        train(small_run(undisturbed, resume="auto", rows="dense"))
    output = shutil.copytree(undisturbed, tmp_path / "damaged")
    (output / "config.json").write_text("")
    with pytest.raises(ValueError, match=r"config\.json is not a run's config\.json: restore it, or give the --output"):
        train(small_run(output, resume="auto"))
    output = shutil.copytree(undisturbed, tmp_path / "lost")
    shutil.rmtree(output / "checkpoints")
    with pytest.raises(ValueError, match=r"no checkpoint to resume from: .*checkpoints has no file"):
        train(small_run(output, resume="auto"))
    output = tmp_path / "unclaimed"
    shutil.copytree(undisturbed / "servers", output / "servers")
    with pytest.raises(ValueError, match=r"the weight servers hold the rows of run 'run' up to step 40: resume it"):
        train(small_run(output, resume="auto"))
    assert not (output / "config.json").exists()


@pytest.mark.guard  # seconds
def test_a_live_run_that_has_written_nothing_yet_is_not_superseded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "process_id", lambda: os.urandom(16))  # as if each client were in its own
    with LocalCluster(1) as cluster, WeightClient(cluster.addresses) as other:
        run = small_run(tmp_path / "run", servers=cluster.addresses[0], steps=4, checkpoint_every=0)
        with pytest.raises(OSError, match="power"):
            train(run, on_step=fail)
        other.open_session("other")
        begin = run.with_settings(output=tmp_path / "second")
        with pytest.raises(
            ValueError, match=r"hold the rows of run 'other' up to step 0: .* \(process \d+ on .*, .*alive \d+ s ago\)"
        ):
            train(begin)
        assert train(begin.with_settings(take_over=True)).summary["steps"] == 4
        with pytest.raises(FencedError):
            other.checkpoint("late", step=4)


@pytest.mark.guard  # seconds
def test_a_command_submitted_twice_does_not_drop_the_rows_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has opened its session and written nothing yet, apart from the directory."""
    monkeypatch.setattr(processes, "process_id", lambda: os.urandom(16))  # as if each client were in its own
    with LocalCluster(1) as cluster, WeightClient(cluster.addresses) as first:
        run = small_run(tmp_path / "run", servers=cluster.addresses[0], steps=4, checkpoint_every=0)
        with monkeypatch.context() as patch:
            patch.setattr(WeightClient, "checkpoint", fail)
            with pytest.raises(OSError, match="power"):
                train(run)
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run/config.json").write_text(run.to_json())
        first.open_session("run")
        with pytest.raises(SessionInUseError):
            train(run.with_settings(resume=True))
        first.checkpoint("first", step=0)
        assert train(run.with_settings(resume=True, take_over=True)).summary["steps"] == 4


@pytest.mark.guard  # seconds
def test_servers_of_another_run_are_refused_untouched(tmp_path: Path, undisturbed: Path) -> None:
    """The other run has the same settings, and checkpoints of the same names."""
    with LocalCluster(2) as cluster, WeightClient(cluster.addresses) as client:
        servers = ",".join(cluster.addresses)
        # it releases no checkpoint, since the shards would sweep its versions away meanwhile
        train(small_run(tmp_path / "other", servers=servers, seed=1, keep_checkpoints=9))
        before = client.describe()
        with pytest.raises(
            ValueError,
            match=r"hold another table than that of .*: give the servers .* that it was saved with, or restore .*$",
        ):
            train(small_run(undisturbed, servers=servers, resume=True))
        assert client.describe() == before


@pytest.mark.guard
def test_a_run_that_was_rolled_back_keeps_its_own_checkpoints(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of later steps, whose rows were rolled back, are set aside; an operator's checkpoints stay."""
    take = WeightClient.checkpoint

    def take_another(self: WeightClient, name: str, *, step: int) -> None:
        take(self, name, step=step)
        if step == 27:
            take(self, "mine", step=step)

    output = shutil.copytree(undisturbed, tmp_path / "run")
    with LocalCluster(2, output / "servers") as cluster, WeightClient(cluster.addresses) as client:
        client.open_session("operator")
        client.rollback("step-000000000026")
    monkeypatch.setattr(WeightClient, "checkpoint", take_another)
    (output / "checkpoints" / "step-abc.safetensors").write_text("")
    (output / "checkpoints" / "step-000000000020.x.partial").write_text("")
    with pytest.raises(ValueError, match=r"do not hold checkpoint 'step-0+40' .*, or give --resume-step 26,"):
        train(small_run(output, resume=True))
    train(small_run(output, resume=True, resume_step=26, keep_checkpoints=2, checkpoint_every=9))
    assert_same(output, undisturbed)
    assert saved_steps(output / "checkpoints") == [36, 40]
    kept = ["mine", "step-000000000036", "step-000000000040"]
    assert [sorted(inspect_directory(shard)["checkpoints"]) for shard in (output / "servers").glob("shard-*/")] == [
        kept,
        kept,
    ]
    assert not list((output / "checkpoints").glob("*.partial"))


@pytest.mark.guard  # seconds
def test_a_run_that_fails_before_its_first_file_can_be_started_again(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its disk is full, then a rank is lost after the shards took the checkpoint."""

    def fill(_: Any, path: Path, **__: Any) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("no space")

    take = WeightClient.checkpoint

    def lose_a_rank(client: WeightClient, name: str, **step: int) -> NoReturn:
        take(client, name, **step)
        raise RuntimeError("gloo: Connection closed by peer")

    with LocalCluster(2) as cluster:
        run = small_run(tmp_path / "run", servers=",".join(cluster.addresses))
        with monkeypatch.context() as patched:
            patched.setattr(trainer.run.checkpoint, "save_file", fill)
            with pytest.raises(OSError, match=r"step-000000000000\..*partial cannot be written \(no space\)"):
                train(run)
        assert not list(tmp_path.glob("run/checkpoints/*.partial")), "no half of a file keeps the disk full"
        with monkeypatch.context() as patched:
            patched.setattr(WeightClient, "checkpoint", lose_a_rank)
            with pytest.raises(RuntimeError, match="closed by peer"):
                train(run)
        train(run)
    assert_same(tmp_path / "run", undisturbed)


def test_a_start_that_failed_does_not_fix_the_settings_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(tmp_path / "run", steps=1, num_shards=1, encoder=ONLY_ROWS)
    with monkeypatch.context() as patched:
        patched.setattr(WeightClient, "checkpoint", fail)
        with pytest.raises(OSError, match="power"):
            train(run)
    with pytest.raises(ValueError, match=r"servers holds 1 shards: give --num-shards 1"):
        train(run.with_settings(num_shards=2))
    (tmp_path / "killed/servers/shard-0").mkdir(parents=True)  # in its first start, between two shards
    (tmp_path / "killed/servers/cluster.json").write_text('{"num_shards": 2, "finished": false}\n')
    killed = run.with_settings(num_shards=2, output=tmp_path / "killed")
    assert train(killed).summary["steps"] == 1
    shutil.rmtree(tmp_path / "killed/servers/shard-1")  # it was not copied with the run
    with pytest.raises(WeightServerError, match=r"shard 1 did not start: .*shard-1 .*is its disk mounted"):
        train(killed.with_settings(resume=True))
    assert train(run.with_settings(dim=8)).summary["steps"] == 1
    (tmp_path / "run/config.json").unlink()
    shutil.rmtree(tmp_path / "run/checkpoints")
    for name in ("metrics.jsonl", "summary.json", "encoder.safetensors"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(ValueError, match="hold the rows of run 'run' up to step 1"):
        train(run)


@pytest.mark.guard
def test_rows_of_a_file_that_cannot_be_read_for_a_moment_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network's file system, when older checkpoints are released."""
    forget_old = Checkpoints._forget_old

    def unreadable(*_: Any, **__: Any) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def forget(self: Checkpoints, client: WeightClient) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(trainer.run.checkpoint_file, "safe_open", unreadable)
            forget_old(self, client)

    with LocalCluster(2) as cluster, WeightClient(cluster.addresses) as client:
        run = small_run(tmp_path / "run", servers=",".join(cluster.addresses), keep_checkpoints=1)
        with monkeypatch.context() as patched:
            patched.setattr(Checkpoints, "_forget_old", forget)
            train(run)
        files = saved_steps(tmp_path / "run/checkpoints")
        assert len(files) > 1
        assert [kept.name for kept in client.checkpoints()] == list(map(checkpoint_name, files))
        train(run.with_settings(resume=True, steps=NUM_STEPS + 1))
        assert len(client.checkpoints()) == len(saved_steps(tmp_path / "run/checkpoints")) == 1


@pytest.mark.guard
def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", steps=8, checkpoint_every=3)
    train(run)
    newest = tmp_path / "run" / "checkpoints" / "step-000000000008.safetensors"
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(
        ValueError, match=r"step-000000000008.safetensors cannot be read .*restore a copy of it, or resume"
    ):
        train(run.with_settings(resume=True))
    assert train(run.with_settings(resume=True, resume_step=3)).summary["steps"] == 8
    (aside,) = newest.parent.glob("set-aside-*")
    assert (aside / newest.name).stat().st_size == 1000


@pytest.mark.parametrize("older", [{}, {"format": 4, "split": "auto"}], ids=["no format", "an older one"])
def test_a_run_of_another_version_is_refused_in_one_line(older: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()
    settings = json.loads(small_run(output).to_json())
    assert settings.pop("format") == 5
    (output / "config.json").write_text(json.dumps(settings | older))
    before = (output / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"run is a run of another version of this program: finish .* \(0\.2 or older"):
        train(small_run(output, resume=True))
    assert (output / "config.json").read_bytes() == before


@pytest.mark.guard  # seconds
def test_only_rank_0_needs_the_runs_directory(tmp_path: Path) -> None:
    """Two ranks as on two machines that share no disk: each has its own working directory, and --output is relative.
    What is not given on resuming is what the run had, on both."""
    settings = (
        "synthetic --num-images 300 --encoder.image-size 16 --encoder.width 8 --dim 16 --steps 20 --batch-size 16 "
        "--num-negatives 64 --window-size 96 --window-stride 24 --checkpoint-every 5 --log-every 1 --no-evaluate"
    )
    for rank in "01":
        (tmp_path / rank).mkdir()

    def run(*given: str) -> list[float]:
        command = [sys.executable, "-m", "trainer", *given, "--output", "run"]
        with reserved_ports(1) as (port,):
            group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            environments = [os.environ | group | {"RANK": rank} for rank in "01"]
            ranks = [subprocess.Popen(command, cwd=tmp_path / each["RANK"], env=each) for each in environments]
            assert [rank.wait() for rank in ranks] == [0, 0]
        return losses(tmp_path / "0" / "run")

    with LocalCluster(2) as cluster:
        once = run(*settings.split(), "--resume", "auto", "--servers", ",".join(cluster.addresses))
        assert run("--resume", "--resume-step", "10") == once
    assert not list((tmp_path / "1").iterdir())


def test_results_are_set_aside_on_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To which checkpoints/ may be a link."""

    def across(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    summary = tmp_path / "summary.json"
    summary.write_text("{}")
    monkeypatch.setattr(os, "rename", across)
    set_newer_aside(tmp_path / "checkpoints", 5, [summary], tmp_path / "metrics.jsonl")
    (aside,) = (tmp_path / "checkpoints").iterdir()
    assert [path.read_text() for path in aside.iterdir()] == ["{}"]
    assert not summary.exists()


def test_records_of_a_long_run_take_little_memory(tmp_path: Path) -> None:
    records = tmp_path / "metrics.jsonl"
    record = {"step": 0, "loss": 7.1} | {f"monitor_{number}": 0.1 + number for number in range(30)}
    records.write_text((json.dumps(record) + "\n") * 2_000)
    tracemalloc.start()
    try:
        DirectoryClaim(small_run(tmp_path), 300, is_first=True).prepare(1, NUM_STEPS)
        assert tracemalloc.get_traced_memory()[1] < records.stat().st_size / 2
    finally:
        tracemalloc.stop()


def test_records_that_a_run_repeats_are_removed(tmp_path: Path) -> None:
    """And one that was cut off; damaged ones are named."""
    records, first = tmp_path / "metrics.jsonl", '{"step": 1, "loss": 7.1}\n'
    records.write_text(first + '{"step": 2, "loss": 6}\n{"step": 3, "lo')
    claim = DirectoryClaim(small_run(tmp_path), 300, is_first=True)
    claim.prepare(2, NUM_STEPS)
    assert records.read_text() == first
    records.write_text('{"step": 1, "los\n' + first)
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1 is not JSON"):
        claim.prepare(2, NUM_STEPS)
