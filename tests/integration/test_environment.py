"""Processes take the world as they find it: as PID 1, without a home, beside other services' settings."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.commands import weightserver
from tests.helpers.failing_disk import FailingDisk
from tests.helpers.secure_shards import served
from tests.helpers.watching import metric, wait_until
from weightserver import StorageError
from weightserver.common.atomic_files import directory_lock
from weightserver.storage.lmdb_storage import LmdbStorage

AS_ROOT = os.geteuid() == 0
NOBODY = 54_321
"""A user without an entry in /etc/passwd."""
TRAINER = [sys.executable, "-m", "trainer", "synthetic", "--num-images", "512", "--batch-size", "64"]
TRAINER += ["--num-negatives", "128", "--window-size", "256", "--window-stride", "64", "--encoder.name", "none"]


def serve(directory: Path, *more: str) -> list[str]:
    """A command that serves a new shard."""
    command = [sys.executable, "-m", "weightserver", "serve", "--init", "--announce", "--metrics-port", "0"]
    return [*command, "--data-dir", str(directory), "--listen", "127.0.0.1:0", *more]


@contextmanager
def first_process(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Runs a command as PID 1 of a namespace, which needs root; yields what waits for it, and its own id."""
    as_first = ["unshare", "--pid", "--fork", "--kill-child"] if AS_ROOT else []
    with subprocess.Popen([*as_first, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            wait_until(lambda: not AS_ROOT or bool(children.read_text().split()))
            yield process, int(children.read_text()) if AS_ROOT else process.pid
        finally:
            process.kill()


def handles_sigterm(pid: int) -> bool:
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:\t")[2].split()[0]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.skipif(not AS_ROOT, reason="only root may begin a namespace of process ids")
def test_libraries_are_imported_after_sigterm_has_a_handler(tmp_path: Path) -> None:
    """The kernel spares PID 1 signals without a handler."""
    with first_process(serve(tmp_path / "data")) as (_, pid):
        maps = Path(f"/proc/{pid}/maps")
        while not any(name in (seen := maps.read_text()) for name in ("numpy", "lmdb", "grpc")):
            handled = handles_sigterm(pid)
            time.sleep(0.001)
    assert handled, seen


@pytest.mark.guard
@pytest.mark.parametrize("is_serving", [False, True], ids=["starting", "serving"])
def test_a_shard_that_is_the_first_process_ends_at_sigterm(is_serving: bool, tmp_path: Path) -> None:
    with first_process(serve(tmp_path / "data")) as (process, pid):
        wait_until(lambda: not AS_ROOT or handles_sigterm(pid))
        if is_serving:
            assert process.stdout is not None
            process.stdout.readline()
        os.kill(pid, signal.SIGTERM)
        assert process.wait(20) in ({0} if is_serving else {128 + signal.SIGTERM, -signal.SIGTERM, 0})


@pytest.mark.guard
@pytest.mark.parametrize("is_training", [False, True], ids=["starting", "training"])
def test_a_trainer_that_is_the_first_process_ends_at_sigterm(is_training: bool, tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [*TRAINER, "--steps", "1000000", "--log-every", "1", "--no-evaluate", "--output", str(output)]
    with first_process(command) as (process, pid):
        wait_until(lambda: not AS_ROOT or handles_sigterm(pid))
        if is_training:
            wait_until(lambda: (output / "metrics.jsonl").exists())
        os.kill(pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode in {128 + signal.SIGTERM, -signal.SIGTERM}, errors
    assert "Traceback" not in errors
    assert not is_training or list((output / "checkpoints").iterdir()), "it stops after a step, with a checkpoint"


@pytest.mark.parametrize("folder", ["other", "missing"])
def test_another_services_folder_of_metrics_is_left_alone(folder: str, tmp_path: Path) -> None:
    """By a shard and a client."""
    (tmp_path / "other").mkdir()
    program = "import sys; from weightserver import *\nwith WeightClient(sys.argv[1:]) as client: client.drop_table()"
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / folder)}
    with served({"shard": []}, environment) as shards:
        assert metric(shards["shard"].metrics_address, "weightserver_serving") == 1
        subprocess.run([sys.executable, "-c", program, shards["shard"].address], env=environment, check=True)
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.skipif(not AS_ROOT, reason="only root may take another user's id")
@pytest.mark.guard
def test_a_trainer_without_a_home_or_a_name_trains(tmp_path: Path) -> None:
    """As in a container with a user id of the cluster's choice. Another service's folder of metrics is left alone."""
    output, other = tmp_path / "runs", tmp_path / "other"
    output.mkdir()
    other.mkdir(mode=0o777)
    other.chmod(0o777)
    os.chown(output, NOBODY, NOBODY)
    as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    as_nobody += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "TMPDIR": str(output)}
    environment |= {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
    environment["PROMETHEUS_MULTIPROC_DIR"] = str(other)
    command = [*as_nobody, *TRAINER, "--steps", "3", "--output", str(output / "a")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((output / "a/summary.json").read_text())
    assert (output / f"home-of-uid-{NOBODY}").stat().st_mode & 0o777 == 0o700
    assert not list(other.iterdir())


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_refused(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuses)
    reason = re.escape(
        f"the file system of {tmp_path}/owner.lock has no locks ({os.strerror(number)}): use a local disk"
    )
    with pytest.raises(StorageError, match=reason):
        LmdbStorage(tmp_path)
    with pytest.raises(OSError, match=r"the file system of .* has no locks"), directory_lock(tmp_path / "other"):
        pass


def test_a_file_system_without_writable_maps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FailingDisk(tmp_path).install(monkeypatch)
    monkeypatch.setenv("NO_WRITABLE_MAPS", "1")
    done = subprocess.run(serve(tmp_path / "data"), capture_output=True, text=True, timeout=60, check=False)
    expected = f"the file system of {tmp_path}/data/lock.mdb cannot map files (Invalid argument): use a local disk\n"
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.endswith(expected)


@pytest.mark.guard
def test_a_path_that_the_locale_cannot_spell_is_served(tmp_path: Path) -> None:
    directory = tmp_path / "gewichte-\u00fcber"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    with served({"shard": ["--data-dir", str(directory)]}, environment) as shards:
        assert weightserver("health", shards["shard"].address, environment=environment)[0] == 0
    for program in ("inspect", "verify"):
        status, _, errors = weightserver(program, directory, environment=environment)
        assert status == 0, errors


@pytest.mark.guard
def test_few_descriptors_are_told_at_the_start() -> None:
    with served({"shard": []}, inside=["sh", "-c", 'ulimit -n 200; exec "$@"', "sh"]) as shards:
        told = "only 200 files may be open, and each connection is one: raise ulimit -n"
        assert told in shards["shard"].log.read_text()


@pytest.mark.parametrize(
    "command",
    [
        "weightserver plan --num-rows 1000000 --json",
        "weightserver --help",
        "trainer.pic --help",
        "trainer.data inspect --help",
        "trainer.pic train fashion-mnist --print-config",
    ],
)
def test_a_command_whose_output_nobody_reads_says_nothing(command: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as unread:
        arguments = [sys.executable, "-m", *command.split()]
        done = subprocess.run(arguments, stdout=unread, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode in (0, 1), done.stderr) == (True, b"")
