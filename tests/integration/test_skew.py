"""Clients and shards of neighbouring versions from 0.2 understand each other: the contract only grows. Those of 0.1 and
later ones refuse each other.

The contract of version 0.2 is kept in golden/; a future one is this one with additional fields in every message. A
translator between client and shard passes on only what an older peer knows, or adds what a newer peer may send.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc

from tests.helpers.comparing import same
from weightserver import (
    ClusterError,
    LocalCluster,
    StepError,
    TableMismatchError,
    TableSpec,
    WeightClient,
    __version__,
)
from weightserver.cli import main
from weightserver.protocol._generated import weight_server_pb2 as pb

GOLDEN = Path(__file__).parent.parent / "golden"
SERVICE = "pic.weightserver.v1.WeightServer"
SPEC = TableSpec(num_rows=500, dim=8, rows_per_block=6)
ROWS = np.arange(SPEC.num_rows)
METHODS = list(pb.DESCRIPTOR.services_by_name["WeightServer"].methods)
LATER_METHODS = {
    "CopyCheckpoint",
    "ReadBlocks",
    "ReadSchedule",
    "ExtendTable",
}


def in_pool(file: FileDescriptorProto) -> FileDescriptor:
    pool = DescriptorPool()
    pool.Add(file)
    return pool.FindFileByName(file.name)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptor:
    """The contract of version 0.2."""
    output = tmp_path_factory.mktemp("older") / "descriptors"
    include = f"--proto_path={resources.files('grpc_tools') / '_proto'}"
    arguments = ["protoc", f"--proto_path={GOLDEN}", include, f"--descriptor_set_out={output}"]
    assert protoc.main([*arguments, str(GOLDEN / "weight_server_0.2.proto")]) == 0
    return in_pool(FileDescriptorSet.FromString(output.read_bytes()).file[0])


@pytest.fixture(scope="module")
def lacking() -> FileDescriptor:
    """This contract without some of its methods."""
    file = FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    methods = file.service[0].method
    for position in reversed(range(len(methods))):
        if methods[position].name in LATER_METHODS:
            del methods[position]
    assert len(methods) == len(METHODS) - len(LATER_METHODS)
    return in_pool(file)


@pytest.fixture(scope="module")
def newer() -> FileDescriptor:
    """This contract with an additional text, number and list in every message."""
    file = FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    for message in file.message_type:
        for number, kind in enumerate(("TYPE_STRING", "TYPE_SINT64", "TYPE_DOUBLE", "TYPE_FIXED32"), start=100):
            message.field.add(
                name=f"new_{number}",
                number=number,
                type=FieldDescriptorProto.Type.Value(kind),
                label=FieldDescriptorProto.LABEL_REPEATED if number == 103 else FieldDescriptorProto.LABEL_OPTIONAL,
            )
    return in_pool(file)


class Translator(grpc.GenericRpcHandler):
    """Passes calls on to a shard, each message through `translate`; refuses methods that are not in the contract."""

    def __init__(self, target: str, contract: FileDescriptor, translate: Callable[[Message], None]) -> None:
        self._channel = grpc.insecure_channel(target)
        methods = contract.services_by_name["WeightServer"].methods
        self._methods = {f"/{SERVICE}/{method.name}": method for method in methods}
        self._translate = translate
        self._server = grpc.server(ThreadPoolExecutor(8), handlers=[self])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if (method := self._methods.get(call.method)) is None:
            return None
        forward = self._channel.stream_stream(call.method)

        def behaviour(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            metadata = [(key, value) for key, value in context.invocation_metadata() if key.startswith("weightserver-")]
            answers = forward(
                self._translated(requests, method.input_type), timeout=context.time_remaining(), metadata=metadata
            )
            try:
                for answer in answers:
                    yield from self._translated([answer], method.output_type)
                context.set_trailing_metadata(answers.trailing_metadata())
            except grpc.RpcError as error:
                context.set_trailing_metadata(error.trailing_metadata() or ())
                context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(behaviour)

    def _translated(self, messages: Any, kind: Descriptor) -> Iterator[bytes]:
        for data in messages:
            message = GetMessageClass(kind).FromString(data)
            self._translate(message)
            yield message.SerializeToString()

    def close(self) -> None:
        self._server.stop(None).wait()
        self._channel.close()


def forget(message: Message) -> None:
    """Fields that this contract does not know."""
    message.DiscardUnknownFields()


def add_news(message: Any) -> None:
    """Adds fields to the message and all messages in it."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                add_news(inner)
    message.new_100, message.new_101, message.new_102 = "news", -7, 0.5
    message.new_103.extend([1, 2, 3])


