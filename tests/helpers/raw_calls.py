"""Calls below WeightClient's: a channel that adds to each what every caller's must carry, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from weightserver import __version__
from weightserver.protocol.codec import VERSION_KEY


class _Versioned(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def _call(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=[*(details.metadata or ()), (VERSION_KEY, __version__)]), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = _call


def versioned(channel: grpc.Channel) -> grpc.Channel:
    """The same channel, whose calls say that they are of this version."""
    return grpc.intercept_channel(channel, _Versioned())


@contextmanager
def raw_channel(address: str, options: Sequence[tuple[str, Any]] = ()) -> Iterator[grpc.Channel]:
    """A channel to a shard, whose calls say that they are of this version."""
    with grpc.insecure_channel(address, list(options)) as channel:
        yield versioned(channel)
