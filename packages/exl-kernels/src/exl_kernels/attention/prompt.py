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
from .cuda import AttentionOptions, AttentionTables, Rotation, zeros_of

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
        tables: block table, and row and position of each token, as for `paged_attention`; without a mask.
        slots: as for `store_kv`.
        rotation: of each token, or None.
        options: scale, window and softcap, as `attention_options` returns them.
        out: as for `paged_attention`.

    Raises:
        ShapeError, DTypeError: an operand does not fit.
    """

    def __init__(
        self,
        pages: KVPages,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        tables: AttentionTables,
        slots: Tensor,
        rotation: Rotation | None,
        options: AttentionOptions,
        out: Tensor | None = None,
    ) -> None:
        places = (tables.block_table, tables.rows, tables.positions)
        _check(q, pages, *places, options.window, options.softcap, None)
        for name, t in (("k", k), ("v", v)):
            require_shape(f"PromptAttention: {name}", t, (q.shape[0], pages.heads, pages.head_dim))
            require_dtype(f"PromptAttention: {name}", t, q.dtype)
            if not t.is_contiguous():
                raise ShapeError(f"PromptAttention: {name} is not contiguous (strides {t.stride()})")
        self.out = require_out("PromptAttention", out, q)
        self._q, self._k, self._v, self._slots, self._rotation = q, k, v, slots, rotation
        self._options, self._places = options, (places[0].contiguous(), places[1].contiguous(), places[2].contiguous())
        self._max_keys = tables.max_keys
        if not q.is_cuda:
            return
        turns = () if rotation is None else (rotation.cos, rotation.sin, rotation.positions)
        one_device("PromptAttention", pages, q, k, v, *self._places, slots, *turns)
        self._stride = q.shape[1] * q.shape[2]
        self._seen = AttentionTables(
            self._places[0], rows=self._places[1], positions=self._places[2], max_keys=self._max_keys
        )
        self._new_keys: _native.NewKeys | None = None
        if rotation is not None:
            stride = k.shape[1] * k.shape[2]
            try:
                self._new_keys = _native.NewKeys(
                    key=k.view(-1), value=v.view(-1), stride=stride, rotation=rotation, slots=slots, early=True
                )
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
                rope_store(pages, q, self._k, self._v, rotation=self._rotation, slots=self._slots)
            options = self._options
            return paged_attention(
                q,
                pages,
                *self._places,
                scale=options.scale,
                window=options.window,
                softcap=options.softcap,
                max_keys=self._max_keys,
                out=out,
            )
        if not q.shape[0]:
            return out
        if checks_enabled():
            check_slots("PromptAttention", pages.key, self._slots)
            check_tables("PromptAttention", pages.key, *self._places, self._options.window)
        native, stream = pages.native_cuda(), stream_of(out)
        launch = launch_of(stream)
        try:
            if self._new_keys is None:
                _native.cuda_kv_transfer(native, k=self._k, v=self._v, slots=self._slots, load=False, launch=launch)
            else:
                _native.cuda_rope_store(
                    native, q, q_stride=self._stride, q_heads=q.shape[1], new_keys=self._new_keys, launch=launch
                )
            call = native.attention(
                q, q_stride=self._stride, tables=self._seen, options=self._options, out=out, launch=launch
            )
        except ValueError as error:
            raise ShapeError(f"PromptAttention: {error}") from None
        floats, count = call.partial_floats, call.ticket_counters
        # Not kept: the next half of a layer needs the most memory, and no workspace.
        partials = torch.empty(floats, dtype=torch.float32, device=out.device) if floats else None
        call.run(partials, zeros_of(out.device, stream, count) if count else None)
        return out
