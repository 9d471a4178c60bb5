"""Matrices that share launches are stored alike on a GPU, whatever the groups that a converter gives each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import write_random_model
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Config
from exl_core.execution.kernels import kernel_uses
from exl_core.loading.checkpoint import TensorReader
from exl_core.loading.sizes import linear_bytes
from exl_kernels import formats
from exl_kernels.errors import FormatError
from exl_kernels.quantize.plans import OPTIONS
from exl_kernels.safetensors_file import read_safetensors_folder, read_tensor, write_safetensors
from exl_kernels.selection import Card, has_fine_scales

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 1280,
    "intermediate_size": 1280,
    "num_hidden_layers": 1,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
ROLES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def quantized(folder: Path, family: str, plan_of: Callable[[str], str | None]) -> Path:
    """A model of SIZES, each of its matrices quantized by the plan of its key, or left as it is."""
    source = write_random_model(folder / "float", {**SIZES, "architectures": [family]})
    tensors: dict[str, Tensor] = {}
    perm = torch.randperm(1280, generator=torch.Generator().manual_seed(3))
    for name, entry in read_safetensors_folder(source).items():
        key, tensor = name.removesuffix(".weight"), read_tensor(entry).clone()
        plan = plan_of(key)
        if plan is None:
            tensors[name] = tensor
            continue
        parts = formats.exl2_quantize(tensor, plan, perm=perm, fast=True)
        tensors |= {f"{key}.{part}": value for part, value in parts.items()}
    target = folder / "quantized"
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    write_safetensors(target / "model.safetensors", tensors)
    return target


@pytest.mark.sampled(6)
@pytest.mark.parametrize("option", range(len(OPTIONS["mlp"])))
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_every_row_of_the_table_of_plans_shares_launches(family: str, option: int, tmp_path: Path) -> None:
    """Rows give gate, up and down groups of their own, and those of attention q, k and v."""
    mlp, attention = OPTIONS["mlp"][option], OPTIONS["attention"][option % len(OPTIONS["attention"])]

    def plan_of(key: str) -> str | None:
        name = key.rpartition(".")[2]
        if "self_attn" in key:
            return attention[name[0]]
        return mlp[ROLES[name]] if name in ROLES else None

    folder = quantized(tmp_path, family, plan_of)
    uses = kernel_uses(ExLlamaV2Config(folder), Card.named("H200"), rows=(1, 8, 32), prompts=())
    found = {(use.operation, use.rows): use.kernel for use in uses}
    for rows in (1, 8, 32):
        assert found["way", rows] == "captured"
        assert found["q+k+v", rows] == {1: "gemv_ring", 8: "gemm_few", 32: "gemm_batch"}[rows]
        together = found["experts" if family == "MixtralForCausalLM" else "gate+up", rows]
        assert together.startswith("experts_arrange" if family == "MixtralForCausalLM" else "gem")


def test_equal_groups_keep_their_few_scales(tmp_path: Path) -> None:
    """Only what shares a launch with smaller groups is stored with more scales."""
    plans = {"q_proj": "1:4b_128g", "k_proj": "1:4b_128g", "v_proj": "1:5b_128g", "o_proj": "1:4b_32g"}
    plans |= {"gate_proj": "1:4b_128g", "up_proj": "1:4b_32g", "down_proj": "1:4b_128g"}
    folder = quantized(tmp_path, "LlamaForCausalLM", lambda key: plans.get(key.rpartition(".")[2]))
    model = ExLlamaV2(ExLlamaV2Config(folder))
    assert model.config.checkpoint is not None
    source = TensorReader(model.config.checkpoint)
    fine = {linear.key.rpartition(".")[2]: linear.stored(source).fine_scales for linear in model.linears()}
    assert {name for name, found in fine.items() if found} == {"gate_proj", "up_proj"}


@pytest.mark.parametrize(
    ("groups", "fine"),
    [
        ([(4, 128)] * 3, False),
        ([(5, 64)] * 4, True),
        ([(8, 32), (4, 128)], False),
        ([(8, 32), (8, 32), (4, 128)], True),
        ([(8, 32)] * 4 + [(4, 128)], True),
        ([(6, 256), (4, 128), (4, 128)], False),
    ],
)
def test_groups_that_need_a_scale_every_32_rows(groups: list[tuple[int, int]], fine: bool) -> None:
    words = [rows // 32 * bits for bits, rows in groups]
    starts = [sum(words[:at]) for at in range(len(words))]
    q_groups = torch.tensor([[bits, start] for (bits, _), start in zip(groups, starts, strict=True)]).flatten()
    assert has_fine_scales(q_groups.to(torch.int16), sum(words)) == fine


def test_groups_that_the_format_forbids_are_left_to_the_load() -> None:
    assert not has_fine_scales(torch.tensor([7, 0], dtype=torch.int16), 14)
    assert not has_fine_scales(torch.tensor([4, 4], dtype=torch.int16), 16)


def test_the_plan_of_memory_counts_all_scales(tmp_path: Path) -> None:
    plans = {"q_proj": "1:2b_128g", "k_proj": "1:2b_128g", "v_proj": "1:4b_32g"}
    folder = quantized(tmp_path, "LlamaForCausalLM", lambda key: plans.get(key.rpartition(".")[2]))
    model = ExLlamaV2(ExLlamaV2Config(folder))
    assert model.config.checkpoint is not None
    reader = TensorReader(model.config.checkpoint)
    for linear in model.linears():
        if linear.key.endswith(("q_proj", "k_proj")):
            rows, columns = linear.in_features, linear.out_features
            codes, scales = rows * columns * 2 // 8, rows // 32 * columns // 2
            assert linear_bytes(linear, reader, "cuda", set()) >= codes + scales


@pytest.mark.parametrize(
    "damaged",
    [
        torch.zeros(4, dtype=torch.float16),
        torch.full((4,), 70_000, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int16),
    ],
    ids=["float16", "int32", "empty"],
)
def test_damaged_groups_are_an_error_of_their_matrix(damaged: Tensor, tmp_path: Path) -> None:
    """Also where another matrix, which would share its launches, asks for them."""
    folder = quantized(tmp_path, "LlamaForCausalLM", lambda key: "1:4b_128g" if "self_attn" in key else None)
    (path,) = folder.glob("*.safetensors")
    tensors = {name: read_tensor(entry).clone() for name, entry in read_safetensors_folder(folder).items()}
    tensors["model.layers.0.self_attn.k_proj.q_groups"] = damaged
    path.unlink()
    write_safetensors(path, tensors)
    with pytest.raises(FormatError, match="k_proj"):
        kernel_uses(ExLlamaV2Config(folder), Card.named("H200"), rows=(1,), prompts=())
