"""OLMo 2 and 3: norms only after the sub-layers, and over all heads of q and of k; OLMo 3 slides. OLMoE: experts."""

from dataclasses import replace

from ..json_reader import JsonReader
from .base import Architecture, Experts
from .qwen import norm_topk_prob
from .windows import LayerRope, alternating_windows

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


def olmo3_rope(read: JsonReader, windows: list[int]) -> list[LayerRope]:
    """Return the second table, without the file's scaling, for sliding layers."""
    return ["alt" if window else "main" for window in windows]


OLMO3 = replace(
    OLMO2,
    name="Olmo3ForCausalLM",
    rope_theta=500_000.0,
    rope_theta_alt=500_000.0,
    rope_theta_alt_keys=("rope_theta",),
    windows=alternating_windows(4096, 4),
    layer_rope=olmo3_rope,
)

OLMOE = Architecture(
    name="OlmoeForCausalLM",
    defaults={"rms_norm_eps": 1e-5},
    head_norm="rms",
    head_norm_of="all_heads",
    mlp_bias="none",
    experts=Experts(normalize=norm_topk_prob, width_keys=(), count_keys=("num_experts",)),
)
