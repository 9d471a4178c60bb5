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

    Formats, bit widths, inner sizes and `compute` may differ from matrix to matrix. A row's result is bitwise that of
    one expert after the other (`QuantMatrix.matmul` and `gated_activation`), added in the order of the row's choice. It
    depends neither on the other rows nor on the number of threads.

    Attributes: device, dtype (of activations), hidden, joins_shared (whether it holds a shared expert).
    """

    def __init__(self, experts: Sequence[Expert], activation: ActivationKind, shared: Expert | None = None) -> None:
        """`shared`: an expert that every row takes besides those that it chooses.

        Raises ShapeError (no experts, or sizes that do not fit) and UnsupportedError (a matrix that is not on the CPU).
        """
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

    def shares(self, rows: int, chosen: int) -> bool:
        """Always: one call is faster at any number of rows."""
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
    ) -> Tensor:
        """Return residual + (sum over c of weights[:, c] * expert ids[:, c] of h, in that order, + the shared expert).

        h, shared, residual and out: [T, hidden] float32, contiguous; out may be residual. weights float32 and ids int64
        [T, chosen]. shared: the shared expert's result; None for that of the held one, if any. shared_weights: float32
        [T] or [T, 1], its factors; None for ones. Raises ShapeError (also for the number of an expert that does not
        exist), DTypeError and UnsupportedError (a tensor on a GPU).
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
        if residual is not None and residual is not out:
            out.copy_(residual)
        self._native.run(
            h.clone() if h.data_ptr() == out.data_ptr() else h,
            ids.contiguous(),
            weights.contiguous(),
            out,
            add=residual is not None,
            shared=shared,
            shared_weights=shared_weights,
        )
        return out


def _natives(parts: Expert) -> list[_native.Matrix]:
    return [matrix._native for matrix in parts]
