"""Granite, its experts, and MiniCPM: Llama with multipliers on embeddings, residuals, attention and logits."""

from dataclasses import replace

from .base import Architecture, Experts, FusedTensor

GRANITE = Architecture(
    name="GraniteForCausalLM",
    defaults={"attention_multiplier": 1.0, "rms_norm_eps": 1e-6},
    scale_keys=("attention_multiplier",),
    scales=("embedding_multiplier", "residual_multiplier", "logits_scaling"),
)

MINICPM = Architecture(
    name="MiniCPMForCausalLM",
    scales=("scale_emb", "scale_depth", "logit_scale"),
    logit_base_key="dim_model_base",
    tied_head=True,
)

GRANITE_MOE = replace(
    GRANITE,
    name="GraniteMoeForCausalLM",
    experts=Experts(
        router="block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{}.w1",
        up="block_sparse_moe.experts.{}.w3",
        down="block_sparse_moe.experts.{}.w2",
        stacked=(
            FusedTensor(
                "block_sparse_moe.input_linear", ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3")
            ),
            FusedTensor("block_sparse_moe.output_linear", ("block_sparse_moe.experts.{}.w2",)),
        ),
        width_keys=(),
    ),
    keymap=(
        (".block_sparse_moe.router.layer.", ".block_sparse_moe.gate."),
        (".block_sparse_moe.router.", ".block_sparse_moe.gate."),
    ),
)
