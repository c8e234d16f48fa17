"""A linear classifier that learns beside the run from its features, to watch them; nothing of it reaches the run."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model import PICModel
from weightserver.torch import Ranks

_log = logging.getLogger(__name__)

_LEARNING_RATE = 1e-3
_EPSILON = 1e-5
"""ε of BatchNorm."""


class OnlineProbe:
    """A linear classifier of the encoder's features, the same on every rank; all ranks call its methods together.

    It sees the detached features of the training views, before the head, through BatchNorm without affine parameters,
    as is usual for linear probes (He et al., 2111.06377, appendix A.1), with the statistics of the whole batch on all
    ranks; small crops are ignored. It learns by Adam (Kingma and Ba, 1412.6980) with a learning rate of 0.001, which
    hardly depends on batch size and number of features, without weight decay. It starts at zero and draws no random
    number. A step never waits for the device.
    """

    def __init__(
        self,
        model: PICModel,
        num_classes: int,
        ranks: Ranks,
        *,
        labels_of: Callable[[int], Tensor],
        num_views: int,
        num_crops: int,
        batch_size: int,
    ) -> None:
        """`labels_of` gives the labels of this rank's images in a step, int64 (A, b) on the device.

        Of the `num_crops` views that a step computes of each part of a batch, the first `num_views` are used.
        """
        device = next(model.parameters()).device
        self._weight = nn.Parameter(torch.zeros(num_classes, model.feature_dim, device=device))
        self._bias = nn.Parameter(torch.zeros(num_classes, device=device))
        self._parameters = {"weight": self._weight, "bias": self._bias}
        self._optimizer = torch.optim.Adam(self._parameters.values(), lr=_LEARNING_RATE)
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # images classified correctly, and all
        self._ranks = ranks
        self._labels_of = labels_of
        self._num_views, self._num_crops, self._batch_size = num_views, num_crops, batch_size
        self._features: list[Tensor] = []  # (b, d) each, of the parts and views of the step
        model.head.register_forward_pre_hook(lambda _, inputs: self._features.append(inputs[0].detach()))

    def learn(self, step: int) -> None:
        """Updates the classifier by the features that the model computed since the last call, those of a step."""
        features, self._features = self._features, []
        labels = self._labels_of(step)  # (A, b)
        num_images = self._batch_size * self._num_views
        correct = torch.zeros(1, dtype=torch.int64, device=labels.device)
        labelled = (labels >= 0).sum().reshape(1) * self._num_views
        self._optimizer.zero_grad()
        for number, seen in enumerate(features):
            part, view = divmod(number, self._num_crops)
            if view < self._num_views:
                own = labels[part]
                logits = F.linear(self._normalised(seen, self._batch_size // len(labels)), self._weight, self._bias)
                loss = F.cross_entropy(logits, own, reduction="sum", ignore_index=-1)  # images without a label
                (loss / num_images).backward()  # type: ignore[no-untyped-call]
                correct += (logits.argmax(dim=1) == own).sum()
        if self._ranks.world_size > 1:
            for summand in (self._weight.grad, self._bias.grad, correct, labelled):
                dist.all_reduce(summand)
        self._optimizer.step()
        self._counts += torch.cat([correct, labelled])

    def _normalised(self, features: Tensor, part_size: int) -> Tensor:
        """Features (b, d) with mean 0 and variance 1 over the `part_size` images of all ranks."""
        centred = features - self._sum_over_ranks(features.sum(dim=0)) / part_size
        variance = self._sum_over_ranks(centred.square().sum(dim=0)) / part_size
        return centred * (variance + _EPSILON).rsqrt()

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        if self._ranks.world_size > 1:
            dist.all_reduce(values)
        return values

    def take_top1(self) -> float:
        """Top-1 in percent of the views since the last call, each classified before the classifier learned from it."""
        correct, seen = map(int, self._counts.tolist())
        self._counts.zero_()
        return 100.0 * correct / max(1, seen)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state by name."""
        tensors = {"counts": self._counts}
        for name, parameter in self._parameters.items():
            tensors[name] = parameter.detach()
            tensors |= {f"{name}.{key}": value for key, value in self._optimizer.state[parameter].items()}
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Takes the state that `tensors` returned; starts untrained, and logs it, if there is none for these labels."""
        found, expected = tensors.get("weight", torch.empty(0)).shape, self._weight.shape
        if found != expected:
            if self._ranks.is_first:
                known = f"is for {' x '.join(map(str, found))} weights" if tensors else "is missing"
                _log.warning(
                    "the online probe in the checkpoint %(reason)s: a new one starts untrained", {"reason": known}
                )
            return
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[name])
                self._optimizer.state[parameter] = {
                    key.removeprefix(f"{name}."): value if value.ndim == 0 else value.to(parameter.device)
                    for key, value in tensors.items()  # Adam counts its steps on the CPU
                    if key.startswith(f"{name}.")
                }
            self._counts.copy_(tensors["counts"])
