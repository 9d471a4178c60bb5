"""InternLM2: Llama with other key names and q, k, v packed by key/value head."""

from .base import Architecture, FusedTensor

INTERNLM2 = Architecture(
    name="InternLM2ForCausalLM",
    norm_1="attention_norm",
    norm_2="ffn_norm",
    bias_keys=("bias",),
    mlp_bias="none",
    gate_proj="feed_forward.w1",
    up_proj="feed_forward.w3",
    down_proj="feed_forward.w2",
    fused=(
        FusedTensor("self_attn.wqkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "grouped"),
        FusedTensor("feed_forward.gate_up_proj", ("feed_forward.w1", "feed_forward.w3")),
    ),
    keymap=(
        ("$output.", "lm_head."),
        ("$model.tok_embeddings.", "model.embed_tokens."),
        (".attention.", ".self_attn."),
        (".wo.", ".o_proj."),
    ),
)