@contextlib.contextmanager
def between(
    cluster: LocalCluster, contract: FileDescriptor, translate: Callable[[Message], None]
) -> Iterator[list[str]]:
    """Addresses of a translator in front of each shard."""
    translators = [Translator(address, contract, translate) for address in cluster.addresses]
    try:
        yield [translator.address for translator in translators]
    finally:
        for translator in translators:
            translator.close()


def everything(client: WeightClient) -> list[Any]:
    """The results of calls of every kind."""
    client.drop_table()
    client.create_table(SPEC)
    client.extend_schedule(0, np.linspace(0.2, 0.1, 50, dtype=np.float32))
    client.open_session("skew")
    client.extend_schedule(50, [0.1, 0.05])
    values = np.random.default_rng(0).standard_normal((2, SPEC.num_rows, SPEC.dim)).astype(np.float32)
    client.push_gradients(ROWS[::3], values[0, ::3], step=0)
    client.checkpoint("one", step=1)
    client.write_state(ROWS[::7], values[0, ::7], values[1, ::7], 4)
    client.push_gradients(ROWS, values[1], step=6)
    client.checkpoint("two", step=7)
    seen = [client.fetch(ROWS, step=40), *vars(client.fetch_state(ROWS)).values()]
    seen += [client.checkpoints(), client.fetch(ROWS, step=9, checkpoint="one")]
    client.rollback("one")
    seen += vars(client.fetch_state(ROWS, step=30)).values()
    client.release("one")
    info = client.describe()
    return [*seen, info.spec, info.clock, info.horizon, info.rows_stored, info.run, client.checkpoints()]


@pytest.mark.parametrize("skew", ["older", "newer"])
def test_neighbouring_versions_understand_one_another(
    skew: str, older: FileDescriptor, newer: FileDescriptor, client: WeightClient, cluster: LocalCluster
) -> None:
    expected = everything(client)
    contract, translate = (older, forget) if skew == "older" else (newer, add_news)
    with between(cluster, contract, translate) as addresses, WeightClient(addresses, retry_seconds=1) as skewed:
        for one, other in zip(everything(skewed), expected, strict=True):
            assert np.array_equal(one, other) if isinstance(other, np.ndarray) else one == other
        with pytest.raises(StepError, match=r"is outside the schedule's 0\.\.52"):  # errors too
            skewed.fetch([1], step=99)


