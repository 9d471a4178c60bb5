"""LoRA adapters: reading them, mapping their keys to the model's matrices, and adding them up (spec core.md 14)."""

from .adapter import ExLlamaV2Lora

__all__ = ["ExLlamaV2Lora"]
