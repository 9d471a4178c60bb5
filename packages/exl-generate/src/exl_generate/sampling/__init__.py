"""Sampling: settings, the sampler of a request over `exl_kernels.sampling`, and each request's random numbers.

`transforms` has the definitions in float64.
"""

from exl_generate.sampling.batch import Draw, LaunchedDraws, launch_draws, sample_draws
from exl_generate.sampling.hooks import ExLlamaV2PostSamplingHook, ExLlamaV2PostSamplingResult
from exl_generate.sampling.rng import RequestRandom
from exl_generate.sampling.sampler import UNCONSTRAINED, Constraint, RequestSampler, Sample
from exl_generate.sampling.settings import FrozenSettings, Settings
from exl_generate.sampling.static import ExLlamaV2Sampler
from exl_generate.sampling.vocabulary import Vocabulary
from exl_kernels.sampling import SparseBias

__all__ = [
    "UNCONSTRAINED",
    "Constraint",
    "Draw",
    "ExLlamaV2PostSamplingHook",
    "ExLlamaV2PostSamplingResult",
    "ExLlamaV2Sampler",
    "FrozenSettings",
    "LaunchedDraws",
    "RequestRandom",
    "RequestSampler",
    "Sample",
    "Settings",
    "SparseBias",
    "Vocabulary",
    "launch_draws",
    "sample_draws",
]
