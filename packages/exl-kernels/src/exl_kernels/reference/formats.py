"""Oracle of `exl_kernels.formats`: the same formats in plain numpy, written from their definition alone.

Shapes and meanings are those of `exl_kernels.formats`, with arrays instead of tensors and without checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "exl2_dequantize",
    "exl2_pack",
    "exl2_quantize",
    "exl2_scale_costs",
    "exl2_scales",
    "gptq_dequantize",
    "gptq_quantize",
    "pack_columns",
    "pack_rows",
    "unpack_columns",
    "unpack_rows",
]

Array = NDArray[Any]


# Packing: a column of words, read downwards, is a little-endian stream of bits; so is a row of words.


def pack_columns(codes: Array, bits: int) -> Array:
    """Pack codes [rows, N] to int32 words [rows * bits / 32, N]."""
    stream = (codes[:, None, :].astype(np.int64) >> np.arange(bits)[None, :, None]) & 1
    stream = stream.reshape(-1, 32, codes.shape[1])
    words: Array = (stream << np.arange(32)[None, :, None]).sum(axis=1).astype(np.uint32)
    return words.view(np.int32)


def unpack_columns(words: Array, bits: int) -> Array:
    """Invert `pack_columns`; returns int64."""
    stream = (words.view(np.uint32)[:, None, :].astype(np.int64) >> np.arange(32)[None, :, None]) & 1
    stream = stream.reshape(-1, bits, words.shape[1])
    codes: Array = (stream << np.arange(bits)[None, :, None]).sum(axis=1)
    return codes


def pack_rows(codes: Array, bits: int) -> Array:
    """Pack codes [G, N] to int32 words [G, N * bits / 32]."""
    return np.ascontiguousarray(pack_columns(codes.T, bits).T)


def unpack_rows(words: Array, bits: int) -> Array:
    """Invert `pack_rows`; returns int64."""
    return np.ascontiguousarray(unpack_columns(np.ascontiguousarray(words.T), bits).T)


# EXL2


def exl2_scales(q_scale: Array, q_scale_max: Array) -> Array:
    """Return the scales s(g, n) [G, N] float16 with both roundings, prescale 1."""
    smax = (q_scale_max.astype(np.float32) / np.float32(256)).astype(np.float16)
    steps = (unpack_rows(q_scale, 4) + 1) ** 2
    return (steps.astype(np.float32) * smax.astype(np.float32)[:, None]).astype(np.float16)


def exl2_dequantize(tensors: Mapping[str, Array]) -> Array:
    """Return W [K, N] float16."""
    words, table = tensors["q_weight"], tensors["q_groups"].view(np.uint16).astype(np.int64)
    scales = exl2_scales(tensors["q_scale"], tensors["q_scale_max"]).astype(np.float32)
    starts = [*table[1::2].tolist(), words.shape[0]]
    rows = []
    for g, bits in enumerate(table[0::2].tolist()):
        codes = unpack_columns(words[starts[g] : starts[g + 1]], bits)
        rows.append(((codes - 2 ** (bits - 1)).astype(np.float32) * scales[g]).astype(np.float16))
    packed = np.concatenate(rows)
    result: Array = packed[tensors["q_invperm"]]  # input feature i is packed row q_invperm[i]
    return result


def exl2_pack(
    codes: Array,
    scale_codes: Array,
    q_scale_max: Array,
    groups: Sequence[tuple[int, int]],
    perm: Array | None = None,
) -> dict[str, Array]:
    """Pack codes [K, N] and stored scale codes [G, N] into file tensors."""
    words: list[Array] = []
    table: list[int] = []
    row = 0
    for bits, rows in groups:
        table += [bits, sum(w.shape[0] for w in words)]
        words.append(pack_columns(codes[row : row + rows], bits))
        row += rows
    order = np.arange(row) if perm is None else perm
    return {
        "q_weight": np.concatenate(words),
        "q_scale": pack_rows(scale_codes, 4),
        "q_scale_max": q_scale_max,
        "q_groups": np.array(table).astype(np.uint16).view(np.int16),
        "q_invperm": np.argsort(order).astype(np.int32),
    }


def exl2_quantize(
    weight: Array, groups: Sequence[tuple[int, int]], perm: Array | None = None, factors: Array | None = None
) -> dict[str, Array]:
    """Quantize float32 [out, in] by round to nearest; `factors` [G] scale each group's largest scale, 1 by default."""
    out_features, in_features = weight.shape
    order = np.arange(in_features) if perm is None else perm
    packed = np.zeros((in_features, -(-out_features // 32) * 32), np.float32)
    packed[:, :out_features] = weight.T[order]
    all_codes, all_scales, maxima, row = [], [], [], 0
    for g, (bits, rows) in enumerate(groups):
        block, zero = packed[row : row + rows], 2 ** (bits - 1)
        widest, scale_codes = column_scales(block, bits)
        factor = np.float32(1.0 if factors is None else factors[g])
        maximum = np.minimum(widest * factor, np.float32(65504 / zero)).astype(np.float16)
        stored = (scale_codes - 1).astype(np.int64)
        scales = exl2_scales(pack_rows(stored[None], 4), maximum[None])[0].astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            steps = np.where(scales == 0, np.float32(0), block / scales)
        all_codes.append(np.rint(np.clip(steps, -zero, zero - 1)).astype(np.int64) + zero)
        all_scales.append(stored)
        maxima.append(maximum)
        row += rows
    return exl2_pack(np.concatenate(all_codes), np.stack(all_scales), np.array(maxima, np.float16), groups, order)


def exl2_scale_costs(block: Array, bits: int) -> tuple[Array, Array]:
    """Return factors of a group's largest scale and the sum of |error|^3.5 of each, float64, for a block [rows, N]."""
    widest, scale_codes = column_scales(block, bits)
    trial = (scale_codes.astype(np.float64) / 16) ** 2 * widest
    zero, factors, costs = 2 ** (bits - 1), np.linspace(0.70, 1.20, 97), []
    for factor in factors:
        steps = np.rint(np.clip(block / (trial * factor), -zero, zero - 1))
        costs.append((np.abs(steps * trial * factor - block) ** 3.5).sum())
    return factors, np.array(costs)


def column_scales(block: Array, bits: int) -> tuple[np.float32, Array]:
    """Return the largest column scale and the codes c1 (1..16) of all columns."""
    base = (np.abs(block).max(axis=0) + np.float32(1e-12)) / np.float32((2**bits - 1) / 2)
    widest = base.max()
    return widest, np.clip(np.rint(np.float32(16) * np.sqrt(base / widest)), 1, 16)


# GPTQ


def gptq_dequantize(tensors: Mapping[str, Array], bits: int, v2: bool = False, group_size: int | None = None) -> Array:
    """Return W [K, N] float16."""
    codes, scales = unpack_columns(tensors["qweight"], bits), tensors["scales"]
    zeros = unpack_rows(tensors["qzeros"], bits) + (0 if v2 else 1)
    rows, groups = codes.shape[0], scales.shape[0]
    g_idx = tensors.get("g_idx")
    if g_idx is None or not g_idx.any():
        if group_size is None:
            group_size = 1
            while group_size * groups < rows:
                group_size *= 2
            if -(-rows // group_size) != groups:
                group_size = -(-rows // groups)
        g_idx = np.arange(rows) // group_size
    exact: Array = (codes - zeros[g_idx]).astype(np.float32) * scales[g_idx].astype(np.float32)
    return exact.astype(np.float16)


def gptq_quantize(
    weight: Array, bits: int, group_size: int, symmetric: bool, v2: bool, perm: Array | None = None
) -> dict[str, Array]:
    """Quantize float32 [out, in] by round to nearest; with `perm`, rows perm[0:group_size] make group 0 and so on."""
    w, largest = weight.T, np.float32(2**bits - 1)
    order = np.arange(w.shape[0]) if perm is None else perm
    g_idx = np.argsort(order) // group_size
    first, middle = (np.float32(0 if v2 else 1), np.float32(2 ** (bits - 1)))
    scales, zeros = [], []
    for g in range(-(-w.shape[0] // group_size)):
        low = np.minimum(w[g_idx == g].min(axis=0), 0).astype(np.float32)
        high = np.maximum(w[g_idx == g].max(axis=0), 0).astype(np.float32)
        span = 2 * np.maximum(high, -low) if symmetric else high - low
        scale = np.minimum(span / largest, np.float32(65504)).astype(np.float16)
        dead = scale == 0
        scale = np.where(dead, np.float16(1), scale)
        zero = np.clip(np.rint(-low / scale.astype(np.float32)), first, largest)
        zeros.append(np.where(dead | symmetric, middle, zero))
        scales.append(scale)
    points, steps = np.stack(zeros).astype(np.float32), np.stack(scales)
    codes = np.rint(np.clip(w / steps[g_idx].astype(np.float32) + points[g_idx], 0, largest))
    return {
        "qweight": pack_columns(codes, bits),
        "qzeros": pack_rows(points - (0 if v2 else 1), bits),
        "scales": steps,
        "g_idx": g_idx.astype(np.int32),
    }
