"""Descriptions of the halves of a layer: executors choose and make launches by these, not by a module's class."""

from __future__ import annotations

from dataclasses import dataclass

from exl_kernels.moe import ExpertRouter

from ..architectures.base import Activation
from ..architectures.windows import LayerRope
from .linear import Linear
from .module import Module, is_changed
from .norm import Norm

__all__ = ["AttentionDescription", "ExpertsDescription", "HalfDescription", "MatmulDescription", "MlpDescription"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfDescription:
    """x + post(inner(norm(x))), where either norm may be absent. Matrices know their biases and prescales."""

    module: Module
    of: type[object]
    """The class whose forward pass this is. A subclass that changes the pass describes itself, or is not described."""
    norm: Norm | None
    post: Norm | None
    float_residual: bool
    """x is float32 on a GPU, where matmuls take halves."""

    @property
    def holds(self) -> bool:
        """Whether the module computes this: neither its class nor a replaced method has other code."""
        return type(self.module) is self.of and not is_changed(self.module)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulDescription(HalfDescription):
    """A half whose inner is last(middle(first @ norm(x))): a matmul of all `first` matrices, and one of `last`."""

    first: tuple[Linear, ...]
    last: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionDescription(MatmulDescription):
    """inner is o(attention(rope(q_norm(q)), rope(k_norm(k)), v)); `first` are q, k and v, `last` is o."""

    layer_idx: int
    head_dim: int
    scale: float
    """Factor of q.k before the softmax."""
    window: int
    """Sliding window in tokens; 0 is off."""
    softcap: float
    """Limit of the logits; 0 is off."""
    rope: LayerRope
    interleaved: bool
    """Rotate GPT-J pairs."""
    clip: float
    """If > 0, q, k and v are clamped to +- clip before the norms."""
    q_norm: Norm | None
    k_norm: Norm | None
    mlp: HalfDescription | None = None
    """The layer's MLP, without norms, where it takes the same normed input and is part of this module."""

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v."""
        q, k, v = (linear.out_features for linear in self.first)
        return q, k, v


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpDescription(MatmulDescription):
    """inner is down(act(gate) * up) where `first` are gate and up, else down(act(up)); `last` is down."""

    activation: Activation

    @property
    def gated(self) -> bool:
        """Whether there is a gate."""
        return len(self.first) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsDescription(HalfDescription):
    """inner is the sum of `chosen` experts' results, weighted by the router [+ the shared expert's, by its gate].

    The router's probabilities are a softmax over all experts, of which the `chosen` largest are kept.
    """

    router: Linear
    experts: tuple[tuple[Linear, ...], ...]
    """Gate, up and down of each."""
    chosen: int
    normalize: bool
    """Divide the kept probabilities by their sum."""
    jitter: float | None
    """Choose as `sparse_mixture` with this jitter; None: as above."""
    activation: Activation
    """The activation of every expert, whose result is down(act(gate) * up)."""
    shared: MlpDescription | None
    """The shared expert, without norms."""
    shared_gate: Linear | None
    """The sigmoid of its result weights the shared expert's."""
    routing: ExpertRouter | None
    """The launch of the loaded router; None where there is none."""
    apart: bool
    """The experts never share calls, since processes exchange the outputs of each."""

    @property
    def holds(self) -> bool:
        """Whether the module, and the shared expert's, are what was described."""
        own = type(self.module) is self.of and not is_changed(self.module)
        return own and (self.shared is None or self.shared.holds)
