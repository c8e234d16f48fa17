"""Settings of the loss (Equation 1 of the paper)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.settings import Settings, check_positive, named_by_flags


@dataclass(frozen=True, kw_only=True)
class LossConfig(Settings):
    """The softmax over the active rows."""

    softmax: Literal["cosine", "plain"] = "cosine"
    """Logits: cosines of row and embedding, or their inner products (plain: compared in Table 1)."""
    temperature: float = 0.2
    """τ, which divides cosines but not inner products."""
    margin: Literal["none", "cosface", "arcface", "adaface"] = "none"
    """Margin on the cosine θ of an image and its own class: cosface subtracts it, arcface adds it to the angle;
    adaface does either, by the norm of the embedding."""
    margin_size: float | None = None
    """The margin, in radians for arcface. Without it: 0.35 for cosface, 0.5 for arcface, 0.4 for adaface."""

    def check(self) -> None:
        check_positive(self, "temperature")
        if self.margin != "none":
            from weightserver.torch import margin_of

            with named_by_flags():
                margin_of(self.margin, self.margin_size)

    def chance(self, num_negatives: int) -> float:
        """The loss of an encoder that tells no image from another, in nats: log K, and more with a margin, at cosines
        of 1."""
        import torch

        from weightserver.torch import margin_of

        one = torch.ones(1, 1, dtype=torch.float64)
        own = (margin_of(self.margin, self.margin_size).of(one) - one) / self.temperature
        return (torch.logaddexp(torch.log((num_negatives - 1) * one), own) - own).item()

    def unused_settings(self) -> dict[str, str]:
        needed = {} if self.margin != "none" else {"margin_size": "--margin cosface, arcface or adaface"}
        if self.softmax == "plain":
            needed |= dict.fromkeys(("temperature", "margin"), "--softmax cosine")
        return needed
