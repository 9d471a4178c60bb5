"""Phi-3, Phi-3.5 and Phi-4: Llama with fused matrices, partial rotation and longrope."""

from .base import Architecture
from .windows import one_window

PHI3 = Architecture(name="Phi3ForCausalLM", attention_bias="none", mlp_bias="none", windows=one_window())
