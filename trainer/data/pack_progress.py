"""Packs images and shows the progress on stderr."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from trainer.counting import counting
from trainer.data.manifest import Manifest
from trainer.data.pack import PackOptions, pack
from trainer.display import shown, stage
from weightserver.common.logs import say


def pack_with_progress(source: Path, output: Path, options: PackOptions) -> Manifest:
    """Packs as `pack` does; the progress and a line for each broken image are shown instead of options' callbacks."""
    with shown(), counting("packing") as progress, stage("packing"):
        reporting = replace(options, on_rows=progress.update, on_broken=lambda line: say(line, logging.WARNING))
        return pack(source, output, reporting)
