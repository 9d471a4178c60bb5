"""From a configuration to the list of modules (spec core.md 1.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from ..loading.linears import LinearOptions, LinearSpec
from .attention import Attention
from .embedding import Embedding
from .head import Head
from .linear import Linear
from .mlp import GatedMLP
from .module import Module
from .norm import RMSNorm

if TYPE_CHECKING:
    from ..config import ExLlamaV2Config

__all__ = ["build_modules"]


def build_modules(config: ExLlamaV2Config) -> list[Module]:
    """Embedding, then attention and MLP of each layer, final norm, head. No weights are touched."""
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
        self.widths = self._output_widths()

    def modules(self) -> list[Module]:
        c, arch = self.config, self.arch
        modules: list[Module] = [Embedding(arch.embed_tokens, c.vocab_size, c.hidden_size, c.scale_emb)]
        for layer in range(c.num_hidden_layers):
            modules += [self._attention(layer), self._mlp(layer)]
        modules.append(RMSNorm(arch.final_norm, c.hidden_size, c.norm_eps))
        modules.append(self._head())
        return modules

    def _attention(self, layer: int) -> Attention:
        c, arch = self.config, self.arch
        q_width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        return Attention(
            f"{arch.layer_prefix}.{layer}",
            layer,
            self._norm(layer, arch.norm_1),
            (
                self._linear(layer, arch.q_proj, c.hidden_size, q_width, bias=c.qkv_bias),
                self._linear(layer, arch.k_proj, c.hidden_size, kv_width, bias=c.qkv_bias),
                self._linear(layer, arch.v_proj, c.hidden_size, kv_width, bias=c.qkv_bias),
                self._linear(layer, arch.o_proj, q_width, c.hidden_size, bias=c.o_bias, prescale=c.scale_depth),
            ),
            head_dim=c.head_dim,
            scale=c.attention_scale,
            window=c.layer_windows[layer],
            softcap=c.attn_logit_softcapping or 0.0,
            interleaved=arch.rope_style == "gptj",
        )

    def _mlp(self, layer: int) -> GatedMLP:
        c, arch = self.config, self.arch
        return GatedMLP(
            f"{arch.layer_prefix}.{layer}",
            layer,
            self._norm(layer, arch.norm_2),
            (
                self._linear(layer, arch.gate_proj, c.hidden_size, c.intermediate_size, bias=c.mlp_bias),
                self._linear(layer, arch.up_proj, c.hidden_size, c.intermediate_size, bias=c.mlp_bias),
                self._linear(
                    layer, arch.down_proj, c.intermediate_size, c.hidden_size, bias=c.mlp_bias, prescale=c.scale_depth
                ),
            ),
            c.activation,
        )

    def _head(self) -> Head:
        c, arch = self.config, self.arch
        spec = LinearSpec(
            arch.lm_head,
            c.hidden_size,
            c.vocab_size,
            prescale=c.logit_scale,
            wider=True,
            alternate_key=arch.embed_tokens if c.tie_word_embeddings else None,
        )
        return Head(Linear(spec, self.options), c.padded_vocab_size, c.final_logit_softcapping)

    def _norm(self, layer: int, part: str) -> RMSNorm:
        return RMSNorm(f"{self.arch.layer_prefix}.{layer}.{part}", self.config.hidden_size, self.config.norm_eps)

    def _linear(
        self, layer: int, part: str, in_features: int, out_features: int, *, bias: bool, prescale: float = 1.0
    ) -> Linear:
        key = f"{self.arch.layer_prefix}.{layer}.{part}"
        fused = self.arch.fused_key(key)
        rows = (0, 0)
        if fused is not None:
            begin = sum(self.widths[p] for p in fused[2].parts[: fused[1]])
            rows = (begin, begin + out_features)
        spec = LinearSpec(
            key,
            in_features,
            out_features,
            bias=bias,
            prescale=prescale,
            fused_key=fused[0] if fused else None,
            fused_rows=rows,
        )
        return Linear(spec, self.options)

    def _output_widths(self) -> dict[str, int]:
        """Rows that each part takes of a fused matrix."""
        c, arch = self.config, self.arch
        return {
            arch.q_proj: c.num_attention_heads * c.head_dim,
            arch.k_proj: c.num_key_value_heads * c.head_dim,
            arch.v_proj: c.num_key_value_heads * c.head_dim,
            arch.gate_proj: c.intermediate_size,
            arch.up_proj: c.intermediate_size,
        }
