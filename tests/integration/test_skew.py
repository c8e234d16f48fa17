"""Clients and shards of neighbouring versions understand one another: the contract only ever grows.

The contract of version 0.1 is kept in golden/; one to come is this one with more in every message. Between client
and shard stands a translator that passes on only what a peer of the one knows, or all that one of the other may send.
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

from weightserver import (
    ClusterError,
    LocalCluster,
    NoTableError,
    StepError,
    TableMismatchError,
    TableSpec,
    WeightClient,
)
from weightserver._generated import weight_server_pb2 as pb
from weightserver.cli import main

GOLDEN = Path(__file__).parent.parent / "golden"
SERVICE = "pic.weightserver.v1.WeightServer"
SPEC = TableSpec(num_rows=500, dim=8, rows_per_block=6)
ROWS = np.arange(SPEC.num_rows)


def in_pool(file: FileDescriptorProto) -> FileDescriptor:
    pool = DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    return pool.FindFileByName(file.name)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptor:
    """The contract of version 0.1."""
    output = tmp_path_factory.mktemp("older") / "descriptors"
    include = f"--proto_path={resources.files('grpc_tools') / '_proto'}"
    arguments = ["protoc", f"--proto_path={GOLDEN}", include, f"--descriptor_set_out={output}"]
    assert protoc.main([*arguments, str(GOLDEN / "weight_server_0.1.proto")]) == 0
    return in_pool(FileDescriptorSet.FromString(output.read_bytes()).file[0])


@pytest.fixture(scope="module")
def newer() -> FileDescriptor:
    """This contract, with a text, a number and a list more in every message."""
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
    """Passes calls on to a shard, each message through `translate`; refuses methods that the contract lacks."""

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
            try:
                for answer in forward(self._translated(requests, method.input_type), timeout=context.time_remaining()):
                    yield from self._translated([answer], method.output_type)
            except grpc.RpcError as error:
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
    """What this contract does not know."""
    message.DiscardUnknownFields()  # type: ignore[attr-defined]


def add_news(message: Message) -> None:
    """To the message and all in it."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                add_news(inner)
    message.new_100, message.new_101, message.new_102 = "news", -7, 0.5  # type: ignore[attr-defined]
    message.new_103.extend([1, 2, 3])  # type: ignore[attr-defined]


@contextlib.contextmanager
def between(
    cluster: LocalCluster, contract: FileDescriptor, translate: Callable[[Message], None]
) -> Iterator[list[str]]:
    """Addresses of translators before each shard."""
    translators = [Translator(address, contract, translate) for address in cluster.addresses]
    try:
        yield [translator.address for translator in translators]
    finally:
        for translator in translators:
            translator.close()


def everything(client: WeightClient) -> list[Any]:
    """What calls of every kind give."""
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


def test_an_older_shard_is_named_where_it_cannot_do_what_is_asked(
    older: FileDescriptor,
    client: WeightClient,
    cluster: LocalCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    everything(client)
    client.checkpoint("kept", step=1)
    with between(cluster, older, forget) as addresses, pytest.raises(SystemExit):
        main(["backup", *addresses, "--output", str(tmp_path / "backup")])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "does not know this call: it runs an older version" in error
    assert [known.name for known in client.checkpoints()] == ["kept"]
    with between(cluster, older, forget) as addresses, WeightClient(addresses, retry_seconds=1) as skewed:
        with pytest.raises(ClusterError, match=r"shard 0 at .* does not know this call: it runs an older version"):
            skewed.extend_table(501)
        with pytest.raises(ClusterError, match="does not know this call"):
            skewed.learning_rates()  # which a trainer that resumes bears with
        assert skewed.describe().spec == SPEC
    client.drop_table()
    with between(cluster, older, forget) as addresses, WeightClient(addresses, retry_seconds=1) as skewed:
        with pytest.raises(ClusterError, match=r"does not know this call: it runs an older version"):
            skewed.create_table(replace(SPEC, correction="paper"))
        with pytest.raises(NoTableError):  # nor was another made
            skewed.describe()
    everything(client)
    client.checkpoint("kept", step=1)
    with pytest.raises(SystemExit) as stopped:  # when the shards are updated, the same command goes on
        main(["backup", *cluster.addresses, "--output", str(tmp_path / "backup")])
    assert stopped.value.code == 0


def test_an_older_client_cannot_mistake_the_papers_correction(
    older: FileDescriptor, client: WeightClient, cluster: LocalCluster
) -> None:
    """It sees a table that is corrected, and knows it by another digest."""
    client.create_table(replace(SPEC, correction="paper"))
    client.extend_schedule(0, [0.1, 0.2])
    with between(cluster, older, forget) as addresses, WeightClient(addresses, retry_seconds=1) as skewed:
        assert skewed.describe().spec == SPEC
        with pytest.raises(TableMismatchError, match="another table exists, correction paper there and True here"):
            skewed.create_table(SPEC)
        with pytest.raises(TableMismatchError, match=r"the table was replaced, it is now .*correction='paper'"):
            skewed.fetch(ROWS, step=1)


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


def test_the_contract_only_grew(older: FileDescriptor) -> None:
    """What version 0.1 said still means the same on the wire."""
    now = pb.DESCRIPTOR
    for name, message in older.message_types_by_name.items():
        for field in message.fields:
            found = now.message_types_by_name[name].fields_by_number[field.number]
            for what in ("name", "type", "is_repeated", "has_presence"):
                assert getattr(found, what) == getattr(field, what), f"{name}.{field.name}"
            if field.message_type is not None:
                assert found.message_type.full_name == field.message_type.full_name
    for method in older.services_by_name["WeightServer"].methods:
        found = now.services_by_name["WeightServer"].methods_by_name[method.name]
        for what in ("client_streaming", "server_streaming"):
            assert getattr(found, what) == getattr(method, what)
        assert found.input_type.full_name == method.input_type.full_name
        assert found.output_type.full_name == method.output_type.full_name
