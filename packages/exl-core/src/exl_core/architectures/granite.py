"""Granite and MiniCPM: Llama with multipliers on embeddings, residuals, attention and logits."""

from .base import Architecture

GRANITE = Architecture(
    name="GraniteForCausalLM",
    defaults={"attention_multiplier": 1.0, "rms_norm_eps": 1e-6},
    scale_keys=("attention_multiplier",),
)

MINICPM = Architecture(name="MiniCPMForCausalLM", logit_base_key="dim_model_base")
