"""Doubles on the CPU for the two operators of `exl_core.execution` that only a GPU has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.execution import attention_half, half, operators
from exl_core.execution import fused as plan
from exl_core.lora.rows import RowAdapters
from exl_kernels.activation import activation as activate
from exl_kernels.activation import gated_activation
from exl_kernels.attention import paged_attention
from exl_kernels.attention.cuda import AttentionTables, Rotation
from exl_kernels.device import rows_are_invariant
from exl_kernels.fused import add_post_norm, rope_store
from exl_kernels.kv import store_kv
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.fused import Packed
from exl_kernels.linear.matmul_input import MatmulInput
from exl_kernels.norm import layer_norm, rms_norm
from exl_kernels.selection import BLOCK_ROWS, FEW_ROWS, LIMITS

__all__ = ["FusedDouble", "GroupDouble", "joined_on_cpu"]


class FusedDouble:
    """`FusedLinear` as its documentation states it, out of CPU operators."""

    calls = 0
    packed = 0
    """Inputs that launches of norms have packed."""
    is_quantized = False
    """Torch multiplies by no dequantized matrix here."""
    apart: str | None = None
    """Key of a matrix that no launch joins with others."""

    def __init__(self, matrices: list[QuantMatrix], *, norm: Any = None, activation: Any = None) -> None:
        self.matrices, self.norm, self.activation = matrices, norm, activation
        self.is_gated = activation is not None and len(matrices) > 1
        self.out_features = matrices[0].out_features if activation else sum(m.out_features for m in matrices)

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        blocks = self.blocks(x.shape[0])
        if len(blocks) > 1:
            for rows in blocks:
                self(x[rows], out[rows], None if residual is None else residual[rows])
            return out
        FusedDouble.calls += 1
        h = x
        if self.norm is not None and self.norm.layer:
            h = layer_norm(x, self.norm.weight, self.norm.bias, self.norm.eps)
        elif self.norm is not None:
            h = rms_norm(x, self.norm.weight, self.norm.eps)
        parts = [matrix.matmul(h) for matrix in self.matrices]
        if self.activation is None:
            y = torch.cat(parts, 1)
        elif len(parts) == 1:
            y = activate(parts[0], self.activation)
        else:
            y = gated_activation(parts[0], parts[1], self.activation)
        return out.copy_(y if residual is None else residual + y)

    def kernel(self, rows: int) -> str | None:
        """Choose as for matrices that all kernels take, on a card with all. Only the fewest rows fuse a LayerNorm."""
        if self.apart is not None and any(self.apart in matrix.name for matrix in self.matrices):
            return None
        if self.norm is not None and self.norm.layer and rows > LIMITS.gemv_rows:
            return None
        names = ((LIMITS.gemv_rows, "gemv_ring"), (FEW_ROWS, "gemm_few"), (BLOCK_ROWS, "gemm_batch"))
        return next((name for limit, name in names if rows <= limit), None)

    def blocks(self, rows: int) -> list[slice]:
        return [slice(begin, min(begin + BLOCK_ROWS, rows)) for begin in range(0, rows, BLOCK_ROWS)]

    def joins(self, rows: int) -> bool:
        return all(self.kernel(block.stop - block.start) is not None for block in self.blocks(rows))

    def pays_apart(self, rows: int, *, invariant: bool) -> bool:
        return rows_are_invariant(rows, invariant=invariant) and self.kernel(min(rows, BLOCK_ROWS)) == "gemm_batch"

    def takes_packed(self, rows: int) -> bool:
        return self.kernel(rows) == "gemm_few"

    def input_columns(self, rows: int) -> int | None:
        """Few rows have a packed input; attention packs none of more, here."""
        return FEW_ROWS if self.takes_packed(rows) and self.norm is None else None

    def columns_for_adapters(self, rows: int) -> int | None:
        return self.input_columns(rows)

    def input_of(self, m: int) -> MatmulInput | None:
        """The plain input."""
        if self.input_columns(m) is None:
            return None
        return MatmulInput(self.matrices[0], FEW_ROWS, [], rows=m)  # type: ignore[arg-type]

    def from_input(self, given: MatmulInput, out: Tensor, residual: Tensor | None = None) -> Tensor:
        plain: Any = given.scratch[0]
        return self(plain, out, residual)

    def then(self, following: FusedDouble, x: Tensor | Packed, out: Tensor, residual: Tensor | None = None) -> Tensor:
        plain: Any = x.scratch[0] if isinstance(x, Packed) else x
        between = torch.empty((plain.shape[0], self.out_features), dtype=plain.dtype)
        return following(self(plain, between), out, residual)

    def chains_to(self, following: FusedDouble, rows: int) -> bool:
        whole = self.activation is not None or len(self.matrices) == 1
        return whole and self.kernel(rows) == "gemm_few" and following.takes_packed(rows)

    def scratch(self, rows: int) -> list[Tensor]:
        """Where a packed input is left: the plain one, here."""
        return []

    def chained(
        self,
        x: Tensor | Packed,
        out: Tensor | None = None,
        residual: Tensor | None = None,
        following: FusedDouble | None = None,
    ) -> Packed | None:
        plain: Any = x.scratch[0] if isinstance(x, Packed) else x
        y = self(plain, torch.empty(plain.shape[0], self.out_features) if out is None else out, residual)
        return None if following is None else Packed([y.clone()], len(y))  # type: ignore[arg-type]


def own_double(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Any,
    tables: AttentionTables,
    slots: Tensor,
    rotation: Rotation,
    options: Any,
    *,
    early: bool,
    into: Any = None,
    norms: Any = None,
) -> Tensor:
    """`attend_own` as its documentation states it: one token a row of the block table."""
    assert early
    assert k.stride(0) == v.stride(0) or len(k) == 1, "as a GPU needs it"
    assert len(set(tables.rows.tolist())) == len(tables.rows)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    if rotation.cos.shape[1]:
        rope_store(pages, q, k, v, rotation=rotation, slots=slots)
    else:
        store_kv(pages, k, v, slots)
    return _attended(q, pages, tables, options, into)


def _attended(q: Tensor, pages: Any, tables: AttentionTables, options: Any, into: Any) -> Tensor:
    mixed = paged_attention(
        q.contiguous(),
        pages,
        tables.block_table,
        tables.rows,
        tables.positions,
        key_mask=tables.key_mask,
        max_keys=tables.max_keys,
        scale=options.scale,
        window=options.window,
        softcap=options.softcap,
    )
    if into is not None:
        assert into.columns == 8
        into.scratch.append(mixed.flatten(1))
    return mixed


def rope_store_double(pages: Any, q: Tensor, k: Tensor, v: Tensor, *, rotation: Rotation, slots: Tensor) -> None:
    """`rope_store` of views of wider rows, which only a GPU takes."""
    assert k.stride(0) == v.stride(0), "as a GPU needs it"
    turned = q.contiguous()
    rope_store(pages, turned, k.contiguous(), v.contiguous(), rotation=rotation, slots=slots)
    q.copy_(turned)


def stored_double(
    q: Tensor,
    pages: Any,
    tables: AttentionTables,
    options: Any,
    *,
    tokens: int,
    into: Any = None,
    windows: bool = False,
) -> Tensor:
    """`attend_stored` as its documentation states it."""
    return _attended(q, pages, tables, options, into)


def add_post_norm_double(
    x: Tensor, y: Tensor, post: Any, norm: Any, *, out: Tensor | None = None, into: Any = None
) -> Any:
    """`add_post_norm` as its documentation states it."""
    h = add_post_norm(x, y, post, norm, out=out)
    if into is None:
        return h
    assert h is not None
    assert into.columns == FEW_ROWS
    assert len(x) <= FEW_ROWS
    FusedDouble.packed += 1
    into.scratch.append(h)
    return into.scratch


def layer_norm_packed_double(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, into: Any) -> Any:
    """`layer_norm_packed` as its documentation states it."""
    assert into.columns == FEW_ROWS
    assert len(x) <= FEW_ROWS
    FusedDouble.packed += 1
    into.scratch.append(layer_norm(x, weight, bias, eps))
    return into.scratch


class GroupDouble:
    """`LoraGroup` as its documentation states it, out of the pairs of each matrix."""

    calls = 0
    multiplied = 0
    """Matmuls that have added their adapters themselves."""
    levels = 1
    """Most adapters of a row, which the test knows."""

    def __init__(self, rows: RowAdapters, keys: Sequence[str], widths: Sequence[int]) -> None:
        self.rows, self.keys, self.widths = rows, keys, list(widths)

    def shrink(
        self, x: Tensor, slots: Tensor, *, norm: Any = None, normed: Tensor | None = None, into: Any = None
    ) -> Tensor:
        """The input itself, from which `expand` computes all."""
        assert slots is self.rows.slots
        GroupDouble.calls += 1
        h = x.clone() if norm is None else rms_norm(x, norm.weight, norm.eps)
        if into is not None:
            assert normed is None
            into.scratch.append(h)
        elif norm is not None:
            assert normed is not None
            normed.copy_(h)
        return h

    def fits(self, matmul: FusedDouble, x: Tensor, *, residual: bool = False) -> bool:
        """Whether the matmul takes rows with at most one adapter each."""
        rows = x.shape[0]
        plain = matmul.norm is None or not matmul.norm.layer
        gated = matmul.activation is None or len(matmul.matrices) > 1
        return rows <= LIMITS.gemv_rows and matmul.joins(rows) and plain and gated and GroupDouble.levels == 1

    def multiply(
        self, matmul: FusedDouble, x: Tensor, slots: Tensor, *, out: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        GroupDouble.calls += 1
        GroupDouble.multiplied += 1
        h = x if matmul.norm is None else rms_norm(x, matmul.norm.weight, matmul.norm.eps)
        y = torch.cat([matrix.matmul(h) for matrix in matmul.matrices], 1)
        if matmul.activation is not None:
            return out.copy_(self.expand(y, h, slots, activation=matmul.activation))
        return self.expand(y, h, slots, out=out, residual=residual)

    def expand(
        self,
        y: Tensor,
        middle: Tensor,
        slots: Tensor,
        *,
        out: Tensor | None = None,
        residual: Tensor | None = None,
        activation: Any = None,
    ) -> Tensor:
        parts = [part.clone() for part in torch.split(y, self.widths, dim=1)]
        for key, part in zip(self.keys, parts, strict=True):
            if key in self.rows.pairs:
                self.rows.pairs[key].add_to(middle, part)
        if activation is not None:
            return gated_activation(parts[0], parts[1], activation)
        whole = torch.cat(parts, 1)
        return (y if out is None else out).copy_(whole if residual is None else residual + whole)

    @staticmethod
    def of(rows: RowAdapters, keys: Sequence[str], in_features: int, widths: Sequence[int]) -> GroupDouble | None:
        return None if rows.touched.isdisjoint(keys) else GroupDouble(rows, keys, widths)


def joined_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Plans of models on the CPU, out of the doubles."""
    for module in (plan, half):
        patch.setattr(module, "FusedLinear", FusedDouble)
    for module in (half, operators):
        patch.setattr(module, "add_post_norm", add_post_norm_double)
    patch.setattr(operators, "layer_norm_packed", layer_norm_packed_double)
    patch.setattr(attention_half, "attend_own", own_double)
    patch.setattr(attention_half, "attend_stored", stored_double)
    patch.setattr(attention_half, "rope_store", rope_store_double)
    patch.setattr(RowAdapters, "groups", lambda self, keys, in_features, widths: True)
    patch.setattr(RowAdapters, "group", GroupDouble.of)
