"""Describes the GPUs: python -m benchmarks.gpu.facts OUT.json."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def facts() -> dict[str, Any]:
    """Names and memory of the GPUs, versions, and the connections of the GPUs if nvidia-smi reports them."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(number)],
        "gpu_bytes": [torch.cuda.mem_get_info(index)[1] for index in range(number)],
        "host_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if number else None,
        "driver": _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "topology": _nvidia_smi("topo", "-m"),
    }


def _nvidia_smi(*arguments: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    result = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=False, timeout=60)
    return result.stdout.strip()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(facts()) + "\n")
