"""Small mixtures of experts of seven families, for the tests of experts on the CPU and on a GPU."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
MOE = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": MOE,
    "Qwen2MoeForCausalLM": {**MOE, "shared_expert_intermediate_size": 64},
    "Qwen3MoeForCausalLM": {**MOE, "norm_topk_prob": True},
    "PhiMoEForCausalLM": {**MOE, "num_experts_per_tok": 2},
    "GraniteMoeForCausalLM": {**MOE, "intermediate_size": 96, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "OlmoeForCausalLM": {**MOE, "intermediate_size": 96},
    "DbrxForCausalLM": {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}, "attn_config": {"clip_qkv": 1.5}},
}
