"""exllamav2's import paths: its names are classes of exl_core, exl_filters and exl_generate.

A name without a counterpart can be imported; using it raises `UnsupportedError`, which names docs/guides/compat.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    ExLlamaV2Lora,
    ExLlamaV2Tokenizer,
    ExLlamaV2VisionTower,
    Intervention,
    SeqTensor,
    Timer,
)
from exllamav2._names import prepare_third_parties
from exllamav2._original import warn_of_original
from exllamav2.linear import ExLlamaV2Linear
from exllamav2.version import __version__
from exllamav2.vlm.mmprojector import ExLlamaV2MultimodalProjector

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
    "ExLlamaV2Linear",
    "ExLlamaV2Lora",
    "ExLlamaV2MultimodalProjector",
    "ExLlamaV2Tokenizer",
    "ExLlamaV2VisionTower",
    "Intervention",
    "SeqTensor",
    "Timer",
    "__version__",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a submodule that nothing has imported yet: scripts read `exllamav2.attn` after `import exllamav2`."""
        from importlib import import_module
        from importlib.util import find_spec

        path = f"{__name__}.{name}"
        if name.startswith("_") or find_spec(path) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(path)


warn_of_original()
prepare_third_parties()
