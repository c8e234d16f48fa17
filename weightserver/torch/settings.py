"""A head's settings in groups. `ClassifierHead` takes a group, or any of its fields as a keyword of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from weightserver import TableSpec, WeightClient
from weightserver.common.addresses import parse_addresses
from weightserver.common.spelling import did_you_mean
from weightserver.core.arrays import Float32Array, checked_integer, checked_number
from weightserver.core.correction import checked_rates
from weightserver.torch.loss import Loss
from weightserver.torch.margins import MarginKind

DEFAULT_PREFETCH_STEPS = 8
BLOCK_OF_WINDOWS, BLOCK_OF_ANY_ORDER = 63, 7
"""Rows of a block where a window visits neighbouring rows, and where rows are scattered: writing those takes 0.29 of
the time in the smaller blocks."""
_SECONDS = ("timeout_seconds", "retry_seconds", "connect_seconds")


@dataclass(frozen=True)
class Servers:
    """Weight servers, and how to call them."""

    addresses: str | Sequence[str] | None = None
    """"host:port,host:port" of all weight servers, or a list, also "ws-{0..63}.ws:50051" for 64. Without any, a head
    starts its own on this machine."""
    num_shards: int = 1
    """Number of servers that a head starts."""
    take_over: bool = False
    """End a live run that uses the servers: its next step raises FencedError."""
    timeout_seconds: float = 30
    """Deadline of a call, see `WeightClient`."""
    retry_seconds: float = 300
    """How long calls are retried of a server that has answered before and cannot be reached."""
    connect_seconds: float = 15
    """How long the first call of each server is tried."""
    credentials: grpc.ChannelCredentials | Callable[[], grpc.ChannelCredentials] | None = field(
        default=None, repr=False
    )
    """gRPC channel credentials (TLS) for servers on other machines, or what makes them for each new channel."""
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    """Bearer token sent with every call, or what returns it."""
    insecure: bool = False
    """Whether servers on other machines may be called without credentials."""

    def __post_init__(self) -> None:
        checked_integer(self.num_shards, "num_shards", 1)
        for name in _SECONDS:
            checked_number(getattr(self, name), name)
        for name in ("take_over", "insecure"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        self.parsed()

    def parsed(self) -> list[str]:
        """The addresses. Raises TypeError for what is no text, ValueError for one that is no address."""
        given = [] if self.addresses is None else self.addresses
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f'servers must be addresses "host:port,host:port" or a list of them, got {given!r}')
        return parse_addresses(*texts)

    def client(self, addresses: Sequence[str], own_token: str) -> WeightClient:
        """A client of these addresses: the given ones, or those of a head's own servers, which are on loopback."""
        seconds = {name: getattr(self, name) for name in _SECONDS}
        security = {name: getattr(self, name) for name in ("credentials", "token", "insecure")}
        return WeightClient(addresses, **seconds, **(security if self.addresses else {"token": own_token}))


