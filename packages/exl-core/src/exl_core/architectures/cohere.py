"""Cohere: attention and MLP in parallel after one LayerNorm, GPT-J rotation, a logit scale."""

from dataclasses import replace

from ..json_reader import JsonReader
from .base import Architecture
from .windows import LayerRope, alternating_windows

COHERE = Architecture(
    name="CohereForCausalLM",
    defaults={"logit_scale": 0.0625, "layer_norm_eps": 1e-5},
    norm="layer",
    norm_eps_keys=("layer_norm_eps",),
    norm_2=None,
    parallel=True,
    head_norm="layer",
    head_norm_key="use_qk_norm",
    mlp_bias="none",
    rope_style="gptj",
    rope_theta=500_000.0,
    scales=("logit_scale",),
    tied_head=True,
    requires_bos=True,
)


def cohere2_rope(read: JsonReader, windows: list[int]) -> list[LayerRope]:
    """Return no positions for layers with full attention."""
    return ["main" if window else "none" for window in windows]


COHERE2 = replace(
    COHERE,
    name="Cohere2ForCausalLM",
    head_norm=None,
    head_norm_key=None,
    rope_theta=10_000.0,
    windows=alternating_windows(4096, 4),
    layer_rope=cohere2_rope,
)
