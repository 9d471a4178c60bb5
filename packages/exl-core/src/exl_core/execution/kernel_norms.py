"""The launches of a pass that only norm rows, for the report of kernels (`kernels.py`).

Most norms are part of a matmul's launches, or of attention's. Which half norms or packs the input of the next one is
the answer that executors launch (`prologues.py`), as are the launches that norm the input of a half and that end it
(`half_matmuls.HalfPlan`). tests/core/test_cuda_kernel_uses.py compares the result with the launches of whole models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from exl_kernels.linear.planned import ShapedMatmul
from exl_kernels.selection import NormOperation, Selection, norm_kernel

from ..layers import Norm
from ..layers.description import AttentionDescription, HalfDescription
from ..layers.norm import LayerNorm
from .half_launches import POST_NORMS, HeadNormLaunch, LastLaunch, NormLaunch, Prologue
from .half_matmuls import HalfPlan

__all__ = ["HalfRun", "NormLaunches"]


class HalfRun(NamedTuple):
    """How a half of a layer runs in a pass."""

    about: HalfDescription | None
    plan: HalfPlan[ShapedMatmul] | None
    """None: the module runs its own forward pass."""
    joins: bool
    routes_norm: bool
    """The launch of a router norms the hidden state."""


class NormLaunches:
    """The launches of a pass that only norm rows, in their order, by the kernel of each.

    Args:
        hidden: elements of the hidden state.
        rows: rows of the pass.
        tokens: tokens of each sequence.
        invariant: the pass asks for batch-invariant rows.
        adapted: adapters change all matrices of joined launches.
    """

    def __init__(
        self,
        hidden: int,
        rows: int,
        *,
        tokens: int,
        invariant: bool,
        adapted: bool,
    ) -> None:
        self._hidden, self._rows, self._tokens, self._invariant = hidden, rows, tokens, invariant
        self._adapted = adapted
        self._normed = False
        """The next half finds its input normed, or packed for the matmul that norms it."""

    def of(
        self, halves: Sequence[HalfRun], prologues: Sequence[Prologue[ShapedMatmul]], last: Norm | None
    ) -> Iterator[Selection]:
        """Yield the kernel of each launch.

        Args:
            halves: the halves of all layers.
            prologues: what each does for the next one.
            last: the last norm, or None.
        """
        self._normed = False
        for half, prologue in zip(halves, prologues, strict=True):
            if half.plan is None:
                yield from self._own_pass(half)
                continue
            yield from self._before_last(half.plan, half.joins)
            if half.plan.mlp is None:
                yield from self._end(half.plan, prologue, half.joins)
            else:
                yield from self._end(half.plan, Prologue(), half.joins)
                yield from self._end(half.plan.mlp, prologue, half.joins)
        if not self._normed and last is not None:
            floats = bool(halves) and halves[-1].about is not None and halves[-1].about.float_residual
            yield self._norm(last, floats=floats)

    def _own_pass(self, half: HalfRun) -> Iterator[Selection]:
        about, self._normed = half.about, False
        if about is None:
            return
        if about.norm is not None and not half.routes_norm:
            yield self._norm(about.norm, floats=about.float_residual)
        if isinstance(about, AttentionDescription):
            yield from self._norms_of_heads_apart(about)
        if about.post is not None:
            yield self._norm(about.post, floats=about.float_residual)

    def _before_last(self, plan: HalfPlan[ShapedMatmul], joins: bool) -> Iterator[Selection]:
        """Yield the launches that norm before the last matmul of a half."""
        norm, rows = plan.about.norm, self._rows
        launch = NormLaunch.NONE if self._normed else plan.norm_launch(rows, joined=joins, adapted=self._adapted)
        if launch is NormLaunch.PACKING:
            yield norm_kernel("layer", self._hidden, columns=plan.first_normed.input_columns(rows))
        elif launch is NormLaunch.OWN and norm is not None:
            yield self._norm(norm, floats=plan.about.float_residual)
        if isinstance(plan.about, AttentionDescription):
            yield from self._heads(plan.about, plan, joins)

    def _heads(self, a: AttentionDescription, plan: HalfPlan[ShapedMatmul], joins: bool) -> Iterator[Selection]:
        """Yield the launches that norm q and k: both, one each, or none where attention norms them."""
        together = joins or plan.first_normed.pays_apart(self._rows, invariant=self._invariant)
        launch = plan.head_norm_launch(self._tokens, together=together)
        if launch is HeadNormLaunch.PARTS:
            yield norm_kernel("rms parts", self._hidden)
        elif launch is HeadNormLaunch.OWN:
            yield from self._norms_of_heads_apart(a)

    def _norms_of_heads_apart(self, a: AttentionDescription) -> Iterator[Selection]:
        yield from (self._norm(norm, floats=False) for norm in (a.q_norm, a.k_norm) if norm is not None)

    def _end(self, plan: HalfPlan[ShapedMatmul], following: Prologue[ShapedMatmul], joins: bool) -> Iterator[Selection]:
        """Yield the launches that norm after the last matmul of a half."""
        launch = plan.last_launch(self._rows, following, joined=joins, invariant=self._invariant)
        about, norm = plan.about, following.norm
        self._normed = plan.norms_next(self._rows, following, joined=joins, invariant=self._invariant)
        if launch in POST_NORMS:
            into = following.matmul if launch is LastLaunch.PACKING_POST_NORM else None
            columns = None if into is None else into.input_columns(self._rows)
            yield norm_kernel("add post", self._hidden, float32=about.float_residual, columns=columns)
            return
        if launch in (LastLaunch.SUM, LastLaunch.SUM_AND_NORM) and about.post is not None:
            yield self._norm(about.post, floats=about.float_residual)
        if launch is LastLaunch.SUM_AND_NORM:
            yield norm_kernel("add rms", self._hidden)
        elif norm is not None and not joins:
            yield self._norm(norm, floats=about.float_residual)

    def _norm(self, norm: Norm, *, floats: bool) -> Selection:
        operation: NormOperation = "layer" if isinstance(norm, LayerNorm) else "rms"
        return norm_kernel(operation, norm.shapes[0][-1], float32=floats)
