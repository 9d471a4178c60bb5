"""Choose the half of a module; run attention and MLP side by side; tell which halves pack one another's input."""

from __future__ import annotations

from torch import Tensor

from exl_kernels.linear.fused import FusedLinear, Packed

from ..layers import Attention, FeedForward, Linear, Module, ParallelDecoder, RMSNorm
from ..layers.description import MlpDescription
from .attention_half import AttentionHalf
from .batch import Step
from .half import Half, JoinedHalf, ModuleHalf, Normed, why_apart
from .mlp_half import MlpHalf

__all__ = ["ParallelHalf", "chains", "chains_to", "half_of"]


class ParallelHalf(AttentionHalf):
    """A whole layer whose attention and MLP take the same normed input.

    The results of both are added to the hidden state.
    """

    def __init__(self, decoder: ParallelDecoder, float_residual: bool = False) -> None:
        super().__init__(decoder, float_residual)
        self.mlp = MlpHalf(decoder.mlp, float_residual)
        self.first_matmul = None  # the MLP reads the normed input, too
        self.plain = False

    def join(self, rows: int) -> bool:
        """Return whether both halves can run joined."""
        return super().join(rows) and self.mlp.join(rows)

    def takes_adapters(self, step: Step) -> bool:
        """Return whether both halves add the adapters of the step."""
        return super().takes_adapters(step) and self.mlp.takes_adapters(step)

    def run_joined(
        self, x: Tensor, h: Normed, following: RMSNorm | None, step: Step, into: FusedLinear | None = None
    ) -> tuple[Tensor, Normed]:
        """Run attention, then MLP, on one normed input with joined launches."""
        assert not isinstance(h, Packed), "two matmuls read the input"
        h = self.normed(x, h)
        x, _ = super().run_joined(x, h, None, step)
        return self.mlp.run_joined(x, h, following, step, into)

    def run(self, x: Tensor, h: Tensor | None, following: RMSNorm | None, step: Step) -> tuple[Tensor, Tensor | None]:
        """Run attention, then MLP, on one normed input as separate launches."""
        h = self.normed(x, h)
        x, _ = super().run(x, h, None, step)
        return self.mlp.run(x, h, following, step)

    def run_last(
        self, x: Tensor, h: Tensor | None, following: RMSNorm | None, step: Step, batch: int
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer for the last token of each of `batch` rows."""
        x, h, mixed = self._attend_last(x, h, step, batch)
        self.add_matmul(x, mixed, None, None)
        return self.mlp.run(x, h, following, step)


def half_of(module: Module, float_residual: bool = False) -> Half:
    """Return the half of a loaded module; float_residual: the hidden state is float32 on a GPU."""
    if why_apart(module) is not None or any(_padded(linear) for linear in module.submodules()):
        return ModuleHalf(module)
    if isinstance(module.describe(), MlpDescription):
        assert isinstance(module, FeedForward)
        return MlpHalf(module, float_residual)
    assert isinstance(module, Attention)
    if isinstance(module, ParallelDecoder):
        return ParallelHalf(module, float_residual)
    return AttentionHalf(module, float_residual)


def chains(half: Half, following: Half, rows: int) -> FusedLinear | None:
    """Return the first matmul of the following half if the last one of `half` can pack its input of `rows` rows."""
    if not isinstance(following, JoinedHalf) or not following.chains(rows):
        return None
    first, _ = following.matmuls
    return first if chains_to(half, first, rows) else None


def chains_to(half: Half, following: FusedLinear, rows: int) -> bool:
    """Return whether the last matmul of a half can pack its results of `rows` rows as the input of `following`."""
    return isinstance(half, JoinedHalf) and half.chains(rows) and half.matmuls[1].chains_to(following, rows)


def _padded(linear: Linear) -> bool:
    return linear.quant.out_features != linear.out_features
