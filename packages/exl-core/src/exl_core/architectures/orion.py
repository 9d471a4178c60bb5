"""Orion: Llama with LayerNorm."""

from .base import Architecture

ORION = Architecture(name="OrionForCausalLM", norm="layer", norm_bias=True)
