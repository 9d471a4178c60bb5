"""Loading and unloading again and again gives all memory back."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from feature_cases import make_adapter

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Lora

FOLDER = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
CYCLES = 100
MOST_GROWN = 3
"""Loads whose memory may still be held after CYCLES: by allocators, which give pages back late."""


def resident() -> int:
    """Bytes of this process in memory, after what can be given back was."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown(cycle: Callable[[], None]) -> int:
    """Bytes that the process grows by in CYCLES, after a few that fill what is kept for good."""
    for _ in range(5):
        cycle()
    before = resident()
    for _ in range(CYCLES):
        cycle()
    return resident() - before


@pytest.fixture(scope="module")
def model() -> ExLlamaV2:
    model = ExLlamaV2(ExLlamaV2Config(FOLDER))
    model.load()
    return model


@pytest.mark.covers("core: lora")
def test_adapters(model: ExLlamaV2, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", model, 1)
    ids = torch.tensor([[5, 17, 300]])
    cache = ExLlamaV2Cache(model, max_seq_len=256)
    plain = model.forward(ids).clone()

    def cycle() -> None:
        lora = ExLlamaV2Lora.from_directory(model, folder)
        cache.current_seq_len = 0
        assert not torch.equal(model.forward(ids, cache, loras=[lora]), plain)
        lora.unload()

    size = (folder / "adapter_model.safetensors").stat().st_size
    assert grown(cycle) < MOST_GROWN * size
    assert torch.equal(model.forward(ids), plain)


def test_models() -> None:
    ids = torch.tensor([[5, 17, 300]])

    def cycle() -> None:
        model = ExLlamaV2(ExLlamaV2Config(FOLDER))
        model.load()
        model.forward(ids, ExLlamaV2Cache(model, max_seq_len=256))
        model.unload()

    size = sum(path.stat().st_size for path in FOLDER.glob("*.safetensors"))
    assert grown(cycle) < MOST_GROWN * size
