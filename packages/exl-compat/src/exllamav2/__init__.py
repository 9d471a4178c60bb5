"""exllamav2's import paths on this project's packages. Nothing is implemented here: each name is a class of exl_core,
exl_filters or exl_generate. A name whose feature is not built can be imported and says so when it is used.
"""

from __future__ import annotations

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
    SeqTensor,
    Timer,
)
from exllamav2._names import core_name, prepare_third_parties
from exllamav2._original import warn_of_original
from exllamav2.version import __version__

ExLlamaV2Lora = core_name("ExLlamaV2Lora")
ExLlamaV2Cache_TP = core_name("ExLlamaV2Cache_TP")
ExLlamaV2VisionTower = core_name("ExLlamaV2VisionTower")
ExLlamaV2MultimodalProjector = core_name("ExLlamaV2MultimodalProjector")
Intervention = core_name("Intervention")

__all__ = [
    "ExLlamaV2",
    "ExLlamaV2Cache",
    "ExLlamaV2CacheBase",
    "ExLlamaV2Cache_8bit",
    "ExLlamaV2Cache_Q4",
    "ExLlamaV2Cache_Q6",
    "ExLlamaV2Cache_Q8",
    "ExLlamaV2Cache_TP",
    "ExLlamaV2Config",
    "ExLlamaV2Lora",
    "ExLlamaV2MultimodalProjector",
    "ExLlamaV2Tokenizer",
    "ExLlamaV2VisionTower",
    "Intervention",
    "SeqTensor",
    "Timer",
    "__version__",
]

warn_of_original()
prepare_third_parties()
