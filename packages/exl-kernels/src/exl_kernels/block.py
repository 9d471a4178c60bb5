"""Whole sub-layers of a decoder in one call, on the CPU: the same kernels in the same order, hence the same bits.

What a block computes is the composition of the doors beside it (`norm`, `linear`, `rope`, `kv`, `attention` and so on);
calling those one by one is its twin. It saves the trips through Python, which for one token cost as much as the small
kernels themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from ._check import require_cpu, require_dtype
from .activation import ActivationKind
from .errors import ShapeError
from .kv import KVPages
from .linear import QuantMatrix

__all__ = ["AttentionBlock", "GatedMlpBlock", "Tokens"]


class Tokens:
    """Where the tokens of one step lie and what they see: made once, used by every layer.

    rows, positions int32 [T]; slots, rope_positions int64 [T]; block_table int32 [B, max_pages]; cos, sin float32
    [S, R/2]; key_mask float32 [B, width] or None: as `paged_attention`, `store_kv` and `apply_rope` take them. The
    tensors must be contiguous and stay unchanged while this object is used. Raises ShapeError, DTypeError.
    """

    __slots__ = ("_native", "count")

    def __init__(
        self,
        rows: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_table: Tensor,
        rope_positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_mask: Tensor | None = None,
        *,
        interleaved: bool = False,
    ) -> None:
        require_cpu("Tokens", rows, positions, slots, block_table, rope_positions, cos, sin, key_mask)
        for name, tensor, dtype in (
            ("rows", rows, torch.int32),
            ("positions", positions, torch.int32),
            ("slots", slots, torch.int64),
            ("block_table", block_table, torch.int32),
            ("rope_positions", rope_positions, torch.int64),
            ("cos", cos, torch.float32),
            ("sin", sin, torch.float32),
        ):
            require_dtype(f"Tokens: {name}", tensor, dtype)
        if key_mask is not None:
            require_dtype("Tokens: key_mask", key_mask, torch.float32)
        self.count = rows.numel()
        self._native = _native.Tokens(
            rows, positions, slots, block_table, rope_positions, cos, sin, key_mask, interleaved
        )


class AttentionBlock:
    """x += o(attention(rope(q(h)), rope(k(h)), v(h))) with h = rms_norm(x); keys and values go into the pages.

    norm_weight: float32 [hidden] on the CPU. head_dim divides the outputs of q and of k; matrices carry no padding
    columns. Raises ShapeError when sizes do not fit.
    """

    __slots__ = ("_native", "hidden_size")

    def __init__(
        self,
        norm_weight: Tensor,
        eps: float,
        projections: tuple[QuantMatrix, QuantMatrix, QuantMatrix, QuantMatrix],
        *,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> None:
        self.hidden_size = _check_norm("AttentionBlock", norm_weight)
        matrices = [m._native for m in projections]
        self._native = _native.AttentionBlock(norm_weight, eps, matrices, head_dim, scale, window, softcap)

    def forward(self, x: Tensor, tokens: Tokens, pages: KVPages) -> Tensor:
        """x float32 [T, hidden], contiguous, changed in place and returned. Errors as the kernels inside."""
        _check_x("AttentionBlock", x, self.hidden_size)
        self._native.forward(x, tokens._native, pages.native())
        return x


class GatedMlpBlock:
    """x += down(activation(gate(h)) * up(h)) with h = rms_norm(x). Arguments and errors as `AttentionBlock`."""

    __slots__ = ("_native", "hidden_size")

    def __init__(
        self,
        norm_weight: Tensor,
        eps: float,
        projections: tuple[QuantMatrix, QuantMatrix, QuantMatrix],
        activation: ActivationKind,
    ) -> None:
        self.hidden_size = _check_norm("GatedMlpBlock", norm_weight)
        matrices = [m._native for m in projections]
        self._native = _native.GatedMlpBlock(norm_weight, eps, matrices, activation)

    def forward(self, x: Tensor) -> Tensor:
        """x float32 [T, hidden], contiguous, changed in place and returned."""
        _check_x("GatedMlpBlock", x, self.hidden_size)
        self._native.forward(x)
        return x


def _check_norm(what: str, weight: Tensor) -> int:
    require_cpu(f"{what}: norm_weight", weight)
    require_dtype(f"{what}: norm_weight", weight, torch.float32)
    if weight.dim() != 1 or not weight.numel():
        raise ShapeError(f"{what}: norm_weight {list(weight.shape)}, expected [hidden]")
    return weight.numel()


def _check_x(what: str, x: Tensor, hidden: int) -> None:
    require_cpu(f"{what}: x", x)
    require_dtype(f"{what}: x", x, torch.float32)
    if x.dim() != 2 or x.shape[1] != hidden or not x.is_contiguous():
        raise ShapeError(f"{what}: x {list(x.shape)}, expected contiguous [tokens, {hidden}]")
