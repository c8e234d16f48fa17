"""Parts on a real Ray cluster of three workers: one is killed, the whole cluster goes away, none is there."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.helpers.image_tree import odd_tree, plain_tree
from tests.helpers.nodes import no_network
from tests.helpers.object_store import credentials, s3_server
from tests.helpers.watching import wait_until
from tests.trainer.test_embed import CONFIG, run_with
from trainer.data.manifest import Manifest
from trainer.data.pack import PackOptions, pack
from trainer.data.packed import PackedImages
from trainer.data.parts import WHOLE
from trainer.data.planning import planned_pack
from trainer.ray_tasks import on_ray
from weightserver.common.atomic_files import sha256

pytest.importorskip("ray", reason="Ray is not installed: pip install 'pic-weightserver[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.guard, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
OPTIONS = PackOptions(order_seed=5, tar_bytes=20_000, threads=2)
PACK = """
import sys
from pathlib import Path
from trainer.data.pack import PackOptions
from trainer.data.pack import pack_on_ray
from trainer.stopping import exit_on_error

with exit_on_error("pack"):
    source, output, address = sys.argv[1:]
    pack_on_ray(Path(source), Path(output), PackOptions(order_seed=5, tar_bytes=20_000), address)
"""
PACK_IN_BUCKET = """
import http.client, sys
from dataclasses import replace
from pathlib import Path
from tests.helpers.image_tree import plain_tree
from tests.helpers.object_store import url_to_make_bucket
from trainer.data.config import SourceOptions
from trainer.data.pack import PackOptions
from trainer.data.pack import pack_on_ray
from weightserver.common.object_store import below, read

source, copy, address, store = sys.argv[1:]
connection = http.client.HTTPConnection(store)
connection.request("PUT", url_to_make_bucket("images").removeprefix(f"http://{store}"))
connection.getresponse().read()
output = Path("s3://images/packed")
how = PackOptions(order_seed=5, tar_bytes=20_000, source=SourceOptions(cache_dir=Path(copy, "cache")))
for _ in range(2):  # the second time, nothing is to be done
    pack_on_ray(Path(source), output, how, address)
plain_tree(Path(source, "train"), 9, first=900)
pack_on_ray(Path(source), output, replace(how, extend=True), address)
for path in below(output):
    target = Path(copy, "packed", path.relative_to(output))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(read(path))
"""
DIES = """
import os, sys
from trainer import ray_tasks
from trainer.stopping import exit_on_error

ray_tasks._REPEATS = 1
with exit_on_error("parts"):
    ray_tasks.on_ray(lambda part: os._exit(1), 1, lambda: None, address=sys.argv[1])
"""
LACKS = """
import sys
sys.path.append(sys.argv[2])
import only_here
from trainer import ray_tasks
from trainer.stopping import exit_on_error

with exit_on_error("parts"):
    ray_tasks.on_ray(lambda part: only_here.done(part), 1, lambda: None, address=sys.argv[1])
"""
EMBED = """
import sys
from trainer import embed, embedding

embedding._IMAGES_OF_A_TASK = 8
embed.main(sys.argv[1:])
"""


@contextmanager
def cluster(folder: Path, inside: list[str]) -> Iterator[tuple[psutil.Process, str]]:
    """A Ray cluster with three workers: its first process, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    arguments = ["start", "--head", "--node-ip-address=127.0.0.2", f"--port={port}", "--num-cpus=3", "--block"]
    arguments += ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"]
    log = folder / "head.log"
    with log.open("w") as output:
        head = subprocess.Popen(
            [*inside, sys.executable, "-m", "ray.scripts.scripts", *arguments], stdout=output, stderr=output, cwd=ROOT
        )
    process = psutil.Process(head.pid)
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text(), seconds=300)
        yield process, f"127.0.0.2:{port}"
    finally:
        end(process)
        head.wait()


def end(process: psutil.Process) -> None:
    """Kills a process and all that it started."""
    for each in [*process.children(recursive=True), process]:
        each.kill()


