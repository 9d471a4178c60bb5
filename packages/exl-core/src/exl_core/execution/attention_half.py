"""The steps of a layer's attention: norm, q, k and v, rotation, storing, attention, o and residual.

Norms of q and k over all heads, and a clamp, are separate launches between the others. Results are bitwise identical to
the module's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from exl_kernels.attention import paged_attention
from exl_kernels.attention.cuda import HeadNorms, MatmulInput, attend_own, attend_stored
from exl_kernels.fused import norm_parts, rope_store
from exl_kernels.kv import store_kv
from exl_kernels.linear.fused import FusedLinear, Packed

from ..layers import Norm, RMSNorm
from ..layers.attention import rotate, shape_heads
from ..layers.description import AttentionDescription
from .batch import Step
from .half import Features, JoinedHalf, Normed, OutputTokens, PendingMatmul, last_rows
from .half_matmuls import HalfPlan, norms_of_heads, norms_of_parts
from .operators import Operators

__all__ = ["AttentionHalf"]


class AttentionHalf(JoinedHalf):
    """Norm and q, k, v; rotation, storing and attention; o and residual."""

    about: AttentionDescription

    def __init__(self, about: AttentionDescription, mlp: HalfPlan[FusedLinear] | None = None) -> None:
        super().__init__(about, mlp)
        self._widths = list(about.widths)
        self.held = (*about.widths, about.widths[0])
        self.kind = (self.held, about.head_dim, about.rope, about.interleaved, about.scale, about.window, about.softcap)
        """Attention of halves of one kind differs in the pages alone."""
        self.head_norms = _head_norms_of(about)
        """Norms of q and k that attention of one token a row applies."""
        self._part_norms = _part_norms_of(about) if self.head_norms is None else None
        """Norms of all of q and of all of k, which one launch applies where the matmul has left them."""
        self._shapes = about.q_norm is not None or about.k_norm is not None or bool(about.clip)

    def features(
        self, x: Tensor, h: Normed, step: Step, ops: Operators, output_tokens: OutputTokens = "all"
    ) -> tuple[Tensor, Normed, Features | None]:
        """Run norm, q, k, v and attention; see `JoinedHalf.features`. Separate launches for fewer output tokens."""
        if output_tokens != "all":
            return self._stored(x, self.normed(x, h), step, output_tokens)
        mixed = ops.attention(self, x, h, step)
        if mixed is not None:
            return x, h, mixed
        found, rows = ops.first(self, x, h, step), x.shape[0]
        if isinstance(found, PendingMatmul):
            found = found.now()
        into = ops.room(self, rows, step)
        mixed = self._attended(found, step, into)
        return x, h, mixed.view(rows, -1) if into is None else Packed(into.scratch, rows, by_matmul=False)

    def _attended(self, found: Tensor | Iterable[Tensor], step: Step, into: MatmulInput | None) -> Tensor:
        """Return attention [T, heads, head_dim] of q, k and v: side by side, in rows that it may change, or each."""
        a = self.about
        if not isinstance(found, Tensor):
            q, k, v = (self._shaped(t, norm) for t, norm in zip(found, (a.q_norm, a.k_norm, None), strict=True))
            return _attend_heads(a, q, k, v, step)
        norms = self._part_norms if found.dtype == torch.float16 and found.is_cuda else None
        if norms is not None:
            norm_parts(found, norms[0].loaded_weight, norms[1].loaded_weight, norms[0].eps)
        q, k, v = torch.split(found, self._widths, dim=1)
        if self._shapes and norms is None and (step.q_len > 1 or self.head_norms is None):
            q, k, v = (t.contiguous() for t in (q, k, v))
            q, k, v = self._shaped(q, a.q_norm), self._shaped(k, a.k_norm), self._shaped(v)
        else:
            q, k, v = (t.view(t.shape[0], -1, a.head_dim) for t in (q, k, v))
        return _attend_heads(a, q, k, v, step, into, self.head_norms)

    def shape_heads(self, parts: Sequence[Tensor]) -> None:
        """Clamp and norm q, k and v [T, heads * head_dim] in place."""
        if self._shapes:
            for t, norm in zip(parts, (self.about.q_norm, self.about.k_norm, None), strict=True):
                self._shaped(t, norm)

    def _stored(
        self, x: Tensor, h: Tensor, step: Step, output_tokens: OutputTokens
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store all keys and values; attend with the last token of each row, unless no output is needed."""
        a = self.about
        q_proj, k_proj, v_proj = (linear.quant for linear in a.first)
        k, v = self._shaped(k_proj.matmul(h), a.k_norm), self._shaped(v_proj.matmul(h))
        rotate(k, step, a.rope, step.rope_positions, interleaved=a.interleaved)
        store_kv(step.pages(a.layer_idx), k, v, step.slots)
        if output_tokens == "none":
            return x, h, None
        x, h, rows, places, turns = (
            last_rows(t, step.batch_size) for t in (x, h, step.rows, step.positions, step.rope_positions)
        )
        q = self._shaped(q_proj.matmul(h), a.q_norm)
        rotate(q, step, a.rope, turns, interleaved=a.interleaved)
        return x, h, _attend_stored(a, q, step, rows, places).view(x.shape[0], -1)

    def _shaped(self, t: Tensor, norm: Norm | None = None) -> Tensor:
        return shape_heads(t, self.about.head_dim, self.about.clip, norm)


