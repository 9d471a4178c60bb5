"""The matmuls of a half of a layer, as its description lists them, loaded or not.

Executors build their launches by this; the report of kernels (`kernels.py`) asks it without weights.
"""

from __future__ import annotations

from typing import NamedTuple

from ..layers import Linear, RMSNorm
from ..layers.description import MatmulDescription, MlpDescription
from ..layers.norm import rms_of

__all__ = ["HalfMatmul", "is_plain", "matmuls_of"]


class HalfMatmul(NamedTuple):
    """A matmul with the prologue and epilogue that one launch may have."""

    linears: tuple[Linear, ...]
    norm: RMSNorm | None
    """The norm of the input that the launch applies."""
    gate: bool
    """The matrices are gate and up."""
    residual: bool
    """The launch adds the hidden state."""
    required: bool
    """The half's launches are joined only if this one is."""


def matmuls_of(about: MatmulDescription) -> tuple[HalfMatmul, HalfMatmul]:
    """Return the first and the last matmul of a half.

    A hidden state of float32 is normed and added by launches of their own. The last matmul of an MLP may run alone.
    """
    mlp = isinstance(about, MlpDescription)
    norm = None if about.float_residual else rms_of(about.norm)
    first = HalfMatmul(about.first, norm, gate=mlp and len(about.first) > 1, residual=False, required=True)
    residual = about.post is None and not about.float_residual
    return first, HalfMatmul((about.last,), None, gate=False, residual=residual, required=not mlp)


def is_plain(about: MatmulDescription) -> bool:
    """Return whether a half has only an RMS norm, a gate of an MLP and the residual besides its matmuls.

    Norms and limits of the heads of attention are not considered.
    """
    gated = not isinstance(about, MlpDescription) or about.gated
    return matmuls_of(about)[0].norm is not None and about.post is None and gated
