"""LoRA adapters: reading them, mapping their keys to the model's matrices, and adding their results."""

from .adapter import ExLlamaV2Lora

__all__ = ["ExLlamaV2Lora"]