def _head_norms_of(a: AttentionDescription) -> HeadNorms | None:
    """Return norms of q and k that attention of one token a row can apply, or None.

    These are RMS norms whose weight all heads share.
    """
    norms = norms_of_heads(a, _shape_of)
    if norms is None:
        return None
    q, k = norms
    return HeadNorms(q.loaded_weight, k.loaded_weight, q.eps)


def _part_norms_of(a: AttentionDescription) -> tuple[RMSNorm, RMSNorm] | None:
    """Return RMS norms of all heads of q together and of k, if `norm_parts` applies them."""
    norms = norms_of_parts(a, _shape_of)
    return norms if norms and all(norm.loaded_weight.dtype == torch.float32 for norm in norms) else None


def _shape_of(norm: RMSNorm) -> tuple[int, ...]:
    return tuple(norm.loaded_weight.shape)


def _attend_heads(
    a: AttentionDescription,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    into: MatmulInput | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotate, store and attend: one launch, which also applies `norms`, where a row is one token."""
    if step.q_len > 1:
        return _attend_many(a, q, k, v, step, into)
    return attend_own(
        q,
        k,
        v,
        step.pages(a.layer_idx),
        step.block_table,
        step.rows,
        step.positions,
        step.slots,
        *step.table(a.rope),
        step.rope_positions,
        scale=a.scale,
        interleaved=a.interleaved,
        window=a.window,
        softcap=a.softcap,
        max_keys=step.max_keys,
        # The step's tensors, and all keys but the tokens' own, were written before the graph's launches.
        early=True,
        into=into,
        norms=norms,
    )


def _attend_many(
    a: AttentionDescription, q: Tensor, k: Tensor, v: Tensor, step: Step, into: MatmulInput | None = None
) -> Tensor:
    pages = step.pages(a.layer_idx)
    if not step.decodes:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if a.rope == "none":
        store_kv(pages, k, v, step.slots)
    else:
        rope_store(pages, q, k, v, *step.table(a.rope), step.rope_positions, step.slots, interleaved=a.interleaved)
    if not step.decodes:
        return _attend_stored(a, q, step, step.rows, step.positions)
    return attend_stored(
        q,
        pages,
        step.block_table,
        step.rows,
        step.positions,
        scale=a.scale,
        window=a.window,
        softcap=a.softcap,
        max_keys=step.max_keys,
        into=into,
        windows=step.windows,
    )


def _attend_stored(a: AttentionDescription, q: Tensor, step: Step, rows: Tensor, positions: Tensor) -> Tensor:
    return paged_attention(
        q,
        step.pages(a.layer_idx),
        step.block_table,
        rows,
        positions,
        scale=a.scale,
        window=a.window,
        softcap=a.softcap,
        max_keys=step.max_keys,
    )
