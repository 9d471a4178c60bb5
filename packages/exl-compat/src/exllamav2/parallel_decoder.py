"""`exllamav2.parallel_decoder`."""

from exl_core.layers import ParallelDecoder
from exllamav2._names import stand_in

__all__ = ["ExLlamaV2ParallelDecoder"]

ExLlamaV2ParallelDecoder = stand_in("exllamav2.parallel_decoder.ExLlamaV2ParallelDecoder", ParallelDecoder)
