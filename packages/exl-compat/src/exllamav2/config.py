"""`exllamav2.config`."""

from exl_core import ExLlamaV2Config

__all__ = ["ExLlamaV2Config"]
