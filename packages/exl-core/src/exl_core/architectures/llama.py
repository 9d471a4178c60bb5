"""Llama: the default every other family is described against. Yi and Index are Llama with other key names or extras."""

from .base import Architecture

LLAMA = Architecture(name="LlamaForCausalLM")

# Old Yi files say ln1 and ln2; converted ones say what Llama says.
YI = Architecture(
    name="YiForCausalLM",
    keymap=((".ln1.", ".input_layernorm."), (".ln2.", ".post_attention_layernorm.")),
)

INDEX = Architecture(name="IndexForCausalLM", norm_head=True)
