"""The tensors of pretended GPUs, and what torch.cuda says of them: see pretended_gpu.py, which starts with the shim."""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.helpers.pretended_gpu import load, observed, where

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"}
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_COPYING = {"_to_copy", "copy_"}
# What CUDA refuses with deterministic algorithms (torch.use_deterministic_algorithms), as far as images may meet it.
_NOT_DETERMINISTIC = {
    "_adaptive_avg_pool2d_backward",
    "adaptive_max_pool2d_backward",
    "_upsample_bilinear2d_aa_backward",
    "bincount",
    "cumsum",
    "grid_sampler_2d_backward",
    "histc",
    "median",
    "nll_loss2d_forward",
    "put_",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward",
}
_KEPT_UPLOADS = 200
GPU_BYTES = 16 << 30


@dataclass
class _Devices:
    number: int = 0
    largest_tensor_bytes: float = float("inf")
    sync_debug_mode: str = "default"


devices = _Devices()
_shim = load()
_lock = threading.RLock()


@dataclass
class _Pinned:
    """The set of pinned storages."""

    storages: dict[int, StorageWeakRef] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> Tensor:
        with _lock:
            self.storages = {key: kept for key, kept in self.storages.items() if not kept.expired()}
            reference = StorageWeakRef(tensor.untyped_storage())
            self.storages[reference.cdata] = reference
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.storages


@dataclass
class _Uploads:
    """Copies from pinned memory that may still be running: their sources must not change."""

    under_way: list[tuple[Tensor, Tensor, str]] = field(default_factory=list)

    def add(self, source: Tensor) -> None:
        with _lock:
            self.under_way.append((source, source.clone(), where()))
            if len(self.under_way) > _KEPT_UPLOADS:
                self._check_first(_KEPT_UPLOADS // 2)

    def check(self) -> None:
        with _lock:
            self._check_first(len(self.under_way))

    def _check_first(self, number: int) -> None:
        checked, self.under_way = self.under_way[:number], self.under_way[number:]
        for source, was, line in checked:
            if not torch.equal(_bytes(source), _bytes(was)):
                raise RuntimeError(f"memory was written while a copy from it was under way: {line}")


def _bytes(tensor: Tensor) -> Tensor:
    """uint8, of any strides: NumPy's single elements may have 0."""
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


@dataclass
class _Downloads:
    """Copies to the host that no thread has waited for: their destinations hold no values yet."""

    under_way: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, destination: Tensor, source: Tensor) -> None:
        with _lock:
            self.under_way.append((destination, source.clone()))
            destination.view(-1).view(torch.uint8).fill_(0xFF)  # NaN, or -1

    def finish(self, chosen: list[tuple[Tensor, Tensor]]) -> None:
        with _lock:
            for destination, source in chosen:
                destination.copy_(source)
            done = {id(pair) for pair in chosen}
            self.under_way = [pair for pair in self.under_way if id(pair) not in done]


pinned, uploads, downloads = _Pinned(), _Uploads(), _Downloads()


def _wait(what: str) -> None:
    """The program stops until the GPU has done everything."""
    _note_wait(what)
    uploads.check()
    downloads.finish(downloads.under_way[:])


def _note_wait(what: str) -> None:
    if devices.sync_debug_mode != "default" and what != "event":  # which CUDA's mode does not report
        message = f"called a synchronizing CUDA operation: {what} at {where()}"
        if devices.sync_debug_mode == "error":
            raise RuntimeError(message)
        file, _, line = where(1).rpartition(":")
        warnings.warn_explicit(message, UserWarning, file, int(line) if line.isdecimal() else 0)
    if threading.current_thread() is threading.main_thread():  # others stop no step
        observed.waits[observed.steps, f"{what}: {where()}"] += 1


