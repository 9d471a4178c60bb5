"""Whole sub-layers of a decoder in one call on the CPU: the same kernels in the same order, bitwise identical.

A block computes the composition of the operators in `norm`, `linear`, `rope`, `kv` and `attention`; calling those one
by one is its twin. A block saves the calls through Python, which for one token cost as much as the small kernels
themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from ._check import require_cpu, require_dtype
from .activation import ActivationKind
from .errors import ShapeError
from .kv import KVPages
from .linear.matrix import QuantMatrix

__all__ = ["AttentionBlock", "BlockNorm", "MlpBlock", "Tokens"]


class Tokens:
    """Places and visible keys of the tokens of one step; made once, used by every layer.

    The tensors must be contiguous and stay unchanged while this object is used.

    Args:
        rows: int32 [T], row of each token in the block table.
        positions: int32 [T], as for `paged_attention`.
        slots: int64 [T], as for `store_kv`.
        block_table: int32 [B, max_pages], page numbers.
        rope_positions: int64 [T], rows of cos and sin.
        cos: float32 [S, R/2].
        sin: float32 [S, R/2].
        key_mask: float32 [B, width] or None, as for `paged_attention`.
        interleaved: RoPE pairs of neighbouring dimensions.

    Raises:
        ShapeError, DTypeError: an operand does not fit.
    """

    __slots__ = ("_native", "count")

    def __init__(
        self,
        *,
        rows: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_table: Tensor,
        rope_positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_mask: Tensor | None = None,
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
        tables = _native.AttentionTables(block_table, rows=rows, positions=positions, key_mask=key_mask)
        rotation = _native.Rotation(cos=cos, sin=sin, positions=rope_positions, interleaved=interleaved)
        self._native = _native.Tokens(tables, rotation, slots)


class BlockNorm:
    """A norm inside a block: RMS norm, or layer norm with or without bias.

    Args:
        weight: float32 on the CPU, [D], or [H, D] for one norm a head.
        eps: added to the mean square or variance.
        bias: like the weight, or None.
        layer: layer norm instead of RMS norm.

    Raises:
        ShapeError, DTypeError: an operand does not fit.
    """

    __slots__ = ("_native",)

    def __init__(self, weight: Tensor, eps: float, bias: Tensor | None = None, *, layer: bool = False) -> None:
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None:
                require_cpu(f"BlockNorm: {name}", tensor)
                require_dtype(f"BlockNorm: {name}", tensor, torch.float32)
                if tensor.dim() not in (1, 2):
                    raise ShapeError(f"BlockNorm: {name} {list(tensor.shape)}, expected [D] or [H, D]")
        self._native = _native.BlockNorm(weight, bias, eps, layer)


class AttentionBlock:
    """x += post(o(attention(rope(q_norm(q(h))), rope(k_norm(k(h))), v(h)))) with h = norm(x); each norm is optional.

    Keys and values are stored in the pages.

    Args:
        norm: norm of the input, or None.
        projections: q, k, v and o, without padding columns.
        head_dim: elements of a head; divides the outputs of q and of k.
        scale: factor of the attention logits.
        window: sliding window in tokens; 0 is off.
        softcap: limit of the attention logits; 0 is off.
        clip: q, k and v are clamped to +- clip if clip > 0.
        q_norm: norm per head, or over all heads.
        k_norm: norm per head, or over all heads.
        post: norm of the result, or None.

    Raises:
        ShapeError: sizes do not fit.
    """

    __slots__ = ("_native", "hidden_size")

    def __init__(
        self,
        norm: BlockNorm | None,
        projections: tuple[QuantMatrix, QuantMatrix, QuantMatrix, QuantMatrix],
        *,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        clip: float = 0.0,
        q_norm: BlockNorm | None = None,
        k_norm: BlockNorm | None = None,
        post: BlockNorm | None = None,
    ) -> None:
        self.hidden_size = projections[0].in_features
        norms = [_maybe_native(n) for n in (norm, q_norm, k_norm, post)]
        matrices = [m._native for m in projections]
        self._native = _native.AttentionBlock(
            norms, matrices, head_dim=head_dim, scale=scale, window=window, softcap=softcap, clip=clip
        )

    def forward(self, x: Tensor, tokens: Tokens, pages: KVPages) -> Tensor:
        """Run the block on x float32 [T, hidden], contiguous, in place, and return x. Errors as the operators."""
        _check_x("AttentionBlock", x, self.hidden_size)
        self._native.forward(x, tokens._native, pages.native())
        return x


class MlpBlock:
    """x += post(down(activation(gate(h)) * up(h))) with h = norm(x); without a gate, down(activation(up(h))).

    Args:
        norm: norm of the input, or None.
        gate: gate projection, or None.
        projections: up and down.
        activation: kind of activation.
        post: norm of the result, or None.

    Raises:
        ShapeError: sizes do not fit.
    """

    __slots__ = ("_native", "hidden_size")

    def __init__(
        self,
        norm: BlockNorm | None,
        gate: QuantMatrix | None,
        projections: tuple[QuantMatrix, QuantMatrix],
        activation: ActivationKind,
        *,
        post: BlockNorm | None = None,
    ) -> None:
        self.hidden_size = projections[0].in_features
        norms = [_maybe_native(n) for n in (norm, post)]
        matrices = [m._native for m in projections]
        self._native = _native.MlpBlock(norms, None if gate is None else gate._native, matrices, activation)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block on x float32 [T, hidden], contiguous, in place, and return x."""
        _check_x("MlpBlock", x, self.hidden_size)
        self._native.forward(x)
        return x


def _maybe_native(norm: BlockNorm | None) -> _native.BlockNorm | None:
    return None if norm is None else norm._native


def _check_x(what: str, x: Tensor, hidden: int) -> None:
    require_cpu(f"{what}: x", x)
    require_dtype(f"{what}: x", x, torch.float32)
    if x.dim() != 2 or x.shape[1] != hidden or not x.is_contiguous():
        raise ShapeError(f"{what}: x {list(x.shape)}, expected contiguous [tokens, {hidden}]")
