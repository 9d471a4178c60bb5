"""A small adapter for the bundled model, as a folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from exl_kernels.safetensors_file import write_safetensors
from exl_serve.testing.local import EngineThread

__all__ = ["write_adapter"]


def write_adapter(folder: Path, fable: EngineThread, value: float = 0.05) -> None:
    folder.mkdir(parents=True)
    config = fable.generator.model.config
    tensors = {}
    for layer in range(config.num_hidden_layers):
        key = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{key}.lora_A.weight"] = torch.full((2, config.hidden_size), value)
        tensors[f"{key}.lora_B.weight"] = torch.full((config.num_attention_heads * config.head_dim, 2), 0.05)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 64, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))
