"""`exllamav2.vlm.mmprojector`: the projector, which is a part of the image tower here."""

from exllamav2._names import stand_in

__all__ = ["ExLlamaV2MultimodalProjector"]

ExLlamaV2MultimodalProjector = stand_in("exllamav2.vlm.mmprojector.ExLlamaV2MultimodalProjector")
