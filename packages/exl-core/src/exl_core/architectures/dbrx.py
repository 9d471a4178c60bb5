"""DBRX: stacked experts, LayerNorm without bias, clamped q, k and v."""

from ..errors import UnsupportedError
from ..json_reader import JsonReader
from .base import Architecture, Experts, FusedTensor


def normalize(read: JsonReader) -> bool:
    """Return whether the probabilities are scaled to sum 1.

    `moe_normalize_expert_weights` is the order of a norm: 1 means a sum of 1, null no scaling.
    """
    if read.explicit_null("ffn_config->moe_normalize_expert_weights"):
        return False
    order = read.number("ffn_config->moe_normalize_expert_weights", default=1.0)
    if order != 1.0:
        raise UnsupportedError(f"{read.file}: moe_normalize_expert_weights is {order}; supported: 1 and null")
    return True


def kv_heads(read: JsonReader) -> int | None:
    """Return the number in `attn_config`.

    transformers also writes it at the top level, but does not read it from there.
    """
    heads: int | None = read.integer("attn_config->kv_n_heads", default=None, minimum=1)
    return heads


DBRX = Architecture(
    name="DbrxForCausalLM",
    norm="layer",
    norm_eps_keys=(),  # 1e-5
    attention_bias="none",
    mlp_bias="none",
    kv_heads=kv_heads,
    clip_key="attn_config->clip_qkv",
    activation_keys=("ffn_config->ffn_act_fn->name",),
    experts=Experts(
        router="block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{}.w1",
        up="block_sparse_moe.experts.{}.v1",
        down="block_sparse_moe.experts.{}.w2",
        stacked=tuple(
            FusedTensor(f"block_sparse_moe.experts.{w}", (f"block_sparse_moe.experts.{{}}.{w}",))
            for w in ("w1", "v1", "w2")
        ),
        stacked_transposed=("block_sparse_moe.experts.w2",),
        count_keys=("ffn_config->moe_num_experts",),
        chosen_keys=("ffn_config->moe_top_k",),
        width_keys=("ffn_config->ffn_hidden_size",),
        normalize=normalize,
    ),
    fused=(FusedTensor("self_attn.Wqkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),),
    keymap=(
        ("transformer.", "model."),
        (".blocks.", ".layers."),
        (".ffn.experts.mlp.", ".block_sparse_moe.experts."),
        (".ffn.router.layer.", ".block_sparse_moe.gate."),
        (".norm_attn_norm.norm_1.", ".input_layernorm."),
        (".norm_attn_norm.norm_2.", ".post_attention_layernorm."),
        (".norm_attn_norm.attn.", ".self_attn."),
        (".out_proj.", ".o_proj."),
        (".norm_f.", ".norm."),
        (".wte.", ".embed_tokens."),
    ),
)
