"""StableLM: Llama with LayerNorm, a quarter of each head rotated, and a separate key for biases of q, k, v."""

from .base import Architecture

STABLELM = Architecture(
    name="StableLmForCausalLM",
    defaults={"layer_norm_eps": 1e-5},
    # The 12B model: a norm with separate weights for each head, and attention and MLP after one norm.
    fixed={"qk_layernorm": False, "use_parallel_residual": False},
    norm="layer",
    norm_bias=True,
    norm_eps_keys=("layer_norm_eps",),
    bias_keys=("use_qkv_bias",),
    bias_from_file="qkv",
    mlp_bias="none",
    partial_rotary=True,
    partial_rotary_factor=0.25,
)
