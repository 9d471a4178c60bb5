"""The part that the last launches of a half do for the next one: its norm, and packing its input.

Executors launch what `next_prologues` answers for loaded matrices; the report of kernels asks it for shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layers import RMSNorm
from .half_launches import M, Prologue
from .half_matmuls import HalfPlan

__all__ = ["next_prologues"]


def next_prologues(
    plans: Sequence[HalfPlan[M] | None],
    joins: Sequence[bool],
    last: RMSNorm | None,
    head: M | None,
    rows: int,
    *,
    packs: bool = True,
) -> list[Prologue[M]]:
    """Return for each half the part of the next prologue that it may do.

    Args:
        plans: of consecutive halves; None for one that runs its module's own pass.
        joins: whether the launches of each are joined.
        last: the last norm, after the last half, or None.
        head: the last norm and the head as one matmul, for which the last half may pack its results, or None.
        rows: rows of the pass.
        packs: whether launches may pack the input of the next half.
    """
    found: list[Prologue[M]] = []
    for index in reversed(range(len(plans))):
        plan, final = plans[index], index + 1 == len(plans)
        following = None if final else plans[index + 1]
        both = packs and joins[index] and (final or joins[index + 1])
        to = head if final else None
        if following is not None:
            to = following.chained_first(rows)
        if both and plan is not None and to is not None and plan.chains_to(to, rows):
            found.append(Prologue(matmul=to))
        elif final:
            found.append(Prologue(last))
        elif following is None or following.input_norm is None or found[-1].chained is not None:
            found.append(Prologue())  # the first matmul of a chain norms its input
        else:
            found.append(Prologue(following.input_norm, following.first_matmul if both else None))
    return found[::-1]
