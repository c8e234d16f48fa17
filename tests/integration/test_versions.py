"""Clients and shards of one minor version work together; all others refuse each other, and change nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.integration.tables import begin
from weightserver import ClusterError, LocalCluster, TableSpec, WeightClient, __version__
from weightserver.cli import main
from weightserver.common.version import FORMAT
from weightserver.core.errors import WrongShardError
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import SHARD_KEY
from weightserver.protocol.status import status_of

SERVICE = "pic.weightserver.v1.WeightServer"
SPEC = TableSpec(num_rows=500, dim=8, rows_per_block=6)
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["WeightServer"].methods]
OTHERS = ("0.1.0", "0.2.0", "0.2.9", "0.30.0", "0.4.0", "1.3.0", "3", "")
AS_VERSION = """
import sys
from weightserver.common import version
version.__version__, version.works_with = sys.argv.pop(1), lambda caller: True
from weightserver.cli import main
main()
"""


@contextmanager
def cluster_of(version: str, directory: Path) -> Iterator[LocalCluster]:
    """A shard that says it is of that version, and takes any caller, as one of 0.2 takes later ones."""

    class OfVersion(LocalCluster):
        _program = [sys.executable, "-c", AS_VERSION, version]  # noqa: RUF012 - read only

    with OfVersion(1, directory) as cluster:
        yield cluster


def test_the_format_is_the_minor_version() -> None:
    assert __version__.rpartition(".")[0] == FORMAT


def test_versions_that_differ_in_the_last_number_work_together(tmp_path: Path) -> None:
    with cluster_of(f"{FORMAT}.17", tmp_path) as cluster, WeightClient(cluster.addresses) as client:
        begin(client, SPEC)
        client.push_gradients([1], np.ones((1, 8), np.float32), step=0)
        assert client.describe().rows_stored == 1
        assert {shard.version for shard in client.describe().shards} == {f"{FORMAT}.17"}


@pytest.mark.parametrize("version", [None, *OTHERS])
def test_a_caller_of_another_version_is_refused(
    version: str | None, client: WeightClient, cluster: LocalCluster
) -> None:
    client.create_table(SPEC)
    before = client.describe()
    metadata = [] if version is None else [("weightserver-version", version)]
    with grpc.insecure_channel(cluster.addresses[0]) as channel:
        for method in METHODS:
            with pytest.raises(grpc.RpcError) as raised:
                list(channel.stream_stream(f"/{SERVICE}/{method}")(iter([b""]), timeout=10, metadata=metadata))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method
            told = f"the caller {'none' if version is None else version}: use one minor version for all"
            assert raised.value.details() == f"this shard has version {__version__}, {told}"
    assert client.describe() == before


def test_a_caller_of_another_version_and_of_another_shard_is_told_which_shard_answers(cluster: LocalCluster) -> None:
    """Names that turned to another cluster are followed until they turn back, whatever its version."""
    metadata = [("weightserver-version", "0.9.0"), (SHARD_KEY, "3/4")]
    with grpc.insecure_channel(cluster.addresses[0]) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(f"/{SERVICE}/Describe")(b"", timeout=10, metadata=metadata)
    assert raised.value.code() is status_of(WrongShardError)
    assert raised.value.details() == f"shard 0/{len(cluster.addresses)} answers, the call is for shard 3/4"


@pytest.mark.parametrize("version", ["0.2.0", "", pytest.param("0.4.1", marks=pytest.mark.guard)])
def test_a_shard_of_another_version_is_refused(
    version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster_of(version, tmp_path / "data") as cluster, WeightClient(cluster.addresses, retry_seconds=1) as client:
        calls: list[Callable[[], object]] = [
            client.describe,
            client.drop_table,
            lambda: client.create_table(SPEC),
            lambda: client.open_session("run"),
            lambda: client.fetch([0], step=0),
            lambda: main(["backup", *cluster.addresses, "--output", str(tmp_path / "backup")]),
        ]
        for call in calls:
            with pytest.raises((ClusterError, SystemExit)) as raised:
                call()
            said = str(raised.value) if isinstance(raised.value, ClusterError) else capsys.readouterr().err
            shown = version or "unknown"
            assert f"is a shard of version {shown}, this client is of {__version__}: use one minor version" in said
            assert said.count("\n") <= 1
