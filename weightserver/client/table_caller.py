"""How a client creates, extends and drops the table of all shards. Each call may be repeated if it failed halfway."""

from __future__ import annotations

from dataclasses import replace

from weightserver.client import agreement
from weightserver.client.connection import ShardConnection
from weightserver.client.fan_out import Shards
from weightserver.client.table_cache import KnownTable
from weightserver.core.spec import TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import spec_to_proto, table_digest


def create_table(shards: Shards, spec: TableSpec) -> KnownTable:
    """Creates the table on every shard, or finds the same one there; see `WeightClient.create_table`."""
    answers = shards.describe()
    agreement.require_creatable(answers, spec)

    def create(connection: ShardConnection, answer: pb.DescribeResponse, identity: bytes) -> bytes:
        request = pb.CreateTableRequest(spec=spec_to_proto(spec), epoch=answer.epoch, identity=identity)
        created: bytes = connection.call("CreateTable", request).identity
        return created

    # Shard 0 alone draws the table's identity, so that two callers at the same time create the same table.
    first, *others = zip(shards.connections(), answers, strict=True)
    identity = create(*first, b"")
    if others:
        shards.in_parallel(create, ((*other, identity) for other in others))
    return KnownTable(spec, identity)


def extend_table(shards: Shards, num_rows: int, epoch: int | None) -> KnownTable:
    """Gives the table `num_rows` rows on every shard; see `WeightClient.extend_table`.

    Args:
        epoch: the client's session; None without one.
    """
    answers = shards.describe()
    identity = agreement.common_identity(answers, shards.names)
    largest = agreement.largest_spec(answers)
    if num_rows < largest.num_rows:
        raise ValueError(
            f"the table has {largest.num_rows} rows and can only become larger, not {num_rows}: give at least as many"
        )
    extended = replace(largest, num_rows=num_rows)

    def extend(connection: ShardConnection, answer: pb.DescribeResponse) -> None:
        spec = agreement.spec_of(answer)
        if spec != extended:
            request = pb.ExtendTableRequest(
                num_rows=num_rows,
                epoch=answer.epoch if epoch is None else epoch,
                table=table_digest(spec, identity),
            )
            connection.call("ExtendTable", request)

    shards.in_parallel(extend, zip(shards.connections(), answers, strict=True))
    return KnownTable(extended, identity)


def drop_table(shards: Shards) -> None:
    """Deletes the table on every shard; see `WeightClient.drop_table`."""
    answers = shards.describe()
    agreement.require_droppable(answers)
    shards.in_parallel(
        lambda connection, answer: connection.call("DropTable", pb.DropTableRequest(epoch=answer.epoch)),
        zip(shards.connections(), answers, strict=True),
    )
