"""Grouped experts on the CPU: all chosen experts of a call's rows in one native call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _native
from .._check import require_cpu, require_dtype, require_shape
from ..activation import ActivationKind
from ..errors import ShapeError, UnsupportedError
from ..linear.matrix import QuantMatrix

__all__ = ["CpuExperts"]

Expert = tuple[QuantMatrix, QuantMatrix, QuantMatrix]
"""gate, up and down."""


class CpuExperts:
    """The gated MLPs of a layer: expert(h) = down(act(gate(h)) * up(h)), each matrix EXL2, GPTQ or float.

    Formats, bit widths, inner sizes and `compute` may differ from matrix to matrix. A row's result is bitwise identical
    to that of one expert after the other (`QuantMatrix.matmul` and `gated_activation`), added in the order of the row's
    choice. It depends neither on the other rows nor on the number of threads.

    Args:
        experts: gate, up and down of each expert.
        activation: kind of activation.
        shared: an expert for every row, in addition to the chosen ones.

    Attributes:
        device: the CPU.
        dtype: dtype of activations, float32.
        hidden: hidden size.
        joins_shared: whether calls compute the shared expert.

    Raises:
        ShapeError: there are no experts, or sizes do not fit.
        UnsupportedError: a matrix is not on the CPU.
    """

    def __init__(self, experts: Sequence[Expert], activation: ActivationKind, shared: Expert | None = None) -> None:
        self.device, self.dtype = torch.device("cpu"), torch.float32
        for matrix in (matrix for parts in (*experts, *([] if shared is None else [shared])) for matrix in parts):
            if matrix.device.type != "cpu":
                raise UnsupportedError(
                    f"{matrix.name or 'a matrix of an expert'} is on {matrix.device}, not on the CPU"
                )
        held = [_natives(parts) for parts in experts]
        self._native = _native.Experts(held, None if shared is None else _natives(shared), activation)
        self.hidden: int = self._native.hidden
        self.joins_shared = shared is not None

    def shares(self, rows: int, chosen: int, invariant: bool | None) -> bool:
        """Return True: one call is faster for any `rows` and `chosen`, and on a CPU rows are always `invariant`."""
        return True

    def __call__(
        self,
        h: Tensor,
        weights: Tensor,
        ids: Tensor,
        *,
        shared: Tensor | None = None,
        shared_weights: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        invariant: bool | None = None,
    ) -> Tensor:
        """Compute residual + (sum over c of weights[:, c] * expert ids[:, c] of h, in that order, + the shared expert).

        Args:
            h: [T, hidden] float32, contiguous.
            weights: float32 [T, chosen].
            ids: int64 [T, chosen], expert numbers.
            shared: like h, the shared expert's result; None for that of `joins_shared`.
            shared_weights: float32 [T] or [T, 1], factors of the shared expert; None for ones.
            residual: like h, or None.
            out: like h; may share memory with the other arguments.
            invariant: not used: all rows are batch-invariant.

        Raises:
            ShapeError: shapes do not fit, or an expert does not exist.
            DTypeError: an element type does not fit.
            UnsupportedError: a tensor is on a GPU.
        """
        require_cpu("experts", h, weights, ids, shared, shared_weights, residual, out)
        rows = h.shape[0] if h.dim() == 2 else -1
        for name, tensor in (("h", h), ("shared", shared), ("residual", residual), ("out", out)):
            if tensor is not None:
                require_dtype(f"experts: {name}", tensor, torch.float32)
                require_shape(f"experts: {name}", tensor, (rows, self.hidden))
                if not tensor.is_contiguous():
                    raise ShapeError(f"experts: {name} is not contiguous: call .contiguous() first")
        require_dtype("experts: weights", weights, torch.float32)
        require_dtype("experts: ids", ids, torch.int64)
        chosen = ids.shape[-1] if ids.dim() == 2 else 0
        if chosen < 1:
            raise ShapeError(f"experts: ids {list(ids.shape)}, expected [{rows}, chosen] with at least one chosen")
        require_shape("experts: ids", ids, (rows, chosen))
        require_shape("experts: weights", weights, (rows, chosen))
        if shared_weights is not None:
            require_dtype("experts: shared_weights", shared_weights, torch.float32)
            require_shape("experts: shared_weights", shared_weights.reshape(-1), (rows,))
            shared_weights = shared_weights.contiguous()
        out = torch.empty_like(h) if out is None else out
        # The native call writes `out` while it reads the others.
        h = h.clone() if _overlaps(h, out) else h
        shared = shared.clone() if shared is not None and _overlaps(shared, out) else shared
        weights = weights.clone() if _overlaps(weights, out) else weights
        if shared_weights is not None and _overlaps(shared_weights, out):
            shared_weights = shared_weights.clone()
        if residual is not None and residual is not out:
            out.copy_(residual.clone() if _overlaps(residual, out) else residual)
        self._native.run(
            h,
            ids=ids.contiguous(),
            weights=weights.contiguous(),
            out=out,
            add=residual is not None,
            shared=shared,
            shared_weights=shared_weights,
        )
        return out


def _overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    begin, other = a.data_ptr(), b.data_ptr()
    return begin < other + b.numel() * b.element_size() and other < begin + a.numel() * a.element_size()


def _natives(parts: Expert) -> list[_native.Matrix]:
    return [matrix._native for matrix in parts]
