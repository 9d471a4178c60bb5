"""The contexts that the guide to several GPUs promises for 70B on two cards are those of the plan."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path

import pytest
from make_random_model import SHAPES, llama_config, plan_for, write_tokenizer

from exl_core import ExLlamaV2Config
from exl_core.device import using_devices
from exl_core.loading.plan import plan
from exl_kernels.formats import exl2_groups
from exl_kernels.kv import KVKind

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "multi-gpu.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d\.\d) bpw \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", GUIDE, re.MULTILINE)
CACHES: tuple[KVKind, ...] = ("fp16", "q8", "q4")
SIZES = {"I32": 4, "F16": 2, "I16": 2}


def exl2(in_features: int, out_features: int, bits: float) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of the tensors of one matrix."""
    groups = exl2_groups(plan_for(bits), in_features)
    return {
        "q_weight": ("I32", [sum(rows * width // 32 for width, rows in groups), out_features]),
        "q_scale": ("I32", [len(groups), out_features // 8]),
        "q_scale_max": ("F16", [len(groups)]),
        "q_groups": ("I16", [2 * len(groups)]),
        "q_invperm": ("I32", [in_features]),
    }


def folder_of_70b(folder: Path, bits: float) -> None:
    """A folder of Llama 3.1 70B that has a header and no weights: the file is a hole of their size."""
    shape = SHAPES["70b"]
    tensors = {"model.embed_tokens.weight": ("F16", [shape.vocab, shape.hidden])}
    tensors["model.norm.weight"] = ("F16", [shape.hidden])
    matrices = {"lm_head": (shape.hidden, shape.vocab, 6.0)}
    for layer in range(shape.layers):
        matrices |= {f"model.layers.{layer}.{part}": (*size, bits) for part, size in shape.linears().items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = ("F16", [shape.hidden])
    for key, size in matrices.items():
        tensors |= {f"{key}.{name}": about for name, about in exl2(*size).items()}
    header, end = {}, 0
    for name, (dtype, dimensions) in tensors.items():
        begin, end = end, end + SIZES[dtype] * math.prod(dimensions)
        header[name] = {"dtype": dtype, "shape": dimensions, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + end)
    about = {"quant_method": "exl2", "bits": bits, "head_bits": 6}
    config = {**llama_config(shape, 131072, rope_theta=5e5), "quantization_config": about}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, 1000)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} bpw")
def test_the_longest_contexts_of_70b_on_two_cards(row: tuple[str, ...], tmp_path: Path) -> None:
    bits, *tokens = row
    folder_of_70b(tmp_path, float(bits))
    config = ExLlamaV2Config(str(tmp_path))
    with using_devices("cpu:0=23,cpu:1=23"):
        found = [plan(config, cache=cache).max_cache_tokens for cache in CACHES]
    assert [f"{one:,}" for one in found] == tokens


def test_the_table_is_found() -> None:
    assert [bits for bits, *_ in ROWS] == ["4.0", "4.5", "5.0"]
