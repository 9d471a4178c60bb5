"""The steps of a half of a layer, as its description lists them, for any operators that run them.

norm and first matmul | rotation, storing and attention, or activation | last matmul, post norm and residual

A half runs these with separate launches or with joined ones (`operators.py`). `why_apart` names the reason why a module
has only its own forward pass, as a mixture of experts does (`experts_pass.py`). A norm of the result, and the
addition to a hidden state of float32, are one launch with the norm that follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeGuard, get_args

import torch
from torch import Tensor

from exl_kernels.fused import add_post_norm
from exl_kernels.linear.fused import Activation, FusedLinear, FusedNorm, Packed

from ..device import activation_dtype
from ..layers import Linear, Module, Norm, RMSNorm
from ..layers.description import (
    AttentionDescription,
    ExpertsDescription,
    HalfDescription,
    MatmulDescription,
    MlpDescription,
)
from ..layers.module import is_changed
from ..layers.norm import LayerNorm, rms_of
from ..layers.sublayer import SubLayer
from .adapted import takes_adapters
from .batch import Step
from .half_launches import Prologue
from .half_matmuls import HalfPlan

if TYPE_CHECKING:
    from .operators import Operators

__all__ = [
    "NO_PROLOGUE",
    "Features",
    "Half",
    "HalfInput",
    "JoinedHalf",
    "ModuleHalf",
    "NextPrologue",
    "OutputTokens",
    "PackedInput",
    "PendingMatmul",
    "description_of",
    "input_norm",
    "is_mixture",
    "is_padded",
    "joined",
    "loaded_shape",
    "refusal_of_code",
    "why_apart",
    "why_own_pass",
]


OutputTokens = Literal["all", "last", "none"]
"""The tokens for which a pass returns a hidden state: all, the last one of each row, or none, when the pass only stores
keys and values."""


class PackedInput(NamedTuple):
    """The input of a matmul, packed by an earlier launch; normed, unless the matmul norms it."""

    matmul: FusedLinear
    packed: Packed


HalfInput = Tensor | PackedInput | None
"""The input of a half as an earlier launch has left it: the normed hidden state, [T, hidden], or packed for the first
matmul, normed or not; None if the half itself norms the hidden state."""


NextPrologue = Prologue[FusedLinear]
"""The prologue of the next half, of loaded matrices."""
NO_PROLOGUE: NextPrologue = NextPrologue()


class PendingMatmul(NamedTuple):
    """A matmul that is not launched yet: the next one may be launched with it (`FusedLinear.then`)."""

    matmul: FusedLinear
    input: Tensor | Packed
    x: Tensor
    """The hidden state, whose rows and device the results have."""

    def now(self) -> Tensor:
        """Launch the matmul; returns [T, outputs]."""
        x = self.x
        out = x.new_empty(x.shape[0], self.matmul.out_features, dtype=activation_dtype(x.device))
        if not isinstance(self.input, Packed):
            return self.matmul(self.input, out)
        self.matmul.chained(self.input, out)
        return out


Features = Tensor | Packed | PendingMatmul
"""The input of the last matmul: a tensor, packed, or a matmul that is still to be launched."""


def description_of(module: Module) -> HalfDescription | None:
    """Return the description of a half of a layer, loaded or not; None for other modules."""
    return module.describe() if isinstance(module, SubLayer) else None


def why_apart(module: Module) -> str | None:
    """Return why a module, loaded or not, has no matmuls whose launches are joined; None where it has."""
    about = description_of(module)
    return f"{module.key} is not the attention or the MLP of a layer" if about is None else _why_apart(about)


def _why_apart(about: HalfDescription) -> str | None:
    key = about.module.key
    if not about.holds:
        return f"{key} has code that its description does not know"
    if isinstance(about, ExpertsDescription):
        return f"{key} chooses among {len(about.experts)} experts"
    if isinstance(about, AttentionDescription) and about.mlp is not None:
        return _why_apart(about.mlp)
    if isinstance(about, MlpDescription) and about.gated and about.activation not in get_args(Activation):
        return f"{key} has activation {about.activation}"
    return None


def why_own_pass(module: Module, padded: Callable[[Linear], bool]) -> str | None:
    """Return why a module has no joined matmuls, by its description or by a matrix that is `padded`; else None."""
    why = why_apart(module)
    if why is not None:
        return why
    key = next((linear.key for linear in module.submodules() if padded(linear)), None)
    return None if key is None else f"{key} has padding columns"


def is_mixture(about: HalfDescription | None) -> TypeGuard[ExpertsDescription]:
    """Return whether a half is a mixture of experts whose own pass its description knows."""
    return isinstance(about, ExpertsDescription) and about.holds


def is_padded(linear: Linear) -> bool:
    """Return whether a loaded matrix has columns beyond the layer's features."""
    return linear.quant.out_features != linear.out_features


