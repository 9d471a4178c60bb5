"""Twins of `linear` in plain numpy: the exact matmul in float64, the int8 matmul block by block. Slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .formats import exl2_scales, unpack_columns, unpack_rows

__all__ = ["Block", "exl2_blocks", "gptq_blocks", "matmul", "matmul_int8", "quantize_activations"]

Array = npt.NDArray[Any]
# A block: input features of up to 32 rows, code - zero point [rows, N], column scales [N] float32.
Block = tuple[Array, Array, Array]
BLOCK = 32
QUARTERS = 4  # of K, each summed from zero


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, prescale: float = 1.0) -> Tensor:
    """Compute (x @ W + bias) * prescale in float64; x [..., K], W [K, N] as `QuantMatrix.dequantize` returns it."""
    y = x.double() @ weight.double()
    return (y if bias is None else y + bias.double()) * prescale


def exl2_blocks(tensors: Mapping[str, Tensor]) -> Iterator[Block]:
    """Yield the blocks of 32 packed rows of an EXL2 matrix, in order."""
    words = tensors["q_weight"].numpy()
    scales = exl2_scales(tensors["q_scale"].numpy(), tensors["q_scale_max"].numpy()).astype(np.float32)
    table = tensors["q_groups"].numpy().view(np.uint16).astype(np.int64)
    perm = np.argsort(tensors["q_invperm"].numpy())
    ends = np.append(table[3::2], words.shape[0])
    row = 0
    for group, (bits, first, end) in enumerate(zip(table[0::2], table[1::2], ends, strict=True)):
        codes = unpack_columns(words[first:end], int(bits)) - (1 << (int(bits) - 1))
        for start in range(0, codes.shape[0], BLOCK):
            yield perm[row + start : row + start + BLOCK], codes[start : start + BLOCK], scales[group]
        row += codes.shape[0]


def gptq_blocks(tensors: Mapping[str, Tensor], bits: int, v2: bool, group_of: Array) -> Iterator[Block]:
    """Yield the blocks of a GPTQ matrix: rows by group, in file order within a group.

    group_of: [K], the group of each row. The last block of a group may be short.
    """
    codes = unpack_columns(tensors["qweight"].numpy(), bits)
    zeros = unpack_rows(tensors["qzeros"].numpy(), bits) + (0 if v2 else 1)
    scales = tensors["scales"].numpy().astype(np.float32)
    for group in range(zeros.shape[0]):
        rows = np.flatnonzero(group_of == group)
        for start in range(0, len(rows), BLOCK):
            part = rows[start : start + BLOCK]
            yield part, codes[part] - zeros[group], scales[group]


def quantize_activations(x: Array) -> tuple[Array, Array]:
    """Quantize one block of activations, float32 [T, rows], to int8 values and a float32 scale a token.

    scale = max |x| / 127, q = round to nearest even of x * (127 / max |x|). A maximum below 1e-36 counts as zero; a
    value that is not finite makes the scale NaN.
    """
    largest = np.abs(x).max(axis=1, initial=np.float32(0)).astype(np.float32)
    finite = np.isfinite(largest)
    usable = finite & (largest >= np.float32(1e-36))
    divisor = np.where(usable, largest, np.float32(1))
    inverse = np.where(usable, np.float32(127) / divisor, np.float32(0)).astype(np.float32)
    with np.errstate(invalid="ignore"):
        q = np.rint(np.where(finite[:, None], x, 0) * inverse[:, None]).astype(np.int64)
    scale = np.where(usable, divisor / np.float32(127), np.float32(0)).astype(np.float32)
    return q, np.where(finite, scale, np.float32(np.nan))


def matmul_int8(
    x: Tensor, blocks: Iterator[Block], out_features: int, bias: Tensor | None = None, prescale: float = 1.0
) -> Tensor:
    """Compute the int8 path of `QuantMatrix.matmul`: exact integers in a block, float32 over the blocks in order.

    The blocks of each quarter of K are summed from zero, and the quarters are added in order. The fused multiply-add is
    computed in float64 and rounded again, so a result may differ in its last bit.
    """
    activations = x.numpy().astype(np.float32)
    every = list(blocks)
    borders = [len(every) * quarter // QUARTERS for quarter in range(QUARTERS + 1)]
    total = np.zeros((x.shape[0], out_features), dtype=np.float32)
    for begin, end in pairwise(borders):
        own = np.zeros_like(total)
        for features, codes, scales in every[begin:end]:
            q, scale = quantize_activations(activations[:, features])
            factor = scales[None, :] * scale[:, None]
            own = ((q @ codes) * factor.astype(np.float64) + own).astype(np.float32)
        total += own
    y = torch.from_numpy(total)
    return (y if bias is None else y + bias.float()) * prescale
