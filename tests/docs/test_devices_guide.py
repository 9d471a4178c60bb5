"""The table of memory in the guide to devices follows from the shapes of the models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exl_core import (
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2CacheBase,
)
from exl_kernels.kv import KVPages

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "devices.md").read_text(encoding="utf-8")
GIB = 1 << 30
#: (layers, hidden size, inner size of the MLP, query heads, key/value heads, size of a head, vocabulary)
SHAPES = {
    "Llama 3.1 8B": (32, 4096, 14336, 32, 8, 128, 128256),
    "Qwen2.5 14B": (48, 5120, 13824, 40, 8, 128, 152064),
    "Mistral Small 24B": (40, 5120, 32768, 32, 8, 128, 131072),
    "Qwen2.5 32B": (64, 5120, 27648, 40, 8, 128, 152064),
    "Llama 3.1 70B": (80, 8192, 28672, 64, 8, 128, 128256),
}
CACHES: tuple[type[ExLlamaV2CacheBase], ...] = (
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q4,
)


def weights(shape: tuple[int, ...], bits: float) -> float:
    """Bytes of the layers at `bits`, a head of 6 bits and an embedding of 16."""
    layers, hidden, inner, heads, kv_heads, head, vocabulary = shape
    layer = 2 * hidden * heads * head + 2 * hidden * kv_heads * head + 3 * hidden * inner
    return layers * layer * bits / 8 + vocabulary * hidden * (6 + 16) / 8


def cache(shape: tuple[int, ...], kind: type[ExLlamaV2CacheBase], tokens: int) -> float:
    layers, *_, kv_heads, head, _ = shape
    return layers * KVPages.allocate(kind.kind, 1, 256, kv_heads, head).nbytes * tokens / 256


def rows() -> dict[str, list[float]]:
    table = re.findall(r"^\| ([\w.]+ [\w. ]+) \| ([\d.| ]+) \|$", GUIDE, re.MULTILINE)
    return {name: [float(cell) for cell in cells.split(" | ")] for name, cells in table}


@pytest.mark.parametrize("name", SHAPES)
def test_a_row_is_computed(name: str) -> None:
    shape = SHAPES[name]
    wanted = [weights(shape, bits) for bits in (3.0, 4.0, 5.0)] + [cache(shape, kind, 16384) for kind in CACHES]
    assert rows()[name] == [round(number / GIB, 1) for number in wanted]
