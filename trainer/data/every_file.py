"""Lists folders as versions before `trainer.data.tree` did, so that their runs are resumed with the same images.

Every link counts as an image of its own, empty files and links to missing files count too, and a folder without images
is a class.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from trainer.data.tree import in_order, is_image


class EveryFile:
    """One walk over a folder of images. Links are followed, except in cycles."""

    empty_folders_are_classes = True

    def __init__(self, root: Path) -> None:
        self._root = root

    def children(self) -> list[os.DirEntry[str]]:
        """What the folder contains, in order."""
        return in_order(self._root)

    def is_tar(self, child: os.DirEntry[str]) -> bool:
        """Whether a child of the folder itself is a tar to list."""
        return child.name.endswith(".tar") and child.is_file()

    def images(self, child: os.DirEntry[str], above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
        """Paths of the images at and below `child`, which lies in the folders `above`."""
        if not child.is_dir():
            if is_image(child.name):
                yield child.path
            return
        status = child.stat()
        here = (status.st_dev, status.st_ino)
        if here not in above:
            for grandchild in in_order(child.path):
                yield from self.images(grandchild, (*above, here))
