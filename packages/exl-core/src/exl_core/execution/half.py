"""Norms and residual of joined launches, and matmuls in blocks of rows, for all kinds of halves of a layer.

The description of a half decides whether it is joined; `why_apart` names the reason if not. A norm of the result, and
the addition to a hidden state of float32, are one launch with the norm that follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import get_args

import torch
from torch import Tensor

from exl_kernels.fused import add_post_norm, add_rms_norm, layer_norm_packed
from exl_kernels.linear.cuda import CudaQuantMatrix
from exl_kernels.linear.fused import Activation, FusedLinear, Packed
from exl_kernels.linear.fused import Norm as InputNorm
from exl_kernels.norm import rms_norm
from exl_kernels.selection import FEW_ROWS

from ..device import activation_dtype
from ..layers import Linear, Module, Norm, ParallelDecoder, RMSNorm
from ..layers.description import AttentionDescription
from ..layers.module import is_changed
from ..layers.norm import LayerNorm
from .adapted import MatmulAdapters
from .batch import Step

__all__ = [
    "Half",
    "JoinedHalf",
    "ModuleHalf",
    "Normed",
    "input_norm",
    "joined",
    "multiplied",
    "multiply_apart",
    "why_apart",
]


Normed = Tensor | Packed | None
"""The normed hidden state, if an earlier launch has computed it: [T, hidden], or packed for one matmul."""


def why_apart(module: Module) -> str | None:
    """Return why a module, loaded or not, runs as its own forward pass; None where its launches are joined."""
    found = module.describe()
    if found is None:
        return f"{module.key} is not the attention or the MLP of a layer"
    if is_foreign(module):
        return f"{module.key} has code that its description does not know"
    if isinstance(found, AttentionDescription):
        if found.with_mlp and not isinstance(module, ParallelDecoder):
            return f"{module.key} has attention and MLP side by side"
        return why_apart(module.mlp) if isinstance(module, ParallelDecoder) else None
    if found.experts:
        return f"{module.key} chooses among {found.experts} experts"
    if found.gated and found.activation not in get_args(Activation):
        return f"{module.key} has activation {found.activation}"
    return None


def is_foreign(module: Module) -> bool:
    """Return whether a module runs code that its description does not know, or has no description."""
    return "describe" not in vars(type(module)) or is_changed(module)


class Half(ABC):
    """A module between embedding and last norm."""

    module: Module
    input_norm: RMSNorm | None = None
    """Norm of the input, if the preceding half may compute it."""
    first_matmul: FusedLinear | None = None
    """The only reader of the normed input, if the preceding half may pack it for this matmul."""

    def takes_adapters(self, step: Step) -> bool:
        """Return whether `run_joined` adds the adapters of the step."""
        return True

    def join(self, rows: int) -> bool:
        """Return whether the matmuls of `rows` rows can run with their prologue and epilogue, many rows in blocks."""
        return True

    def refusal_of_rows(self, rows: int) -> str | None:
        """Return why a captured step of so many rows, which need blocks, is not batch-invariant; None if it is."""
        if is_foreign(self.module):
            return f"{self.module.key} has code that its description does not know"
        return self.module.refusal_of_rows(rows)

    @abstractmethod
    def run_joined(
        self, x: Tensor, h: Normed, following: RMSNorm | None, step: Step, into: FusedLinear | None = None
    ) -> tuple[Tensor, Normed]:
        """Run the half with joined matmuls; arguments and results as for `run`.

        `h` may be packed as the input of `first_matmul`, and `following`(x) as that of `into`, the next half's.
        """

    @abstractmethod
    def run(self, x: Tensor, h: Tensor | None, following: RMSNorm | None, step: Step) -> tuple[Tensor, Tensor | None]:
        """Run the half with separate matmuls.

        Args:
            x: [T, hidden]; may be changed in place.
            h: input_norm(x), if it is computed already; may be changed in place.
            following: norm of the next half, or None.
            step: the step.

        Returns:
            x and, if it was computed, `following`(x). Both may be changed in place.
        """


class ModuleHalf(Half):
    """A module as its own forward pass."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def run_joined(
        self, x: Tensor, h: Normed, following: RMSNorm | None, step: Step, into: FusedLinear | None = None
    ) -> tuple[Tensor, Normed]:
        """Run the module's own forward pass."""
        return self.module.forward(x, step), None

    def run(self, x: Tensor, h: Tensor | None, following: RMSNorm | None, step: Step) -> tuple[Tensor, Tensor | None]:
        """Run the module's own forward pass."""
        return self.module.forward(x, step), None


