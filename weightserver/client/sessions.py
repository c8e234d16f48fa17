"""How a client opens a session on all shards, or joins one."""

from __future__ import annotations

import os

from weightserver.client.fan_out import Answers, Shards
from weightserver.client.table import common_identity
from weightserver.client.writer import Session
from weightserver.common import processes
from weightserver.core.errors import ClusterError, DataLossError, FencedError
from weightserver.protocol._generated import weight_server_pb2 as pb


def open_session(
    shards: Shards,
    answers: Answers,
    name: str,
    *,
    session_id: bytes,
    force: bool = False,
    take_over: bool = False,
) -> Session:
    """Opens a session newer than any that the shards describe.

    Args:
        session_id: 16 random bytes.

    Raises:
        DataLossError, ClusterError: as `require_common_state`, unless `force`.
        FencedError: another client opened a session at the same time.
        SessionInUseError: a live run holds the newest session; without `take_over`.
    """
    common_identity(answers, shards.names)
    if not force:
        require_common_state(shards, answers)
    epoch = 1 + max(answer.epoch for answer in answers)
    peers = [] if force else shards.marks()
    request = pb.OpenSessionRequest(
        name=name,
        epoch=epoch,
        session_id=session_id,
        peers=peers,
        force=force,
        take_over=take_over,
        holder=pb.Holder(id=processes.process_id()),
    )
    _call_in_order(shards, request)
    shards.forget_data_loss()  # each shard holds what this client knows it to have acknowledged
    timeline = answers[0].timeline
    if force:  # each shard has drawn one of its own
        timeline = shards.timeline()
    return Session(epoch, session_id, timeline)


def join_session(shards: Shards, answers: Answers, epoch: int) -> Session:
    """Joins session `epoch`, that of shard 0.

    Raises:
        FencedError: the session was superseded, or was opened by no client, as after a restore.
    """
    common_identity(answers, shards.names)
    session_id = answers[0].session_id
    if not session_id:
        raise FencedError(f"session {epoch} was opened by no client, as after a restore: open a new one")
    _call_in_order(shards, pb.OpenSessionRequest(epoch=epoch, join=True, session_id=session_id))
    return Session(epoch, session_id, answers[0].timeline)


def join_newest_session(shards: Shards, answers: Answers) -> Session:
    """See `WeightClient.join_newest_session`."""
    newest = max(answers, key=lambda answer: answer.epoch)
    for answer in answers:
        if answer.epoch != newest.epoch:
            raise FencedError(
                f"shard {answer.shard} is at session {answer.epoch}, shard {newest.shard} at {newest.epoch}, as "
                "after restoring only one of them: take all to one checkpoint first, with 'weightserver rollback', or "
                "resume the run with --resume"
            )
    try:
        return join_session(shards, answers, newest.epoch)
    except FencedError:  # if another client opened a session meanwhile, shard 0 refuses this one too
        return open_session(shards, answers, newest.run, session_id=os.urandom(16), take_over=True)


def require_common_state(shards: Shards, answers: Answers) -> None:
    """Checks that the shards' rows are of one time, as far as the shards know.

    Raises:
        DataLossError: a shard lacks what another one knows it to have acknowledged.
        ClusterError: the shards were not rolled back or restored together.
    """
    for answer in answers:
        for connection, mark in zip(shards.connections(), answer.peers, strict=False):
            try:
                connection.require(mark)
            except DataLossError:
                raise DataLossError(
                    f"{connection.name} lacks what shard {answer.shard} knows it to have acknowledged: serve its "
                    "newest directory, or take all shards to one checkpoint ('weightserver rollback'), or restore all "
                    "of them from one backup"
                ) from None
    require_one_timeline(answers)


def require_one_timeline(answers: Answers) -> None:
    """Raises ClusterError where a rollback or restore reached only some of the shards."""
    for answer in answers:
        if answer.timeline != answers[0].timeline:
            raise ClusterError(
                f"shard {answer.shard} was not rolled back or restored together with shard 0, and its rows are of "
                "another time: take all shards to one checkpoint ('weightserver rollback'), or restore all of them "
                "from one backup"
            )


def _call_in_order(shards: Shards, request: pb.OpenSessionRequest) -> None:
    for connection in shards.connections():  # one by one: of two clients that race, shard 0 accepts one
        connection.call("OpenSession", request)
