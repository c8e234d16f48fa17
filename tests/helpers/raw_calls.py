"""Calls without WeightClient: a channel that adds only the metadata that every call must carry, and a stub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from weightserver import __version__
from weightserver.protocol._generated import weight_server_pb2 as pb
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
    """The channel, with this version in the metadata of its calls."""
    return grpc.intercept_channel(channel, _Versioned())


@contextmanager
def raw_channel(address: str, options: Sequence[tuple[str, Any]] = ()) -> Iterator[grpc.Channel]:
    """A channel to a shard, with this version in the metadata of its calls."""
    with grpc.insecure_channel(address, list(options)) as channel:
        yield versioned(channel)


def stub(channel: grpc.Channel) -> Any:
    """An object with a callable for each method of the contract."""
    service = pb.DESCRIPTOR.services_by_name["WeightServer"]
    made = SimpleNamespace()
    for method in service.methods:
        kind = "_".join(
            "stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming)
        )
        request, response = (GetMessageClass(message) for message in (method.input_type, method.output_type))
        call = getattr(channel, kind)(
            f"/{service.full_name}/{method.name}", request.SerializeToString, response.FromString
        )
        setattr(made, method.name, call)
    return made
