"""Mistral: Llama with a sliding window on every layer if the file defines one. Mixtral: the same with experts."""

from .base import Architecture, Experts, FusedTensor
from .windows import one_window

DEFAULT_WINDOW = 4096  # transformers' MistralConfig default when config.json has no `sliding_window`
MISTRAL_WINDOWS = one_window(DEFAULT_WINDOW)

MISTRAL = Architecture(name="MistralForCausalLM", attention_bias="none", mlp_bias="none", windows=MISTRAL_WINDOWS)

MIXTRAL_EXPERTS = Experts(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
    stacked=(
        FusedTensor(
            "block_sparse_moe.experts.gate_up_proj",
            ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        ),
        FusedTensor("block_sparse_moe.experts.down_proj", ("block_sparse_moe.experts.{}.w2",)),
    ),
    width_keys=(),
)

MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    attention_bias="none",
    windows=one_window(),
    rope_theta=1_000_000.0,
    experts=MIXTRAL_EXPERTS,
    keymap=((".mlp.gate.", ".block_sparse_moe.gate."), (".mlp.experts.", ".block_sparse_moe.experts.")),
)
