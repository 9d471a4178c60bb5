"""Generators for EXL2, GPTQ and float models: paged continuous batching, sampling, streaming, command line.

Names are loaded on first use, so that the command line can answer before torch has been imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exl_core import ExLlamaV2MMEmbedding
    from exl_generate.aio import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync
    from exl_generate.dynamic import (
        COLUMN_FLAGS,
        PAGED_PAGE_SIZE,
        ExLlamaV2DynamicGenerator,
        ExLlamaV2DynamicJob,
        GeneratorSnapshot,
        StepColumns,
    )
    from exl_generate.errors import (
        CapacityError,
        JobStateError,
        NoCandidatesError,
        NonFiniteLogitsError,
        RequestError,
        ResumeError,
    )
    from exl_generate.sampling import ExLlamaV2PostSamplingHook, ExLlamaV2PostSamplingResult, ExLlamaV2Sampler
    from exl_generate.static import ExLlamaV2BaseGenerator, ExLlamaV2StreamingGenerator

__all__ = [
    "COLUMN_FLAGS",
    "PAGED_PAGE_SIZE",
    "CapacityError",
    "ExLlamaV2BaseGenerator",
    "ExLlamaV2DynamicGenerator",
    "ExLlamaV2DynamicGeneratorAsync",
    "ExLlamaV2DynamicJob",
    "ExLlamaV2DynamicJobAsync",
    "ExLlamaV2MMEmbedding",
    "ExLlamaV2PostSamplingHook",
    "ExLlamaV2PostSamplingResult",
    "ExLlamaV2Sampler",
    "ExLlamaV2StreamingGenerator",
    "GeneratorSnapshot",
    "JobStateError",
    "NoCandidatesError",
    "NonFiniteLogitsError",
    "RequestError",
    "ResumeError",
    "StepColumns",
]
__version__ = "0.1.0"

_HOME = {
    "COLUMN_FLAGS": "dynamic",
    "PAGED_PAGE_SIZE": "dynamic",
    "ExLlamaV2DynamicGenerator": "dynamic",
    "ExLlamaV2DynamicJob": "dynamic",
    "GeneratorSnapshot": "dynamic",
    "StepColumns": "dynamic",
    "ExLlamaV2DynamicGeneratorAsync": "aio",
    "ExLlamaV2DynamicJobAsync": "aio",
    "ExLlamaV2MMEmbedding": "contracts",
    "ExLlamaV2PostSamplingHook": "sampling",
    "ExLlamaV2PostSamplingResult": "sampling",
    "ExLlamaV2Sampler": "sampling",
    "ExLlamaV2BaseGenerator": "static",
    "ExLlamaV2StreamingGenerator": "static",
    "CapacityError": "errors",
    "JobStateError": "errors",
    "NoCandidatesError": "errors",
    "NonFiniteLogitsError": "errors",
    "RequestError": "errors",
    "ResumeError": "errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
