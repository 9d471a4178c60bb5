"""Loading and unloading again and again gives all memory back."""

from __future__ import annotations

import ctypes
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Lora
from exl_kernels.safetensors_file import write_safetensors

FOLDER = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
CYCLES = 100
MOST_GROWN = 3
"""Loads whose memory may still be held after CYCLES: by allocators, which give pages back late."""
RANK = 128
PROJECTIONS = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]


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


def write_adapter(folder: Path, model: ExLlamaV2) -> Path:
    """An adapter of every projection, in PEFT's layout."""
    tensors: dict[str, torch.Tensor] = {}
    for linear in model.linears():
        layer, _, name = linear.key.removeprefix("model.layers.").partition(".")
        if name in PROJECTIONS:
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, linear.in_features) * 0.05
            tensors[f"{key}.lora_B.weight"] = torch.randn(linear.out_features, RANK) * 0.05
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    config: dict[str, Any] = {
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [name.split(".")[1] for name in PROJECTIONS],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.covers("core: lora")
def test_adapters(model: ExLlamaV2, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", model)
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