def refusal_of_code(module: Module) -> str | None:
    """Return why nobody knows whether rows of a module, loaded or not, are batch-invariant; None if it is known."""
    about = description_of(module)
    answers = type(module).refusal_of_rows is not Module.refusal_of_rows
    known = answers and not is_changed(module) if about is None else about.holds
    return None if known else f"{module.key} has code that its description does not know"


class Half(ABC):
    """A module between embedding and last norm."""

    module: Module
    plan: HalfPlan[FusedLinear] | None = None
    """The plans of the matmuls; None where there are only the module's own."""

    def takes_adapters(self, step: Step) -> bool:
        """Return whether joined launches add the adapters of the step."""
        return True

    def joins(self, rows: int) -> bool:
        """Return whether the matmuls of `rows` rows can run with their prologue and epilogue, many rows in blocks."""
        return self.plan is None or self.plan.joins(rows)

    def refusal_of_rows(self, rows: int) -> str | None:
        """Return why a captured step of so many rows, which need blocks, is not batch-invariant; None if it is."""
        return refusal_of_code(self.module) or self.module.refusal_of_rows(rows)

    @abstractmethod
    def run(
        self,
        x: Tensor,
        h: HalfInput,
        step: Step,
        ops: Operators,
        next_prologue: NextPrologue = NO_PROLOGUE,
        output_tokens: OutputTokens = "all",
    ) -> tuple[Tensor, HalfInput]:
        """Run the half.

        Args:
            x: [T, hidden]; may be changed in place.
            h: input_norm(x), if it is computed already, or the packed input; may be changed in place.
            step: the step.
            ops: how the matmuls run.
            next_prologue: the part of the next half's first matmul that the last launches may do.
            output_tokens: the tokens whose hidden states are returned. Keys and values of all are stored.

        Returns:
            x of these tokens, and its norm or packed input for the next half, if computed. Both may be changed.
        """


class ModuleHalf(Half):
    """A module as its own forward pass."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def run(
        self,
        x: Tensor,
        h: HalfInput,
        step: Step,
        ops: Operators,
        next_prologue: NextPrologue = NO_PROLOGUE,
        output_tokens: OutputTokens = "all",
    ) -> tuple[Tensor, HalfInput]:
        """Run the module's own forward pass."""
        x = self.module.forward(x, step)
        return step.last_rows(x) if output_tokens == "last" else x, None


