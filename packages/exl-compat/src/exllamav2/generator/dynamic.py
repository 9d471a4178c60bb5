"""`exllamav2.generator.dynamic`."""

from exl_filters import ExLlamaV2Filter
from exl_generate import PAGED_PAGE_SIZE, ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.dynamic.pages import Page as CachePage
from exl_generate.dynamic.speculation import NGramTrie
from exllamav2.generator.sampler import ExLlamaV2Sampler

__all__ = [
    "PAGED_PAGE_SIZE",
    "CachePage",
    "ExLlamaV2DynamicGenerator",
    "ExLlamaV2DynamicJob",
    "ExLlamaV2Filter",
    "ExLlamaV2Sampler",
    "NGramTrie",
]
