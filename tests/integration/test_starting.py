"""How shards start: which directories they accept, and what an interrupted start leaves."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import psutil
import pytest

from tests.helpers.watching import wait_until
from tests.integration.tables import begin
from weightserver import LocalCluster, ShardUnavailableError, StorageError, TableSpec, WeightClient
from weightserver.operations.inspect import inspect_directory
from weightserver.operations.verify import verify_directory
from weightserver.storage.lmdb_storage import LmdbStorage

ROOT = Path(__file__).parents[2]
SERVE = [sys.executable, "-m", "weightserver", "serve", "--listen", "127.0.0.1:0"]
SPEC = TableSpec(num_rows=100, dim=4, rows_per_block=3)
ROWS = np.arange(SPEC.num_rows)


def refused(directory: Path, *, init: bool = False) -> str:
    """Why a shard does not begin there, in one line; `init` is --init."""
    with pytest.raises((StorageError, ValueError)) as raised:
        LmdbStorage(directory, must_exist=not init)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def make_table(cluster: LocalCluster) -> None:
    with WeightClient(cluster.addresses) as client:
        begin(client, SPEC)
        client.push_gradients(ROWS, np.ones((SPEC.num_rows, SPEC.dim), np.float32), step=0)


def rows_stored(cluster: LocalCluster) -> int:
    with WeightClient(cluster.addresses) as client:
        return client.describe().rows_stored


# ---- empty directories


@pytest.mark.guard  # seconds
def test_an_empty_directory_takes_init(tmp_path: Path) -> None:
    advice = "is its disk mounted? Give --init to begin a new, empty shard here"
    assert refused(tmp_path / "missing") == f"{tmp_path}/missing is missing: {advice}"
    (tmp_path / "empty" / "lost+found").mkdir(parents=True)
    assert refused(tmp_path / "empty") == f"{tmp_path}/empty is empty: {advice}"
    assert [path.name for path in tmp_path.rglob("*")] == ["empty", "lost+found"], "a refused directory stays as it is"
    with LocalCluster(1, tmp_path, serve_options=["--data-dir", str(tmp_path / "empty")]) as cluster:
        make_table(cluster)
    options = ["--data-dir", str(tmp_path / "empty"), "--init"]
    with LocalCluster(1, tmp_path, serve_options=options) as cluster:
        assert rows_stored(cluster) == SPEC.num_rows
    log = (tmp_path / "shard-0.log").read_text()
    assert log.count("--init has no effect") == 1
    assert "warning" in next(line for line in log.splitlines() if "--init has no effect" in line)


def test_a_disk_that_is_full_at_the_first_start_leaves_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(path: bytes, **_: object) -> None:
        (Path(os.fsdecode(path)) / "data.mdb").write_bytes(bytes(4096))  # the first of two pages
        raise lmdb.DiskError("No space left on device")

    with monkeypatch.context() as full:
        full.setattr(lmdb, "open", cut_short)
        assert "No space left" in refused(tmp_path / "shard", init=True)
    LmdbStorage(tmp_path / "shard").close()


def test_an_empty_data_file_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").touch()
    for read in (verify_directory, inspect_directory):
        with pytest.raises(StorageError, match="holds no weight server data: give the --data-dir of a shard"):
            read(tmp_path)


def test_a_large_local_shard_has_more_time_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(1, tmp_path) as cluster:
        monkeypatch.setattr("weightserver.local_cluster._START_SECONDS", 0.0)
        monkeypatch.setattr("weightserver.local_cluster._LOOKED_AT_BYTES", 200)
        cluster.restart(0)
        monkeypatch.setattr("weightserver.local_cluster._LOOKED_AT_BYTES", 1_000_000_000)
        with pytest.raises(ShardUnavailableError, match=r"shard 0 did not start within 0 s: see .*shard-0\.log"):
            cluster.restart(0)


@pytest.mark.parametrize("init", [True, False])
def test_a_directory_of_other_files_is_refused(init: bool, tmp_path: Path) -> None:
    """--data-dir names the wrong folder, which keeps its contents and mode."""
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    (home / "precious.txt").write_text("mine")
    (home / "lost+found").mkdir()
    message = refused(home, init=init)
    assert f"{home} is not empty: give another directory" in message
    assert "--init" not in message
    assert (home.stat().st_mode & 0o777, len(list(home.iterdir()))) == (0o755, 2)


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk/shard")
    message = f"{tmp_path}/link is a link to {tmp_path}/disk/shard, which is missing: is its disk mounted?"
    assert refused(tmp_path / "link", init=True) == message
    assert refused(tmp_path / "link") == message
    assert not (tmp_path / "disk").exists()


def test_a_shard_that_never_began_takes_init(tmp_path: Path) -> None:
    """LMDB creates a file before it writes anything to it, and databases before a shard is in them."""
    lmdb.open(str(tmp_path), lib_version=0).close()
    with pytest.raises(StorageError, match="is empty: is its disk mounted"):
        LmdbStorage(tmp_path, must_exist=True)
    LmdbStorage(tmp_path).close()
    with pytest.raises(StorageError, match="holds no shard yet: repeat the 'restore', 'reshard' or 'serve --init'"):
        LmdbStorage(tmp_path, must_exist=True)


@pytest.mark.guard
def test_a_cluster_refuses_a_shard_that_went_away(tmp_path: Path) -> None:
    with LocalCluster(2, tmp_path) as cluster:
        make_table(cluster)
    marker = tmp_path / "cluster.json"
    assert json.loads(marker.read_text()) == {"num_shards": 2, "finished": True}
    before = (tmp_path / "shard-0" / "data.mdb").read_bytes()
    (tmp_path / "shard-1").rename(tmp_path / "away")
    with pytest.raises(ShardUnavailableError, match=r"shard 1 did not start: .*shard-1 is missing: is its disk"):
        LocalCluster(2, tmp_path)
    (tmp_path / "shard-1").mkdir()
    with pytest.raises(ShardUnavailableError, match=r"shard 1 did not start: .*shard-1 is empty: is its disk mounted"):
        LocalCluster(2, tmp_path)
    (tmp_path / "shard-1").rmdir()
    assert (tmp_path / "shard-0" / "data.mdb").read_bytes() == before
    (tmp_path / "away").rename(tmp_path / "shard-1")
    with LocalCluster(2, tmp_path) as cluster:
        assert rows_stored(cluster) == SPEC.num_rows
        shutil.rmtree(tmp_path / "shard-1")
        with pytest.raises(ShardUnavailableError, match="shard-1 is missing"):
            cluster.restart(1)
    assert json.loads(marker.read_text()) == {"num_shards": 2, "finished": True}


@pytest.mark.guard
def test_an_interrupted_first_start_resumes(tmp_path: Path) -> None:
    """One of two shards has started when the other fails."""
    (tmp_path / "shard-1").write_text("in the way")
    with pytest.raises(ShardUnavailableError, match="shard-1 is a file"):
        LocalCluster(2, tmp_path)
    assert (tmp_path / "shard-0" / "data.mdb").exists()
    (tmp_path / "shard-1").unlink()
    with LocalCluster(2, tmp_path) as cluster:
        make_table(cluster)


def test_a_shard_that_cannot_be_started_leaves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no more processes may be begun."""
    start, started = LocalCluster._start, list[subprocess.Popen[str]]()

    def only_the_first(cluster: LocalCluster, shard: int, num_shards: int, *, init: bool = False) -> Any:
        if shard:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(start(cluster, shard, num_shards, init=init))
        return started[0]

    monkeypatch.setattr(LocalCluster, "_start", only_the_first)
    with pytest.raises(BlockingIOError):
        LocalCluster(2, tmp_path)
    assert [process.returncode is None for process in started] == [False]