@pytest.mark.guard  # seconds
def test_an_older_shard_without_a_call_is_named(
    lacking: FileDescriptor,
    client: WeightClient,
    cluster: LocalCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    everything(client)
    client.checkpoint("kept", step=1)
    with between(cluster, lacking, forget) as addresses, pytest.raises(SystemExit):
        main(["backup", *addresses, "--output", str(tmp_path / "backup")])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "does not know this call: it runs an older version" in error
    assert [known.name for known in client.checkpoints()] == ["kept"]
    with between(cluster, lacking, forget) as addresses, WeightClient(addresses, retry_seconds=1) as skewed:
        with pytest.raises(ClusterError, match=r"shard 0 at .* does not know this call: it runs an older version"):
            skewed.extend_table(501)
        with pytest.raises(ClusterError, match="does not know this call"):
            skewed.learning_rates()  # which a trainer that resumes tolerates
        assert skewed.describe().spec == SPEC
    with pytest.raises(SystemExit) as stopped:  # when the shards are updated, the same command resumes
        main(["backup", *cluster.addresses, "--output", str(tmp_path / "backup")])
    assert stopped.value.code == 0


def test_a_side_that_overlooks_the_dtype_is_refused(
    older: FileDescriptor,
    client: WeightClient,
    cluster: LocalCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The digest of the table differs: no side takes bfloat16 for float32, or reads half of the rows."""
    client.create_table(replace(SPEC, dtype="bfloat16"))
    client.extend_schedule(0, [0.1, 0.1])
    client.open_session("one")
    client.push_gradients(ROWS, np.ones((500, 8), np.float32), step=0)
    client.checkpoint("kept", step=1)
    before = client.fetch_state(ROWS)
    with between(cluster, older, forget) as addresses, WeightClient(addresses, retry_seconds=1) as skewed:
        assert skewed.describe().spec == SPEC, "an older client"
        skewed.open_session("two")
        values = np.ones((500, 8), np.float32)
        calls: list[Callable[[], object]] = [
            lambda: skewed.fetch(ROWS, step=1),
            lambda: skewed.fetch_state(ROWS),
            lambda: skewed.push_gradients(ROWS, values, step=1),
            lambda: skewed.write_state(ROWS, values, values, 2),
            lambda: skewed.extend_schedule(0, [0.1, 0.2]),
            lambda: skewed.checkpoint("none", step=1),
        ]
        for call in calls:
            with pytest.raises(TableMismatchError, match=r"the table was replaced, it is now .*dtype='bfloat16'"):
                call()
        with pytest.raises(TableMismatchError, match="another table exists, dtype bfloat16 there and float32 here"):
            skewed.create_table(SPEC)
        with pytest.raises(SystemExit):
            main(["backup", *addresses, "--output", str(tmp_path / "backup")])
        assert "dtype='bfloat16'" in capsys.readouterr().err
    assert same(client.fetch_state(ROWS), before)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("version", [None, "0.1.0"])
def test_a_caller_of_the_first_version_is_refused(
    version: str | None, method: Any, client: WeightClient, cluster: LocalCluster
) -> None:
    """It sends no version: every call is refused with what to update, and changes nothing."""
    client.create_table(SPEC)
    before = client.describe()
    metadata = [] if version is None else [("weightserver-version", version)]
    with grpc.insecure_channel(cluster.addresses[0]) as channel, pytest.raises(grpc.RpcError) as raised:
        list(channel.stream_stream(f"/{SERVICE}/{method.name}")(iter([b""]), timeout=10, metadata=metadata))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    told = version or "0.1"
    assert raised.value.details() == f"this shard has version {__version__}, the caller {told}: update the caller"
    assert client.describe() == before


@pytest.mark.parametrize("version", ["0.1.0", "0.1.17"])
def test_a_shard_of_the_first_version_is_refused(
    version: str, client: WeightClient, cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shard answers as if nothing were wrong."""
    client.create_table(SPEC)
    before = client.describe()

    def of_first_version(message: Message) -> None:
        if isinstance(message, pb.DescribeResponse):
            message.server_version = version

    with between(cluster, pb.DESCRIPTOR, of_first_version) as addresses:
        refused = f"{addresses[0]} is a shard of version {version}, this client is of {__version__}: update the shard"
        with WeightClient(addresses, retry_seconds=1) as skewed:
            calls: list[Callable[[], object]] = [
                skewed.describe,
                skewed.drop_table,
                lambda: skewed.create_table(SPEC),
                lambda: skewed.open_session("skew"),
                lambda: skewed.fetch(ROWS, step=0),
            ]
            for call in calls:
                with pytest.raises(ClusterError) as raised:
                    call()
                assert str(raised.value) == refused
        for command in (
            ["drop", *addresses, "--yes"],
            ["backup", *addresses, "--output", str(tmp_path / "backup")],
        ):
            with pytest.raises(SystemExit) as stopped:
                main(command)
            assert stopped.value.code == 1
            assert capsys.readouterr().err == f"weightserver {command[0]}: {refused}\n"
    assert client.describe() == before


@pytest.mark.parametrize("version", ["0.2.0", "0.2.9", "0.3", "0.10.0", "1.0.0"])
def test_later_versions_are_welcome(version: str, client: WeightClient, cluster: LocalCluster) -> None:
    def of_that_version(message: Message) -> None:
        if isinstance(message, pb.DescribeResponse):
            message.server_version = version

    client.create_table(SPEC)
    with between(cluster, pb.DESCRIPTOR, of_that_version) as addresses, WeightClient(addresses) as skewed:
        assert {shard.version for shard in skewed.describe().shards} == {version}
    with grpc.insecure_channel(cluster.addresses[0]) as channel:
        describe = channel.unary_unary(f"/{SERVICE}/Describe")
        assert describe(b"", timeout=10, metadata=[("weightserver-version", version)])


def test_a_newer_shard_can_be_backed_up(
    newer: FileDescriptor, client: WeightClient, cluster: LocalCluster, tmp_path: Path
) -> None:
    everything(client)
    client.push_gradients(ROWS, np.ones((500, 8), np.float32), step=1)
    client.checkpoint("kept", step=2)
    with between(cluster, newer, add_news) as addresses, pytest.raises(SystemExit) as stopped:
        main(["backup", *addresses, "--output", str(tmp_path / "backup")])
    assert stopped.value.code == 0
    assert client.checkpoints()[0].name == "kept"
