"""`exllamav2.vlm.vision_tower`."""

from exl_core import ExLlamaV2VisionTower

__all__ = ["ExLlamaV2VisionTower"]
