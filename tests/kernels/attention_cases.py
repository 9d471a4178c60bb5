"""Paged sequences for the tests of attention, on a CPU or a GPU, and decode steps of own keys and values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_kernels import _native
from exl_kernels.attention import cuda as attention_cuda
from exl_kernels.attention import paged_attention
from exl_kernels.kv import KVPages, store_kv
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaQuantMatrix
from exl_kernels.norm import rms_norm
from exl_kernels.reference import attention as twin
from exl_kernels.rope import apply_rope
from exl_kernels.selection import Card

UNDER_A_TOOL = "EXL_SANITIZER" in os.environ
"""compute-sanitizer: a launch takes a thousand times as long, so that a case is content with fewer."""

KINDS: tuple[Any, ...] = ("fp16", "fp8", "q8", "q6", "q4")
# Queries, weights and scaled codes are rounded to half (2^-11 of each), the result once more.
BOUND = 3e-3


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """Sequences of random tokens in shuffled pages; on a GPU with a copy on the CPU for the twin."""

    pages: KVPages
    block_table: Tensor
    q: Tensor  # [B, n, Hq, D] on the CPU, for a GPU representable in half; the token at position p has that of p % n
    scale: float
    dtype: torch.dtype

    def queries(self, rows: Tensor, positions: Tensor) -> Tensor:
        return self.q[rows, positions.long().clamp(min=0) % self.q.shape[1]]

    def run(self, rows: list[int], positions: list[int], **options: Any) -> Tensor:
        """Attention for the listed (sequence, position) pairs."""
        device = self.pages.device
        r, p = torch.tensor(rows, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)
        q = self.queries(r.long().clamp(0, self.q.shape[0] - 1), p).to(device, self.dtype).contiguous()
        where = (self.block_table.to(device), r.to(device), p.to(device))
        return paged_attention(q, self.pages, *where, scale=self.scale, **options).cpu()

    def plan(
        self, tokens: int, keys: int, *, row_tokens: int | None = None, windows: bool = False
    ) -> _native.AttentionPlan:
        """Return the plan of a call of so many float16 tokens over the pages on their GPU."""
        sequences, pages = self.block_table.shape
        kept = self.pages
        shape = _native.AttentionShape(
            _native.AttentionHeads(kept.kind, kept.head_dim, q_heads=self.q.shape[2], kv_heads=kept.heads),
            batch=sequences,
            tokens=tokens,
            keys=keys,
        ).with_pages(kept.page_size, pages)
        if row_tokens is not None:
            shape = shape.with_rows(row_tokens, windows=windows)
        return _native.cuda_select_attention(_native.CudaCard.device(torch.cuda.current_device()), shape)

    def oracle(self, rows: list[int], positions: list[int], **options: Any) -> Tensor:
        r, p = torch.tensor(rows, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)
        cpu = KVPages(
            self.pages.kind,
            self.pages.head_dim,
            *(None if t is None else t.cpu() for t in (self.pages.key, self.pages.value)),
            *(None if t is None else t.cpu() for t in (self.pages.key_scales, self.pages.value_scales)),
        )
        q = self.queries(r.long(), p).double()
        return twin.paged_attention(q, cpu, self.block_table, r, p, scale=self.scale, **options)


def make_case(
    kind: Any,
    lengths: list[int],
    *,
    heads: int = 2,
    groups: int = 2,
    dim: int = 64,
    page_size: int = 16,
    spare: int = 3,
    queries: int = 1 << 20,
    shuffle: int = 0,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Case:
    """`shuffle` changes where the pages lie. Unused memory holds NaN, or nonsense where there is none. `queries`: how
    many tokens of a sequence have one of their own at most (queries for all of 64 x 2,100 tokens: 9 GB, 10 seconds)."""
    n = max(lengths)
    used = sum(-(-length // page_size) for length in lengths)
    pages = KVPages.allocate(kind, used + spare, page_size, heads, dim, device)
    for t in pages.tensors():
        t.fill_(torch.nan if t.dtype == torch.float16 else 0xFF)
    order = torch.randperm(used + spare, generator=torch.Generator().manual_seed(shuffle)).tolist()
    # Entries beyond a sequence's pages are nonsense on purpose: they must never be read.
    table = torch.full((len(lengths), -(-n // page_size) + shuffle), -12345, dtype=torch.int32)
    k, v = randn(len(lengths), n, heads, dim, seed=seed + 1), randn(len(lengths), n, heads, dim, seed=seed + 2)
    for b, length in enumerate(lengths):
        for i in range(-(-length // page_size)):
            table[b, i] = order.pop()
        at = torch.arange(length)
        slots = table[b].long()[at // page_size] * page_size + at % page_size
        store_kv(pages, k[b, :length].to(device), v[b, :length].to(device), slots.to(device))
    q = randn(len(lengths), min(n, queries), heads * groups, dim, seed=seed + 3)
    return Case(pages, table, q if device == "cpu" else q.bfloat16().float(), dim**-0.5, dtype)


def make_cuda_case(kind: Any, lengths: list[int], *, dtype: torch.dtype = torch.float16, **options: Any) -> Case:
    """A case on the first GPU. Skips the test on Turing cards for pages whose caches are refused there."""
    case, card = make_case(kind, lengths, device="cuda", dtype=dtype, **options), Card.device(0)
    if (refusal := card.refusal_of_pages(kind, case.q.shape[-1])) is not None:
        assert card.code < 80, refusal
        pytest.skip(refusal)
    return case


def is_prompt(plan: _native.AttentionPlan) -> bool:
    """Return whether blocks take tiles of many query rows."""
    return plan.kernel.endswith(("_prefill", "_wide"))


def require_prompt_kernel(plan: _native.AttentionPlan) -> None:
    """Fail without a kernel of prompts, or skip the test where blocks of the card have too little shared memory."""
    if is_prompt(plan):
        return
    why = "; ".join(refused.why for refused in plan.refused)
    assert "shared memory" in why
    pytest.skip(f"{plan.kernel} computes prompts: {why}")


def assert_close(got: Tensor, oracle: Tensor, bound: float = BOUND) -> None:
    assert got.isfinite().all()
    scale = oracle.abs().amax().clamp(min=0.05)
    assert float((got.double() - oracle).abs().max() / scale) < bound


@dataclass
class OwnStep:
    """A decode step whose own keys and values are in q, k, v [B, heads, D] and not yet in the pages."""

    case: Case
    lengths: list[int]
    rotated: int
    interleaved: bool
    dtype: torch.dtype

    def __post_init__(self) -> None:
        pages, batch = self.case.pages, len(self.lengths)
        q_heads, width = self.case.q.shape[2], pages.heads * pages.head_dim
        self.qkv = randn(batch, q_heads * pages.head_dim + 2 * width, seed=5).to("cuda", self.dtype)
        self.positions = torch.tensor(self.lengths, dtype=torch.int32, device="cuda") - 1
        self.rope_positions = self.positions.long().clamp(min=0)
        self.rows = torch.arange(batch, dtype=torch.int32, device="cuda")
        self.table = self.case.block_table.cuda()
        page = self.table[self.rows.long(), self.rope_positions // pages.key.shape[1]].long()
        at = page * pages.key.shape[1] + self.rope_positions % pages.key.shape[1]
        self.slots = torch.where(self.positions >= 0, at, -1)
        angles = randn(max(self.lengths) + 1, self.rotated // 2, seed=6).cuda()
        self.cos, self.sin = angles.cos(), angles.sin()

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the fused rows."""
        pages, batch = self.case.pages, len(self.lengths)
        q_width, width = self.case.q.shape[2] * pages.head_dim, pages.heads * pages.head_dim
        ends = (0, q_width, q_width + width, q_width + 2 * width)
        q, k, v = (self.qkv[:, a:b].view(batch, -1, pages.head_dim) for a, b in pairwise(ends))
        return q, k, v

    def forget(self) -> None:
        for t in self.case.pages.tensors():
            flat = t.view(-1, *t.shape[2:])
            flat[self.slots[self.slots >= 0]] = torch.nan if t.dtype == torch.float16 else 0xFF

    def norms(self) -> attention_cuda.HeadNorms:
        q, k = (randn(self.case.pages.head_dim, seed=seed).cuda() for seed in (7, 8))
        return attention_cuda.HeadNorms(q, k, 1e-6)

    def stored(self, norms: attention_cuda.HeadNorms | None = None) -> Tensor:
        """Keys and values normed, rotated and stored by operators of their own; the rotated queries."""
        q, k, v = (t.clone(memory_format=torch.contiguous_format) for t in self.parts())
        if norms is not None:
            q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
        for t in (q, k):
            if self.rotated:
                apply_rope(t, self.cos, self.sin, self.rope_positions, interleaved=self.interleaved)
        store_kv(self.case.pages, k, v, self.slots)
        return q

    def apart(self, norms: attention_cuda.HeadNorms | None = None, **options: Any) -> Tensor:
        where = (self.table, self.rows, self.positions)
        return paged_attention(self.stored(norms), self.case.pages, *where, scale=self.case.scale, **options)

    def together(
        self,
        *,
        window: int = 0,
        softcap: float = 0.0,
        key_mask: Tensor | None = None,
        max_keys: int | None = None,
        **options: Any,
    ) -> Tensor:
        return attention_cuda.attend_own(
            *self.parts(),
            self.case.pages,
            tables=attention_cuda.AttentionTables(
                self.table, rows=self.rows, positions=self.positions, key_mask=key_mask, max_keys=max_keys
            ),
            slots=self.slots,
            rotation=attention_cuda.Rotation(
                cos=self.cos, sin=self.sin, positions=self.rope_positions, interleaved=self.interleaved
            ),
            options=attention_cuda.attention_options(self.case.scale, window=window, softcap=softcap),
            **options,
        )


