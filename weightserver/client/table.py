"""What table the shards hold, and how it is created, extended and dropped on all of them.

Each of these calls may be repeated if it failed halfway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weightserver.client.connection import ShardConnection
from weightserver.client.fan_out import ONE_CLUSTER, Answers, Shards
from weightserver.core.errors import ClusterError, NoTableError, TableMismatchError
from weightserver.core.spec import TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import spec_from_proto, spec_to_proto, table_number


def common_table(shards: Shards, answers: Answers, *, is_extended: bool = False) -> tuple[TableSpec, bytes]:
    """The spec and the identity of the one table that all shards hold.

    Args:
        is_extended: take the largest size where an extension has reached only some shards.

    Raises:
        NoTableError: a shard holds no table.
        ClusterError: the shards hold different tables, or sizes of one table.
    """
    specs = [spec_of(answer) for answer in answers]
    largest, identity = max(specs, key=lambda spec: spec.num_rows), common_identity(answers, shards.names)
    for shard, spec in enumerate(specs):
        if spec != specs[0] and not is_extended:
            raise ClusterError(
                f"the table of shard 0 has {specs[0].num_rows} rows, that of shard {shard} {spec.num_rows}, as after "
                f"an extend_table() that failed halfway: repeat extend_table({largest.num_rows}), or 'weightserver "
                "extend'"
            )
    return largest, identity


def spec_of(answer: pb.DescribeResponse) -> TableSpec:
    """The spec of the shard's table. Raises NoTableError if it holds none."""
    if not answer.HasField("spec"):
        raise NoTableError(f"shard {answer.shard} holds no table: a run begins one, or create_table()")
    return spec_from_proto(answer.spec)


def common_identity(answers: Answers, names: Sequence[str]) -> bytes:
    """The identity of the table that all shards hold, in one size or several.

    Raises:
        NoTableError: a shard holds no table.
        ClusterError: the shards hold tables, or are in sessions, of several clusters, or blocks of different sizes.
    """
    first_of_epoch: dict[int, pb.DescribeResponse] = {}
    for answer, name in zip(answers, names, strict=True):
        spec, first_spec = spec_of(answer), spec_of(answers[0])
        if answer.table_identity != answers[0].table_identity:
            raise ClusterError(f"{name} holds the table of another cluster than {names[0]}: {ONE_CLUSTER}")
        if replace(spec, num_rows=first_spec.num_rows) != first_spec:
            raise ClusterError(
                f"the shards hold different tables, {first_spec} and {spec}: {ONE_CLUSTER}, all of whose shards were "
                "filled with the same 'weightserver reshard --rows-per-block'"
            )
    for answer, name in zip(answers, names, strict=True):
        first = first_of_epoch.setdefault(answer.epoch, answer) if answer.session_id else answer
        if answer.session_id != first.session_id:  # two clusters, or older copies that were served in turn
            raise ClusterError(
                f"{name} is in another session {answer.epoch} (run {answer.run!r}) than {names[first.shard]} "
                f"(run {first.run!r}): {ONE_CLUSTER}, and serve each shard's newest directory"
            )
    return bytes(answers[0].table_identity)


def create_table(shards: Shards, spec: TableSpec) -> tuple[TableSpec, bytes]:
    """See `WeightClient.create_table`. Returns the table's spec and identity."""
    answers = shards.describe()
    _require_creatable(answers, spec)

    def create(connection: ShardConnection, answer: pb.DescribeResponse, identity: bytes) -> bytes:
        request = pb.CreateTableRequest(spec=spec_to_proto(spec), epoch=answer.epoch, identity=identity)
        created: bytes = connection.call("CreateTable", request).identity
        return created

    # Shard 0 alone draws the table's identity, so that two callers at the same time create the same table.
    first, *others = zip(shards.connections(), answers, strict=True)
    identity = create(*first, b"")
    if others:
        shards.in_parallel(create, ((*other, identity) for other in others))
    return spec, identity


def _require_creatable(answers: Answers, spec: TableSpec) -> None:
    """Raises TableMismatchError unless every shard holds no table, or this one."""
    for answer in answers:
        if answer.HasField("spec") and (existing := spec_of(answer)) != spec:
            if existing.num_rows < spec.num_rows and existing.is_another_size_of(spec):
                raise TableMismatchError(
                    f"the table of shard {answer.shard} has {existing.num_rows} rows, not {spec.num_rows}: "
                    f"extend_table({spec.num_rows}) makes it larger"
                )
            raise TableMismatchError(
                f"shard {answer.shard} holds another table, {existing}: use its spec, or other shards"
            )
    used = [str(answer.shard) for answer in answers if answer.rows_stored or answer.clock]
    lacking = [str(answer.shard) for answer in answers if not answer.HasField("spec")]
    if used and lacking:
        raise TableMismatchError(
            f"shard {', '.join(used)} holds rows of a table that shard {', '.join(lacking)} lacks: is a disk not "
            "mounted, an address wrong, or did a drop_table() end halfway? Serve the right directories, or restore all "
            "shards from one backup"
        )


def extend_table(shards: Shards, num_rows: int, epoch: int | None) -> tuple[TableSpec, bytes]:
    """See `WeightClient.extend_table`; `epoch` is that of the client's session, if it has one. Returns the table's spec
    and identity."""
    answers = shards.describe()
    spec, identity = common_table(shards, answers, is_extended=True)
    if num_rows < spec.num_rows:
        raise ValueError(
            f"the table has {spec.num_rows} rows and can only become larger, not {num_rows}: give at least as many"
        )
    extended, number = replace(spec, num_rows=num_rows), table_number(spec, identity)

    def extend(connection: ShardConnection, answer: pb.DescribeResponse) -> None:
        if spec_of(answer) != extended:
            newest = answer.epoch if epoch is None else epoch
            request = pb.ExtendTableRequest(num_rows=num_rows, epoch=newest, table=number)
            connection.call("ExtendTable", request)

    shards.in_parallel(extend, zip(shards.connections(), answers, strict=True))
    return extended, identity


def drop_table(shards: Shards) -> None:
    """See `WeightClient.drop_table`."""
    answers = shards.describe()
    if len({answer.table_identity for answer in answers if answer.HasField("spec")}) > 1:
        raise ClusterError(f"the shards hold tables of several clusters: {ONE_CLUSTER}")
    shards.in_parallel(
        lambda connection, answer: connection.call("DropTable", pb.DropTableRequest(epoch=answer.epoch)),
        zip(shards.connections(), answers, strict=True),
    )
