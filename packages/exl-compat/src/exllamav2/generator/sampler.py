"""`exllamav2.generator.sampler`."""

from __future__ import annotations

from exl_filters import ExLlamaV2Filter
from exl_generate import ExLlamaV2Sampler as NativeSampler
from exllamav2.generator._settings import Settings as SamplerSettings

__all__ = ["ExLlamaV2Filter", "ExLlamaV2Sampler"]


class ExLlamaV2Sampler(NativeSampler):
    """Sampling for scripts that run a loop of their own, and the settings of all generators."""

    Settings = SamplerSettings
