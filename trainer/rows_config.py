"""Settings of the classifier's rows and of the weight servers that store them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from trainer.settings import (
    SettingError,
    Settings,
    check_at_least,
    check_not_negative,
    check_of_table,
    check_positive,
    of_one_start,
    resumable,
)
from weightserver import ClientSecurity
from weightserver.common.addresses import is_loopback, parse_addresses

_SECURITY = tuple(field.name for field in fields(ClientSecurity))


@dataclass(frozen=True, kw_only=True)
class RowsConfig(Settings):
    """Which rows a step has, where they are held, and how they are initialised and corrected."""

    rows: Literal["resident", "remote", "dense"] = resumable("resident")
    """resident: the rows around the window on the trainer's device, all others on the weight servers. remote: all on
    the weight servers, fetched for each step. dense: all in the trainers' memory, updated by plain SGD."""
    num_negatives: int = 1024
    """K, the number of classes of a step, the batch's own included."""
    negatives: Literal["recent", "uniform", "both"] = "recent"
    """Which classes a step has besides its own: the most recently visited ones (recent), ones sampled uniformly in
    whole blocks of rows (uniform), or both."""
    recent_share: float = 0.5
    """With --negatives both: the share of --num-negatives that the most recent classes have."""
    capacity: int | None = resumable(None)
    """Resident rows on all ranks together. Without it: as many as the window and prefetching can use. Each rank has
    room for its share, for two more blocks, and for the random imbalance of active rows between ranks."""
    prefetch_steps: int = resumable(8)
    """Steps in advance at which resident rows are requested."""
    correction: Literal["exact", "paper", "none"] = "exact"
    """How inactive rows follow momentum and weight decay. exact: with the learning rate of each step. paper: with one
    learning rate for all steps since the row was active. none, or --no-correction: they do not move (compared in
    Table 2)."""
    init_std: float = 0.01
    """Standard deviation of a row's values when it begins."""
    row_momentum: float | None = None
    """m of the rows' SGD. Without it: --momentum."""
    row_learning_rate: float = 1.0
    """Factor on the learning rates of the rows: theirs are those of the encoder times this. Under a cosine softmax it
    does the same as --init-std divided by its root, except that it also multiplies how fast rows decay."""
    rows_per_block: int | None = resumable(None)
    """Rows that the weight servers store together in one block. Without it: as they do, and in a new table 63, or 7 if
    the window is all images, which visits rows in random order."""

    row_precision: Literal["float32", "bfloat16"] = "float32"
    """Numbers in which the weight servers store and send rows and gradients. bfloat16 takes half the disk and network;
    a row is rounded, stochastically, whenever it is written to them. Training computes in float32 either way."""

    def check(self) -> None:
        if not 0 < self.recent_share < 1:
            raise SettingError(f"--recent-share must lie between 0 and 1, got {self.recent_share:g}", "recent_share")
        if self.rows == "dense" and self.row_precision != "float32":
            raise SettingError(
                f"--row-precision {self.row_precision} is for rows on weight servers, but --rows dense keeps them in "
                "the trainers' memory as float32: omit it, or use --rows resident or --rows remote",
                "row_precision",
            )
        if self.row_momentum is not None and not 0 <= self.row_momentum < 1:
            raise SettingError(
                f"--row-momentum must be at least 0 and below 1, got {self.row_momentum:g}", "row_momentum"
            )
        check_positive(self, "row_learning_rate")
        check_of_table(self, "init_std", "rows_per_block")
        check_at_least(self, 0, "prefetch_steps")
        check_at_least(self, 1, "capacity")
        if self.rows == "dense" and self.correction == "paper":
            raise SettingError(
                "--correction paper corrects rows after a gap, but --rows dense updates all rows in every step: "
                "use --rows resident or --rows remote",
                "correction",
            )
        if self.capacity is not None and self.rows != "resident":
            raise SettingError(f"--capacity is for --rows resident, not {self.rows}: omit it", "capacity")

    def unused_settings(self) -> dict[str, str]:
        return {} if self.negatives == "both" else {"recent_share": "--negatives both"}


@dataclass(frozen=True, kw_only=True)
class ServersConfig(Settings):
    """The weight servers and how to call them."""

    servers: str | None = resumable(None)
    """Addresses of all weight servers, host:port,host:port, or ws-{0..63}.ws:50051 for 64 of them. Without it the run
    starts local ones (if all ranks are on one machine)."""
    num_shards: int = resumable(2)
    """Number of local weight servers that a run without --servers starts; they store rows in the run's directory."""
    take_over: bool = of_one_start(False)
    """End a live run that uses the weight servers, and begin instead of it."""
    retry_seconds: float = resumable(300.0)
    """Time for which calls to a weight server that has answered before are retried before the run stops."""
    wait_for_servers: float = resumable(15.0)
    """Time for which the run waits for the first answer of each weight server."""
    tls_ca: Path | None = resumable(None)
    """Call --servers over TLS; the CA that signed their certificates, PEM."""
    tls_cert: Path | None = resumable(None)
    """The trainer's own certificate, PEM, for --servers that require one."""
    tls_key: Path | None = resumable(None)
    """The key of --tls-cert, PEM."""
    token_file: Path | None = resumable(None)
    """File with the token for --servers. Without it: the environment variable WEIGHTSERVER_TOKEN, if set."""
    insecure: bool = resumable(False)
    """Allow calls to --servers on other machines without TLS."""

    def check(self) -> None:
        check_at_least(self, 1, "num_shards")
        check_not_negative(self, "retry_seconds")
        check_positive(self, "wait_for_servers")
        try:
            security = self.security
        except ValueError as error:
            raise SettingError(str(error), *_SECURITY) from None
        if security.tls_ca is not None and not self.servers:
            raise SettingError("--tls-ca is for --servers: omit it, or give their addresses", *_SECURITY)
        try:
            addresses = self.addresses
        except ValueError as error:
            raise SettingError(str(error), "servers") from None
        for address in addresses:
            if not is_loopback(address) and security.tls_ca is None and not self.insecure:
                raise SettingError(
                    f"--servers {address} is on another machine and would be called without TLS: "
                    "give --tls-ca, or --insecure on a network you trust",
                    "servers",
                )

    def unused_settings(self) -> dict[str, str]:
        return {} if self.servers else {"token_file": "--servers", "take_over": "--servers"}

    @property
    def security(self) -> ClientSecurity:
        """Credentials for --servers. Raises ValueError for options that contradict each other."""
        return ClientSecurity(**{name: getattr(self, name) for name in _SECURITY})

    @property
    def addresses(self) -> list[str]:
        return parse_addresses(self.servers or "")
