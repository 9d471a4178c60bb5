"""Qwen2: biases on q, k, v. Qwen3: a norm on every head of q and k. Both: an optional window on upper layers."""

from dataclasses import replace

from ..json_reader import JsonReader
from .base import Architecture, Experts, Vision
from .windows import layer_types, read_window

# Defaults of transformers' configuration classes for keys that config.json omits.
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


def qwen2_windows(read: JsonReader, num_layers: int) -> list[int]:
    """Return transformers' windows: if enabled, by `layer_types`, else on layers from `max_window_layers` on."""
    if not read.boolean("use_sliding_window", default=False, text=True):
        return [0] * num_layers
    window = read_window(read, DEFAULT_WINDOW)
    kinds = layer_types(read, num_layers)
    if kinds is None:
        first = read.integer("max_window_layers", default=DEFAULT_MAX_WINDOW_LAYERS, text=True, minimum=0)
        return [window if i >= first else 0 for i in range(num_layers)]
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def qwen3_moe_windows(read: JsonReader, num_layers: int) -> list[int]:
    """Return one window on all layers, if enabled."""
    on = read.boolean("use_sliding_window", default=False, text=True)
    return [read_window(read, DEFAULT_WINDOW) if on else 0] * num_layers


def sparse_layers(read: JsonReader, num_layers: int) -> list[bool]:
    """Return experts on each `decoder_sparse_step`th layer that is not in `mlp_only_layers`."""
    step = read.integer("decoder_sparse_step", default=1, text=True, minimum=1)
    dense = read.listing("mlp_only_layers", default=None, text=True) or []
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


def norm_topk_prob(read: JsonReader) -> bool:
    """Return `norm_topk_prob`; transformers' default is False, and published files set the key."""
    normalize: bool = read.boolean("norm_topk_prob", default=False, text=True)
    return normalize


QWEN_EXPERTS = Experts(normalize=norm_topk_prob, sparse=sparse_layers)

QWEN2 = Architecture(name="Qwen2ForCausalLM", attention_bias="qkv", mlp_bias="none", windows=qwen2_windows)

QWEN2_MOE = replace(
    QWEN2,
    name="Qwen2MoeForCausalLM",
    defaults={"qkv_bias": True},
    attention_bias="file",
    bias_keys=("qkv_bias",),
    bias_from_file="qkv",
    experts=replace(
        QWEN_EXPERTS,
        count_keys=("num_experts",),
        shared_prefix="mlp.shared_expert",
        shared_gate="mlp.shared_expert_gate",
        shared_width_keys=("shared_expert_intermediate_size",),
    ),
)

QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    defaults={"head_dim": 128},
    mlp_bias="none",
    head_norm="rms",
    windows=qwen2_windows,
)

QWEN3_MOE = replace(QWEN3, name="Qwen3MoeForCausalLM", defaults={}, windows=qwen3_moe_windows, experts=QWEN_EXPERTS)

# The language part of the vision models, under its older and its present prefix.
QWEN2_VL_KEYS = (("$model.language_model.", "model."), ("$model.visual.", "visual."))
QWEN2_VL_DEFAULTS = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
}
QWEN2_VL = replace(
    QWEN2,
    name="Qwen2VLForConditionalGeneration",
    defaults=QWEN2_VL_DEFAULTS,
    keymap=QWEN2_VL_KEYS,
    vision=Vision("Qwen2-VL", "qwen2", "qwen"),
    rope_theta=1_000_000.0,
    grid_merge=2,
    mrope_section=(16, 24, 24),
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    name="Qwen2_5_VLForConditionalGeneration",
    vision=Vision("Qwen2.5-VL", "qwen2.5", "qwen", gated=True),
)
