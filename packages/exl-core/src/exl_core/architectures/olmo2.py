"""OLMo 2: norms only behind the sub-layers, and one over all heads of q and of k."""

from .base import Architecture

OLMO2 = Architecture(
    name="Olmo2ForCausalLM",
    defaults={"rms_norm_eps": 1e-5},
    norm_1=None,
    norm_1_post="post_attention_layernorm",
    norm_2=None,
    norm_2_post="post_feedforward_layernorm",
    head_norm="rms",
    head_norm_of="all_heads",
    mlp_bias="none",
)
