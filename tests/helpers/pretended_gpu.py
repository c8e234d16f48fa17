"""GPUs for a machine that has none: torch's CPU build computes real values on devices that behave as CUDA's do.

    python -m tests.helpers.pretended_gpu NUM_GPUS -m trainer synthetic ...     (also as a module that torchrun starts)

A tensor on cuda:N is a subclass that holds one on the CPU. Each operation is checked as CUDA checks it, and what stops
the program until the GPU is done is counted, by the lines that asked for it:

- all operands on one device, indices too; a device always has an index, unlike the "cuda" that means whatever device is
  current in the calling thread (0 in each new one);
- fused SGD refuses parameters, gradients and momentum of different strides;
- with deterministic algorithms, the operations that CUDA has none for are refused, and products of matrices unless
  CUBLAS_WORKSPACE_CONFIG is set;
- a copy to the host that does not wait arrives when its event (or anything later) is waited for, and until then its
  destination holds no values; memory that is copied from without waiting must not change meanwhile.

Fused SGD computes what torch's plain SGD does, so that training gives the losses that it gives on the CPU, to the bit.
What it cannot show: NCCL, several streams, cuDNN, Triton (torch.compile does nothing), memory, speed.

The shim is C++, which torch must meet before it asks for CUDA: `load` is called before torch is imported for more than
its headers, hence in a process of its own. It is compiled once a machine, torch and source.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_SOURCE = Path(__file__).with_suffix(".cpp")


def unavailable() -> str | None:
    """The reason why no GPU can be simulated here, or None."""
    if sys.platform != "linux":
        return "pretended GPUs need Linux"
    if not _library().exists() and shutil.which("g++") is None:
        return "pretended GPUs need g++"
    if (_torch_directory() / "lib" / "libtorch_cuda.so").exists():
        return "pretended GPUs need torch's CPU build: this one is for real ones"
    return None


def command(num_gpus: int) -> list[str]:
    """The command that starts a Python process with that many GPUs; append -m MODULE ARGUMENTS."""
    return [sys.executable, "-m", __name__, str(num_gpus)]


def _library() -> Path:
    torch = f"{importlib.metadata.version('torch')} {_torch_directory()}"  # where the shim looks for its libraries
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"pretended-gpu-{os.getuid()}" / f"{key}.so"


def _torch_directory() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def compile_library() -> Path:
    """Compiles the shim, about 15 s, where that was not done before."""
    library = _library()
    if library.exists():
        return library
    torch_directory = _torch_directory()
    include = torch_directory / "include"
    library.parent.mkdir(mode=0o700, exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}")
    compiler = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{include}", f"-I{include}/torch/csrc/api/include"]
    linked = [f"-L{torch_directory}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_directory}/lib"]
    subprocess.run([*compiler, "-o", partial, _SOURCE, *linked], check=True)
    partial.replace(library)
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """The shim, in this process from now on; no code can be compiled for a simulated GPU."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    return ctypes.CDLL(str(compile_library()), mode=ctypes.RTLD_GLOBAL)


@dataclass
class Observed:
    """Everything since this was created or cleared."""

    steps: int = 0
    """Updates of the encoder that ended (launches of fused SGD)."""
    waits: collections.Counter[tuple[int, str]] = field(default_factory=collections.Counter)
    """(step, what and where) to times: the main thread stopped until the GPU was done."""
    copies: collections.Counter[str] = field(default_factory=collections.Counter)
    """Copies to the host that no thread waits for."""
    shapes: dict[int, set[tuple[str, str]]] = field(default_factory=lambda: collections.defaultdict(set))
    """Step to (operation, shapes of its operands), of the products of matrices."""
    memory_asked: set[int] = field(default_factory=set)
    """GPUs whose memory was asked for."""
    seeds: set[int] = field(default_factory=set)
    """Of GPUs' generators."""
    used: set[int] = field(default_factory=set)
    """GPUs on which there were tensors."""

    def clear(self) -> None:
        self.__dict__.update(Observed().__dict__)

    def waits_of_step(self, step: int) -> dict[str, int]:
        return {what: times for (at, what), times in self.waits.items() if at == step}


