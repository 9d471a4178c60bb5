"""`exllamav2.headnorm`: norms of attention heads, which are parts of an attention module here."""

from exl_core.layers import Norm
from exllamav2._names import stand_in

__all__ = ["ExLlamaV2HeadNorm"]

ExLlamaV2HeadNorm = stand_in("exllamav2.headnorm.ExLlamaV2HeadNorm", Norm)