# ---- starts that are cut short


POINTS = (
    "weightserver.server.process:_listen",
    "weightserver.storage.lmdb_storage:lmdb.open",
    "weightserver.server.process:service.add_to_server",
    "grpc._server:_Server.start",
    "weightserver.server.process:_Stop.wait",
)
"""Points of a start in order; from the third on a thread would keep the process alive."""


def serve(directory: Path, *options: str, what: tuple[str, ...] = ()) -> list[str]:
    """The command of a shard in which `what` happens at a point (see tests/helpers/at_a_point.py)."""
    program = ["tests.helpers.at_a_point", *what] if what else ["weightserver"]
    return [sys.executable, "-m", *program, *SERVE[3:], "--init", "--data-dir", str(directory), *options]


def ends(process: psutil.Process, directory: Path, seconds: float = 60) -> None:
    """Waits for the process to end, and checks that it released the directory."""
    _, alive = psutil.wait_procs([process], timeout=seconds)
    left = [orphan.pid for orphan in alive if orphan.status() != psutil.STATUS_ZOMBIE]
    for orphan in alive:
        orphan.kill()
    assert not left, "it lives"
    if (lock := directory / "owner.lock").exists():
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def dies(command: list[str], directory: Path) -> None:
    """Kills the parent of a starting shard, and checks that the shard ends."""
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.dying_parent", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        shard = psutil.Process(int(parent.stdout.readline()))
        assert parent.wait(30) == -signal.SIGKILL
    ends(shard, directory)


