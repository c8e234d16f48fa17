"""Does the parts of a command on a Ray cluster, whose machines have the same files under the same paths."""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Callable
from typing import Any

from trainer.data.parts import Part
from weightserver.common.installing import install_advice

MOST_PARTS = 1_024
"""Parts are as many on any cluster, so that a command that is repeated on another one finds what is done."""
_REPEATS = 20
"""How often a part is repeated whose process or machine died."""
_CONNECT_SECONDS = 20
_LOOK_SECONDS = 5


def on_ray(
    task: Callable[[Part], object],
    of: int,
    advance: Callable[[], object],
    *,
    address: str | None = None,
    gpu: bool = False,
) -> None:
    """Does each of `of` parts in a task of one core, and with `gpu` of one GPU if there is any; repeats it if its
    process or machine dies, but not for ever: an image that ends its process would do so each time.

    Args:
        advance: called after each part.
        address: of the cluster, as HOST:PORT or auto. None: what RAY_ADDRESS says, or a cluster on this machine.

    Raises:
        ValueError: Ray is not installed, or there is no such cluster.
        OSError: the cluster went away, or a part died too often.
        Exception: what a part raised first; other parts are given up.
    """
    ray = _ray()
    try:
        if address in (None, "auto"):  # Ray's function takes RAY_ADDRESS also where an address is given
            address = ray._private.services.get_ray_address_from_environment(address, None)
        if address and re.fullmatch(r"([^/:]+|\[[^/]+\]):\d+", address):
            _connect(address)  # Ray itself tries for minutes, also where a cluster was that is gone
            os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")  # tries of 40 s, 20 by default
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"no Ray cluster answers at {address or 'RAY_ADDRESS'} ({reason}): start one by 'ray start --head', or "
            "omit --address for one on this machine, after 'ray stop', which forgets one that is gone"
        ) from None
    except RuntimeError as error:
        reason = " ".join(str(error).partition("Last connection error")[0].split())
        raise ValueError(
            f"the Ray cluster at {address or 'this machine'} cannot be joined ({reason}): all machines need the same "
            "versions of Ray and Python, and --address is that of 'ray start --head', by default with port 6379"
        ) from None
    try:
        gpus = min(1, ray.cluster_resources().get("GPU", 0)) if gpu else 0
        do = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=_REPEATS)(task)
        running = [do.remote(Part(number, of)) for number in range(of)]
        cluster = ray.get_runtime_context().gcs_address
        while running:
            done, running = ray.wait(running, timeout=_LOOK_SECONDS)
            ray.get(done)
            if done:
                advance()
            else:
                _connect(cluster)  # Ray itself ends the process, some time after its cluster
    except ray.exceptions.RayTaskError as error:
        if "failed to import on the worker" in (said := str(error.cause)):
            raise ValueError(
                f"a machine of the Ray cluster lacks what the parts need ({said.strip().splitlines()[-1]}): install "
                f"this version on each of them: {install_advice('ray')}"
            ) from None
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except ray.exceptions.WorkerCrashedError:
        raise OSError(
            f"the process of a part died {_REPEATS + 1} times: look for its end in Ray's logs, and repeat the command, "
            "which continues"
        ) from None
    except (ray.exceptions.RayError, OSError) as error:
        reason = " ".join(str(error).split())
        raise OSError(f"the Ray cluster went away ({reason}): repeat the command, which continues") from None
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ValueError(f"--engine ray needs Ray: {install_advice('ray')}") from None
