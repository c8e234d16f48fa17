"""The rows of a run on its weight servers, for commands that read them after or during the run."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.config import TrainConfig
from trainer.data.manifest import Manifest
from trainer.run.checkpoint_file import newest_images, saved_rows, saved_steps
from trainer.run.resume import run_settings
from weightserver import ClientSecurity, DataLossError, LocalCluster, WeightClient
from weightserver.common.addresses import parse_addresses
from weightserver.common.options import given_options
from weightserver.torch import RangesOrder


@dataclass(frozen=True)
class StoredRows:
    """The rows of a run, and the images that they belong to."""

    client: WeightClient
    order: RangesOrder
    """`images` gives the image, or class, of each row."""
    num_images: int
    """Number of the run's images, or classes; the table may have more rows."""
    unit: Literal["image", "class"] = "image"
    """What a row belongs to: an image, or a class that images share."""


@contextmanager
def open_stored_rows(options: argparse.Namespace) -> Iterator[StoredRows]:
    """Connects to the weight servers of `options.run`: those of --servers, else the run's, else its local ones, which
    are started. The options are those of `pic export rows`.

    Raises:
        ValueError: the directory holds no run, or has no local weight servers, or they hold another table.
        WeightServerError: weight servers that are unreachable or refuse, or hold older rows than the run's.
    """
    run, config = options.run, run_settings(options.run)
    with ExitStack() as stack:
        servers = options.servers or config.servers.servers
        security: dict[str, Any] = {}
        if servers:
            given = given_options(options, ClientSecurity)
            security = (config.servers.security if given == ClientSecurity() else given).client_arguments()
            addresses = parse_addresses(servers)
        else:
            directory = run / "servers"
            if not directory.exists():
                raise ValueError(f"{run} has no local weight servers (dense rows?): give --servers")
            security = {"token": secrets.token_urlsafe()}
            cluster = LocalCluster(len(list(directory.glob("shard-*/"))), directory, **security)
            addresses = stack.enter_context(cluster).addresses
        client = stack.enter_context(WeightClient(addresses, retry_seconds=10, **security))
        spec = client.describe().spec
        if (spec.dim, spec.seed) != (config.model.dim, config.sampling.seed):
            raise ValueError(f"the weight servers hold another table than {run}, {spec}: give the run's --servers")
        steps = saved_steps(run / "checkpoints")
        if steps:
            saved = saved_rows(run / "checkpoints", steps[-1])
            if client.table_identity().hex() != saved.table:
                raise ValueError(f"the weight servers hold another table than that of {run}: give the run's --servers")
            try:
                if not options.checkpoint:
                    saved.check_held(client, may_be_released=True)
            except (ValueError, DataLossError) as error:
                raise type(error)(f"{error}, or give --checkpoint") from None
        yield StoredRows(client, *_order(run, spec.num_rows, config))


def _order(run: Path, num_rows: int, config: TrainConfig) -> tuple[RangesOrder, int, Literal["image", "class"]]:
    """The order of the run's images, and their number, which may be less than the table's number of rows; or the same
    of its classes, if images share them.

    Packed images store their order, which later ranges extend.
    """
    images = newest_images(run / "checkpoints")
    if images and images.classes:
        return RangesOrder((num_rows,), config.sampling.order_seed), num_rows, "class"
    num_images = images.num_images if images else num_rows
    if config.data.dataset != "packed" or config.data.data_dir is None:
        return RangesOrder((num_images,), config.sampling.order_seed), num_images, "image"
    packed = Manifest.load(config.data.data_dir).finished
    order = RangesOrder(packed.sizes, packed.order_seed)
    if order.num_rows < num_images:
        raise ValueError(
            f"{run} has {num_images} images, but {config.data.data_dir} only {order.num_rows}: restore the others"
        )
    return order, num_images, "image"
