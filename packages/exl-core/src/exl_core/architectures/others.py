"""Families that differ from Llama by one line: Seed-OSS, ERNIE 4.5, Arcee, Helium, EXAONE 4."""

from ..json_reader import JsonReader
from .base import Architecture
from .windows import LayerRope, alternating_windows, read_window

DEFAULT_WINDOW = 4096

SEED_OSS = Architecture(
    name="SeedOssForCausalLM",
    defaults={"attention_bias": True, "head_dim": 128, "rms_norm_eps": 1e-6},
    bias_from_file="qkv",
    o_bias_keys=("attention_out_bias",),
)

ERNIE4_5 = Architecture(
    name="Ernie4_5ForCausalLM",
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    bias_keys=("use_bias",),
    mlp_bias_keys=("use_bias",),
    rope_style="gptj",
    rope_theta=500_000.0,
    tied_head=True,
)

HELIUM = Architecture(
    name="HeliumForCausalLM",
    defaults={"head_dim": 128, "rms_norm_eps": 1e-8},
    bias_from_file="qkv",
    rope_style="gptj",
    rope_theta=100_000.0,
)

ARCEE = Architecture(name="ArceeForCausalLM", mlp_gated=False, activation="relu2")


def exaone4_rope(read: JsonReader, windows: list[int]) -> list[LayerRope]:
    """Return no positions for layers with full attention where the file has a window."""
    hybrid = read_window(read, DEFAULT_WINDOW) > 0
    return ["none" if hybrid and not window else "main" for window in windows]


EXAONE4 = Architecture(
    name="Exaone4ForCausalLM",
    defaults={"rms_norm_eps": 1e-5},
    norm_1=None,
    norm_1_post="post_attention_layernorm",
    norm_2=None,
    norm_2_post="post_feedforward_layernorm",
    attention_bias="none",
    mlp_bias="none",
    head_norm="rms",
    windows=alternating_windows(DEFAULT_WINDOW, 4),
    layer_rope=exaone4_rope,
)
