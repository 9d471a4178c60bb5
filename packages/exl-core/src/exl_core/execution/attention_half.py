"""The attention of a layer as joined launches: q, k and v, rotation, storing, attention, o and residual.

Norms of q and k over all heads, and a clamp, are separate launches between the others. Results are bitwise identical to
the module's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exl_kernels.attention import paged_attention
from exl_kernels.attention.cuda import HeadNorms, MatmulInput, attend_own, attend_stored
from exl_kernels.fused import norm_parts, rope_store
from exl_kernels.kv import store_kv
from exl_kernels.linear.fused import FusedLinear, Packed
from exl_kernels.rope import apply_rope

from ..layers import Attention, RMSNorm
from ..layers.module import is_changed
from .adapted import adapters_of, takes_adapters
from .batch import Step
from .half import JoinedHalf, Normed, joined, multiplied, multiply_apart

__all__ = ["AttentionHalf", "attend_heads", "head_norms_of"]


class AttentionHalf(JoinedHalf):
    """Norm and q, k, v; rotation, storing and attention; o and residual."""

    def __init__(self, attention: Attention, float_residual: bool = False) -> None:
        a = self.attention = attention
        super().__init__(a, a.norm, a.post, a.o_proj, float_residual)
        self._first_linears = (a.q_proj, a.k_proj, a.v_proj)
        self.qkv_normed = joined(a.q_proj, a.k_proj, a.v_proj)
        self.qkv = self.qkv_normed
        if self._own_norm is not None:
            self.qkv = joined(a.q_proj, a.k_proj, a.v_proj, norm=self._own_norm)
        self._own_qkv = self.own_first(self.qkv, *self._first_linears)
        self.o = joined(a.o_proj)
        self.head_norms = head_norms_of(a)
        """Norms of q and k that attention of one token a row applies."""
        self.first_matmul = self.qkv_normed
        self._part_norms = _part_norms_of(a) if self.head_norms is None else None
        """Norms of all of q and of all of k, which one launch applies where the matmul has left them."""
        self._shapes = a.q_norm is not None or a.k_norm is not None or bool(a.clip)
        self.plain = self.plain and (not self._shapes or self.head_norms is not None)

    def join(self, rows: int) -> bool:
        """Return whether the matmuls qkv and o have fused kernels for `rows` rows."""
        return self.qkv.joins(rows) and self.o.joins(rows)

    @property
    def matmuls(self) -> tuple[FusedLinear, FusedLinear]:
        """The matmuls of q, k and v, and of o."""
        return self.qkv, self.o

    def run_chained(self, x: Tensor, packed: Packed | None, following: FusedLinear | None, step: Step) -> Packed | None:
        """Run norm, q, k, v, attention, o and residual; see `JoinedHalf.run_chained`."""
        rows = x.shape[0]
        qkv = x.new_empty(rows, self.qkv.out_features)
        self.qkv.chained(x if packed is None else packed, qkv)
        if following is None:
            self._attend_to(x, x, qkv, step)
            return None
        given = self.o.input_of(rows) if step.decodes else None
        mixed = self.attend(qkv, step, given)
        attended: Tensor | Packed = mixed.view(rows, -1) if given is None else Packed(given.scratch, rows)
        return self.o.chained(attended, x, x, following)

    def takes_adapters(self, step: Step) -> bool:
        """Return whether the adapters of q, k and v and of o can be added behind the joined matmuls."""
        return takes_adapters(step, self._first_linears) and takes_adapters(step, (self.last,))

    def run_joined(
        self, x: Tensor, h: Normed, following: RMSNorm | None, step: Step, into: FusedLinear | None = None
    ) -> tuple[Tensor, Normed]:
        """Run norm, q, k, v, attention, o and residual with joined launches."""
        adapters = adapters_of(step, self._first_linears)
        if adapters is None:
            qkv = multiplied(*self.first_of(self._own_qkv, self.qkv_normed, x, h), x)
        else:
            taken, middle = self.adapt_input(adapters, x, h)
            qkv = self.qkv_normed(taken, taken.new_empty(x.shape[0], self.qkv_normed.out_features))
            adapters.expand(qkv, middle)
        out, residual = self.result(x)
        self._attend_to(out, residual, qkv, step)
        return x, self.left_packed(x, out, following, h, into)

    def _attend_to(self, out: Tensor, residual: Tensor | None, qkv: Tensor, step: Step) -> None:
        """Compute o of the attention plus the residual; attention packs o's input if possible."""
        rows, o = qkv.shape[0], self.o
        adapters = adapters_of(step, (self.last,))
        if adapters is not None:
            adapters.multiply(o, self.attend(qkv, step).view(rows, -1), out, residual)
            return
        given = o.input_of(rows) if step.decodes else None
        if given is not None:
            self.attend(qkv, step, given)
            o.from_input(given, out, residual=residual)
        else:
            o(self.attend(qkv, step).view(rows, -1), out, residual)

    def attend(self, qkv: Tensor, step: Step, into: MatmulInput | None = None) -> Tensor:
        """Return the attention of rows that hold q, k and v side by side: [T, heads, head_dim]. May change qkv."""
        if self._part_norms is not None and qkv.dtype == torch.float16 and qkv.is_cuda:
            q_norm, k_norm = self._part_norms
            norm_parts(qkv, q_norm.loaded_weight, k_norm.loaded_weight, q_norm.eps)
            q, k, v = self._split(qkv)
        else:
            q, k, v = self._split(qkv)
            if step.q_len > 1 or self.head_norms is None:
                q, k, v = self._shaped(q, k, v)
        return attend_heads(self.attention, q, k, v, step, into, self.head_norms)

    def run(self, x: Tensor, h: Tensor | None, following: RMSNorm | None, step: Step) -> tuple[Tensor, Tensor | None]:
        """Run norm, q, k, v, attention, o and residual as separate launches."""
        a, rows = self.attention, x.shape[0]
        given, h = h, self.normed(x, h)
        qkv = multiply_apart(self.qkv_normed, h)
        if qkv is None:
            q = a.shaped(a.q_proj.quant.matmul(h), a.q_norm)
            k = a.shaped(a.k_proj.quant.matmul(h), a.k_norm)
            v = a.shaped(a.v_proj.quant.matmul(h))
            mixed = attend_heads(a, q, k, v, step)
        else:
            mixed = self.attend(qkv, step)
        return x, self.add_matmul(x, mixed.view(rows, -1), given, following)

    def run_last(
        self, x: Tensor, h: Tensor | None, following: RMSNorm | None, step: Step, batch: int
    ) -> tuple[Tensor, Tensor | None]:
        """Run the half for the last token of each of `batch` rows; x and h of these, [batch, hidden]."""
        x, _, mixed = self._attend_last(x, h, step, batch)
        return x, self.add_matmul(x, mixed, None, following)

    def _attend_last(self, x: Tensor, h: Tensor | None, step: Step, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, h and the attention of the last token of each row; keys and values of all tokens are stored."""
        a, h = self.attention, self.normed(x, h)
        self.store(x, h, step)
        x, h, rows, places, turns = (
            t.view(batch, -1, *t.shape[1:])[:, -1].contiguous()
            for t in (x, h, step.rows, step.positions, step.rope_positions)
        )
        q = a.shaped(a.q_proj.quant.matmul(h), a.q_norm)
        if a.rope != "none":
            apply_rope(q, *step.table(a.rope), turns, interleaved=a.interleaved)
        return x, h, _attend_stored(a, q, step, rows, places).view(batch, -1)

    def store(self, x: Tensor, h: Tensor | None, step: Step) -> None:
        """Store keys and values of x [T, hidden] in the cache; h as for `run`."""
        a, h = self.attention, self.normed(x, h)
        k, v = a.shaped(a.k_proj.quant.matmul(h), a.k_norm), a.shaped(a.v_proj.quant.matmul(h))
        if a.rope != "none":
            apply_rope(k, *step.table(a.rope), step.rope_positions, interleaved=a.interleaved)
        store_kv(step.pages(a.layer_idx), k, v, step.slots)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of q, k and v [T, heads, head_dim] in rows that hold them side by side."""
        a, d, rows = self.attention, self.attention.head_dim, qkv.shape[0]
        widths = [a.num_attention_heads * d, a.num_key_value_heads * d, a.num_key_value_heads * d]
        q, k, v = torch.split(qkv, widths, dim=1)
        return q.view(rows, -1, d), k.view(rows, -1, d), v.view(rows, -1, d)

    def _shaped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Clamp and norm q, k and v before the rotation; returns new tensors if there is anything to do."""
        if not self._shapes:
            return q, k, v
        a = self.attention
        q, k, v = (t.flatten(1).contiguous() for t in (q, k, v))
        return a.shaped(q, a.q_norm), a.shaped(k, a.k_norm), a.shaped(v)


def head_norms_of(a: Attention) -> HeadNorms | None:
    """Return norms of q and k that attention of one token a row can apply, or None.

    These are RMS norms whose weight all heads share.
    """
    norms = norms_of_heads(a, lambda norm: tuple(norm.loaded_weight.shape))
    if norms is None:
        return None
    q, k = norms
    return HeadNorms(q.loaded_weight, k.loaded_weight, q.eps)


def norms_of_heads(a: Attention, shape: Callable[[RMSNorm], tuple[int, ...]]) -> tuple[RMSNorm, RMSNorm] | None:
    """Return the norms of `head_norms_of`, of a module that is loaded or not; shape: of a norm's weight."""
    norms = [norm for norm in (a.q_norm, a.k_norm) if type(norm) is RMSNorm and not is_changed(norm)]
    if len(norms) < 2 or a.clip or any(shape(norm) != (a.head_dim,) for norm in norms):
        return None
    q, k = norms
    return (q, k) if q.eps == k.eps else None


def _part_norms_of(a: Attention) -> tuple[RMSNorm, RMSNorm] | None:
    """Return RMS norms of all heads of q together and of k, if `norm_parts` applies them."""
    q, k = a.q_norm, a.k_norm
    if type(q) is not RMSNorm or type(k) is not RMSNorm or is_changed(q) or is_changed(k) or a.clip or q.eps != k.eps:
        return None
    whole = q.loaded_weight.shape == (a.num_attention_heads * a.head_dim,)
    whole &= k.loaded_weight.shape == (a.num_key_value_heads * a.head_dim,)
    return (q, k) if whole and q.loaded_weight.dtype == k.loaded_weight.dtype == torch.float32 else None


def attend_heads(
    a: Attention,
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


def _attend_many(a: Attention, q: Tensor, k: Tensor, v: Tensor, step: Step, into: MatmulInput | None = None) -> Tensor:
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
    )


def _attend_stored(a: Attention, q: Tensor, step: Step, rows: Tensor, positions: Tensor) -> Tensor:
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
