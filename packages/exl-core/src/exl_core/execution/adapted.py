"""The adapters of a step's rows for the matrices of one joined matmul.

The matmul of one or two rows adds them itself. Otherwise a launch before the matmul multiplies its input by the
adapters' A, and norms and packs the input where that is needed, and a launch after it multiplies that product by B and
adds it to the results, then adds the residual or applies the gate. Results are bitwise identical to `Linear.forward`
and the operators that follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_kernels.activation import activation as activate
from exl_kernels.linear.fused import FusedLinear, FusedNorm
from exl_kernels.linear.lora import LoraGroup

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

    def first(self, matmul: FusedLinear, bare: FusedLinear, x: Tensor) -> Tensor:
        """Return `matmul(x)` with the adapters of each row added before its activation.

        Args:
            matmul: the matmul of all matrices, with the norm of its input and the activation.
            bare: the same without both.
            x: [T, in].

        Returns:
            [T, outputs of the matmul].
        """
        rows = x.shape[0]
        if self.group.fits(matmul, x):
            return self.group.multiply(matmul, x, self.slots, out=x.new_empty(rows, matmul.out_features))
        y, middle = self._multiply(bare, x, matmul.norm, x.new_empty(rows, bare.out_features))
        if matmul.is_gated:
            return self.group.expand(y, middle, self.slots, activation=matmul.activation)
        y = self.group.expand(y, middle, self.slots)
        return y if matmul.activation is None else activate(y, matmul.activation, out=y)

    def last(self, matmul: FusedLinear, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """Compute out = x @ W + adapters [+ residual] with the matmul of one matrix; out may be the residual."""
        if self.group.fits(matmul, x, residual=residual is not None):
            self.group.multiply(matmul, x, self.slots, out=out, residual=residual)
            return
        y, middle = self._multiply(matmul, x, None, out if residual is None else torch.empty_like(out))
        self.group.expand(y, middle, self.slots, out=out, residual=residual)

    def _multiply(self, matmul: FusedLinear, x: Tensor, norm: FusedNorm | None, out: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply by A and by the matrices; the launch before the matmul packs its input where the plan says so."""
        given = None if matmul.columns_for_adapters(x.shape[0]) is None else matmul.input_of(x.shape[0])
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