class JoinedHalf(Half):
    """Norms and residual of a half whose launches are joined."""

    def __init__(
        self, module: Module, norm: Norm | None, post: Norm | None, last: Linear, float_residual: bool
    ) -> None:
        """float_residual: x is float32 on a GPU, where matmuls take halves."""
        self.module = module
        self.norm, self.post, self.last, self.float_residual = norm, post, last, float_residual
        self.input_norm = norm if type(norm) is RMSNorm and not is_changed(norm) else None
        self._own_norm = None if float_residual else self.input_norm
        """The RMS norm that the first matmul applies."""
        layered = type(norm) is LayerNorm and not is_changed(norm) and not float_residual
        self._layer_norm = norm if layered else None
        """The LayerNorm that a first matmul of few rows applies."""
        self._post = post if type(post) is RMSNorm and not is_changed(post) else None
        self._adds_apart = self._post is not None or (float_residual and post is None)
        """One launch norms the last matmul's result, adds it to x, and norms x for the next half."""
        self.plain = self._own_norm is not None and post is None
        """The half has only an RMS norm and the residual besides its matmuls."""

    @property
    @abstractmethod
    def matmuls(self) -> tuple[FusedLinear, FusedLinear]:
        """The first matmul, which norms its input if that is fused, and the last one, which adds the residual."""

    def chains(self, rows: int) -> bool:
        """Return whether `run_chained` takes `rows` rows."""
        return self.plain

    @abstractmethod
    def run_chained(self, x: Tensor, packed: Packed | None, following: FusedLinear | None, step: Step) -> Packed | None:
        """Run the half with matmuls that pack one another's inputs.

        Args:
            x: [T, hidden] half, changed in place.
            packed: x as packed by the preceding half for the first matmul, or None.
            following: the matmul that is to get x packed, or None.
            step: the step.

        Returns:
            x packed for `following`.
        """

    def own_first(
        self, first: FusedLinear, *linears: Linear, activation: Activation | None = None
    ) -> FusedLinear | None:
        """Return the first matmul with the norm of its input: `first` with an RMS norm, another with a LayerNorm."""
        if self._layer_norm is not None:
            return joined(*linears, norm=self._layer_norm, activation=activation)
        return None if self._own_norm is None else first

    def first_of(
        self, own: FusedLinear | None, normed: FusedLinear, x: Tensor, h: Normed
    ) -> tuple[FusedLinear, Tensor | Packed]:
        """Return the first matmul and its input: with a fused norm, if no other launch has computed the norm.

        own: the matmul with an RMS norm, which any number of rows take, or with a LayerNorm, or None.
        """
        if own is not None and self._layer_norm is not None and not own.joins(x.shape[0]):
            own = None
        if h is None and own is None:
            h = self._packed_norm(normed, x)
        if isinstance(h, Packed):
            return normed, h
        return (own, x) if own is not None and h is None else (normed, self.normed(x, h))

    def _packed_norm(self, first: FusedLinear, x: Tensor) -> Packed | None:
        """Return the LayerNorm of x, packed for the first matmul, if one launch does both."""
        norm = self._layer_norm
        if norm is None:
            return None
        given = first.input_of(x.shape[0])
        if given is None:
            return None
        scratch = layer_norm_packed(x, norm.loaded_weight, norm.bias, norm.eps, given)
        return Packed(scratch, x.shape[0], by_matmul=False)

    def normed(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        """Return the input of matmuls without a fused norm: h, if given."""
        if h is not None:
            return h
        return x if self.norm is None else self.norm.forward(x)

    def adapt_input(self, adapters: MatmulAdapters, x: Tensor, h: Normed) -> tuple[Tensor, Tensor]:
        """Return the input of the first matmul without a fused norm, and its product with the adapters' A."""
        assert not isinstance(h, Packed), "steps with adapters pack no input"
        if h is None and self._own_norm is not None:
            h = torch.empty_like(x)
            return h, adapters.shrink(x, norm=input_norm(self._own_norm), normed=h)
        h = self.normed(x, h)
        return h, adapters.shrink(h)

    def result(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output tensor of the last matmul, and its residual."""
        if self.post is None and not self._adds_apart:
            return x, x
        return torch.empty_like(x, dtype=activation_dtype(x.device)), None

    def left(self, x: Tensor, y: Tensor, following: RMSNorm | None, h: Tensor | None = None) -> Tensor | None:
        """Do the work after the last matmul: x += post(y) where y is not in x yet.

        Returns `following`(x), in h if given, where that needs no further launch.
        """
        if y is x:
            return None
        if self._adds_apart:
            return add_post_norm(x, y, input_norm(self._post), input_norm(following), out=h)
        x.add_(y if self.post is None else self.post.apply(y.to(x.dtype)))
        return None

    def left_packed(
        self, x: Tensor, y: Tensor, following: RMSNorm | None, h: Normed, into: FusedLinear | None
    ) -> Normed:
        """Do the work of `left`, and pack `following`(x) as the input of `into` where the same launch can."""
        given = into.input_of(x.shape[0]) if into is not None and self._adds_apart and following is not None else None
        if given is None or given.columns != FEW_ROWS:
            return self.left(x, y, following, None if isinstance(h, Packed) else h)
        scratch = add_post_norm(x, y, input_norm(self._post), input_norm(following), into=given)
        assert scratch is not None
        return Packed(scratch, x.shape[0])

    def add_matmul(self, x: Tensor, y: Tensor, h: Tensor | None, following: RMSNorm | None) -> Tensor | None:
        """Compute x += post(y @ W) with the last matmul; return `following`(x), in h if given."""
        matrix = self.last.quant
        plain = self.post is None and not self.float_residual
        if plain and isinstance(matrix, CudaQuantMatrix) and matrix.adds_at_once(y, x):
            matrix.add_matmul(y, x)
            return None if following is None else rms_norm(x, following.loaded_weight, following.eps, out=h)
        y = matrix.matmul(y)
        if self._adds_apart or following is None:
            return self.left(x, y, following, h)
        y = y if self.post is None else self.post.apply(y.to(x.dtype))
        if self.float_residual:
            return following.forward(x.add_(y))
        return add_rms_norm(x, y, following.loaded_weight, following.eps, out=h)


def multiply_apart(matmul: FusedLinear, h: Tensor) -> Tensor | None:
    """Return the matmul of the normed h in launches of all its matrices; None where a launch each is faster."""
    rows = h.shape[0]
    return matmul(h, h.new_empty(rows, matmul.out_features)) if matmul.pays_apart(rows) else None


def multiplied(matmul: FusedLinear, taken: Tensor | Packed, x: Tensor) -> Tensor:
    """Return the matmul of `taken`, in rows like those of the hidden state x."""
    out = x.new_empty(x.shape[0], matmul.out_features, dtype=activation_dtype(x.device))
    if not isinstance(taken, Packed):
        return matmul(taken, out)
    matmul.chained(taken, out)
    return out


def joined(*linears: Linear, norm: Norm | None = None, activation: Activation | None = None) -> FusedLinear:
    """Return the matmul of linear layers side by side, with the norm of its input and the activation of its results."""
    return FusedLinear([linear.quant for linear in linears], norm=input_norm(norm), activation=activation)


def input_norm(norm: Norm | None) -> InputNorm | None:
    """Return a norm as an argument of the kernels."""
    if norm is None:
        return None
    if isinstance(norm, LayerNorm):
        return InputNorm(norm.loaded_weight, norm.eps, layer=True, bias=norm.bias)
    return InputNorm(norm.loaded_weight, norm.eps)
