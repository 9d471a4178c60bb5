"""`exllamav2.vlm`: image towers."""

from exllamav2.vlm.mmprojector import ExLlamaV2MultimodalProjector
from exllamav2.vlm.vision_tower import ExLlamaV2VisionTower

__all__ = ["ExLlamaV2MultimodalProjector", "ExLlamaV2VisionTower"]