@pytest.fixture
def inside() -> Iterator[list[str]]:
    """The prefix of commands that use Ray, whose processes listen on all addresses."""
    with no_network() as prefix:
        yield prefix


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For Ray, whose sockets have long names; and a token, without which it takes no calls."""
    short = Path(f"/tmp/ray-{os.getpid()}")
    short.mkdir()
    (short / "token").write_text("0" * 64)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(short / "token"))
    yield short
    shutil.rmtree(short)


@pytest.fixture
def stuck(tmp_path: Path) -> Path:
    """An image in tmp_path/images that keeps its reader waiting, once it is planned to be packed into tmp_path/packed;
    tmp_path/whole is the pack of one process."""
    images = odd_tree(tmp_path / "images/train", 60).parent
    plain_tree(images / "test", 9)
    pack(images, tmp_path / "whole", OPTIONS)
    with planned_pack(images, tmp_path / "packed", PackOptions(order_seed=5, tar_bytes=20_000, part=WHOLE)):
        pass
    one = Path(PackedImages(tmp_path / "whole").path(17))
    one.rename(tmp_path / "kept.jpg")
    os.mkfifo(one)
    return one


def lines(output: Path) -> int:
    return len(list(output.glob("parts/[!.]*")))


def busy(head: psutil.Process) -> list[psutil.Process]:
    """The workers that are doing a part; a killed one is none."""
    return [
        each
        for each in head.children(recursive=True)
        if each.status() != psutil.STATUS_ZOMBIE and each.name().startswith("ray::task")
    ]


def files(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): sha256(path) for path in directory.rglob("[!.]*") if path.is_file()}


def test_a_killed_worker_and_a_cluster_that_goes_away(
    stuck: Path, folder: Path, inside: list[str], tmp_path: Path
) -> None:
    """The part of a killed worker is repeated; the command continues on another cluster. The files are those of one
    process."""
    output, tars = tmp_path / "packed", Manifest.load(tmp_path / "packed").ranges[-1].num_tars
    with cluster(folder, inside) as (head, address):
        command = [*inside, sys.executable, "-c", PACK, str(tmp_path / "images"), str(output), address]
        packing = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: lines(output) == tars - 1 and len(busy(head)) == 1, seconds=200)
            (killed,) = busy(head)
            killed.send_signal(signal.SIGKILL)
            wait_until(lambda: len(busy(head)) == 1 and killed not in busy(head), seconds=200)
            end(head)
            _, errors = packing.communicate(timeout=200)
        finally:
            packing.kill()
            packing.communicate()
        assert packing.returncode == 1, errors
        (line,) = (line for line in errors.splitlines() if line.startswith("pack: "))
        assert "the Ray cluster went away" in line
        assert "repeat the command, which continues" in line
    stuck.unlink()
    shutil.copy(tmp_path / "kept.jpg", stuck)
    with cluster(folder, inside) as (_, address):
        subprocess.run([*command[:-1], address], check=True, cwd=ROOT, timeout=300)
    assert files(output) == files(tmp_path / "whole")


def test_parts_are_packed_into_a_bucket(
    folder: Path, inside: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = odd_tree(tmp_path / "images/train", 20).parent
    plain_tree(images / "test", 9)
    pack(images, tmp_path / "whole", OPTIONS)
    (tmp_path / "server").mkdir()
    with s3_server(tmp_path / "server", inside=inside) as port:
        for name, value in credentials(f"http://127.0.0.1:{port}").items():
            monkeypatch.setenv(name, value)
        with cluster(folder, inside) as (_, address):
            command = [*inside, sys.executable, "-c", PACK_IN_BUCKET, str(images), str(tmp_path), address]
            subprocess.run([*command, f"127.0.0.1:{port}"], check=True, cwd=ROOT, timeout=300)
    pack(images, tmp_path / "whole", replace(OPTIONS, extend=True))
    assert files(tmp_path / "packed") == files(tmp_path / "whole")


def test_features_are_computed_in_parts(
    folder: Path, inside: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read is counted and listed; a part that ends its process each time is given up."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    tree = plain_tree(tmp_path / "tree", 20)
    (tree / "a/broken.jpg").write_bytes(b"x")
    run = run_with(CONFIG, tmp_path / "run", tree)
    whole, parts = tmp_path / "whole.parquet", tmp_path / "parts"
    with cluster(folder, inside) as (_, address):
        command = [*inside, sys.executable, "-c", EMBED, str(run), str(tree), "--device", "cpu", "--output"]
        subprocess.run([*command, str(whole)], check=True, cwd=ROOT, timeout=300)
        on_ray = ["--engine", "ray", "--address", address]
        on_ray += ["--broken-list", "broken.txt"]
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        done = subprocess.run([*command, str(parts), *on_ray], check=True, capture_output=True, text=True, timeout=300)
        ends = [*inside, sys.executable, "-c", DIES, address]
        ended = subprocess.run(ends, capture_output=True, text=True, timeout=300)
        (tmp_path / "modules").mkdir()
        (tmp_path / "modules/only_here.py").write_text("def done(part): ...")
        lacks = [*inside, sys.executable, "-c", LACKS, address, str(tmp_path / "modules")]
        lacking = subprocess.run(lacks, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"wrote 3 parts of 21 images to {parts}, 1 could not be read\n"
    assert (tmp_path / "broken.txt").read_text().startswith(f"{tree / 'a/broken.jpg'}\t")
    assert ended.returncode == 1
    assert "the process of a part died 2 times: look for its end in Ray's logs" in ended.stderr
    assert lacking.returncode == 1
    assert "lacks what the parts need (ModuleNotFoundError: No module named 'only_here')" in lacking.stderr
    assert len(list(parts.iterdir())) == 3
    read, expected = parquet.read_table(parts), parquet.read_table(whole)
    assert read["path"].to_pylist() == expected["path"].to_pylist()
    np.testing.assert_allclose(
        np.stack(read["vector"].to_numpy()), np.stack(expected["vector"].to_numpy()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("address", [[], ["--address", "auto"], ["--address"]])
def test_where_there_is_no_cluster(address: list[str], folder: Path, tmp_path: Path) -> None:
    """At an address that is given, or where Ray remembers one; nothing waits for Ray's own attempts of minutes."""
    tree = plain_tree(tmp_path / "tree", 3)
    command = [sys.executable, "-m", "trainer.data", "pack", str(tree), str(tmp_path / "packed"), "--engine", "ray"]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{closed.getsockname()[1]}"
        (folder / "ray").mkdir()
        (folder / "ray/ray_current_cluster").write_text(place)
        done = subprocess.run(
            [*command, *address, *([place] if address == ["--address"] else [])],
            cwd=ROOT,
            env=os.environ | {"RAY_TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("pic pack: no Ray cluster answers at 127.0.0.1:")
    assert "start one by 'ray start --head', or omit --address" in line


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_an_address_that_is_given_counts(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than RAY_ADDRESS; of IPv6 too."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as closed:
        closed.bind((host.strip("[]"), 0))
        place = f"{host}:{closed.getsockname()[1]}"
        with pytest.raises(ValueError, match=re.escape(f"at {place} ([Errno {errno.ECONNREFUSED}]")):
            on_ray(print, 1, lambda: None, address=place)


def test_another_program_at_the_address(folder: Path) -> None:
    """As a dashboard at its port; Ray's own attempts last for a quarter of an hour."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        place = f"127.0.0.1:{other.getsockname()[1]}"
        ends = [sys.executable, "-c", DIES, place]
        done = subprocess.run(ends, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert f"parts: no Ray cluster answers at {place} (Failed to connect to Ray cluster" in done.stderr


def test_a_cluster_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(**_: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n")

    monkeypatch.setattr("ray.init", refuses)
    with pytest.raises(ValueError, match=r"cannot be joined \(Version mismatch: .* Ray: 2\.59\.0\): all machines need"):
        on_ray(print, 1, lambda: None, address="local")
