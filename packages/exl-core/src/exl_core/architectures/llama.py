"""Llama: the default every other family is described against."""

from .base import Architecture

LLAMA = Architecture(name="LlamaForCausalLM")
