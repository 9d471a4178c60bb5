"""Cache pages on a GPU; `kv` calls these functions for pages on a GPU.

Nothing is read back from the GPU. Slots out of range, which the CPU rejects, are not stored and load as zeros; with
EXL_CUDA_CHECKS=1 they are rejected as on the CPU, outside captures (`index_checks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _native
from .._check import require_gpu_head_dim, require_shape
from ..cuda_ops import check_operand, launch_on
from ..errors import DTypeError
from ..index_checks import check_slots, checks_enabled

if TYPE_CHECKING:
    from . import KVPages

__all__ = ["load_kv", "one_device", "store_kv"]


def store_kv(pages: KVPages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Implement `kv.store_kv` on a GPU: k, v [T, H, D] of one float type; codes bitwise identical to the CPU's."""
    shape = (slots.shape[0], pages.heads, pages.head_dim)
    for name, tensor in (("k", k), ("v", v)):
        require_shape(f"store_kv: {name}", tensor, shape)
    k, v, slots = k.contiguous(), v.contiguous(), slots.contiguous()
    check_operand("store_kv: k", k)
    check_operand("store_kv: v", v, k)
    if v.dtype != k.dtype:
        raise DTypeError(f"store_kv: k is {k.dtype}, v is {v.dtype}; expected one type")
    one_device("store_kv", pages, k, slots)
    if checks_enabled():
        check_slots("store_kv", pages.key, slots)
    if slots.numel():
        _native.cuda_kv_transfer(pages.native_cuda(), k=k, v=v, slots=slots, load=False, launch=launch_on(k))


def load_kv(pages: KVPages, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Implement `kv.load_kv` on a GPU: float32 [T, H, D] on the pages' device."""
    one_device("load_kv", pages, slots)
    if checks_enabled():
        check_slots("load_kv", pages.key, slots)
    shape = (slots.shape[0], pages.heads, pages.head_dim)
    k, v = (torch.empty(shape, dtype=torch.float32, device=pages.device) for _ in range(2))
    if slots.numel():
        _native.cuda_kv_transfer(
            pages.native_cuda(), k=k, v=v, slots=slots.contiguous(), load=True, launch=launch_on(k)
        )
    return k, v


def one_device(what: str, pages: KVPages, *tensors: Tensor | None) -> None:
    """Raise DTypeError unless all tensors are on the GPU of the pages; ShapeError for their heads' dimension."""
    for tensor in tensors:
        if tensor is not None and tensor.device != pages.device:
            raise DTypeError(f"{what}: a tensor is on {tensor.device}, the pages are on {pages.device}; use one device")
    require_gpu_head_dim(what, pages.head_dim)
