"""What the gradients of a step's rows and of its encoder decide together: an overflow, and the norm to clip."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from weightserver.torch.ranks import Ranks

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
_ORDER = "call head.step(), scaler.step(optimizer) and scaler.update(), in this order, in each step"


_moments = itertools.count(1)
_stepped_at: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()


@functools.cache
def watch_optimizers() -> None:
    """Notes from now on when optimizers make their steps."""

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        _stepped_at[optimizer] = next(_moments)

    register_optimizer_step_post_hook(note)


def moment() -> int:
    """A number that grows, as the numbers of optimizers' steps do."""
    return next(_moments)


def checked_optimizers(given: object) -> list[torch.optim.Optimizer]:
    """One optimizer, several, or none, as a list, with those that they wrap. Raises TypeError for anything else."""
    several: list[Any] = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    for one in several:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of them, got a {type(one).__name__}")
    return several + [inner for one in several if (inner := _wrapped(one)) is not None]


def _wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The optimizer whose step this one calls, as those of Accelerate and Lightning do."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


@dataclass(frozen=True)
class Scaling:
    """How a loss was scaled, and how its gradients are clipped: arguments of `ClassifierHead.step`."""

    scaler: torch.amp.GradScaler | None = None
    optimizers: Sequence[torch.optim.Optimizer] = ()
    max_norm: float | None = None

    def __post_init__(self) -> None:
        if self.max_norm is not None:
            if not hasattr(self.max_norm, "__float__"):
                raise TypeError(f"max_norm must be a number, got {self.max_norm!r}")
            if not self.max_norm > 0:
                raise ValueError(f"max_norm must be positive, got {self.max_norm:g}: omit it to clip nothing")
        if (self.scaler or self.max_norm) and not self.optimizers:
            raise ValueError("scaler and max_norm are for encoder and rows together: give the encoder's optimizer too")

    @property
    def scale(self) -> float:
        """0 without a scaler."""
        return 0.0 if self.scaler is None else self.scaler.get_scale()

    def require_order(self, since: int) -> None:
        """Raises ValueError if an optimizer has made its step since that `moment`, with gradients that were to be
        clipped; `ScalerUse` knows the order of a scaler's calls."""
        if self.max_norm is None or self.scaler is not None:
            return
        if any(_stepped_at.get(optimizer, 0) > since for optimizer in self.optimizers):
            raise ValueError(
                "optimizer.step() was called before head.step(max_norm=...), so that the encoder moved by gradients "
                "that were not clipped: call head.step() first"
            )

    def parameters(self) -> list[Tensor]:
        """The encoder's parameters that have gradients, each once."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        distinct = {id(parameter): parameter for group in groups for parameter in group["params"]}
        return [parameter for parameter in distinct.values() if parameter.grad is not None]

    def norms(self, gradients: Tensor) -> Tensor:
        """The norms of the gradients of the encoder and of this rank's rows, float32 (K of this rank, D): (2,). Raises
        ValueError for sparse ones."""
        of_encoder = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        if any(gradient.layout != torch.strided for gradient in of_encoder):
            raise ValueError("max_norm cannot clip sparse gradients: make the encoder's embeddings with sparse=False")
        norm = torch.nn.utils.get_total_norm(of_encoder)
        norm = getattr(norm, "full_tensor", lambda: norm)()  # of all ranks' shards, by fully_shard
        norms = norm, torch.linalg.vector_norm(gradients)
        return torch.stack([norm.to(gradients.device) for norm in norms])


def norm_over_ranks(norms: Tensor, ranks: Ranks) -> Tensor:
    """The norm of all gradients, of the encoder and of all ranks' rows, of `Scaling.norms`: a scalar."""
    of_encoder, of_rows = norms
    if ranks.world_size > 1:
        squared = of_rows.square()
        dist.all_reduce(squared)
        of_rows = squared.sqrt()
    norm: Tensor = torch.linalg.vector_norm(torch.stack([of_encoder, of_rows]))
    return norm


@dataclass
class ScalerUse:
    """What a head knows of its scaler: a step that failed leaves traces there, which the next attempt must not take for
    its own. GradScaler has no public name for them: a dictionary of the states of optimizers, new after each update().
    """

    _states: dict[int, dict[str, Any]] | None = None
    """The states that were read last."""
    _own: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The ones among them that were used in `_attempt`."""
    _attempt: object = None
    _scaler: torch.amp.GradScaler | None = None
    _at_forward: dict[int, dict[str, Any]] | None = None

    def note_forward(self, attempt: object) -> None:
        """Is called before a pass of an attempt at a step. Raises ValueError if scaler.update() was not called after
        the last step."""
        self._at_forward = states = None if self._scaler is None else self._scaler._per_optimizer_states
        if states is None or states is not self._states or attempt == self._attempt:
            return
        for key, state in self._own.items():
            if states.get(key) is state:
                if state["stage"].name == "STEPPED":
                    self._states = None  # it is said once, since another scaler may follow
                    raise ValueError(f"scaler.update() of the step before was not called: {_ORDER}")
                del states[key]  # of gradients that were dropped

    def unscale(self, scaling: Scaling, attempt: object) -> bool:
        """Unscales the encoder's gradients, once in an attempt at a step; returns whether one overflowed. Raises
        ValueError for calls of the scaler that are missing, or in another order."""
        scaler = scaling.scaler
        assert scaler is not None
        states = scaler._per_optimizer_states
        if scaler is self._scaler and self._at_forward is not None and self._at_forward is not states:
            raise ValueError(f"scaler.update() was called before head.step(): {_ORDER}")
        self._scaler, self._states, self._attempt = scaler, states, attempt
        for optimizer in scaling.optimizers:
            if (inner := _wrapped(optimizer)) is not None:  # they share a state: scaler.step() is given either
                used = inner if states[id(inner)]["stage"].name != "READY" else optimizer
                states[id(optimizer)] = states[id(inner)] = states[id(used)]
        self._own = {id(optimizer): states[id(optimizer)] for optimizer in scaling.optimizers}
        for optimizer in scaling.optimizers:
            stage = self._own[id(optimizer)]["stage"].name
            if stage == "STEPPED":
                raise ValueError(f"scaler.step(optimizer) was called before head.step(): {_ORDER}")
            if stage == "READY":
                scaler.unscale_(optimizer)
        return any(map(bool, (found for state in states.values() for found in state["found_inf_per_device"].values())))

    def note(self, overflowed: bool, device: torch.device) -> None:
        """Lets the scaler leave out the encoder's step, and lower its scale, if a gradient overflowed."""
        for state in self._own.values():
            state["found_inf_per_device"][device] = torch.tensor(overflowed, dtype=torch.float32, device=device)
