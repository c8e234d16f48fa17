"""Checks that the shards fit together, as pure functions of the answers in which they describe themselves.

Answers are in the order of shards unless a function says otherwise. `names` are the shards' names in error messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightserver.common.version import __version__, works_with
from weightserver.core.checkpoints import Checkpoint
from weightserver.core.errors import ClusterError, FencedError, NoTableError, TableMismatchError
from weightserver.core.spec import TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import spec_from_proto

Answers = Sequence[pb.DescribeResponse]
COMMON_STATE_REMEDY = (
    "serve its newest directory, or take all shards to one checkpoint ('weightserver rollback'), or restore all of "
    "them from one backup"
)


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
                f"{address} is a shard of version {answer.server_version}, this client is of {__version__}: use one "
                "minor version for all"
            )
        if answer.num_shards != num_shards:
            raise ClusterError(
                f"{address} is a shard of {answer.num_shards}, {addresses[0]} one of {num_shards}: give the addresses "
                "of one cluster"
            )
        if (other := position.setdefault(answer.shard, number)) != number:
            raise ClusterError(f"{addresses[other]} and {address} are both shard {answer.shard}: give each shard once")
    if missing := [str(shard) for shard in range(num_shards) if shard not in position]:
        raise ClusterError(
            f"{len(addresses)} of {num_shards} shards were given: add the address of shard {', '.join(missing)}"
        )
    return [position[shard] for shard in range(num_shards)]


# ---- the table


def spec_of(answer: pb.DescribeResponse) -> TableSpec:
    """The spec of the shard's table.

    Raises:
        NoTableError: the shard holds no table.
    """
    if not answer.HasField("spec"):
        raise NoTableError(f"shard {answer.shard} holds no table: call create_table() first")
    return spec_from_proto(answer.spec)


def common_spec(answers: Answers) -> TableSpec:
    """The spec of the one table that all shards hold.

    Raises:
        NoTableError: a shard holds no table.
        ClusterError: the shards hold different tables, or sizes of one table.
    """
    first, *others = map(spec_of, answers)
    for shard, spec in enumerate(others, start=1):
        if spec.is_another_size_of(first):
            most = max(spec.num_rows, first.num_rows)
            raise ClusterError(
                f"the table of shard 0 has {first.num_rows} rows, that of shard {shard} {spec.num_rows}, as after "
                f"an extend_table() that failed halfway: repeat extend_table({most}), or 'weightserver extend'"
            )
        if spec != first:
            raise ClusterError(f"shards 0 and {shard} hold different tables: give the addresses of one cluster")
    return first


def largest_spec(answers: Answers) -> TableSpec:
    """The spec of the shards' table, whose extension may have reached some of them only.

    Raises:
        NoTableError: a shard holds no table.
        ClusterError: the shards hold tables that differ in more than their number of rows.
    """
    specs = [spec_of(answer) for answer in answers]
    largest = max(specs, key=lambda spec: spec.num_rows)
    if other := next((spec for spec in specs if spec != largest and not spec.is_another_size_of(largest)), None):
        raise ClusterError(
            f"the shards hold different tables, {largest} and {other}: give the addresses of one cluster"
        )
    return largest


def common_identity(answers: Answers, names: Sequence[str]) -> bytes:
    """The identity of the table that all shards hold.

    Raises:
        NoTableError: a shard holds no table.
        ClusterError: the shards hold tables, or are in sessions, of several clusters.
    """
    for answer, name in zip(answers, names, strict=True):
        spec_of(answer)
        if answer.table_identity != answers[0].table_identity:
            raise ClusterError(
                f"{name} holds the table of another cluster than {names[0]}: give the addresses of one cluster"
            )
    first_of_epoch: dict[int, pb.DescribeResponse] = {}
    for answer, name in zip(answers, names, strict=True):
        first = first_of_epoch.setdefault(answer.epoch, answer) if answer.session_id else answer
        if answer.session_id != first.session_id:  # shards of one cluster are never in two sessions of one epoch
            raise ClusterError(
                f"{name} is in another session {answer.epoch} (run {answer.run!r}) than {names[first.shard]} "
                f"(run {first.run!r}): give the addresses of one cluster"
            )
    return bytes(answers[0].table_identity)


def require_creatable(answers: Answers, spec: TableSpec) -> None:
    """Checks that the table can be created: every shard holds no table, or this one.

    Raises:
        TableMismatchError: a shard holds another table, or lacks one of which others hold rows.
    """
    for answer in answers:
        if answer.HasField("spec") and (existing := spec_from_proto(answer.spec)) != spec:
            if existing.num_rows < spec.num_rows and existing.is_another_size_of(spec):
                raise TableMismatchError(
                    f"the table of shard {answer.shard} has {existing.num_rows} rows, not {spec.num_rows}: "
                    f"extend_table({spec.num_rows}) makes it larger"
                )
            raise TableMismatchError(
                f"shard {answer.shard} holds another table, {existing}: use its spec, or other shards"
            )
    used = [str(answer.shard) for answer in answers if _has_rows(answer)]
    lacking = [str(answer.shard) for answer in answers if not answer.HasField("spec")]
    if used and lacking:
        raise TableMismatchError(
            f"shard {', '.join(used)} holds rows of a table that shard {', '.join(lacking)} lacks: is a disk not "
            "mounted, an address wrong, or did a drop_table() end halfway? Serve the right directories, or restore all "
            "shards from one backup"
        )


def require_droppable(answers: Answers) -> None:
    """Raises ClusterError where the shards hold tables of several clusters."""
    if len({answer.table_identity for answer in answers if answer.HasField("spec")}) > 1:
        raise ClusterError("the shards hold tables of several clusters: give the addresses of one cluster")


# ---- the state of the rows


def newest_common_epoch(answers: Answers) -> pb.DescribeResponse:
    """The answer of a shard in the newest session, which all shards must have reached.

    Raises:
        FencedError: the shards are at different epochs.
    """
    newest = max(answers, key=lambda answer: answer.epoch)
    if older := [answer for answer in answers if answer.epoch != newest.epoch]:
        raise FencedError(
            f"shard {older[0].shard} is at session {older[0].epoch}, shard {newest.shard} at {newest.epoch}, as "
            "after restoring only one of them: take all to one checkpoint first, with 'weightserver rollback', or "
            "resume the run with --resume"
        )
    return newest


def require_one_timeline(answers: Answers) -> None:
    """Raises ClusterError where a rollback or restore reached only some of the shards."""
    if other := next((answer for answer in answers if answer.timeline != answers[0].timeline), None):
        raise ClusterError(
            f"shard {other.shard} was not rolled back or restored together with shard 0, and its rows are of "
            "another time: take all shards to one checkpoint ('weightserver rollback'), or restore all of them "
            "from one backup"
        )


def checkpoints_of(answer: pb.DescribeResponse) -> tuple[Checkpoint, ...]:
    """The checkpoints that a shard retains, oldest first."""
    return tuple(Checkpoint(kept.name, kept.step, kept.identity, (kept.mark,)) for kept in answer.checkpoints)


def _has_rows(answer: pb.DescribeResponse) -> bool:
    return bool(answer.rows_stored or answer.clock)
