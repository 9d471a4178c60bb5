"""Adapters of mixtures of experts that are sharded over devices: bitwise the results of one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import write_random_model
from safetensors.torch import save_file
from test_sharded_launches import CONFIG, build

from exl_core import ExLlamaV2, ExLlamaV2Lora

pytestmark = pytest.mark.covers("core: tensor-parallel")


def write_adapter(folder: Path, model: ExLlamaV2) -> Path:
    """An adapter of every matrix of every layer but the routers."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    targets: set[str] = set()
    for linear in model.linears():
        if linear.key.endswith("gate") or not linear.key.startswith("model.layers."):
            continue
        for name, shape in (("A", (4, linear.in_features)), ("B", (linear.out_features, 4))):
            tensors[f"base_model.model.{linear.key}.lora_{name}.weight"] = torch.randn(shape, generator=generator) / 10
        targets.add(linear.key.rpartition(".")[2])
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"r": 4, "lora_alpha": 8, "peft_type": "LORA", "target_modules": sorted(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        (
            "Qwen2MoeForCausalLM",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 96,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
        ),
    ],
    ids=["experts", "shared expert"],
)
def test_adapters_of_a_sharded_mixture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, more: dict[str, Any]
) -> None:
    """Experts keep their adapters on their device; with more devices than experts some have none."""
    folder = write_random_model(tmp_path / "model", {**CONFIG, "architectures": [family], **more})
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    whole = build(folder)
    whole.load()
    adapter = write_adapter(tmp_path / "adapter", whole)
    ids = torch.arange(40).view(2, 20) * 3
    plain = whole.forward(ids)
    adapted = whole.forward(ids, loras=[ExLlamaV2Lora.from_directory(whole, adapter)])
    assert not torch.equal(plain, adapted)
    for devices in (2, 3, 5):
        monkeypatch.setenv("EXL_DEVICE", ",".join(f"cpu:{at}" for at in range(devices)))
        model = build(folder)
        model.load_tp()
        assert torch.equal(model.forward(ids, loras=[ExLlamaV2Lora.from_directory(model, adapter)]), adapted)
        assert torch.equal(model.forward(ids), plain)
