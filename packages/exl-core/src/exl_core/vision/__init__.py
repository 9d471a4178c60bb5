"""Image encoders of multimodal models: from an image to rows of hidden states."""

from .images import open_image
from .tower import ExLlamaV2VisionTower

__all__ = ["ExLlamaV2VisionTower", "open_image"]
