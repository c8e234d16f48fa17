"""Bounds of a computation's distance from its formula: running error analysis, which holds on every machine.

The model (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 2.2, 3.1 and 3.3). With u = 2^-24 for
float32, an operation gives (a op b)(1 + δ), |δ| ≤ u; fused operations and other orders of a sum are within the same
bounds; a sum of n products errs by at most γ_n · Σ|a·b|, γ_n = n·u / (1 − n·u), in whatever order, in how many threads
and on how many ranks it is added up; exp, log, sqrt and the like of vector libraries are within 4 u. So `Rounded` holds
a value in float64 and a bound of its float32 error, which every operation carries on: the sums of absolute values are
the conditioning of the case. The bound is of first order, doubled where it is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weightserver.core.arrays import Float64Array

_FUNCTION = 4.0
"""Units of rounding of an elementary function."""


@dataclass(frozen=True)
class Rounded:
    """Numbers and how far a computation with unit roundoff `unit` may be from them; float64 arrays of one shape."""

    value: Float64Array
    error: Float64Array
    unit: float

    @classmethod
    def exact(cls, value: Tensor | npt.ArrayLike, dtype: torch.dtype) -> Rounded:
        """Inputs that both computations are given."""
        array = value.detach().double().numpy() if isinstance(value, Tensor) else np.asarray(value, np.float64)
        return cls(array, np.zeros_like(array), torch.finfo(dtype).eps / 2)

    def _made(self, value: Float64Array, error: Float64Array, roundings: float = 1) -> Rounded:
        return Rounded(value, error + roundings * self.unit * np.abs(value), self.unit)

    def __sub__(self, other: Rounded) -> Rounded:
        return self._made(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Rounded) -> Rounded:
        error = np.abs(self.value) * other.error + np.abs(other.value) * self.error
        return self._made(self.value * other.value, error)

    def __truediv__(self, other: Rounded) -> Rounded:
        value = self.value / other.value
        return self._made(value, (self.error + np.abs(value) * other.error) / np.abs(other.value))

    def __matmul__(self, other: Rounded) -> Rounded:
        (a, b), num_terms = (np.abs(self.value), np.abs(other.value)), self.value.shape[-1]
        error = a @ other.error + self.error @ b + num_terms * self.unit * (a @ b)
        return self._made(self.value @ other.value, error)

    def __getitem__(self, index: Any) -> Rounded:
        return Rounded(self.value[index], self.error[index], self.unit)

    def where(self, condition: npt.NDArray[np.bool_], other: Rounded) -> Rounded:
        """These numbers where the condition is true, elsewhere the other ones."""
        value, error = np.where(condition, self.value, other.value), np.where(condition, self.error, other.error)
        return Rounded(value, error, self.unit)

    @property
    def T(self) -> Rounded:
        return Rounded(self.value.T, self.error.T, self.unit)

    def sum(self, axis: int) -> Rounded:
        num_terms, sizes = self.value.shape[axis], np.abs(self.value).sum(axis, keepdims=True)
        error = self.error.sum(axis, keepdims=True) + num_terms * self.unit * sizes
        return self._made(self.value.sum(axis, keepdims=True), error)

    def apply(self, function: Callable[..., Float64Array], slope: Callable[[Float64Array], Float64Array]) -> Rounded:
        """Elementwise; the slope is that of the function."""
        return self._made(function(self.value), np.abs(slope(self.value)) * self.error, _FUNCTION)

    def assert_near(self, actual: Tensor | npt.NDArray[np.floating] | None, name: str = "") -> None:
        """Whether every number of another computation is this, within twice the bound of its error."""
        assert actual is not None, name
        found = actual.detach().double().numpy() if isinstance(actual, Tensor) else np.asarray(actual, np.float64)
        expected, bound = self.value.reshape(found.shape), 2 * self.error.reshape(found.shape)
        difference = np.abs(found - expected)
        worst = np.unravel_index((difference - bound).argmax(), found.shape)
        assert (difference <= bound).all(), (
            f"{name} at {[int(i) for i in worst]}: {found[worst]} is {difference[worst]:.1e} from {expected[worst]}, "
            f"of which rounding explains {bound[worst]:.1e}"
        )


@dataclass(frozen=True)
class RoundedLoss:
    """The loss and its gradients."""

    loss: Rounded
    features: Rounded
    weight: Rounded


def softmax_loss(
    features: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    cosines: bool = True,
) -> RoundedLoss:
    """The loss of Equation 1 and its gradients, of features (B, D), weight (K, D) and labels (B,) or (B, P).

    exp is taken of logits less the largest size that one can have, so that the bound holds whatever is subtracted.
    """
    dtype = weight.dtype
    z, w = Rounded.exact(features, dtype), Rounded.exact(weight, dtype)
    (unit_z, norm_z), (unit_w, norm_w) = _normalised(z), _normalised(w)
    if not cosines:
        unit_z, unit_w = z, w
    tau = _constant(temperature, w.unit)
    products = unit_z @ unit_w.T  # (B, K)
    own = np.zeros(products.value.shape, bool)
    for image, classes in enumerate(labels.reshape(len(labels), -1).tolist()):
        own[image, [label for label in classes if label >= 0]] = True
    logits = products / tau
    shifted = logits - Rounded.exact(np.abs(logits.value).max(axis=1, keepdims=True), dtype)
    exponentials = shifted.apply(np.exp, np.exp)
    total = exponentials.sum(axis=1)
    nothing, num_own = Rounded.exact(np.zeros(own.shape), dtype), Rounded.exact(own.sum(axis=1, keepdims=True), dtype)
    positive, count = shifted.where(own, nothing).sum(axis=1) / num_own, Rounded.exact(float(len(own)), dtype)
    losses = total.apply(np.log, lambda x: 1 / x) - positive
    slope = exponentials / total - Rounded.exact(own, dtype) / num_own
    loss = losses.sum(axis=0) / count

    slope = slope / count / tau  # dLoss/dproducts, (B, K)
    by_z, by_w = slope @ unit_w, slope.T @ unit_z
    if cosines:
        by_z, by_w = _unnormalised(by_z, unit_z, norm_z), _unnormalised(by_w, unit_w, norm_w)
    return RoundedLoss(loss[0, 0], by_z, by_w)


def _constant(number: float, unit: float) -> Rounded:
    """A number that is rounded before it is used."""
    return Rounded(np.asarray(number), np.asarray(abs(number) * unit), unit)


def _normalised(rows: Rounded) -> tuple[Rounded, Rounded]:
    """Rows of length 1, and the lengths that they had, (n, 1)."""
    norm = (rows * rows).sum(axis=1).apply(np.sqrt, lambda x: 0.5 / np.sqrt(x))
    return rows / norm, norm


def _unnormalised(gradient: Rounded, unit_rows: Rounded, norm: Rounded) -> Rounded:
    """The gradient of rows from that of the same rows made as long as 1."""
    return (gradient - unit_rows * (unit_rows * gradient).sum(axis=1)) / norm