class PretendedTensor(Tensor):
    """On cuda:N, with its values in `inside`, on the CPU."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor, device: torch.device) -> PretendedTensor:
        num_bytes = inside.untyped_storage().nbytes()
        observed.used.add(device.index)
        if num_bytes > devices.largest_tensor_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} B. GPU {device.index} ...")
        made: PretendedTensor = Tensor._make_wrapper_subclass(
            cls,
            inside.size(),
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=device,
        )
        return made

    def __init__(self, inside: Tensor, device: torch.device) -> None:
        self.inside = inside

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PretendedTensor({self.inside!r}, device={self.device})"

    def tolist(self) -> Any:
        _wait("tolist")
        return self.inside.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


class PretendedMode(TorchDispatchMode):
    """Tensors that are asked for on a GPU are pretended ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat, _ = tree_flatten((args, kwargs))
    ours = [one for one in flat if isinstance(one, PretendedTensor)]
    if func.namespace in ("c10d", "_c10d_functional"):
        return _collective(func, args, kwargs, ours)
    name = func.overloadpacket.__name__
    if name == "is_pinned":
        return not ours and pinned.holds(args[0])
    if name == "_pin_memory":
        return pinned.add(args[0].clone())
    wanted = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if kwargs.get("pin_memory") and (wanted is None or wanted.type == "cpu"):
        return pinned.add(func(*args, **kwargs | {"pin_memory": False}))
    if not ours and (wanted is None or wanted.type != "cuda"):
        return func(*args, **kwargs)
    if wanted is not None:
        _check_device(wanted, name)
    if name in _COPYING:
        return _copy(func, name, args, kwargs, wanted)
    place = _checked_place(func, name, flat, ours, wanted)
    if name in _PRODUCTS:
        shapes = " ".join("×".join(map(str, one.shape)) for one in ours)
        observed.shapes[observed.steps].add((name, shapes))
    if name == "_fused_sgd_":
        return _fused_sgd(*args, **kwargs)
    return _compute(func, args, kwargs, place)


def _compute(func: Any, args: Any, kwargs: dict[str, Any], place: torch.device) -> Any:
    """On the CPU, with results on the GPU `place`."""
    inner = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if inner.get("device") is not None:
        inner["device"] = torch.device("cpu")
    bare_args, bare_kwargs = (tree_map_only(PretendedTensor, lambda one: one.inside, part) for part in (args, inner))
    out = func(*bare_args, **bare_kwargs)
    wrapped = tree_map_only(
        Tensor, lambda one: one if isinstance(one, PretendedTensor) else PretendedTensor(one, place), out
    )
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _check_device(device: torch.device, name: str) -> None:
    if device.type != "cuda":
        return
    if device.index is None:
        raise RuntimeError(f"a GPU without an index, hence whichever this thread has: {name} at {where()}")
    if device.index >= devices.number:
        raise RuntimeError(f"CUDA error: invalid device ordinal: {device} of {devices.number}")


def _checked_place(
    func: Any, name: str, flat: list[Any], ours: list[PretendedTensor], wanted: torch.device | None
) -> torch.device:
    """The GPU that computes; what CUDA refuses raises, what it waits for is counted."""
    places = {one.device for one in ours}
    hosts = [one for one in flat if isinstance(one, Tensor) and not isinstance(one, PretendedTensor) and one.ndim > 0]
    if hosts and name in _INDEXING and all(one.dtype in (torch.int64, torch.bool) for one in hosts):
        _wait("indices on the host")
    elif hosts and name != "set_":
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found cpu and {places}: {name}, {where()}"
        )
    if len(places) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {places}: {name}, {where()}")
    if name in _WAITING:
        _wait(name)
    if name in _INDEXING and any(one.dtype in (torch.bool, torch.uint8) for one in _indices(name, flat)):
        _wait("a mask of bools")
    if torch.are_deterministic_algorithms_enabled():
        _check_deterministic(name)
    return wanted if wanted is not None else next(iter(places))


def _indices(name: str, flat: list[Any]) -> list[Tensor]:
    """The indices of an indexing operation (self, indices, values)."""
    tensors = [one for one in flat if isinstance(one, Tensor)]
    return tensors[1:] if name in ("index", "_unsafe_index") else tensors[1:-1]


