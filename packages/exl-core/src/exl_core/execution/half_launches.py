"""The launches of a half of a layer that norm its input and that end it, as `HalfPlan` answers them.

Executors launch what it answers for loaded matrices; the report of kernels asks it for shapes.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

from exl_kernels.linear.planned import PlannedMatmul

from ..layers import RMSNorm

__all__ = ["POST_NORMS", "HeadNormLaunch", "LastLaunch", "M", "NormLaunch", "Prologue"]

M = TypeVar("M", bound=PlannedMatmul)


class NormLaunch(Enum):
    """The launch that norms the input of a half."""

    NONE = auto()
    """The half has no norm."""
    MATMUL = auto()
    """The first matmul."""
    ADAPTERS = auto()
    """The launch before the first matmul that multiplies by the adapters' A, or the matmul if it adds them itself."""
    PACKING = auto()
    """A launch that also packs the input of the first matmul."""
    OWN = auto()
    """A launch that only norms."""


class HeadNormLaunch(Enum):
    """The launch that norms q and k of an attention."""

    NONE = auto()
    """Neither a norm nor a clamp changes q, k or v."""
    ATTENTION = auto()
    """The launch of attention, which stores the keys, too."""
    PARTS = auto()
    """One launch for all of q and all of k, where the matmul has left them."""
    OWN = auto()
    """One for each of them, and the clamp, if there is one, before."""


class LastLaunch(Enum):
    """The launch that adds the result of a half's last matmul to the hidden state."""

    PACKING_MATMUL = auto()
    """The last matmul, which also packs the input of the next half."""
    MATMUL = auto()
    """The last matmul."""
    PACKING_POST_NORM = auto()
    """The launch of POST_NORM, which also packs the input of the next half."""
    POST_NORM = auto()
    """A launch that applies the post norm, if there is one, before the sum, and the next half's norm after it."""
    SUM_AND_NORM = auto()
    """A launch of the sum and the next half's norm, after that of the post norm if there is one."""
    SUM = auto()
    """A launch of torch, after that of the post norm if there is one."""


POST_NORMS = (LastLaunch.PACKING_POST_NORM, LastLaunch.POST_NORM)
"""These also norm the input of the next half, if that has an RMS norm."""


class Prologue(NamedTuple, Generic[M]):
    """The part of the next half's first matmul that the last launches of a half may do: norm and packed input."""

    norm: RMSNorm | None = None
    """Norm the hidden state with this."""
    matmul: M | None = None
    """Pack the normed hidden state for this matmul; without `norm` the hidden state itself, which the matmul norms."""

    @property
    def chained(self) -> M | None:
        """The matmul for which the last matmul itself packs its results."""
        return self.matmul if self.norm is None else None