observed = Observed()
"""What this process's pretended GPUs saw."""


def where(depth: int = 5) -> str:
    """The lines of the trainer that asked for what happens, the innermost first."""
    lines: list[str] = []  # such as loop.py:12 < ...
    frame = sys._getframe(1)
    while frame is not None and len(lines) < depth:
        for root in ("/trainer/", "/benchmarks/", "/weightserver/"):
            if root in frame.f_code.co_filename:
                file = frame.f_code.co_filename.rpartition(root)[2]
                lines.append(f"{root.strip('/')}/{file}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines) or threading.current_thread().name


@contextlib.contextmanager
def pretended_gpus(num_gpus: int, *, largest_tensor_bytes: float = float("inf")) -> Iterator[Observed]:
    """torch has `num_gpus` GPUs and puts tensors there, in threads that begin inside too.

    NCCL's collectives are gloo's. A tensor above `largest_tensor_bytes` is refused as CUDA out of memory.
    """
    shim = load()
    import torch  # from here on: the shim comes first

    from tests.helpers.pretended_tensor import PretendedMode, devices, uploads

    shim.pretend_devices(num_gpus)
    devices.number, devices.largest_tensor_bytes = num_gpus, largest_tensor_bytes
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in _replacements(num_gpus):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        stack.enter_context(PretendedMode())
        yield observed
        uploads.check()
    shim.pretend_devices(0)


def _replacements(num_gpus: int) -> list[tuple[Any, str, Any]]:
    """Replacements: (owner, name, new value)."""
    import torch
    import torch.distributed as dist

    from tests.helpers import pretended_tensor as pretended

    shim = load()
    run_thread = threading.Thread.run
    init_process_group = dist.init_process_group

    def run_pretending(thread: threading.Thread) -> None:
        torch._C._set_only_lift_cpu_tensors(True)
        with pretended.PretendedMode():
            run_thread(thread)

    def init(backend: str, *, device_id: torch.device | None = None, **options: Any) -> None:
        if "nccl" in backend:
            assert device_id is not None
            assert device_id.index == shim.current_device(), "NCCL on another GPU than the current one"
        init_process_group("gloo", **options)

    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: num_gpus,
        "set_device": lambda device: shim.set_current_device(pretended.index_of(device)),
        "current_device": lambda: int(shim.current_device()),
        "device": pretended.CurrentDevice,
        "get_device_name": lambda device=None: "pretended GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "manual_seed": lambda seed: observed.seeds.add(seed),
        "manual_seed_all": lambda seed: None,
        "synchronize": pretended.synchronize,
        "Event": pretended.Event,
        "set_sync_debug_mode": pretended.set_sync_debug_mode,
        "get_sync_debug_mode": lambda: pretended.devices.sync_debug_mode,
        "memory_allocated": pretended.memory,
        "max_memory_allocated": pretended.memory,
        "max_memory_reserved": lambda index: (index in observed.used) << 30,
        "mem_get_info": lambda device=None: (pretended.GPU_BYTES, pretended.GPU_BYTES),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    return [
        *((torch.cuda, name, replacement) for name, replacement in cuda.items()),
        (torch.cuda.nccl, "version", lambda: (2, 27, 0)),
        (dist, "init_process_group", init),
        (threading.Thread, "run", run_pretending),
    ]


def main(arguments: Sequence[str]) -> None:
    """NUM_GPUS -m MODULE ARGUMENTS: runs a module as a program."""
    number, flag, module, *rest = arguments
    if flag != "-m":
        raise SystemExit("pretended_gpu: NUM_GPUS -m MODULE ARGUMENTS")
    load()
    sys.argv = [module, *rest]
    limit = float(os.environ.get("PRETENDED_GPU_LARGEST_TENSOR_BYTES", "inf"))
    from tests.helpers import pretended_gpu  # the module that others import, not __main__

    with pretended_gpu.pretended_gpus(int(number), largest_tensor_bytes=limit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
