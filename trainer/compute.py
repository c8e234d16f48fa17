"""The device that a run computes on, and how."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainer.settings import SettingError, Settings, check_positive, resumable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ComputeConfig(Settings):
    """Device, precision and ranks."""

    device: str = resumable("auto")
    """cpu, cuda, cuda:1, ...; auto uses a GPU if there is one."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Precision of the encoder; head, loss and rows are float32. tf32: float32 whose mantissa is cut from 23 to 10 bits
    in a GPU's matrix products, including those of the head."""
    compile: bool = resumable(False)
    """Whether to compile encoder and augmentation with torch.compile, which takes half a minute or more and needs a C
    compiler; on a GPU the encoder is then launched as a graph, which counts most for small images. With --accumulate or
    --views it is not."""
    deterministic: bool = False
    """Whether to replace or refuse nondeterministic operations; on a CPU all operations are deterministic."""
    rank_timeout_seconds: float = resumable(600.0)
    """Time for which ranks wait for one that vanished silently (a machine without power), in addition to
    --retry-seconds, before the run stops. All ranks wait for rank 0 while it searches neighbours for --knn-every:
    allow for that."""

    def check(self) -> None:
        check_positive(self, "rank_timeout_seconds")
        compilers = (os.environ.get("CXX", "g++"), os.environ.get("CC", "gcc"), "clang")
        if self.compile and not any(map(shutil.which, compilers)):
            raise SettingError("--compile finds no C compiler: install gcc and g++, or give --no-compile", "compile")

    def torch_device(self) -> torch.device:
        """The device of --device. Raises ValueError if this machine does not have it."""
        import torch

        name = self.device
        if name == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(name)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"--device {name!r} is unknown: give cpu, cuda or cuda:N")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device {name} needs a GPU and this machine has none: give --device cpu")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device {name} does not exist: the GPUs are cuda:0..{torch.cuda.device_count() - 1}")
        return device

    def configure_torch(self) -> None:
        """Sets the process-wide precision and determinism."""
        import torch

        set_matmul_precision("tf32" if self.precision == "tf32" else "ieee")
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:  # the call alone takes seconds
            torch.use_deterministic_algorithms(self.deterministic)
        if self.deterministic:  # cuBLAS reads it when it starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def set_matmul_precision(precision: Literal["ieee", "tf32"]) -> None:
    """Sets the precision of float32 convolutions and matrix products on a GPU; torch's default is TF32 in
    convolutions only."""
    import torch

    backends: Any = torch.backends
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    # torch keeps an older flag beside the newer one, sets the older one only by name, and raises RuntimeError where
    # one of its own readers, torch.compile among them, meets a contradiction.
    cudnn.allow_tf32 = matmul.allow_tf32 = precision == "tf32"
    for backend in (cudnn, cudnn.conv, cudnn.rnn, matmul):
        backend.fp32_precision = precision
