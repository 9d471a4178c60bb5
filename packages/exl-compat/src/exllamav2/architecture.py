"""`exllamav2.architecture`: what distinguishes model families."""

from enum import IntEnum

from exl_core.architectures import Architecture
from exllamav2._names import stand_in, without_counterpart

__all__ = ["ExLlamaV2ArchParams", "RopeStyle"]

ExLlamaV2ArchParams = stand_in("exllamav2.architecture.ExLlamaV2ArchParams", Architecture)


class RopeStyle(IntEnum):
    """How positions rotate queries and keys; `Architecture.rope_style` says it in words here."""

    NONE = 0
    GPTJ = 1
    NEOX = 2


__getattr__ = without_counterpart(__name__)
