"""`exllamav2.conv`: convolutions, which are parts of the image towers here."""

from exllamav2._names import stand_in

__all__ = ["ExLlamaV2Conv"]

ExLlamaV2Conv = stand_in("exllamav2.conv.ExLlamaV2Conv")
