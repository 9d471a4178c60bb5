"""Random models of any family, without another library: tensors as the modules ask for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Config
from exl_core.device import GIB, devices
from exl_core.layers import Attention, Embedding, FeedForward, LayerNorm, Module, Norm, PositionEmbedding, build_modules
from exl_core.loading.plan import plan_modules
from exl_core.placement import Placement
from exl_kernels.safetensors_file import write_safetensors

__all__ = ["loaded_on", "loaded_over", "split_over_two", "write_random_model"]


def write_random_model(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float16) -> Path:
    """A model of any family, its tensors named and shaped as its modules ask for them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    prepared = ExLlamaV2Config()
    prepared.model_dir = str(folder)
    prepared.prepare(no_tensors=True)
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).half()

    tensors: dict[str, Tensor] = {}

    def add_norm(norm: Norm | None) -> None:
        if norm is None:
            return
        shape = norm.shapes[0 if isinstance(norm, LayerNorm) else -1]  # RMS norms of q and k: one for all heads
        tensors[f"{norm.key}.weight"] = normal(*shape, std=0.1) + (0 if prepared.arch.norm_offset else 1)
        if isinstance(norm, LayerNorm) and norm.has_bias:
            tensors[f"{norm.key}.bias"] = normal(*shape, std=0.1)

    def add(module: Module) -> None:
        if isinstance(module, Embedding):
            tensors[f"{module.key}.weight"] = normal(module.vocab_size, module.hidden_size, std=0.5)
        elif isinstance(module, PositionEmbedding):
            tensors[f"{module.key}.weight"] = normal(module.positions, module.hidden_size, std=0.5)
        elif isinstance(module, Norm):
            add_norm(module)
        elif isinstance(module, Attention):
            for norm in (module.norm, module.post, module.q_norm, module.k_norm):
                add_norm(norm)
        elif isinstance(module, FeedForward):
            add_norm(module.norm)
            add_norm(module.post)
        for linear in module.submodules():
            rows, columns = linear.out_features, linear.in_features
            weight = normal(rows, columns, std=columns**-0.5)
            tensors[f"{linear.key}.weight"] = weight.T.contiguous() if linear.spec.transposed else weight
            if linear.spec.bias:
                tensors[f"{linear.key}.bias"] = normal(rows, std=0.1)

    for module in build_modules(prepared):
        add(module)
    write_safetensors(folder / "model.safetensors", {name: tensor.to(dtype) for name, tensor in tensors.items()})
    return folder


def loaded_on(device: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2:
    """The model in `folder`, with the CPU's exact matmuls."""
    monkeypatch.setenv("EXL_DEVICE", device)
    config = ExLlamaV2Config(folder)
    config.cpu_matmul = "exact"
    model = ExLlamaV2(config)
    model.load()
    return model


def loaded_over(model: ExLlamaV2, first: str, *others: tuple[int, str]) -> ExLlamaV2:
    """The model on `first`, and from each module number on the device that is named with it."""
    count = len(model.modules)
    names = [first] * count
    for begin, name in others:
        names[begin:] = [name] * (count - begin)
    model.placement = Placement(names, model.config.arch.float_residual)
    model.device = model.placement.device(count - 1)
    model.set_cache_map()
    for index in range(count):
        model.load_module(index)
    return model


def split_over_two(model: ExLlamaV2) -> None:
    """Load about half of a model's modules on each of the first two devices."""
    found = plan_modules(model.config, model.modules, devices()[:1], None, [64.0], None, True).devices[0]
    model.set_device_map([(found.weights / 2 + found.tables + found.scratch) / GIB, 64.0], embed_cpu=False)
    assert len(set(model.placement.names)) == 2
    for index in range(len(model.modules)):
        model.load_module(index)
