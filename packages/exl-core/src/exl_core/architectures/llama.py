"""Llama: the default that other families are described against. Yi and Index have other key names or extras."""

from .base import Architecture

LLAMA = Architecture(name="LlamaForCausalLM")

# Old Yi files use ln1 and ln2; converted files use Llama's names.
YI = Architecture(
    name="YiForCausalLM",
    keymap=((".ln1.", ".input_layernorm."), (".ln2.", ".post_attention_layernorm.")),
)

INDEX = Architecture(name="IndexForCausalLM", norm_head=True)
