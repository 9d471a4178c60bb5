"""The adapters of a step's rows for the matrices of one joined matmul.

A launch before the matmul multiplies its input by the adapters' A, and norms and packs the input where that is needed.
A launch behind it multiplies that by B and adds it to the results, then the residual or the gate. Bitwise identical
to `Linear.forward` and the operators that follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_kernels.linear.fused import Activation, FusedLinear, FusedNorm
from exl_kernels.linear.lora import LoraGroup
from exl_kernels.selection import adapters_pack_input

from ..layers import Linear
from ..lora.rows import RowAdapters
from .batch import Step

__all__ = ["MatmulAdapters", "adapters_of", "takes_adapters"]


@dataclass(frozen=True, slots=True)
class MatmulAdapters:
    """The adapters that the rows of a step have for the matrices of one matmul."""

    group: LoraGroup
    slots: Tensor
    """int32 [T], the slot of each row, as for `LoraGroup.shrink`."""

    def first(self, matmul: FusedLinear, x: Tensor, norm: FusedNorm | None) -> tuple[Tensor, Tensor]:
        """Multiply x [T, in], or its norm, by the matrices [T, outputs of all matrices] and by A, for `expand`.

        Args:
            matmul: the matmul of all matrices, without norm or activation.
            x: the input.
            norm: the norm of the input, or None.
        """
        out = x.new_empty(x.shape[0], matmul.out_features)
        return self._multiply(matmul, x, norm, out)

    def expand(self, y: Tensor, middle: Tensor, activation: Activation | None = None) -> Tensor:
        """Add the results to y [T, outputs of all matrices], in place or in a new tensor of gated results."""
        return self.group.expand(y, middle, self.slots, activation=activation)

    def last(self, matmul: FusedLinear, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """Compute out = x @ W + adapters [+ residual] with the matmul of one matrix; out may be the residual."""
        y, middle = self._multiply(matmul, x, None, out if residual is None else torch.empty_like(out))
        self.group.expand(y, middle, self.slots, out=out, residual=residual)

    def _multiply(self, matmul: FusedLinear, x: Tensor, norm: FusedNorm | None, out: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply by A and by the matrices; where the matmul takes packed input, the launch before packs it."""
        given = matmul.input_of(x.shape[0]) if adapters_pack_input(*x.shape) else None
        if given is not None:
            middle = self.group.shrink(x, self.slots, norm=norm, into=given)
            return matmul.from_input(given, out), middle
        normed = None if norm is None else torch.empty_like(x)
        middle = self.group.shrink(x, self.slots, norm=norm, normed=normed)
        return matmul(x if normed is None else normed, out), middle


def takes_adapters(step: Step, linears: Sequence[Linear]) -> bool:
    """Return whether `adapters_of` finds all adapters that the step has for these matrices."""
    found = all(isinstance(rows, RowAdapters) and rows.groups(*_about(linears)) for rows in step.loras)
    return found and len(step.loras) <= 1


def adapters_of(step: Step, linears: Sequence[Linear]) -> MatmulAdapters | None:
    """Return the adapters of the matrices of a joined matmul; None where no adapter of the step changes them."""
    if not step.loras:
        return None
    (rows,) = step.loras
    assert isinstance(rows, RowAdapters), "takes_adapters lets no other through"
    group = rows.group(*_about(linears))
    return None if group is None else MatmulAdapters(group, rows.slots)


def _about(linears: Sequence[Linear]) -> tuple[list[str], int, list[int]]:
    """Return the keys of the matrices, their inputs and the outputs of each."""
    return [one.key for one in linears], linears[0].in_features, [one.out_features for one in linears]
