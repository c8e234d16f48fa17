"""Reads the stored blocks of a checkpoint from running shards, for `backup` and `reshard`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from weightserver.client.client import WeightClient
from weightserver.client.results import TableInfo
from weightserver.core.blocks import BlockCodec
from weightserver.core.errors import ClusterError
from weightserver.core.versions import digest
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import table_number


@dataclass
class CheckpointReader:
    """Reads one shard's blocks of a checkpoint: all of them, those of `part`, or those written after another one."""

    client: WeightClient
    shard: int
    checkpoint: str
    info: TableInfo
    part: pb.Part | None = None
    since: str = ""
    """The checkpoint after which the blocks were written; empty for all."""
    rows_stored: int = 0
    """Rows of the blocks so far that were ever written."""
    lineage: list[str] = field(default_factory=list)
    """Marks of the shard up to the checkpoint, once all blocks are read."""

    def blocks(self) -> Iterator[pb.Block]:
        """Yields the blocks, checked, in ascending order.

        Raises:
            NoTableError: the shard does not keep the checkpoint any more.
            StorageError: a block is damaged.
            ClusterError: at the end, if the blocks are not those that the shard says it keeps.
        """
        codec, known = BlockCodec(self.info.spec), digest([])
        first, end = 0, self.info.spec.num_blocks
        while first < end:
            answer = self._read(first)
            for block in answer.blocks:
                codec.check(block.number, block.write_id, block.content)
                self.rows_stored += codec.num_written(block.content)
                yield block
            known = digest(((block.number, block.write_id) for block in answer.blocks), known)
            first = answer.next_block or end
        last = self._read(end)
        if known != last.digest:
            raise ClusterError(
                f"shard {self.shard} sent other blocks of checkpoint {self.checkpoint!r} than it keeps: check its "
                "directory with 'weightserver verify'"
            )
        self.lineage = list(last.lineage)

    def digest(self, checkpoint: str) -> bytes:
        """The digest of all blocks of a checkpoint, as the shard keeps it. Raises NoTableError if it does not."""
        return bytes(replace(self, checkpoint=checkpoint, since="")._read(self.info.spec.num_blocks).digest)

    def _read(self, first_block: int) -> pb.ReadBlocksResponse:
        """Some blocks from a number on. After the last one, the digest of all of them and the marks up to the
        checkpoint."""
        table = table_number(self.info.spec, self.info.identity)
        request = pb.ReadBlocksRequest(
            checkpoint=self.checkpoint, table=table, first_block=first_block, part=self.part, since=self.since
        )
        answer: pb.ReadBlocksResponse = self.client.call_shard(self.shard, "ReadBlocks", request)
        return answer
