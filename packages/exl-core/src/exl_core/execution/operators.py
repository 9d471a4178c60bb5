"""The operators of a half's steps: separate matmuls, or joined launches, which add the adapters of the step.

Results are bitwise identical, but for residual sums that torch's matmul rounds once (`Operators.last`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from exl_kernels.fused import add_post_norm, add_rms_norm, layer_norm_packed
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaQuantMatrix
from exl_kernels.linear.fused import Packed
from exl_kernels.linear.matmul_input import MatmulInput
from exl_kernels.norm import rms_norm

from ..layers.norm import layer_of
from .adapted import adapters_of
from .batch import Step
from .half import Features, HalfInput, JoinedHalf, NextPrologue, PackedInput, PendingMatmul, input_norm
from .half_launches import LastLaunch, NormLaunch

__all__ = ["APART", "JOINED", "JoinedOperators", "Operators"]


class Operators:
    """How the matmuls of a half run: here one by one, or all first ones at once where that is faster."""

    def first(self, half: JoinedHalf, x: Tensor, h: HalfInput, step: Step) -> Tensor | PendingMatmul | Iterable[Tensor]:
        """Norm x, unless h is that, and multiply by the first matrices.

        Returns the results side by side, [T, outputs], with the activation that `half.activation` names; or those of
        each matrix, one after the other.
        """
        h, first = half.normed(x, h), half.first_normed
        if first.pays_apart(rows := h.shape[0], invariant=step.invariant):
            return first(h, h.new_empty(rows, first.out_features))
        return (linear.quant.matmul(h, invariant=step.invariant) for linear in half.about.first)

    def attention(self, half: JoinedHalf, x: Tensor, h: HalfInput, step: Step) -> Tensor | None:
        """Run norm, q, k, v and attention of all tokens as the steps of every layer of this kind.

        Returns [T, heads * head_dim], or None where the half itself runs attention after `first`.
        """
        return None

    def room(self, half: JoinedHalf, rows: int, step: Step) -> MatmulInput | None:
        """Return where attention may pack the input of the last matmul, or None."""
        return None

    def last(
        self, half: JoinedHalf, x: Tensor, y: Features, h: HalfInput, next_prologue: NextPrologue, step: Step
    ) -> HalfInput:
        """Compute x += post(y @ last), in place; h: memory that may be used. Returns the work done for the next half.

        Where torch's matmul can add x, the sum is rounded once.
        """
        assert isinstance(y, Tensor), "the features of `first`"
        about, norm, matrix = half.about, next_prologue.norm, half.about.last.quant
        out = h if isinstance(h, Tensor) else None
        launch = half.plan.last_launch(x.shape[0], next_prologue, joined=False, invariant=step.invariant)
        if launch is LastLaunch.MATMUL:
            assert isinstance(matrix, CudaQuantMatrix), "`adds_at_once`"
            self.add(matrix, y, x)
            return None if norm is None else rms_norm(x, norm.loaded_weight, norm.eps, out=out)
        y = self.multiplied(matrix, y, step)
        if launch is LastLaunch.SUM_AND_NORM:
            assert norm is not None
            y = y if about.post is None else about.post.apply(y.to(x.dtype))
            return add_rms_norm(x, y, norm.loaded_weight, norm.eps, out=out)
        normed = half.finish(x, y, norm, out)
        return norm.forward(x) if launch is LastLaunch.SUM and norm is not None else normed

    def add(self, matrix: CudaQuantMatrix, y: Tensor, x: Tensor) -> None:
        """Compute x += y @ matrix in place by one matmul of torch."""
        matrix.add_matmul(y, x)

    def multiplied(self, matrix: QuantMatrix, y: Tensor, step: Step) -> Tensor:
        """Return y @ matrix."""
        return matrix.matmul(y, invariant=step.invariant)


class JoinedOperators(Operators):
    """Matmuls with their norm, activation and residual, each of which may pack the input of the next one."""

    def first(self, half: JoinedHalf, x: Tensor, h: HalfInput, step: Step) -> Tensor | PendingMatmul | Iterable[Tensor]:
        """Norm and multiply; see `Operators.first`. Without adapters the matmul is left to whoever needs its result."""
        adapters = adapters_of(step, half.about.first)
        if adapters is None:
            return self._pending(half, x, h)
        assert not isinstance(h, PackedInput), "steps with adapters pack no input"
        first = half.plan.first_adapted(x.shape[0], normed=h is not None)
        return adapters.first(first, half.first_bare, half.normed(x, h) if first is half.first_normed else x)

    def _pending(self, half: JoinedHalf, x: Tensor, h: HalfInput) -> PendingMatmul:
        """Return the first matmul: with its norm, if no other launch has computed that."""
        if isinstance(h, PackedInput):
            return PendingMatmul(h.matmul, h.packed, x)
        rows = x.shape[0]
        launch = NormLaunch.NONE if h is not None else half.plan.norm_launch(rows, joined=True)
        if launch is NormLaunch.MATMUL:
            return PendingMatmul(half.plan.first_of_unnormed(rows), x, x)
        if launch is NormLaunch.PACKING:
            norm, given = layer_of(half.about.norm), half.first_normed.input_of(rows)
            assert norm is not None
            assert given is not None
            scratch = layer_norm_packed(x, norm.loaded_weight, norm.bias, norm.eps, given)
            return PendingMatmul(half.first_normed, Packed(scratch, rows, by_matmul=False), x)
        return PendingMatmul(half.first_normed, half.normed(x, h), x)

    def room(self, half: JoinedHalf, rows: int, step: Step) -> MatmulInput | None:
        """Return the input of the last matmul, if it can be packed and no adapter reads it."""
        packs = step.decodes and adapters_of(step, (half.about.last,)) is None
        return half.last.input_of(rows) if packs else None

    def last(
        self, half: JoinedHalf, x: Tensor, y: Features, h: HalfInput, next_prologue: NextPrologue, step: Step
    ) -> HalfInput:
        """Multiply and add; see `Operators.last`."""
        last, (out, residual) = half.last, half.result(x)
        adapters = adapters_of(step, (half.about.last,))
        if next_prologue.chained is not None:
            given = y.matmul.chained(y.input, following=last) if isinstance(y, PendingMatmul) else y
            assert given is not None
            packed = last.chained(given, out, residual, next_prologue.chained)
            assert packed is not None
            return PackedInput(next_prologue.chained, packed)
        if adapters is not None:
            assert not isinstance(y, Packed), "`room` leaves the input to the adapters"
            adapters.last(last, y.now() if isinstance(y, PendingMatmul) else y, out, residual)
        elif isinstance(y, PendingMatmul):
            y.matmul.then(last, y.input, out, residual)
        elif isinstance(y, Packed):
            last.chained(y, out, residual)
        else:
            last(y, out, residual)
        return self._run_next_prologue(half, x, out, h, next_prologue, step)

    def _run_next_prologue(
        self, half: JoinedHalf, x: Tensor, y: Tensor, h: HalfInput, next_prologue: NextPrologue, step: Step
    ) -> HalfInput:
        """Do the work after the last matmul, and pack the normed x for the next matmul where the same launch can."""
        into, norm, rows = next_prologue.matmul, next_prologue.norm, x.shape[0]
        launch = half.plan.last_launch(rows, next_prologue, joined=True, invariant=step.invariant)
        if launch is not LastLaunch.PACKING_POST_NORM:
            return half.finish(x, y, norm, h)
        assert into is not None
        scratch = add_post_norm(x, y, input_norm(half.post_rms), input_norm(norm), into=into.input_of(rows))
        assert scratch is not None
        return PackedInput(into, Packed(scratch, rows, by_matmul=False))


APART, JOINED = Operators(), JoinedOperators()
