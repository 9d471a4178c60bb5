"""Self-attention with its norm and residual: the only module that touches the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from exl_kernels.attention import paged_attention
from exl_kernels.block import AttentionBlock
from exl_kernels.kv import store_kv
from exl_kernels.rope import apply_rope

from ..loading.checkpoint import TensorSource
from .linear import Linear
from .module import Module, Step
from .norm import RMSNorm

__all__ = ["Attention"]


class Attention(Module):
    """x + o_proj(attention(rope(q), rope(k), v)) with q, k, v from norm(x) (spec core.md 1.3, 6).

    Keys and values of the chunk are stored before they are read, so that a token's result does not depend on how the
    prompt was cut into chunks.
    """

    name = "Attention"

    def __init__(
        self,
        key: str,
        layer_idx: int,
        norm: RMSNorm,
        projections: tuple[Linear, Linear, Linear, Linear],
        *,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        interleaved: bool = False,
    ) -> None:
        self.key = key
        self.layer_idx = layer_idx
        self.norm = norm
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = projections
        self.head_dim = head_dim
        self.num_attention_heads = self.q_proj.out_features // head_dim
        self.num_key_value_heads = self.k_proj.out_features // head_dim
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self.interleaved = interleaved
        self.block: AttentionBlock | None = None

    def submodules(self) -> Iterator[Linear]:
        yield from (self.q_proj, self.k_proj, self.v_proj, self.o_proj)

    def load(self, source: TensorSource, device: torch.device) -> None:
        try:
            self.norm.load(source, device)
            for linear in self.submodules():
                linear.load(source, device)
            self.block = self._fuse()
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        self.block = None
        self.norm.unload()
        for linear in self.submodules():
            linear.unload()

    @property
    def loaded(self) -> bool:
        return self.o_proj.matrix is not None

    def weight_bytes(self) -> int:
        return self.norm.weight_bytes() + sum(p.weight_bytes() for p in self.submodules())

    def _fuse(self) -> AttentionBlock | None:
        """All of `forward` as one native call, where the matrices allow it."""
        linears = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        if self.norm.weight is None or not all(linear.fusable() for linear in linears):
            return None
        return AttentionBlock(
            self.norm.weight,
            self.norm.eps,
            (self.q_proj.quant, self.k_proj.quant, self.v_proj.quant, self.o_proj.quant),
            head_dim=self.head_dim,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )

    def forward(self, x: Tensor, step: Step) -> Tensor:
        if self.block is not None and not any(linear.adapted(step.loras) for linear in self.submodules()):
            return self.block.forward(x, step.tokens(self.interleaved), step.pages(self.layer_idx))
        return self.forward_unfused(x, step)

    def forward_unfused(self, x: Tensor, step: Step) -> Tensor:
        """The same step by step and to the same bits: for padded matrices, adapters, and as the fused block's twin."""
        q, k, v = self._project(self.norm.forward(x), step)
        pages = step.pages(self.layer_idx)
        store_kv(pages, k, v, step.slots)
        mixed = paged_attention(
            q,
            pages,
            step.block_table,
            step.rows,
            step.positions,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            key_mask=step.key_mask,
            max_keys=step.max_keys,
        )
        return x.add_(self.o_proj.forward(mixed.view(x.shape[0], -1), step.loras))

    def _project(self, h: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q, rotated k, and v, each [T, heads, head_dim]."""
        tokens = h.shape[0]
        q = self.q_proj.forward(h, step.loras).view(tokens, self.num_attention_heads, self.head_dim)
        k = self.k_proj.forward(h, step.loras).view(tokens, self.num_key_value_heads, self.head_dim)
        v = self.v_proj.forward(h, step.loras).view(tokens, self.num_key_value_heads, self.head_dim)
        apply_rope(q, step.cos, step.sin, step.rope_positions, interleaved=self.interleaved)
        apply_rope(k, step.cos, step.sin, step.rope_positions, interleaved=self.interleaved)
        return q, k, v
