"""Files of Debian packages, downloaded and unpacked without installing anything."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path


def download_packages(packages: Sequence[str], folder: Path, otherwise: str) -> None:
    """Downloads packages and unpacks each into a folder of its name in `folder`.

    Args:
        otherwise: what else the user can do, for the error message.

    Raises:
        ValueError: a package cannot be downloaded or unpacked.
    """
    try:
        _run(["apt-get", "download", "-q", *packages], folder)
        for archive in sorted(folder.glob("*.deb")):
            _run(["dpkg-deb", "-x", archive.name, archive.name.partition("_")[0]], folder)
            archive.unlink()
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.stderr.strip().splitlines()[-1:] if isinstance(error, subprocess.CalledProcessError) else [error]
        raise ValueError(
            f"packages cannot be downloaded ({''.join(map(str, reason))}): run it on Debian 12, after apt-get update, "
            f"or {otherwise}"
        ) from None


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=600)
