"""What the gradients of a step's rows and of its encoder decide together: an overflow, and the norm to clip."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weightserver.torch.ranks import Ranks


def check_scaling(
    gradient_scale: float | None,
    scaler: torch.amp.GradScaler | None,
    optimizer: torch.optim.Optimizer | None,
    max_norm: float | None,
) -> None:
    """Raises ValueError for arguments of `ClassifierHead.step` that are out of range or contradict each other."""
    if gradient_scale is not None:
        if scaler is not None:
            raise ValueError("gradient_scale is that of the scaler: give scaler alone")
        if not 0 < gradient_scale < math.inf:
            raise ValueError(
                f"gradient_scale must be a positive number, got {gradient_scale:g}: give scaler.get_scale()"
            )
    if max_norm is not None:
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm:g}: omit it to clip nothing")
        if optimizer is None:
            raise ValueError("max_norm clips the gradients of the encoder and the rows together: give its optimizer")
    if scaler is not None and optimizer is not None and _state(scaler, id(optimizer))["stage"].name == "STEPPED":
        raise ValueError("the encoder's step was made before: call head.step() before scaler.step(optimizer)")


def unscaled(
    gradients: Tensor,
    ranks: Ranks,
    *,
    gradient_scale: float | None,
    scaler: torch.amp.GradScaler | None,
    optimizer: torch.optim.Optimizer | None,
) -> Tensor | None:
    """The rows' gradients divided by the loss's scale; None on all ranks if those of the rows or, with a scaler, of the
    encoder overflowed on one of them.

    A scaler then leaves out the step of `optimizer` that follows, and lowers its scale.
    """
    scale = scaler.get_scale() if scaler is not None else gradient_scale or 1.0
    overflowed = not bool(gradients.isfinite().all())
    if scaler is not None:
        if optimizer is not None and not _state(scaler, id(optimizer))["found_inf_per_device"]:
            scaler.unscale_(optimizer)
        found = [found for state in _states(scaler).values() for found in state["found_inf_per_device"].values()]
        overflowed = overflowed or any(map(bool, found))
    (overflowed_somewhere,) = ranks.max_over_ranks([overflowed])
    if scaler is not None:
        of_rows = torch.tensor(float(overflowed_somewhere), device=gradients.device)
        _state(scaler, id(optimizer or ranks))["found_inf_per_device"][gradients.device] = of_rows
    return None if overflowed_somewhere else gradients / scale


def clipped(
    gradients: Tensor, ranks: Ranks, *, optimizer: torch.optim.Optimizer, max_norm: float
) -> tuple[Tensor, Tensor]:
    """Clips the norm of the gradients of the optimizer's parameters and the rows as `torch.nn.utils.clip_grad_norm_`.

    Returns the rows' gradients, float32 (K of this rank, D), and the norm of all together before, a scalar.
    """
    of_encoder = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
    ]
    squared = torch.linalg.vector_norm(gradients).square()
    if ranks.world_size > 1:
        dist.all_reduce(squared)
    norms = [parameter.grad for parameter in of_encoder if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm([*norms, squared.sqrt()])
    torch.nn.utils.clip_grads_with_norm_(of_encoder, max_norm, total)
    return gradients * torch.clamp(max_norm / (total + 1e-6), max=1.0).to(gradients.device), total


def _states(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """What the scaler found in this step, by the ids of optimizers; it has no public name."""
    return scaler._per_optimizer_states


def _state(scaler: torch.amp.GradScaler, key: int) -> dict[str, Any]:
    return _states(scaler)[key]