def own_step(kind: Any, lengths: list[int], **options: Any) -> OwnStep:
    rope = {k: options.pop(k) for k in ("rotated", "interleaved", "dtype") if k in options}
    case = make_cuda_case(kind, [max(n, 1) for n in lengths], queries=1, **options)  # of which the step has its own
    return OwnStep(
        case,
        lengths,
        rope.get("rotated", case.pages.head_dim),
        rope.get("interleaved", False),
        rope.get("dtype", torch.float16),
    )


def matmul_of(k: int, kind: str) -> CudaQuantMatrix:
    """[k, 64] at four bits: EXL2 with a permutation, or GPTQ, whose rows stand in the features' order."""
    generator = torch.Generator().manual_seed(k)
    words = torch.randint(-(2**31), 2**31, (k // 8 + k // 128, 64), generator=generator).to(torch.int32)
    scales = torch.rand(k // 128, 64, generator=generator).half() * 0.01 + 0.001
    if kind == "gptq":
        parts = {"qweight": words[: k // 8], "qzeros": words[k // 8 :, :8].contiguous(), "scales": scales}
        made = QuantMatrix.from_gptq(parts, bits=4, group_size=128, device="cuda")
    else:
        groups = torch.tensor([[4, 16 * i] for i in range(k // 128)], dtype=torch.int16).flatten()
        perm = torch.randperm(k, generator=generator).to(torch.int32)
        parts = {"q_weight": words[: k // 8], "q_scale": words[k // 8 :, :8].contiguous(), "q_scale_max": scales[:, 0]}
        made = QuantMatrix.from_exl2(parts | {"q_groups": groups, "q_invperm": perm}, device="cuda")
    assert isinstance(made, CudaQuantMatrix)
    return made