@dataclass(frozen=True)
class Rows:
    """Where the rows are, how they begin, and their SGD."""

    where: Literal["resident", "remote", "dense"] = "resident"
    """"resident" keeps the rows around the active ones on the module's device; "remote" fetches and pushes them in each
    step; "dense" keeps all rows in memory, without servers."""
    momentum: float = 0.9
    """m of the rows' SGD."""
    weight_decay: float = 1e-4
    """λ of the rows' SGD."""
    correction: bool | Literal["exact", "paper", "none"] = True
    """How inactive rows move, see `TableSpec`."""
    seed: int = 0
    """Seed of the random initial rows and of sampled negatives."""
    init_std: float = 0.01
    """Standard deviation of random initial rows."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stored rows, see `TableSpec`; they are float32 while they are resident."""
    rows_per_block: int | None = None
    """Rows that the servers store together; by default as in the servers' table, or in a new one 63 if a sampler's
    window orders the classes, otherwise 7."""
    capacity: int | None = None
    """Number of resident rows on all ranks together; by default as many as the steps need."""
    prefetch_steps: int = DEFAULT_PREFETCH_STEPS
    """Steps in advance at which resident rows are requested, if a sampler knows the classes to come."""
    learning_rate_factor: float = 1.0
    """The rows' own learning rates are those of the steps times this: their SGD has no others."""

    def __post_init__(self) -> None:
        if self.where not in ("resident", "remote", "dense"):
            raise ValueError(f"rows must be 'resident', 'remote' or 'dense', got {self.where!r}")
        if self.capacity is not None:
            if checked_integer(self.capacity, "capacity") < 1:
                raise ValueError(
                    f"capacity must be at least 1 row, got {self.capacity}: omit it for as many as the steps need"
                )
            if self.where != "resident":
                raise ValueError(f"capacity is a number of resident rows, but rows={self.where!r}: omit one of them")
        if checked_integer(self.prefetch_steps, "prefetch_steps") < 0:
            raise ValueError(f"prefetch_steps must be at least 0, got {self.prefetch_steps}")
        if not 0 < checked_number(self.learning_rate_factor, "learning_rate_factor") < math.inf:
            raise ValueError(f"learning_rate_factor must be positive, got {self.learning_rate_factor}")
        if self.where != "dense":
            return
        if self.correction == "paper":
            raise ValueError("rows='dense' leave no gap to correct: use correction=True, or rows='resident'")
        if self.dtype != "float32":
            raise ValueError(f"rows='dense' are float32, not {self.dtype}: omit dtype, or use rows='resident'")

    def learning_rates(self, of_steps: npt.ArrayLike, start_step: int = 0) -> Float32Array:
        """The rows' own learning rates, float32 [n], from those of n steps. Raises as `checked_rates` does."""
        momentum = checked_number(self.momentum, "momentum")
        weight_decay = checked_number(self.weight_decay, "weight_decay")
        checked = partial(checked_rates, momentum=momentum, start_step=start_step)
        with np.errstate(over="ignore"):
            own = (checked(of_steps, weight_decay=0.0) * np.float64(self.learning_rate_factor)).astype(np.float32)
        return checked(own, weight_decay=weight_decay)

    def spec(self, num_rows: int, dim: int) -> TableSpec:
        """The table of these rows; its blocks are those of any order unless `rows_per_block` is given."""
        return TableSpec(
            num_rows=num_rows,
            dim=dim,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            init_std=self.init_std,
            seed=self.seed,
            rows_per_block=BLOCK_OF_ANY_ORDER if self.rows_per_block is None else self.rows_per_block,
            correction=self.correction,
            dtype=self.dtype,
        )


class Settings(TypedDict, total=False):
    """The fields of the three groups that a head takes as keywords: all but the first of each."""

    num_shards: int
    take_over: bool
    timeout_seconds: float
    retry_seconds: float
    connect_seconds: float
    credentials: grpc.ChannelCredentials | Callable[[], grpc.ChannelCredentials] | None
    token: str | Callable[[], str] | None
    insecure: bool
    momentum: float
    weight_decay: float
    correction: bool | Literal["exact", "paper", "none"]
    seed: int
    init_std: float
    dtype: Literal["float32", "bfloat16"]
    rows_per_block: int | None
    capacity: int | None
    prefetch_steps: int
    learning_rate_factor: float
    temperature: float
    margin: MarginKind
    margin_size: float | None


Group = TypeVar("Group", Servers, Rows, Loss)


def group_of(kind: type[Group], given: Any, settings: Mapping[str, object]) -> Group:
    """The group that was given, or whose first field was; with its fields among `settings`."""
    first, *others = (field.name for field in fields(kind))
    own: dict[str, Any] = {name: settings[name] for name in others if name in settings}
    if isinstance(given, kind):
        return replace(given, **own)
    return kind(**{first: given}, **own)


def refuse_unknown(settings: Mapping[str, object]) -> None:
    """Raises TypeError for settings that no group has."""
    known = Settings.__annotations__
    for name in settings.keys() - known.keys():
        hint = did_you_mean(name, known, f"there are {', '.join(known)}")
        raise TypeError(f"ClassifierHead has no setting {name!r}: {hint}")
