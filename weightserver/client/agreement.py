"""Checks that the shards fit together, by the answers in which they describe themselves.

Answers are in the order of shards unless a function says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightserver.common.version import __version__, works_with
from weightserver.core.errors import ClusterError, NoTableError
from weightserver.core.spec import TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import spec_from_proto

Answers = Sequence[pb.DescribeResponse]
ONE_CLUSTER = "give the addresses of one cluster"


def shard_order(answers: Answers, addresses: Sequence[str]) -> list[int]:
    """Positions of the addresses in the order of shards.

    Args:
        answers: one for each address, in the order of `addresses`.

    Raises:
        ClusterError: a shard is of another version or cluster, given twice, or missing.
    """
    num_shards = answers[0].num_shards
    position: dict[int, int] = {}
    for number, (answer, address) in enumerate(zip(answers, addresses, strict=True)):
        if not works_with(answer.server_version):
            raise ClusterError(
                f"{address} is a shard of version {answer.server_version or 'unknown'}, this client is of "
                f"{__version__}: use one minor version for all"
            )
        if answer.num_shards != num_shards:
            raise ClusterError(
                f"{address} is a shard of {answer.num_shards}, {addresses[0]} one of {num_shards}: {ONE_CLUSTER}"
            )
        if (other := position.setdefault(answer.shard, number)) != number:
            raise ClusterError(f"{addresses[other]} and {address} are both shard {answer.shard}: give each shard once")
    if missing := [str(shard) for shard in range(num_shards) if shard not in position]:
        raise ClusterError(
            f"{len(addresses)} of {num_shards} shards were given: add the address of shard {', '.join(missing)}"
        )
    return [position[shard] for shard in range(num_shards)]


def spec_of(answer: pb.DescribeResponse) -> TableSpec:
    """The spec of the shard's table.

    Raises:
        NoTableError: the shard holds no table.
    """
    if not answer.HasField("spec"):
        raise NoTableError(f"shard {answer.shard} holds no table: call create_table() first")
    return spec_from_proto(answer.spec)


def common_identity(answers: Answers, names: Sequence[str]) -> bytes:
    """The identity of the table that all shards hold.

    Args:
        names: the shards' names in error messages.

    Raises:
        NoTableError: a shard holds no table.
        ClusterError: the shards hold tables, or are in sessions, of several clusters.
    """
    first_of_epoch: dict[int, pb.DescribeResponse] = {}
    for answer, name in zip(answers, names, strict=True):
        spec_of(answer)
        if answer.table_identity != answers[0].table_identity:
            raise ClusterError(f"{name} holds the table of another cluster than {names[0]}: {ONE_CLUSTER}")
    for answer, name in zip(answers, names, strict=True):
        first = first_of_epoch.setdefault(answer.epoch, answer) if answer.session_id else answer
        if answer.session_id != first.session_id:  # shards of one cluster are never in two sessions of one epoch
            raise ClusterError(
                f"{name} is in another session {answer.epoch} (run {answer.run!r}) than {names[first.shard]} "
                f"(run {first.run!r}): {ONE_CLUSTER}"
            )
    return bytes(answers[0].table_identity)


def require_one_timeline(answers: Answers) -> None:
    """Raises ClusterError where a rollback or restore reached only some of the shards."""
    for answer in answers:
        if answer.timeline != answers[0].timeline:
            raise ClusterError(
                f"shard {answer.shard} was not rolled back or restored together with shard 0, and its rows are of "
                "another time: take all shards to one checkpoint ('weightserver rollback'), or restore all of them "
                "from one backup"
            )