@pytest.mark.guard
def test_a_shard_ends_if_its_announcement_is_not_read(tmp_path: Path) -> None:
    """Even without --stop-with-parent: stdout is closed."""
    point = "weightserver.server.process:_announce"
    dies(serve(tmp_path / "data", "--announce", what=("orphaned", point)), tmp_path / "data")
    command = serve(tmp_path / "data", "--announce")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shard:
        assert shard.stdout is not None
        shard.stdout.close()
        _, errors = shard.communicate(timeout=60)
    assert shard.returncode == 1
    expected = "cannot announce the addresses on stdout (Broken pipe): the process that started this shard is gone"
    assert errors.splitlines()[-1] == f"weightserver serve: {expected}"
    assert "Traceback" not in errors
    with LocalCluster(1, tmp_path, serve_options=["--data-dir", str(tmp_path / "data")]):
        pass


@pytest.mark.guard
@pytest.mark.parametrize("point", POINTS)
def test_parents_die_at_a_point_of_a_start(point: str, tmp_path: Path) -> None:
    dies(serve(tmp_path, "--announce", "--stop-with-parent", what=("orphaned", point)), tmp_path)


@pytest.mark.guard
@pytest.mark.parametrize("point", POINTS)
def test_sigterm_ends_a_start(point: str, tmp_path: Path) -> None:
    """Before the shard serves SIGTERM acts like a kill; later the shard drains."""
    command = serve(tmp_path, "--announce", what=("SIGTERM", point))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    drains = POINTS.index(point) > POINTS.index("weightserver.server.process:service.add_to_server")
    assert done.returncode == (0 if drains else 128 + signal.SIGTERM), done.stderr
    assert ("draining" in done.stderr) is drains
    assert "Traceback" not in done.stderr


@pytest.mark.guard
@pytest.mark.parametrize("point", POINTS)
def test_a_start_that_fails_ends_in_one_line(point: str, tmp_path: Path) -> None:
    command = serve(tmp_path, "--announce", what=("fails", point))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert re.fullmatch(f"weightserver serve: (.*: )?{point} fails", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


@pytest.mark.guard
def test_closed_streams_are_not_reused_for_other_files(tmp_path: Path) -> None:
    """The next file opened would get their numbers, and logs would be written to data.mdb."""
    command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *serve(tmp_path)]
    process = psutil.Popen(command, cwd=ROOT)
    try:
        wait_until(lambda: (tmp_path / "owner.lock").exists() and (tmp_path / "owner.lock").stat().st_size > 0)
        assert [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)] == [os.devnull] * 3
    finally:
        process.terminate()
        assert process.wait(60) in (0, 128 + signal.SIGTERM)
    for option, stream in (("--announce", "stdout"), ("--stop-with-parent", "stdin")):
        command = ["sh", "-c", 'exec "$@" 0<&- 1>&-', "sh", *serve(tmp_path, option)]
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (1, f"weightserver serve: {option} needs {stream}, which is closed\n")


def test_a_shard_without_stderr_logs_nothing_to_stdout(tmp_path: Path) -> None:
    """Whoever started it reads its addresses there."""
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *serve(tmp_path, "--announce")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.terminate()
        assert process.communicate(timeout=60)[0] == ""
    assert json.loads(first)["address"].startswith("127.0.0.1:")
