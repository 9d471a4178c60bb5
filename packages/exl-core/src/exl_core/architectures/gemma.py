"""Gemma: norm weights stored minus 1, scaled embeddings, GELU; from Gemma 2 on sandwich norms, windows, softcaps."""

from dataclasses import replace

from ..json_reader import JsonReader
from .base import Architecture, Vision
from .mistral import MIXTRAL_EXPERTS
from .windows import LayerRope, alternating_windows

GEMMA = Architecture(
    name="GemmaForCausalLM",
    defaults={"head_dim": 256, "rms_norm_eps": 1e-6, "num_attention_heads": 16, "num_key_value_heads": 16},
    # GELU in its tanh form, which old files call "gelu"; versions of transformers differ in the key that they read.
    fixed={
        "use_bidirectional_attention": False,
        "hidden_act": ("gelu", "gelu_pytorch_tanh"),
        "hidden_activation": "gelu_pytorch_tanh",
    },
    norm_offset=1.0,
    mlp_bias="none",
    activation="gelu",
    activation_keys=(),
    normalize_embeddings=True,
    tied_head=True,
    requires_bos=True,
)

GEMMOE = replace(
    GEMMA, name="GemmoeForCausalLM", experts=MIXTRAL_EXPERTS, defaults={"head_dim": 256, "rms_norm_eps": 1e-6}
)

GEMMA2 = replace(
    GEMMA,
    name="Gemma2ForCausalLM",
    defaults={
        "vocab_size": 256000,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fixed={"use_bidirectional_attention": False},
    activation_keys=("hidden_activation",),
    norm_1_post="post_attention_layernorm",
    norm_2="pre_feedforward_layernorm",
    norm_2_post="post_feedforward_layernorm",
    float_residual=True,
    query_scalar=True,
    softcaps=True,
    windows=alternating_windows(4096, 2),
)


def gemma3_rope(read: JsonReader, windows: list[int]) -> list[LayerRope]:
    """Return the second table, with a separate theta and no scaling, for sliding layers."""
    return ["alt" if window else "main" for window in windows]


GEMMA3 = replace(
    GEMMA2,
    name="Gemma3ForCausalLM",
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
    },
    # transformers reads the first key and ignores its value; no published file has it.
    fixed={"attn_logit_softcapping": None, "use_bidirectional_attention": False},
    head_norm="rms",
    windows=alternating_windows(4096, 6),
    rope_theta=1_000_000.0,
    rope_theta_alt=10_000.0,
    layer_rope=gemma3_rope,
)

GEMMA3_MULTIMODAL = replace(
    GEMMA3,
    name="Gemma3ForConditionalGeneration",
    fixed={**GEMMA3.fixed, "final_logit_softcapping": None},
    keymap=(
        ("$language_model.", ""),
        ("$model.language_model.", "model."),
        ("$model.vision_tower.", "vision_tower."),
        ("$model.multi_modal_projector.", "multi_modal_projector."),
        ("$vision_tower.vision_model.", "vision_tower."),
        ("mm_input_projection_weight", "mm_input_projection.weight"),
    ),
    vision=Vision("SigLIP", "siglip_vision_model", "siglip"),
    pictures_see_themselves=True,
)
