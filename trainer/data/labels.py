"""Labels of stored images, read on first use: training never reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StoredLabels:
    """Labels of known number that are not read yet."""

    count: int
    """N."""
    read: Callable[[], Tensor]
    """Reads the labels, int64 [N]."""

    def __len__(self) -> int:
        return self.count


class LabelsField:
    """A dataclass field that is set to a tensor, int64 [N], or to `StoredLabels`, and always read as a tensor."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: object, labels: Tensor | StoredLabels) -> None:
        vars(instance)[self._name] = labels

    def __get__(self, instance: object, owner: type | None = None) -> Tensor:
        if instance is None:
            raise AttributeError(self._name)  # tells the dataclass that the field has no default
        labels: Tensor | StoredLabels = vars(instance)[self._name]
        if isinstance(labels, StoredLabels):
            labels = vars(instance)[self._name] = labels.read()
        return labels
