"""Attention of a prompt in the same tensors in every layer: operands are checked and made native once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _native
from .._check import require_dtype, require_out, require_shape
from ..cuda_ops import stream_of
from ..device import launch_of
from ..errors import DTypeError, ShapeError
from ..fused import rope_store
from ..index_checks import check_slots, check_tables, checks_enabled
from ..kv import store_kv
from ..kv.cuda import one_device
from . import _check, paged_attention
from .cuda import attention_options, zeros_of

if TYPE_CHECKING:
    from ..kv import KVPages

__all__ = ["PromptAttention"]


class PromptAttention:
    """Rotate q and k, store k and v, and attend with q: `rope_store`, then `paged_attention`, bitwise identical.

    The object serves layers whose pages have one shape. Each call overwrites `out`, and q and k with their rotated
    forms. As `rope_store`, the kernel reads slots, cos, sin and rotary positions before the preceding launches end.

    Args:
        pages: keys and values of one of the layers.
        q: [T, Hq, D], contiguous; k, v: [T, H, D], likewise.
        block_table: as for `paged_attention`; so are rows, positions, scale, window, softcap, max_keys and out.
        slots: as for `store_kv`.
        rotation: (cos, sin, positions) as for `apply_rope`, or None: no rotation.
        interleaved: as for `apply_rope`.

    Raises:
        ShapeError, DTypeError: an operand does not fit.
    """

    def __init__(
        self,
        pages: KVPages,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_table: Tensor,
        rows: Tensor,
        positions: Tensor,
        slots: Tensor,
        rotation: tuple[Tensor, Tensor, Tensor] | None,
        *,
        interleaved: bool = False,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        max_keys: int | None = None,
        out: Tensor | None = None,
    ) -> None:
        _check(q, pages, block_table, rows, positions, window, softcap, None)
        for name, t in (("k", k), ("v", v)):
            require_shape(f"PromptAttention: {name}", t, (q.shape[0], pages.heads, pages.head_dim))
            require_dtype(f"PromptAttention: {name}", t, q.dtype)
            if not t.is_contiguous():
                raise ShapeError(f"PromptAttention: {name} is not contiguous (strides {t.stride()})")
        self.out = require_out("PromptAttention", out, q)
        self._q, self._k, self._v, self._slots, self._rotation = q, k, v, slots, rotation
        self._interleaved, self._scale, self._window, self._softcap = interleaved, scale, window, softcap
        self._tables, self._max_keys = (block_table.contiguous(), rows.contiguous(), positions.contiguous()), max_keys
        if not q.is_cuda:
            return
        one_device("PromptAttention", pages, q, k, v, *self._tables, slots, *(rotation or ()))
        self._stride = q.shape[1] * q.shape[2]
        self._options = attention_options(scale, window, softcap)
        self._seen = _native.AttentionTables(*self._tables, None, max_keys)
        self._new_keys: _native.NewKeys | None = None
        if rotation is not None:
            try:
                native = _native.Rotation(*rotation, interleaved)
                stride = k.shape[1] * k.shape[2]
                self._new_keys = _native.NewKeys(k.view(-1), v.view(-1), stride, native, slots, early=True)
            except ValueError as error:
                raise ShapeError(f"PromptAttention: {error}") from None

    def __call__(self, pages: KVPages) -> Tensor:
        """Return attention [T, Hq, D] over the pages of a layer, in `out`.

        Raises:
            ShapeError, DTypeError: the pages have another shape, or another device, than those of `__init__`.
        """
        q, out = self._q, self.out
        if pages.device != out.device:
            raise DTypeError(f"PromptAttention: the pages are on {pages.device}, q is on {out.device}; use one device")
        if not q.is_cuda:
            if self._rotation is None:
                store_kv(pages, self._k, self._v, self._slots)
            else:
                cos, sin, turns = self._rotation
                rope_store(pages, q, self._k, self._v, cos, sin, turns, self._slots, interleaved=self._interleaved)
            return paged_attention(
                q,
                pages,
                *self._tables,
                scale=self._scale,
                window=self._window,
                softcap=self._softcap,
                max_keys=self._max_keys,
                out=out,
            )
        if not q.shape[0]:
            return out
        if checks_enabled():
            check_slots("PromptAttention", pages.key, self._slots)
            check_tables("PromptAttention", pages.key, *self._tables, self._window)
        native, stream = pages.native_cuda(), stream_of(out)
        launch = launch_of(stream)
        try:
            if self._new_keys is None:
                _native.cuda_kv_transfer(native, self._k, self._v, self._slots, False, launch)
            else:
                _native.cuda_rope_store(native, q, self._stride, q.shape[1], self._new_keys, launch)
            call = native.attention(q, self._stride, self._seen, self._options, out, launch)
        except ValueError as error:
            raise ShapeError(f"PromptAttention: {error}") from None
        floats, count = call.workspace
        # Not kept: the next half of a layer needs the most memory, and no workspace.
        partials = torch.empty(floats, dtype=torch.float32, device=out.device) if floats else None
        call.run(partials, zeros_of(out.device, stream, count) if count else None)
        return out
