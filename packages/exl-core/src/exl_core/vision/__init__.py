"""Image encoders of multimodal models: from an image to rows of hidden states (spec core.md 12)."""

from .images import open_image
from .tower import ExLlamaV2VisionTower

__all__ = ["ExLlamaV2VisionTower", "open_image"]
