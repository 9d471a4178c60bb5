"""GPT-2 and GPT-BigCode: learned positions, LayerNorm, plain MLP, one matrix for q, k and v."""

from dataclasses import replace

from ..json_reader import JsonReader
from .base import Architecture, FusedTensor


def a_head_each(read: JsonReader) -> int | None:
    """Return the number of attention heads: GPT-2 has no key for another number of key/value heads."""
    heads: int | None = read.integer("num_attention_heads", "n_heads", "n_head", default=None, minimum=1)
    return heads


def bigcode_kv_heads(read: JsonReader) -> int | None:
    """Return one key/value head, or with `multi_query` false one per head. Other keys have no effect."""
    if read.boolean("multi_query", default=True):
        return 1
    return a_head_each(read)


def fused(packing: str) -> tuple[FusedTensor, ...]:
    """Return `c_attn` in one of its packings."""
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return (FusedTensor("self_attn.c_attn", parts, "grouped" if packing == "grouped" else "rows"),)


GPT2 = Architecture(
    name="GPT2LMHeadModel",
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    norm="layer",
    norm_bias=True,
    norm_eps_keys=("layer_norm_epsilon",),
    defaults={"layer_norm_epsilon": 1e-5},
    norm_1="ln_1",
    norm_2="ln_2",
    attention_bias="all",
    kv_heads=a_head_each,
    mlp_bias="all",
    positions="learned",
    mlp_gated=False,
    activation="gelu",
    activation_keys=("activation_function",),
    inner_multiple=4,
    up_proj="mlp.c_fc",
    down_proj="mlp.c_proj",
    tied_head=True,
    fused=fused("rows"),
    transposed=True,
    keymap=(
        ("$transformer.", ""),
        ("$ln_f.", "model.norm."),
        (".attn.c_proj.", ".self_attn.o_proj."),
        (".attn.", ".self_attn."),
        ("$h.", "model.layers."),
        ("$wte.", "model.embed_tokens."),
        ("$wpe.", "model.wpe."),
    ),
)

GPT_BIGCODE = replace(
    GPT2,
    name="GPTBigCodeForCausalLM",
    kv_heads=bigcode_kv_heads,
    # With one key/value head, "query heads, then the key, then the value" is also the plain order of rows.
    fused=fused("grouped"),
    transposed=False,
    keymap=(
        ("$transformer.ln_f.", "model.norm."),
        ("$transformer.", "model."),
        (".attn.c_proj.", ".self_attn.o_proj."),
        (".attn.", ".self_attn."),
        (".h.", ".layers."),
        (".wte.", ".embed_tokens."),
    ),
)
