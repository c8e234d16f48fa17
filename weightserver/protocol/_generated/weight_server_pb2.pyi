from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_DTYPE_FLOAT32: _ClassVar[RowDtype]
    ROW_DTYPE_BFLOAT16: _ClassVar[RowDtype]
ROW_DTYPE_FLOAT32: RowDtype
ROW_DTYPE_BFLOAT16: RowDtype

class TableSpec(_message.Message):
    __slots__ = ("num_rows", "dim", "momentum", "weight_decay", "init_std", "seed", "rows_per_block", "correction", "single_rate", "dtype")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    INIT_STD_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    SINGLE_RATE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    dim: int
    momentum: float
    weight_decay: float
    init_std: float
    seed: int
    rows_per_block: int
    correction: bool
    single_rate: bool
    dtype: RowDtype
    def __init__(self, num_rows: _Optional[int] = ..., dim: _Optional[int] = ..., momentum: _Optional[float] = ..., weight_decay: _Optional[float] = ..., init_std: _Optional[float] = ..., seed: _Optional[int] = ..., rows_per_block: _Optional[int] = ..., correction: _Optional[bool] = ..., single_rate: _Optional[bool] = ..., dtype: _Optional[_Union[RowDtype, str]] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("ids", "ranges")
    IDS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    ranges: bytes
    def __init__(self, ids: _Optional[bytes] = ..., ranges: _Optional[bytes] = ...) -> None: ...

class Rates(_message.Message):
    __slots__ = ("start", "digest", "learning_rates")
    START_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATES_FIELD_NUMBER: _ClassVar[int]
    start: int
    digest: int
    learning_rates: bytes
    def __init__(self, start: _Optional[int] = ..., digest: _Optional[int] = ..., learning_rates: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("shard", "num_shards", "spec", "epoch", "clock", "rows_stored", "disk_bytes", "run", "server_version", "checkpoints", "table_identity", "session_id", "peers", "timeline", "schedule_digest", "holder")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    ROWS_STORED_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    TABLE_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    shard: int
    num_shards: int
    spec: TableSpec
    epoch: int
    clock: int
    rows_stored: int
    disk_bytes: int
    run: str
    server_version: str
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    table_identity: bytes
    session_id: bytes
    peers: _containers.RepeatedScalarFieldContainer[str]
    timeline: bytes
    schedule_digest: int
    holder: str
    def __init__(self, shard: _Optional[int] = ..., num_shards: _Optional[int] = ..., spec: _Optional[_Union[TableSpec, _Mapping]] = ..., epoch: _Optional[int] = ..., clock: _Optional[int] = ..., rows_stored: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., run: _Optional[str] = ..., server_version: _Optional[str] = ..., checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ..., table_identity: _Optional[bytes] = ..., session_id: _Optional[bytes] = ..., peers: _Optional[_Iterable[str]] = ..., timeline: _Optional[bytes] = ..., schedule_digest: _Optional[int] = ..., holder: _Optional[str] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("name", "step", "identity", "rows_stored", "mark")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ROWS_STORED_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: int
    identity: bytes
    rows_stored: int
    mark: str
    def __init__(self, name: _Optional[str] = ..., step: _Optional[int] = ..., identity: _Optional[bytes] = ..., rows_stored: _Optional[int] = ..., mark: _Optional[str] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("header", "name", "identity", "peers", "timeline")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    header: WriteHeader
    name: str
    identity: bytes
    peers: _containers.RepeatedScalarFieldContainer[str]
    timeline: bytes
    def __init__(self, header: _Optional[_Union[WriteHeader, _Mapping]] = ..., name: _Optional[str] = ..., identity: _Optional[bytes] = ..., peers: _Optional[_Iterable[str]] = ..., timeline: _Optional[bytes] = ...) -> None: ...

class CopyCheckpointRequest(_message.Message):
    __slots__ = ("header", "name", "source", "identity")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    header: WriteHeader
    name: str
    source: str
    identity: bytes
    def __init__(self, header: _Optional[_Union[WriteHeader, _Mapping]] = ..., name: _Optional[str] = ..., source: _Optional[str] = ..., identity: _Optional[bytes] = ...) -> None: ...

class ReadBlocksRequest(_message.Message):
    __slots__ = ("checkpoint", "first_block", "table", "part", "since")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    first_block: int
    table: int
    part: Part
    since: str
    def __init__(self, checkpoint: _Optional[str] = ..., first_block: _Optional[int] = ..., table: _Optional[int] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., since: _Optional[str] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("shard", "num_shards", "rows_per_block")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    shard: int
    num_shards: int
    rows_per_block: int
    def __init__(self, shard: _Optional[int] = ..., num_shards: _Optional[int] = ..., rows_per_block: _Optional[int] = ...) -> None: ...

class ReadBlocksResponse(_message.Message):
    __slots__ = ("blocks", "next_block", "lineage", "digest")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_BLOCK_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    next_block: int
    lineage: _containers.RepeatedScalarFieldContainer[str]
    digest: bytes
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., next_block: _Optional[int] = ..., lineage: _Optional[_Iterable[str]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("number", "content", "write_id")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    number: int
    content: bytes
    write_id: int
    def __init__(self, number: _Optional[int] = ..., content: _Optional[bytes] = ..., write_id: _Optional[int] = ...) -> None: ...

class ReadScheduleRequest(_message.Message):
    __slots__ = ("start_step",)
    START_STEP_FIELD_NUMBER: _ClassVar[int]
    start_step: int
    def __init__(self, start_step: _Optional[int] = ...) -> None: ...

class ReadScheduleResponse(_message.Message):
    __slots__ = ("learning_rates",)
    LEARNING_RATES_FIELD_NUMBER: _ClassVar[int]
    learning_rates: bytes
    def __init__(self, learning_rates: _Optional[bytes] = ...) -> None: ...

class CreateTableRequest(_message.Message):
    __slots__ = ("spec", "epoch", "identity")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    spec: TableSpec
    epoch: int
    identity: bytes
    def __init__(self, spec: _Optional[_Union[TableSpec, _Mapping]] = ..., epoch: _Optional[int] = ..., identity: _Optional[bytes] = ...) -> None: ...

class CreateTableResponse(_message.Message):
    __slots__ = ("identity",)
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    identity: bytes
    def __init__(self, identity: _Optional[bytes] = ...) -> None: ...

class ExtendTableRequest(_message.Message):
    __slots__ = ("num_rows", "epoch", "table")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    epoch: int
    table: int
    def __init__(self, num_rows: _Optional[int] = ..., epoch: _Optional[int] = ..., table: _Optional[int] = ...) -> None: ...

class ExtendTableResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropTableRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class DropTableResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("name", "epoch", "join", "session_id", "peers", "force", "holder", "take_over", "leave")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    join: bool
    session_id: bytes
    peers: _containers.RepeatedScalarFieldContainer[str]
    force: bool
    holder: Holder
    take_over: bool
    leave: bool
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., join: _Optional[bool] = ..., session_id: _Optional[bytes] = ..., peers: _Optional[_Iterable[str]] = ..., force: _Optional[bool] = ..., holder: _Optional[_Union[Holder, _Mapping]] = ..., take_over: _Optional[bool] = ..., leave: _Optional[bool] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Holder(_message.Message):
    __slots__ = ("name", "id", "held_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    HELD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: bytes
    held_seconds: float
    def __init__(self, name: _Optional[str] = ..., id: _Optional[bytes] = ..., held_seconds: _Optional[float] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("rows", "step", "raw", "state", "table", "checkpoint", "identity", "rates")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    rows: Rows
    step: int
    raw: bool
    state: bool
    table: int
    checkpoint: str
    identity: bytes
    rates: Rates
    def __init__(self, rows: _Optional[_Union[Rows, _Mapping]] = ..., step: _Optional[int] = ..., raw: _Optional[bool] = ..., state: _Optional[bool] = ..., table: _Optional[int] = ..., checkpoint: _Optional[str] = ..., identity: _Optional[bytes] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("weight", "momentum_buffer", "last_step")
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_BUFFER_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    weight: bytes
    momentum_buffer: bytes
    last_step: bytes
    def __init__(self, weight: _Optional[bytes] = ..., momentum_buffer: _Optional[bytes] = ..., last_step: _Optional[bytes] = ...) -> None: ...

class WriteHeader(_message.Message):
    __slots__ = ("epoch", "writer", "sequence", "step", "num_rows", "num_blocks", "table", "session_id", "rates")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    writer: bytes
    sequence: int
    step: int
    num_rows: int
    num_blocks: int
    table: int
    session_id: bytes
    rates: Rates
    def __init__(self, epoch: _Optional[int] = ..., writer: _Optional[bytes] = ..., sequence: _Optional[int] = ..., step: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_blocks: _Optional[int] = ..., table: _Optional[int] = ..., session_id: _Optional[bytes] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ...) -> None: ...

class PushGradientsRequest(_message.Message):
    __slots__ = ("header", "rows", "gradients")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    header: WriteHeader
    rows: Rows
    gradients: bytes
    def __init__(self, header: _Optional[_Union[WriteHeader, _Mapping]] = ..., rows: _Optional[_Union[Rows, _Mapping]] = ..., gradients: _Optional[bytes] = ...) -> None: ...

class WriteStateRequest(_message.Message):
    __slots__ = ("header", "rows", "weight", "momentum_buffer", "last_step")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_BUFFER_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    header: WriteHeader
    rows: Rows
    weight: bytes
    momentum_buffer: bytes
    last_step: bytes
    def __init__(self, header: _Optional[_Union[WriteHeader, _Mapping]] = ..., rows: _Optional[_Union[Rows, _Mapping]] = ..., weight: _Optional[bytes] = ..., momentum_buffer: _Optional[bytes] = ..., last_step: _Optional[bytes] = ...) -> None: ...

class SettleWriteRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: WriteHeader
    def __init__(self, header: _Optional[_Union[WriteHeader, _Mapping]] = ...) -> None: ...

class SettleWriteResponse(_message.Message):
    __slots__ = ("applied",)
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    applied: bool
    def __init__(self, applied: _Optional[bool] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("duplicate", "identity")
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    duplicate: bool
    identity: bytes
    def __init__(self, duplicate: _Optional[bool] = ..., identity: _Optional[bytes] = ...) -> None: ...
