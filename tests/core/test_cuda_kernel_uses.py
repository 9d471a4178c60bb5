"""The matmuls and norms that `exl info --kernels` reports are those that a model launches.

Needs a GPU or its emulation.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from make_random_model import Shape, make_model
from random_models import loaded_on, write_random_model

from exl_core import ExLlamaV2, ExLlamaV2Cache, PagedParams
from exl_core.convert import quantize_model
from exl_core.execution.build_step import build_step
from exl_core.execution.fused import JoinedLaunches, joined_launches_of
from exl_core.execution.kernels import KernelUse, kernel_uses
from exl_kernels import _native
from exl_kernels.device import row_invariant_matmuls
from exl_kernels.safetensors_file import read_safetensors_folder, read_tensor, write_safetensors
from exl_kernels.selection import Card

pytestmark = pytest.mark.cuda

PAGE = 16
LAUNCHED = {
    "gemv_ring": "ring_",
    "gemm_few": "few_",
    "gemm_direct": "direct_",
    "gemm_batch": "batch_",
    "gemm_tile": "tile_",
    "gemm_large": "dequantize_",
}
"""How names of the functions of each kernel begin; for gemm_large those that dequantize for cuBLAS."""
NORMS = re.compile("(rms|layer)_norm_|add_.*norm_")
"""How names of functions that only norm rows begin."""
FLOATS = {
    "whole": {},
    "down": {"model.layers.1.mlp.down_proj": (256, 768)},
    "gate": {"model.layers.1.mlp.gate_proj": (768, 256)},
    "o": {"model.layers.0.self_attn.o_proj": (256, 256)},
    "head": {"lm_head": (96, 256)},
}
"""Float matrices of each model: [outputs, inputs]."""
FAMILIES: dict[str, dict[str, Any]] = {
    "Starcoder2ForCausalLM": {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh"},
    "Gemma2ForCausalLM": {"head_dim": 64, "query_pre_attn_scalar": 64, "hidden_activation": "gelu_pytorch_tanh"},
    "CohereForCausalLM": {"layer_norm_eps": 1e-5, "logit_scale": 0.1},
    "Qwen3ForCausalLM": {"head_dim": 64},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""LayerNorm and no gate, norms of results, attention and MLP side by side, norms of heads, experts."""
CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def made(folder: Path, floats: dict[str, tuple[int, int]]) -> Path:
    """A quantized model of two layers, apart from `floats`."""
    make_model(folder, Shape(256, 768, 2, 4, 2, 96), 4.0)
    (path,) = folder.glob("*.safetensors")
    tensors = {name: read_tensor(entry).clone() for name, entry in read_safetensors_folder(folder).items()}
    for key, shape in floats.items():
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{key}.")}
        tensors[f"{key}.weight"] = torch.zeros(shape, dtype=torch.float16)
    path.unlink()
    write_safetensors(path, tensors)
    return folder


def launched(before: dict[str, int]) -> Counter[str]:
    """Launches of each kernel of matmuls, and of each function that norms, since the counts of `before`."""
    now: dict[str, int] = _native.cuda_launches()
    new = {name: count - before.get(name, 0) for name, count in now.items()}
    found = {
        kernel: sum(count for name, count in new.items() if name.startswith(start))
        for kernel, start in LAUNCHED.items()
    }
    return +Counter(found | {name: count for name, count in new.items() if NORMS.match(name)})


def reported(uses: list[KernelUse]) -> Counter[str]:
    """Calls of each kernel of matmuls, and of each function that norms, of one pass in a report."""
    found: Counter[str] = Counter()
    for use in uses:
        calls = zip(use.kernel.split(", "), use.calls, strict=True)
        found.update({k: n for k, n in calls if k in LAUNCHED or NORMS.match(k)})
    return found


def run(model: ExLlamaV2, plan: JoinedLaunches, batch: int, tokens: int) -> Counter[str]:
    """Launches of a step of `batch` sequences of one token, or of one prompt of `tokens` tokens."""
    device, pages = torch.device("cuda:0"), -(-tokens // PAGE)
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    cache = ExLlamaV2Cache(model, max_seq_len=PAGE * pages * batch)
    params = PagedParams(batch, table, torch.zeros(batch, dtype=torch.int32), 0, PAGE, tokens)
    step = build_step(model.config, model.rope, cache, params, batch, tokens, None, device)
    ids = torch.zeros(batch * tokens, dtype=torch.int64, device=device)
    before: dict[str, int] = _native.cuda_launches()
    with torch.inference_mode():
        if tokens == 1:
            plan.run(ids, step, torch.empty(batch, 96, device=device))
        else:
            with row_invariant_matmuls() if tokens <= model.packed_rows else nullcontext():
                plan.head(plan.hidden(ids, step), step)
    return launched(before)


@pytest.mark.parametrize("kind", FLOATS)
def test_a_model_launches_what_the_report_says(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps of 1 to 65 sequences, and prompts."""
    compare(loaded_on("cuda:0", made(tmp_path, FLOATS[kind]), monkeypatch), (1, 8, 32, 65), (8, 65, 128))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_other_families_do_too(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_random_model(tmp_path / "float", {**CONFIG, "architectures": [family], **FAMILIES[family]})
    quantize_model(source, tmp_path / "quantized", bits=4.0)
    compare(loaded_on("cuda:0", tmp_path / "quantized", monkeypatch), (1, 2, 8, 32, 65), (8, 65))


def compare(model: ExLlamaV2, steps: tuple[int, ...], prompts: tuple[int, ...]) -> None:
    """Compare the launches of steps of so many sequences, and of prompts of so many tokens, with the report."""
    plan, card = joined_launches_of(model), Card.device(0)
    assert isinstance(plan, JoinedLaunches), plan
    for rows in steps:
        found = run(model, plan, rows, 1)
        assert found == reported(kernel_uses(model.config, card, rows=(rows,), prompts=())), rows
    for tokens in prompts:
        found = run(model, plan, 1, tokens)
        assert found == reported(kernel_uses(model.config, card, rows=(), prompts=(tokens,))), tokens
