"""The operators of a half's steps: separate matmuls, or joined launches, which add the adapters of the step.

Results are bitwise identical, but for residual sums that torch's matmul rounds once (`Operators.last`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from exl_kernels.activation import activation as activate
from exl_kernels.attention.cuda import MatmulInput
from exl_kernels.fused import add_post_norm, add_rms_norm, layer_norm_packed
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaQuantMatrix
from exl_kernels.linear.fused import Packed
from exl_kernels.norm import rms_norm

from ..layers.norm import layer_of
from .adapted import adapters_of
from .batch import Step
from .half import Features, JoinedHalf, NextPrologue, Normed, PackedInput, PendingMatmul, input_norm

__all__ = ["APART", "JOINED", "Joined", "Operators"]


class Operators:
    """How the matmuls of a half run: here one by one, or all first ones at once where that is faster."""

    def first(self, half: JoinedHalf, x: Tensor, h: Normed, step: Step) -> Tensor | PendingMatmul | Iterable[Tensor]:
        """Norm x, unless h is that, and multiply by the first matrices.

        Returns the results side by side, [T, outputs], with the activation that `half.activation` names; or those of
        each matrix, one after the other.
        """
        h, first = half.normed(x, h), half.first_normed
        if first.pays_apart(rows := h.shape[0]):
            return first(h, h.new_empty(rows, first.out_features))
        return (linear.quant.matmul(h) for linear in half.about.first)

    def attention(self, half: JoinedHalf, x: Tensor, h: Normed, step: Step) -> Tensor | None:
        """Run norm, q, k, v and attention of all tokens as the steps of every layer of this kind.

        Returns [T, heads * head_dim], or None where the half itself runs attention after `first`.
        """
        return None

    def room(self, half: JoinedHalf, rows: int, step: Step) -> MatmulInput | None:
        """Return where attention may pack the input of the last matmul, or None."""
        return None

    def last(
        self, half: JoinedHalf, x: Tensor, y: Features, h: Normed, next_prologue: NextPrologue, step: Step
    ) -> Normed:
        """Compute x += post(y @ last), in place; h: memory that may be used. Returns the work done for the next half.

        Where torch's matmul can add x, the sum is rounded once.
        """
        assert isinstance(y, Tensor), "the features of `first`"
        about, norm, matrix = half.about, next_prologue.norm, half.about.last.quant
        out = h if isinstance(h, Tensor) else None
        plain = about.post is None and not about.float_residual
        if plain and self.added(matrix, y, x):
            return None if norm is None else rms_norm(x, norm.loaded_weight, norm.eps, out=out)
        y = self.multiplied(matrix, y)
        if half.adds_apart or norm is None:
            return half.finish(x, y, norm, out)
        y = y if about.post is None else about.post.apply(y.to(x.dtype))
        if about.float_residual:
            return norm.forward(x.add_(y))
        return add_rms_norm(x, y, norm.loaded_weight, norm.eps, out=out)

    def added(self, matrix: QuantMatrix, y: Tensor, x: Tensor) -> bool:
        """Compute x += y @ matrix in place, if one matmul of torch does; returns whether it does."""
        if not isinstance(matrix, CudaQuantMatrix) or not matrix.adds_at_once(y, x):
            return False
        matrix.add_matmul(y, x)
        return True

    def multiplied(self, matrix: QuantMatrix, y: Tensor) -> Tensor:
        """Return y @ matrix."""
        return matrix.matmul(y)


class Joined(Operators):
    """Matmuls with their norm, activation and residual, each of which may pack the input of the next one."""

    def first(self, half: JoinedHalf, x: Tensor, h: Normed, step: Step) -> Tensor | PendingMatmul | Iterable[Tensor]:
        """Norm and multiply; see `Operators.first`. Without adapters the matmul is left to whoever needs its result."""
        adapters = adapters_of(step, half.about.first)
        if adapters is None:
            return self._pending(half, x, h)
        assert not isinstance(h, PackedInput), "steps with adapters pack no input"
        norms = h is None and half.own_norm is not None
        y, middle = adapters.first(
            half.first_bare, x if norms else half.normed(x, h), input_norm(half.own_norm) if norms else None
        )
        if len(half.about.first) > 1:
            return adapters.expand(y, middle, activation=half.activation)
        y = adapters.expand(y, middle)
        return y if half.activation is None else activate(y, half.activation, out=y)

    def _pending(self, half: JoinedHalf, x: Tensor, h: Normed) -> PendingMatmul:
        """Return the first matmul: with its norm, if no other launch has computed that."""
        if isinstance(h, PackedInput):
            return PendingMatmul(h.matmul, h.packed, x)
        own = half.plan.first_of_unnormed(x.shape[0])
        if h is None and own is not half.first_normed:
            return PendingMatmul(own, x, x)
        norm = layer_of(half.about.norm)
        given = None
        if h is None and norm is not None and not half.about.float_residual:
            given = half.first_normed.input_of(x.shape[0])
        if norm is None or given is None:
            return PendingMatmul(half.first_normed, half.normed(x, h), x)
        # One launch computes the LayerNorm and packs it.
        scratch = layer_norm_packed(x, norm.loaded_weight, norm.bias, norm.eps, given)
        return PendingMatmul(half.first_normed, Packed(scratch, x.shape[0], by_matmul=False), x)

    def room(self, half: JoinedHalf, rows: int, step: Step) -> MatmulInput | None:
        """Return the input of the last matmul, if it can be packed and no adapter reads it."""
        packs = step.decodes and adapters_of(step, (half.about.last,)) is None
        return half.last.input_of(rows) if packs else None

    def last(
        self, half: JoinedHalf, x: Tensor, y: Features, h: Normed, next_prologue: NextPrologue, step: Step
    ) -> Normed:
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
        return self._run_next_prologue(half, x, out, h, next_prologue)

    def _run_next_prologue(
        self, half: JoinedHalf, x: Tensor, y: Tensor, h: Normed, next_prologue: NextPrologue
    ) -> Normed:
        """Do the work after the last matmul, and pack the normed x for the next matmul where the same launch can."""
        into, norm = next_prologue.matmul, next_prologue.norm
        given = None if into is None or not half.adds_apart else into.input_of(x.shape[0])
        if into is None or given is None:
            return half.finish(x, y, norm, h)
        scratch = add_post_norm(x, y, input_norm(half.post_rms), input_norm(norm), into=given)
        assert scratch is not None
        return PackedInput(into, Packed(scratch, x.shape[0], by_matmul=False))


APART, JOINED = Operators(), Joined()
