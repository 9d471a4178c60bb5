"""Phi-3, Phi-3.5 and Phi-4: Llama with fused matrices, partial rotation and longrope. Phi-3.5-MoE: LayerNorm, two
experts chosen one after the other, and longrope with a factor of its own for short and for long contexts."""

from dataclasses import replace

from .base import Architecture
from .mistral import MIXTRAL
from .windows import one_window

PHI3 = Architecture(
    name="Phi3ForCausalLM",
    # The second is at the top of the file, where it counts before one in the rope block.
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
PHIMOE = replace(PHI_MOE, name="PhimoeForCausalLM")  # as transformers calls it
