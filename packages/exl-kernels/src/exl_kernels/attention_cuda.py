"""Paged keys, values and attention on a GPU; `kv` and `attention` come here when the pages are there.

Activations are float16, bfloat16 or float32; arithmetic is float32. Slots, rows, positions and page numbers live on the
GPU and are not read back: those out of range are skipped (a slot) or see no key (a row, a page), where the CPU raises.
A token's result does not depend on what else is in the call: keys are cut at fixed numbers and added in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cuda_ops import check_operand, stream_of
from .device import programmatic_launch
from .errors import DTypeError, ShapeError
from .kv import KVPages
from .reference import kv as _twin

__all__ = ["load_kv", "paged_attention", "store_kv"]

_SCRATCH_FLOATS = 16 << 20
"""Most scratch of one launch; more query tokens are taken in turns, which changes no bit."""


def store_kv(pages: KVPages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Encodes k, v [T, H, D] (one dtype) into slots int64 [T]; a slot outside the pages, such as -1, is skipped."""
    _check_index("store_kv: slots", slots, torch.int64, pages)
    shape = (slots.shape[0], pages.heads, pages.head_dim)
    for name, tensor in (("k", k), ("v", v)):
        check_operand(f"store_kv: {name}", tensor, pages.key)
        if tensor.shape != shape or tensor.dtype != k.dtype:
            raise ShapeError(f"store_kv: {name} is {tuple(tensor.shape)} {tensor.dtype}; expected {shape} {k.dtype}")
    pages.native().store(k, v, slots, stream_of(k), programmatic_launch())


def load_kv(pages: KVPages, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Decoded keys and values of slots int64 [T] as float32 [T, H, D]; -1 gives zeros. In torch operations."""
    _check_index("load_kv: slots", slots, torch.int64, pages)
    page, offset = slots.clamp(min=0) // pages.page_size, slots.clamp(min=0) % pages.page_size
    decoded = []
    for data, scales, bits in (
        (pages.key, pages.key_scales, pages.key_bits),
        (pages.value, pages.value_scales, pages.value_bits),
    ):
        stored = data[page, offset]
        if scales is not None:
            full = _twin.hadamard_decode(stored, scales[page, offset], bits)
        elif stored.dtype == torch.uint8:
            full = _twin.fp8_decode(stored)
        else:
            full = stored
        full = full[..., : pages.head_dim].float()
        decoded.append(torch.where((slots >= 0)[:, None, None], full, 0.0))
    return decoded[0], decoded[1]


def paged_attention(
    q: Tensor,
    pages: KVPages,
    block_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    key_mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`attention.paged_attention` for q [T, Hq, D] on a GPU; head_dim a multiple of 8 up to 256."""
    what = "paged_attention"
    check_operand(f"{what}: q", q, pages.key)
    for name, tensor in (("block_table", block_table), ("rows", rows), ("positions", positions)):
        _check_index(f"{what}: {name}", tensor, torch.int32, pages)
    if q.dim() != 3 or q.shape[2] != pages.head_dim or q.shape[1] % pages.heads:
        raise ShapeError(
            f"{what}: q {tuple(q.shape)}, expected [tokens, heads, {pages.head_dim}], heads a multiple of {pages.heads}"
        )
    if block_table.dim() != 2 or rows.shape != q.shape[:1] or positions.shape != q.shape[:1]:
        raise ShapeError(
            f"{what}: block_table {tuple(block_table.shape)}, rows {tuple(rows.shape)}, positions "
            f"{tuple(positions.shape)}; expected [batch, max_pages], ({q.shape[0]},) and ({q.shape[0]},)"
        )
    if window < 0 or softcap < 0:
        raise ShapeError(f"{what}: window {window}, softcap {softcap}; expected 0 (off) or more")
    if key_mask is not None:
        check_operand(f"{what}: key_mask", key_mask, q)
        if key_mask.dtype != torch.float32 or key_mask.dim() != 2 or key_mask.shape[0] != block_table.shape[0]:
            raise ShapeError(
                f"{what}: key_mask {tuple(key_mask.shape)} {key_mask.dtype}, expected float32 [batch, keys]"
            )
    if out is None:
        out = torch.empty_like(q)
    elif out.shape != q.shape or out.dtype != q.dtype or out.device != q.device or not out.is_contiguous():
        raise ShapeError(f"{what}: out {tuple(out.shape)} {out.dtype}, expected contiguous {tuple(q.shape)} {q.dtype}")
    native, tokens = pages.native(), q.shape[0]
    per_token: int = native.scratch_floats(q.shape[1], block_table.shape[1])
    step = max(1, min(tokens, _SCRATCH_FLOATS // per_token))
    scratch = torch.empty(step * per_token, dtype=torch.float32, device=q.device)
    stream = stream_of(q)
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        native.attend(
            q[part],
            block_table,
            rows[part],
            positions[part],
            key_mask,
            scratch,
            out[part],
            scale,
            window,
            softcap,
            stream,
            programmatic_launch(),
        )
    return out


def _check_index(what: str, tensor: Tensor, dtype: torch.dtype, pages: KVPages) -> None:
    if tensor.dtype != dtype or tensor.device != pages.device:
        raise DTypeError(f"{what} is {tensor.dtype} on {tensor.device}; expected {dtype} on {pages.device}")
    if not tensor.is_contiguous():
        raise ShapeError(f"{what} is not contiguous: call .contiguous()")
