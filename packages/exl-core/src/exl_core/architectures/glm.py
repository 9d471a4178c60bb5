"""GLM-4: half of each head rotated in GPT-J pairs; post norms in the 0414 generation."""

from dataclasses import replace

from .base import Architecture

GLM = Architecture(
    name="GlmForCausalLM",
    defaults={"head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True},
    bias_from_file="qkv",
    mlp_bias="none",
    rope_style="gptj",
    partial_rotary=True,
    partial_rotary_factor=0.5,
)

GLM4 = replace(GLM, name="Glm4ForCausalLM", norm_1_post="post_self_attn_layernorm", norm_2_post="post_mlp_layernorm")
