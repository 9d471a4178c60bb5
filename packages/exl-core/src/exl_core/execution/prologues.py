"""The part that the last launches of a half do for the next one: its norm, and packing its input.

Executors launch what `next_prologues` answers for loaded matrices; the report of kernels asks it for shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol

from ..layers import RMSNorm
from .half_matmuls import M

__all__ = ["PlannedHalf", "Prologue", "next_prologues"]


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


class PlannedHalf(Protocol[M]):
    """A half whose matmuls are planned, or one that runs its module's own pass."""

    @property
    def input_norm(self) -> RMSNorm | None:
        """Norm of the input, if the preceding half may compute it."""

    @property
    def first_matmul(self) -> M | None:
        """The only reader of the normed input, if the preceding half may pack it for this matmul."""

    def chained_first(self, rows: int) -> M | None:
        """Return the matmul whose input of `rows` rows the last matmul of the preceding half may pack, or None."""

    def chains_to(self, following: M, rows: int) -> bool:
        """Return whether the last matmul can pack its results of `rows` rows as the input of `following`."""


def next_prologues(
    halves: Sequence[PlannedHalf[M]],
    joins: Sequence[bool],
    last: RMSNorm | None,
    head: M | None,
    rows: int,
    *,
    packs: bool = True,
) -> list[Prologue[M]]:
    """Return for each half the part of the next prologue that it may do.

    Args:
        halves: consecutive halves.
        joins: whether the launches of each are joined.
        last: the last norm, behind the last half, or None.
        head: the last norm and the head as one matmul, for which the last half may pack its results, or None.
        rows: rows of the pass.
        packs: whether launches may pack the input of the next half.
    """
    found: list[Prologue[M]] = []
    following: PlannedHalf[M] | None = None
    for half, joint in zip(reversed(halves), reversed(joins), strict=True):
        both = packs and joint and (following is None or joins[-len(found)])
        to = None
        if both:
            to = head if following is None else following.chained_first(rows)
        if to is not None and half.chains_to(to, rows):
            found.append(Prologue(matmul=to))
        elif following is None:
            found.append(Prologue(last))
        elif following.input_norm is None or found[-1].chained is not None:
            found.append(Prologue())  # the first matmul of a chain norms its input
        else:
            found.append(Prologue(following.input_norm, following.first_matmul if both else None))
        following = half
    return found[::-1]
