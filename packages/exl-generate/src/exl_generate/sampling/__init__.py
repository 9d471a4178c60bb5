"""Sampling: settings, one small function a transform, random numbers that belong to the request."""

from exl_generate.sampling.batch import Draw, sample_batch
from exl_generate.sampling.hooks import ExLlamaV2PostSamplingHook, ExLlamaV2PostSamplingResult
from exl_generate.sampling.rng import RequestRandom
from exl_generate.sampling.sampler import UNCONSTRAINED, Constraint, RequestSampler, Sample
from exl_generate.sampling.settings import Settings
from exl_generate.sampling.vocabulary import Vocabulary

__all__ = [
    "UNCONSTRAINED",
    "Constraint",
    "Draw",
    "ExLlamaV2PostSamplingHook",
    "ExLlamaV2PostSamplingResult",
    "ExLlamaV2Sampler",
    "RequestRandom",
    "RequestSampler",
    "Sample",
    "Settings",
    "Vocabulary",
    "sample_batch",
]


class ExLlamaV2Sampler:
    """Namespace under which exllamav2's users find the settings."""

    Settings = Settings
