"""Choose the half of a module; run attention and MLP side by side."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..layers import Module
from ..layers.description import AttentionDescription, MlpDescription
from .attention_half import AttentionHalf
from .batch import Step
from .half import (
    NO_PROLOGUE,
    Half,
    HalfInput,
    JoinedHalf,
    ModuleHalf,
    NextPrologue,
    OutputTokens,
    description_of,
    is_mixture,
    is_padded,
    why_own_pass,
)
from .mlp_half import MlpHalf
from .operators import Operators

__all__ = ["ExpertsHalf", "ParallelHalf", "half_of"]


class ParallelHalf(AttentionHalf):
    """A whole layer whose attention and MLP take the same normed input.

    The results of both are added to the hidden state.
    """

    def __init__(self, about: AttentionDescription, mlp: MlpDescription) -> None:
        self.mlp = MlpHalf(mlp)
        super().__init__(about, self.mlp.plan)

    def matmul_halves(self) -> Sequence[JoinedHalf]:
        """Return attention and MLP."""
        return self, self.mlp

    def takes_adapters(self, step: Step) -> bool:
        """Return whether both halves add the adapters of the step."""
        return super().takes_adapters(step) and self.mlp.takes_adapters(step)

    def run(
        self,
        x: Tensor,
        h: HalfInput,
        step: Step,
        ops: Operators,
        next_prologue: NextPrologue = NO_PROLOGUE,
        output_tokens: OutputTokens = "all",
    ) -> tuple[Tensor, HalfInput]:
        """Run attention, then MLP, on one normed input."""
        x, h, y = self.features(x, self.normed(x, h), step, ops, output_tokens)
        if y is None:
            return x, None
        ops.last(self, x, y, None, NO_PROLOGUE, step)
        return self.mlp.run(x, h, step, ops, next_prologue)


class ExpertsHalf(ModuleHalf):
    """A mixture of experts, whose own pass joins the launches of its norm, router and experts (`experts_pass.py`)."""

    def takes_adapters(self, step: Step) -> bool:
        """Return whether the adapters of the step change none of the matrices."""
        return not any(linear.adapted(step.loras) for linear in self.module.submodules())


def half_of(module: Module) -> Half:
    """Return the half of a loaded module."""
    about = description_of(module)
    if is_mixture(about):
        return ExpertsHalf(module)
    if why_own_pass(module, is_padded) is None:
        if isinstance(about, MlpDescription):
            return MlpHalf(about)
        if isinstance(about, AttentionDescription):
            return ParallelHalf(about, about.mlp) if isinstance(about.mlp, MlpDescription) else AttentionHalf(about)
    return ModuleHalf(module)
