"""Packed directories as the earlier version wrote them: each tar with its own index, all named in manifest.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from trainer.data.manifest import Manifest, index_path, shards_path, tar_index_path
from weightserver.common.atomic_files import sha256


def in_format_1(directory: Path) -> Path:
    """Converts the packed images in `directory` to format 1."""
    manifest = Manifest.load(directory)
    content = {"format": 1} | asdict(manifest)
    del content["indexed_by_tar"]
    for part in content["ranges"]:
        path = index_path(directory, part["first"])
        index = np.load(path)
        for shard in part["shards"]:
            start = shard["first"] - part["first"]
            own = tar_index_path(directory, shard["first"])
            np.save(own, index[start : start + shard["count"]])
            shard["index_sha256"] = sha256(own)
        path.unlink()
        shards_path(directory, part["first"]).unlink()
    (directory / "manifest.json").write_text(json.dumps(content, indent=1) + "\n")
    return directory
