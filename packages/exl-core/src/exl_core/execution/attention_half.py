"""The steps of a layer's attention: norm, q, k and v, rotation, storing, attention, o and residual.

Norms of q and k over all heads, and a clamp, are separate launches between the others. Results are bitwise identical to
the module's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_kernels.attention.cuda import (
    AttentionOptions,
    AttentionTables,
    HeadNorms,
    Rotation,
    attend_own,
    attend_stored,
    attention_options,
)
from exl_kernels.fused import norm_parts, rope_store
from exl_kernels.linear.fused import FusedLinear, Packed
from exl_kernels.linear.matmul_input import MatmulInput
from exl_kernels.selection import attention_stores_keys

from ..layers.description import AttentionDescription
from ..layers.heads import Heads, shape_heads, shape_part
from .batch import Step
from .half import Features, HalfInput, JoinedHalf, OutputTokens, PendingMatmul
from .half_launches import HeadNormLaunch
from .half_matmuls import HalfPlan
from .operators import Operators

__all__ = ["AttentionHalf", "JoinedHeads"]


class AttentionHalf(JoinedHalf):
    """Norm and q, k, v; rotation, storing and attention; o and residual."""

    about: AttentionDescription

    def __init__(self, about: AttentionDescription, mlp: HalfPlan[FusedLinear] | None = None) -> None:
        super().__init__(about, mlp)
        self._widths = list(about.widths)
        self.held = (*about.widths, about.widths[0])
        self.kind = (self.held, about.head_dim, about.rope, about.interleaved, about.scale, about.window, about.softcap)
        """Attention of halves of one kind differs in the pages alone."""
        norms = self.plan.head_norms
        self._head_norms = norms and HeadNorms(norms[0].loaded_weight, norms[1].loaded_weight, norms[0].eps)

    def features(
        self, x: Tensor, h: HalfInput, step: Step, ops: Operators, output_tokens: OutputTokens = "all"
    ) -> tuple[Tensor, HalfInput, Features | None]:
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
        heads = JoinedHeads(self.about, step)
        if not isinstance(found, Tensor):
            return heads.attend_joined(*shape_heads(self.about, found))
        launch, norms = self.plan.head_norm_launch(step.q_len, together=True), self.plan.part_norms
        if launch is HeadNormLaunch.PARTS:
            assert norms is not None
            norm_parts(found, norms[0].loaded_weight, norms[1].loaded_weight, norms[0].eps)
        q, k, v = torch.split(found, self._widths, dim=1)
        if launch is HeadNormLaunch.OWN:
            q, k, v = shape_heads(self.about, [t.contiguous() for t in (q, k, v)])
        else:
            q, k, v = (t.view(t.shape[0], -1, self.about.head_dim) for t in (q, k, v))
        return heads.attend_joined(q, k, v, into, self._head_norms if launch is HeadNormLaunch.ATTENTION else None)

    def _stored(
        self, x: Tensor, h: Tensor, step: Step, output_tokens: OutputTokens
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store all keys and values; attend with the last token of each row, unless no output is needed."""
        a = self.about
        q_proj, k_proj, v_proj = (linear.quant for linear in a.first)
        heads = Heads(a, step)
        k, v = (proj.matmul(h, invariant=step.invariant) for proj in (k_proj, v_proj))
        k, v = shape_part(a, k, a.k_norm), shape_part(a, v)
        heads.rotate(k, step.rope_positions)
        heads.store(k, v)
        if output_tokens == "none":
            return x, h, None
        x, h, rows, places, turns = (step.last_rows(t) for t in (x, h, step.rows, step.positions, step.rope_positions))
        q = shape_part(a, q_proj.matmul(h, invariant=step.invariant), a.q_norm)
        heads.rotate(q, turns)
        return x, h, heads.read(q, rows, places).view(x.shape[0], -1)


@dataclass(frozen=True, slots=True)
class JoinedHeads(Heads):
    """Heads whose rotation, storing and attention share launches on a GPU."""

    @property
    def tables(self) -> AttentionTables:
        """The keys that each token sees, as launches take them."""
        step = self.step
        return AttentionTables(step.block_table, rows=step.rows, positions=step.positions, max_keys=step.max_keys)

    @property
    def turn(self) -> Rotation:
        """The rotation of each token, as launches take it."""
        cos, sin = self.step.table(self.about.rope)  # without columns where the layer has no rotation
        return Rotation(cos=cos, sin=sin, positions=self.step.rope_positions, interleaved=self.about.interleaved)

    @property
    def scores(self) -> AttentionOptions:
        """Scale, window and softcap of the layer, as launches take them."""
        return attention_options(self.about.scale, window=self.about.window, softcap=self.about.softcap)

    def attend_joined(
        self, q: Tensor, k: Tensor, v: Tensor, into: MatmulInput | None = None, norms: HeadNorms | None = None
    ) -> Tensor:
        """Rotate, store and attend: one launch, which also applies `norms`, where a row is one token."""
        a, step, pages = self.about, self.step, self.pages
        if attention_stores_keys(step.q_len):
            # The step's tensors, and all keys but the tokens' own, were written before the graph's launches: `early`.
            return attend_own(
                q,
                k,
                v,
                pages,
                tables=self.tables,
                slots=step.slots,
                rotation=self.turn,
                options=self.scores,
                early=True,
                into=into,
                norms=norms,
            )
        if not step.decodes:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if a.rope == "none":
            self.store(k, v)
        else:
            rope_store(pages, q, k, v, rotation=self.turn, slots=step.slots)
        return attend_stored(q, pages, self.tables, self.scores, tokens=step.q_len, into=into, windows=step.windows)
