"""Settings of the loss (Equation 1 of the paper)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from trainer.settings import Settings, check_choice, check_positive
from weightserver.torch import cosine_softmax_loss, softmax_loss


@dataclass(frozen=True, kw_only=True)
class LossConfig(Settings):
    """The softmax over the active rows."""

    softmax: Literal["cosine", "plain"] = "cosine"
    """Logits: cosines of row and embedding, or their inner products (plain: compared in Table 1)."""
    temperature: float = 0.2
    """τ, which divides cosines but not inner products."""

    def check(self) -> None:
        check_choice(self, "softmax", "cosine", "plain")
        check_positive(self, "temperature")

    def unused_settings(self) -> dict[str, str]:
        return {} if self.softmax == "cosine" else {"temperature": "--softmax cosine"}

    def loss_function(self) -> Callable[..., Tensor]:
        """The loss of features, weights and labels: `softmax_loss` or `cosine_softmax_loss`."""
        return softmax_loss if self.softmax == "plain" else partial(cosine_softmax_loss, temperature=self.temperature)