def _check_deterministic(name: str) -> None:
    if name in _NOT_DETERMINISTIC:
        raise RuntimeError(
            f"{name} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'"
        )
    if name in _PRODUCTS and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise RuntimeError(
            "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
            "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses "
            "CuBLAS and you have CUDA >= 10.2: set CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )


def _copy(func: Any, name: str, args: Any, kwargs: dict[str, Any], wanted: torch.device | None) -> Any:
    """`to` and `copy_`, which wait between host and GPU unless `non_blocking` is set and host memory is pinned."""
    if name == "copy_":
        destination, source, *more = args
        non_blocking = bool(more[0]) if more else bool(kwargs.get("non_blocking", False))
        place = destination.device
    else:
        destination, source = None, args[0]
        non_blocking = bool(kwargs.get("non_blocking", False))
        place = wanted if wanted is not None else source.device
    inside = source.inside if isinstance(source, PretendedTensor) else source
    if source.device.type == "cpu" and place.type == "cuda":
        if non_blocking and pinned.holds(source):
            uploads.add(source)
        elif not _is_gloo():
            _wait("host to GPU")
    elif place.type == "cpu" and source.device.type == "cuda":
        if non_blocking and destination is not None and pinned.holds(destination):
            observed.copies[f"GPU to host: {where()}"] += 1
            downloads.add(destination, inside.to(destination.dtype))
            return destination
        if not _is_gloo():
            _wait("GPU to host")
    if destination is None:
        options = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
        made = func(inside, **options)
        made = made.clone() if made is inside else made
        return PretendedTensor(made, place) if place.type == "cuda" else made
    target = destination.inside if isinstance(destination, PretendedTensor) else destination
    target.copy_(inside)
    return destination


def _is_gloo() -> bool:
    """DistributedDataParallel takes gloo's results, which lie on the host, in a thread of torch's."""
    return threading.current_thread().name.startswith("Dummy")


def _collective(func: Any, args: Any, kwargs: dict[str, Any], ours: list[PretendedTensor]) -> Any:
    """Gloo's, of the tensors inside."""
    if any(one.device.index != _shim.current_device() for one in ours):
        raise RuntimeError(f"NCCL on another GPU than the thread's current one: {where()}")
    bare_args, bare_kwargs = (tree_map_only(PretendedTensor, lambda one: one.inside, part) for part in (args, kwargs))
    out = func(*bare_args, **bare_kwargs)
    if ours and isinstance(out, tuple):
        return (args[0], *out[1:])
    return out


def _fused_sgd(
    params: list[PretendedTensor],
    grads: list[PretendedTensor],
    momentum_buffers: list[PretendedTensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: float,
    is_first_step: bool,
    **_: Any,
) -> None:
    """Computes torch.optim.SGD without `fused`, with the restrictions of ATen's check_fast_path_restrictions."""
    observed.steps += 1
    for several in zip(*(part for part in (params, grads, momentum_buffers) if part), strict=True):
        strides = {tuple(s for s, n in zip(one.stride(), one.size(), strict=True) if n != 1) for one in several}
        if len(strides) > 1:
            raise RuntimeError(
                "Expected check_fast_path_restrictions({params, grads, momentum_buffer_list}) to be true, but got "
                f"false: strides {strides} of {tuple(several[0].shape)}"
            )
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        step = grad.inside.add(param.inside, alpha=weight_decay)
        if momentum_buffers:
            buffer = momentum_buffers[index].inside
            step = buffer.copy_(step) if is_first_step else buffer.mul_(momentum).add_(step)
        param.inside.add_(step, alpha=-lr)


# ---- torch.cuda


def index_of(device: Any) -> int:
    """The index of what torch.cuda takes for a device."""
    if device is None:
        return int(_shim.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(_shim.current_device()) if index is None else index


class CurrentDevice:
    """torch.cuda.device."""

    def __init__(self, device: Any) -> None:
        self._index = index_of(device)

    def __enter__(self) -> None:
        self._before = _shim.current_device()
        _shim.set_current_device(self._index)

    def __exit__(self, *_: object) -> None:
        _shim.set_current_device(self._before)


class Event:
    """torch.cuda.Event: what was under way when it was recorded is done once it was waited for."""

    def __init__(self, *_: object, **__: object) -> None:
        self._under_way: list[tuple[Tensor, Tensor]] = []

    def record(self, stream: object = None) -> None:
        self._under_way = downloads.under_way[:]

    def query(self) -> bool:
        """A GPU that is never done by itself: the most that a program may have to reckon with."""
        return not self._under_way

    def synchronize(self) -> None:
        if self._under_way:
            _note_wait("event")
            downloads.finish(self._under_way)
            self._under_way = []


def synchronize(device: Any = None) -> None:
    _wait("synchronize")


def memory(device: Any = None) -> int:
    """A GiB for each number of the GPU, so that a report shows which GPU was asked."""
    index = index_of(device)
    observed.memory_asked.add(index)
    return (index + 1) << 30


def set_sync_debug_mode(mode: str | int) -> None:
    devices.sync_debug_mode = ("default", "warn", "error")[mode] if isinstance(mode, int) else mode
