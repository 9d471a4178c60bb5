"""`exllamav2.generator.base`; third-party filters import the filter class from here."""

from exl_filters import ExLlamaV2Filter
from exl_generate import ExLlamaV2BaseGenerator
from exllamav2.generator.sampler import ExLlamaV2Sampler

__all__ = ["ExLlamaV2BaseGenerator", "ExLlamaV2Filter", "ExLlamaV2Sampler"]