class JoinedHalf(Half):
    """Two matmuls, each of which may be one launch with its prologue and epilogue.

    Args:
        about: the description.
        mlp: the plan of the MLP that is part of the half, or None.

    Attributes:
        plan: the first and last matmuls, and what their plans decide; `first`, `first_normed` and `last` are its.
        activation: the activation that the first matmul applies, or None.
        first_bare: the first matmul of a normed input, without activation.
        own_norm: the norm that `first` applies, or None.
        post_rms: the norm of the last matmul's result, if a launch with the sum applies it.
        adds_apart: as of the plan.
        matrices: the first ones and the last one.
        held: columns of the results that are needed at once before the last matmul.
    """

    plan: HalfPlan[FusedLinear]

    def __init__(self, about: MatmulDescription, mlp: HalfPlan[FusedLinear] | None = None) -> None:
        self.module, self.about = about.module, about
        self.plan = plan = HalfPlan(about, joined, loaded_shape, mlp)
        self.activation, self.own_norm = plan.activation, plan.own_norm
        self.first, self.first_normed, self.last = plan.first, plan.first_normed, plan.last
        self.first_bare = self.first_normed if self.activation is None else joined(about.first)
        self.post_rms = rms_of(about.post)
        self.adds_apart = plan.adds_apart
        self.matrices = tuple(linear.quant for linear in (*about.first, about.last))
        self.held = tuple(matrix.out_features for matrix in self.matrices[:-1])

    def matmul_halves(self) -> Sequence[JoinedHalf]:
        """Return the halves whose matmuls this one runs: itself, unless it is a whole layer."""
        return (self,)

    def takes_adapters(self, step: Step) -> bool:
        """Return whether the adapters of all matrices can be added by the joined matmuls, or around them."""
        return takes_adapters(step, self.about.first) and takes_adapters(step, (self.about.last,))

    @abstractmethod
    def features(
        self, x: Tensor, h: HalfInput, step: Step, ops: Operators, output_tokens: OutputTokens = "all"
    ) -> tuple[Tensor, HalfInput, Features | None]:
        """Run all but the last matmul and its epilogue; arguments as for `run`.

        Returns:
            x and h of the output tokens, and the input of the last matmul; None where there are none.
        """

    def run(
        self,
        x: Tensor,
        h: HalfInput,
        step: Step,
        ops: Operators,
        next_prologue: NextPrologue = NO_PROLOGUE,
        output_tokens: OutputTokens = "all",
    ) -> tuple[Tensor, HalfInput]:
        """Run the steps of the half."""
        x, _, y = self.features(x, h, step, ops, output_tokens)
        free = h if output_tokens == "all" else None  # of fewer tokens it may be x itself
        return x, None if y is None else ops.last(self, x, y, free, next_prologue, step)

    def normed(self, x: Tensor, h: HalfInput = None) -> Tensor:
        """Return the input of matmuls without a fused norm: h, if given."""
        if h is not None:
            assert isinstance(h, Tensor), "packed for a joined matmul"
            return h
        return x if self.about.norm is None else self.about.norm.forward(x)

    def result(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output tensor of the last matmul, and its residual: x for both where nothing is in between."""
        if self.plan.adds_residual:
            return x, x
        return torch.empty_like(x, dtype=activation_dtype(x.device)), None

    def finish(self, x: Tensor, y: Tensor, norm: RMSNorm | None, h: HalfInput = None) -> Tensor | None:
        """Add the result of the last matmul: x += post(y), where y is not in x yet.

        Returns `norm`(x), in h if given, where that needs no further launch.
        """
        if y is x:
            return None
        if self.adds_apart:
            out = h if isinstance(h, Tensor) else None
            return add_post_norm(x, y, input_norm(self.post_rms), input_norm(norm), out=out)
        x.add_(y if self.about.post is None else self.about.post.apply(y.to(x.dtype)))
        return None


def loaded_shape(norm: RMSNorm) -> tuple[int, ...]:
    """Return the shape of the norm's weight."""
    return tuple(norm.loaded_weight.shape)


def joined(linears: tuple[Linear, ...], norm: Norm | None = None, activation: Activation | None = None) -> FusedLinear:
    """Return the matmul of linear layers side by side, with the norm of its input and the activation of its results."""
    return FusedLinear([linear.quant for linear in linears], norm=input_norm(norm), activation=activation)


def input_norm(norm: Norm | None) -> FusedNorm | None:
    """Return a norm as an argument of the kernels."""
    if norm is None:
        return None
    if isinstance(norm, LayerNorm):
        return FusedNorm(norm.loaded_weight, norm.eps, layer=True, bias=norm.bias)
    return FusedNorm(norm.loaded_weight, norm.eps)
