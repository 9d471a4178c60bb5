"""Phi-1 to Phi-4 and Phi-3.5-MoE.

Phi-1 and Phi-2: attention and a plain MLP in parallel after one LayerNorm, biases everywhere. Phi-3, Phi-3.5 and Phi-4:
Llama with fused matrices, partial rotation and longrope. Phi-3.5-MoE: LayerNorm, two experts chosen one after the
other, and longrope with separate factors for short and for long contexts.
"""

from dataclasses import replace

from .base import Architecture
from .mistral import MIXTRAL
from .windows import one_window

PHI = Architecture(
    name="PhiForCausalLM",
    defaults={"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "lm_head_bias": True},
    fixed={"qk_layernorm": False},
    norm="layer",
    norm_bias=True,
    norm_eps_keys=("layer_norm_eps",),
    norm_2=None,
    parallel=True,
    attention_bias="all",
    o_proj="self_attn.dense",
    partial_rotary=True,
    partial_rotary_factor=0.5,
    mlp_gated=False,
    mlp_bias="all",
    up_proj="mlp.fc1",
    down_proj="mlp.fc2",
    final_norm="model.final_layernorm",
    head_bias_key="lm_head_bias",
)

PHI3 = Architecture(
    name="Phi3ForCausalLM",
    # The second key is at the top level of the file, where it has priority over the rope block.
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    attention_bias="none",
    mlp_bias="none",
    windows=one_window(),
    partial_rotary=True,
)

assert MIXTRAL.experts is not None

PHI_MOE = replace(
    MIXTRAL,
    name="PhiMoEForCausalLM",
    attention_bias="file",
    norm="layer",
    norm_bias=True,
    head_bias_key="lm_head_bias",
    rope_mscales=True,
    experts=replace(MIXTRAL.experts, mixer_keys=("router_jitter_noise",), chosen_fixed=2),
    keymap=((".mlp.router.", ".block_sparse_moe.gate."), *MIXTRAL.keymap),
)
PHIMOE = replace(PHI_MOE, name="PhimoeForCausalLM")  # the name in transformers
