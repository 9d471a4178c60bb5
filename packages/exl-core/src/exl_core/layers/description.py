"""Descriptions of the halves of a layer: executors choose launches by these, not by a module's type or family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..architectures.base import Activation

__all__ = ["AttentionDescription", "HalfDescription", "MlpDescription", "NormKind"]

NormKind = Literal["rms", "layer"]


@dataclass(frozen=True, slots=True)
class AttentionDescription:
    """x + post(o(attention(rope(q_norm(q)), rope(k_norm(k)), v))) with q, k, v of norm(x)."""

    norm: NormKind | None
    post: NormKind | None
    q_norm: NormKind | None
    k_norm: NormKind | None
    clipped: bool
    """q, k and v are clamped."""
    with_mlp: bool
    """The layer's MLP takes the same normed input, and is part of this module."""


@dataclass(frozen=True, slots=True)
class MlpDescription:
    """x + post(inner(norm(x))), the MLP half of a layer.

    inner is down(act(gate) * up) if gated, else down(act(up)), or a mixture of `experts`.
    """

    norm: NormKind | None
    post: NormKind | None
    gated: bool
    activation: Activation
    experts: int
    """Number of experts; 0 for one MLP."""


HalfDescription = AttentionDescription | MlpDescription
