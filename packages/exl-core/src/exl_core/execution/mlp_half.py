"""The steps of an MLP: norm, gate and up (or up), activation, down and residual.

An activation without gate that the first matmul does not apply is a separate launch. Results are bitwise identical to
the module's.
"""

from __future__ import annotations

from torch import Tensor

from ..layers.description import MlpDescription
from ..layers.mlp import activated
from .batch import Step
from .half import Features, HalfInput, JoinedHalf, OutputTokens, PendingMatmul
from .operators import Operators

__all__ = ["MlpHalf"]


class MlpHalf(JoinedHalf):
    """Norm, gate, up and activation, or norm and up; down and residual."""

    about: MlpDescription

    def features(
        self, x: Tensor, h: HalfInput, step: Step, ops: Operators, output_tokens: OutputTokens = "all"
    ) -> tuple[Tensor, HalfInput, Features | None]:
        """Run norm, gate, up and activation, of all tokens; see `JoinedHalf.features`."""
        found = ops.first(self, x, h, step)
        if self.activation is not None and isinstance(found, (Tensor, PendingMatmul)):
            return x, h, found
        if isinstance(found, PendingMatmul):
            found = found.now()
        return x, h, activated([found] if isinstance(found, Tensor) else found, self.about.activation)
