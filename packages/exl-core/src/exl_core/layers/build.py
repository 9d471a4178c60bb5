"""Build the list of modules from a configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

from ..architectures import Experts, FusedTensor
from ..errors import ConfigError
from ..loading.linears import LinearOptions, LinearSpec, Ranges, Role
from .attention import Attention, ParallelDecoder
from .embedding import Embedding
from .head import Head
from .linear import Linear
from .mlp import FeedForward, GatedMLP, PlainMLP
from .module import Module
from .moe import Expert, MoE
from .norm import LayerNorm, Norm, RMSNorm
from .positions import PositionEmbedding

if TYPE_CHECKING:
    from ..config import ExLlamaV2Config

__all__ = ["build_modules"]


def build_modules(config: ExLlamaV2Config) -> list[Module]:
    """Return the modules of a model without touching weights.

    The order is embedding, positions if learned, then attention and MLP of each layer (or one module for both), final
    norm, head.
    """
    return _Builder(config).modules()


class _Builder:
    def __init__(self, config: ExLlamaV2Config) -> None:
        self.config = config
        self.arch = config.arch
        self.options = LinearOptions(
            compute=cast(Literal["exact", "int8"], config.cpu_matmul),
            gptq_bits=config.gptq_bits,
            gptq_zeros="v2" if config.checkpoint_offset_qzeros else "classic",
            gptq_group_size=config.gptq_group_size,
        )
        self.q_width = config.num_attention_heads * config.head_dim
        self.kv_width = config.num_key_value_heads * config.head_dim

    def modules(self) -> list[Module]:
        c, arch = self.config, self.arch
        scale = c.scale_emb * (math.sqrt(c.hidden_size) if arch.normalize_embeddings else 1.0)
        modules: list[Module] = [
            Embedding(arch.embed_tokens, c.vocab_size, c.hidden_size, scale, float_residual=arch.float_residual)
        ]
        if arch.positions == "learned":
            modules.append(PositionEmbedding(arch.position_embeddings, c.max_seq_len, c.hidden_size))
        for layer in range(c.num_hidden_layers):
            attention, mlp = self._attention(layer), self._feed_forward(layer)
            attention.float_residual = mlp.float_residual = arch.float_residual
            modules += [ParallelDecoder(attention, mlp)] if arch.parallel else [attention, mlp]
        modules.append(self._norm_at(arch.final_norm))
        modules.append(self._head())
        return modules

    def _attention(self, layer: int) -> Attention:
        c, arch = self.config, self.arch
        return Attention(
            f"{arch.layer_prefix}.{layer}",
            layer,
            self._norm(layer, arch.norm_1),
            (
                self._linear(layer, "q", arch.q_proj, c.hidden_size, self.q_width, bias=c.qkv_bias),
                self._linear(layer, "k", arch.k_proj, c.hidden_size, self.kv_width, bias=c.qkv_bias),
                self._linear(layer, "v", arch.v_proj, c.hidden_size, self.kv_width, bias=c.qkv_bias),
                self._linear(
                    layer, "o", arch.o_proj, self.q_width, c.hidden_size, bias=c.o_bias, prescale=c.scale_depth
                ),
            ),
            head_dim=c.head_dim,
            scale=c.attention_scale,
            window=c.layer_windows[layer],
            softcap=c.attn_logit_softcapping or 0.0,
            interleaved=arch.rope_style == "gptj",
            rope=c.layer_rope[layer],
            clip=c.clip_qkv,
            post=self._norm(layer, arch.norm_1_post),
            q_norm=self._head_norm(layer, arch.q_norm, c.num_attention_heads),
            k_norm=self._head_norm(layer, arch.k_norm, c.num_key_value_heads),
        )

    def _feed_forward(self, layer: int) -> FeedForward:
        c, arch = self.config, self.arch
        key = f"{arch.layer_prefix}.{layer}"
        norm, post = self._norm(layer, None if arch.parallel else arch.norm_2), self._norm(layer, arch.norm_2_post)
        if c.layer_sparse[layer] and arch.experts is not None:
            return self._experts(arch.experts, key, layer, norm, post)
        inner, hidden = c.intermediate_size, c.hidden_size
        up = self._linear(layer, "up", arch.up_proj, hidden, inner, bias=c.mlp_bias)
        down = self._linear(layer, "down", arch.down_proj, inner, hidden, bias=c.mlp_bias, prescale=c.scale_depth)
        if not arch.mlp_gated:
            return PlainMLP(key, layer, norm, (up, down), c.activation, post)
        gate = self._linear(layer, "gate", arch.gate_proj, hidden, inner, bias=c.mlp_bias)
        return GatedMLP(key, layer, norm, (gate, up, down), c.activation, post)

    def _experts(self, keys: Experts, key: str, layer: int, norm: Norm | None, post: Norm | None) -> MoE:
        c = self.config
        count, chosen = c.num_experts or 0, c.num_experts_per_token or 0
        if not 1 <= chosen <= count:
            raise ConfigError(f"num_experts_per_token is {chosen}, must be between 1 and num_experts, {count}")
        inner, hidden = c.moe_intermediate_size, c.hidden_size
        shared = shared_gate = None
        if keys.shared_prefix is not None:
            width, prefix = c.shared_expert_intermediate_size, keys.shared_prefix
            projections = (
                self._linear(layer, "gate", f"{prefix}.gate_proj", hidden, width, bias=False, in_mixture=True),
                self._linear(layer, "up", f"{prefix}.up_proj", hidden, width, bias=False, in_mixture=True),
                self._linear(
                    layer,
                    "down",
                    f"{prefix}.down_proj",
                    width,
                    hidden,
                    bias=False,
                    in_mixture=True,
                    prescale=c.scale_depth,
                ),
            )
            shared = GatedMLP(f"{key}.{prefix}", layer, None, projections, c.activation)
        if keys.shared_gate is not None:
            shared_gate = self._linear(layer, "shared_gate", keys.shared_gate, hidden, 1, bias=False, in_mixture=True)
        return MoE(
            key,
            layer,
            norm,
            self._linear(layer, "router", keys.router, hidden, count, bias=False, in_mixture=True),
            [
                Expert(
                    self._linear(layer, "gate", keys.gate, hidden, inner, bias=False, in_mixture=True, expert=e),
                    self._linear(layer, "up", keys.up, hidden, inner, bias=False, in_mixture=True, expert=e),
                    self._linear(
                        layer,
                        "down",
                        keys.down,
                        inner,
                        hidden,
                        bias=False,
                        in_mixture=True,
                        expert=e,
                        prescale=c.scale_depth,
                    ),
                )
                for e in range(count)
            ],
            chosen=chosen,
            normalize=c.norm_topk_prob,
            jitter=c.router_jitter,
            activation=c.activation,
            post=post,
            shared=shared,
            shared_gate=shared_gate,
        )

    def _head(self) -> Head:
        c, arch = self.config, self.arch
        spec = LinearSpec(
            arch.lm_head,
            c.hidden_size,
            c.vocab_size,
            "head",
            bias=c.head_bias,
            prescale=c.logit_scale,
            wider=True,
            alternate_key=arch.embed_tokens if c.tie_word_embeddings else None,
            unit_rows=bool(c.norm_head),
        )
        return Head(Linear(spec, self.options), c.padded_vocab_size, c.final_logit_softcapping)

    def _norm(self, layer: int, part: str | None) -> Norm | None:
        return None if part is None else self._norm_at(f"{self.arch.layer_prefix}.{layer}.{part}")

    def _norm_at(self, key: str) -> Norm:
        c, arch = self.config, self.arch
        if arch.norm == "layer":
            return LayerNorm(key, c.hidden_size, c.norm_eps, bias=arch.norm_bias)
        return RMSNorm(key, c.hidden_size, c.norm_eps, offset=arch.norm_offset)

    def _head_norm(self, layer: int, part: str, heads: int) -> Norm | None:
        """Return the norm of q or k; a weight for one head serves all heads."""
        c, arch = self.config, self.arch
        if not c.head_norms:
            return None
        key, width = f"{arch.layer_prefix}.{layer}.{part}", c.head_dim
        shapes: list[tuple[int, ...]] = [(heads, width), (width,)]
        if arch.head_norm_of == "all_heads":
            shapes = [(heads * width,)]
        if arch.head_norm == "layer":
            return LayerNorm(key, shapes[0], c.norm_eps, *shapes[1:])
        return RMSNorm(key, shapes[0], c.norm_eps, *shapes[1:], offset=arch.norm_offset)

    def _linear(
        self,
        layer: int,
        role: Role,
        part: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        prescale: float = 1.0,
        in_mixture: bool = False,
        expert: int | None = None,
    ) -> Linear:
        """Return the linear of a key below the layer (`part`), with `{}` for the expert."""
        prefix = f"{self.arch.layer_prefix}.{layer}."
        fused = self.arch.fused_key(part)
        spec = LinearSpec(
            prefix + part.format(expert),
            in_features,
            out_features,
            role,
            expert,
            in_mixture,
            bias=bias,
            prescale=prescale,
            transposed=self.arch.transposed,
        )
        if fused is not None:
            matrix, index = fused
            spec = replace(
                spec,
                fused_key=prefix + matrix.fused,
                fused_rows=self._fused_rows(matrix, index, expert or 0),
                fused_size=self._fused_size(matrix),
                fused_transposed=self.arch.experts is not None and matrix.fused in self.arch.experts.stacked_transposed,
            )
        return Linear(spec, self.options)

    def _fused_rows(self, matrix: FusedTensor, index: int, expert: int) -> Ranges:
        """Return the rows of part `index` in a fused matrix, of expert `expert` if the matrix stacks experts."""
        if matrix.packing == "grouped":
            groups, d = self.config.num_key_value_groups, self.config.head_dim
            begin, end = ((0, groups), (groups, groups + 1), (groups + 1, groups + 2))[index]
            packs = range(self.config.num_key_value_heads)
            return tuple(((p * (groups + 2) + begin) * d, (p * (groups + 2) + end) * d) for p in packs)
        widths = [self._stored_rows(part) for part in matrix.parts]
        begin = expert * sum(widths) + sum(widths[:index])
        return ((begin, begin + widths[index]),)

    def _fused_size(self, matrix: FusedTensor) -> int:
        """Return the rows of a whole fused matrix, of all experts if it stacks them."""
        experts = self.arch.experts
        stacked = experts is not None and matrix in experts.stacked
        return sum(map(self._stored_rows, matrix.parts)) * ((self.config.num_experts or 0) if stacked else 1)

    def _stored_rows(self, part: str) -> int:
        """Return the number of rows of a part in a fused matrix."""
        c, arch = self.config, self.arch
        if part == arch.q_proj:
            return self.q_width
        if part in (arch.k_proj, arch.v_proj):
            return self.kv_width
        experts = arch.experts
        if experts is not None and part in (experts.gate, experts.up, experts.down):
            transposed = any(part in m.parts for m in experts.stacked if m.fused in experts.stacked_transposed)
            return c.hidden_size if part == experts.down and not transposed else c.moe_intermediate_size
        return c.intermediate_size
