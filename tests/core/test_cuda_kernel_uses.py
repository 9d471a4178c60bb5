"""The matmuls, norms, experts and adapters that `exl info --kernels` reports are those that a model launches.

Needs a GPU or its emulation.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from make_random_model import Shape, make_model
from random_models import loaded_on, write_random_model

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Lora, PagedParams
from exl_core.convert import quantize_model
from exl_core.execution.build_step import Chunk, build_step
from exl_core.execution.fused import JoinedLaunches, joined_launches_of
from exl_core.execution.kernels import KernelUse, kernel_uses
from exl_core.lora.rows import RowAdapters
from exl_kernels import _native
from exl_kernels.safetensors_file import read_safetensors_folder, read_tensor, write_safetensors
from exl_kernels.selection import Card

pytestmark = pytest.mark.cuda

PAGE = 16
LAUNCHED = {
    **{kernel: f"{kernel}_" for kernel in ("gemm_few", "gemm_direct", "gemm_batch", "gemm_tile")},
    "gemv_ring_adapted": "gemv_ring_adapted_",
    "gemv_ring": "gemv_ring_(?!adapted)",
    "gemm_large": "dequantize_",
    "experts_route": "experts_route_",
}
"""How names of the functions of each kernel begin, as expressions; for gemm_large those that dequantize for cuBLAS."""
OTHERS = re.compile("(rms|layer)_norm_|add_.*norm_|lora_|experts_(arrange|(float_)?(gate_up|down)|combine)")
"""How names of functions begin that only norm rows, multiply by adapters, or share the launches of experts."""
RANK = 8
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
    """Launches of each kernel of matmuls, and of each function of OTHERS, since the counts of `before`."""
    now: dict[str, int] = _native.cuda_launches()
    new = {name: count - before.get(name, 0) for name, count in now.items()}
    found = {
        kernel: sum(count for name, count in new.items() if re.match(start, name)) for kernel, start in LAUNCHED.items()
    }
    return +Counter(found | {name: count for name, count in new.items() if OTHERS.match(name)})


def reported(uses: list[KernelUse]) -> Counter[str]:
    """Calls of each kernel of matmuls, and of each function of OTHERS, of one pass in a report."""
    found: Counter[str] = Counter()
    for use in uses:
        for kernels, calls in zip(use.kernel.split(", "), use.calls, strict=True):
            found.update({k: calls for k in kernels.split(" + ") if k in LAUNCHED or OTHERS.match(k)})
    return found


def adapter_of(model: ExLlamaV2, folder: Path) -> ExLlamaV2Lora:
    """An adapter of all matrices that adapters of captured steps may change."""
    linears = [linear for linear in model.linears() if linear.spec.role != "head" and not linear.spec.in_mixture]
    tensors = {
        f"base_model.model.{linear.key}.lora_{name}.weight": torch.zeros(shape, dtype=torch.float16)
        for linear in linears
        for name, shape in (("A", (RANK, linear.in_features)), ("B", (linear.out_features, RANK)))
    }
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "r": {RANK}, "lora_alpha": {RANK}}}')
    return ExLlamaV2Lora.from_directory(model, folder)


def run(
    model: ExLlamaV2, plan: JoinedLaunches, batch: int, tokens: int, adapter: ExLlamaV2Lora | None = None
) -> Counter[str]:
    """Launches of a step of `batch` sequences of one token, or of one prompt of `tokens` tokens."""
    device, pages = torch.device("cuda:0"), -(-tokens // PAGE)
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    cache = ExLlamaV2Cache(model, max_seq_len=PAGE * pages * batch)
    params = PagedParams(batch, table, torch.zeros(batch, dtype=torch.int32), 0, PAGE, tokens)
    slots = torch.zeros(batch * tokens, dtype=torch.int32, device=device)
    loras = () if adapter is None else (RowAdapters([(adapter,)], slots, tokens),)
    invariant = tokens == 1 or tokens <= model.packed_rows
    step = build_step(model, Chunk(cache, params, batch, tokens, adapters=loras), device, invariant=invariant)
    ids = torch.zeros(batch * tokens, dtype=torch.int64, device=device)
    before: dict[str, int] = _native.cuda_launches()
    with torch.inference_mode():
        if tokens == 1:
            plan.run(ids, step, torch.empty(batch, 96, device=device))
        else:
            plan.head(plan.hidden(ids, step), step)
    return launched(before)


@pytest.mark.parametrize("kind", FLOATS)
def test_a_model_launches_what_the_report_says(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps of 1 to 65 sequences, and prompts."""
    model = loaded_on("cuda:0", made(tmp_path / "model", FLOATS[kind]), monkeypatch)
    compare(model, (1, 8, 32, 65), (8, 65, 128))
    compare_adapted(model, (1, 8, 32, 65), tmp_path / "adapter")


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_other_families_do_too(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_random_model(tmp_path / "float", {**CONFIG, "architectures": [family], **FAMILIES[family]})
    quantize_model(source, tmp_path / "quantized", bits=4.0)
    model = loaded_on("cuda:0", tmp_path / "quantized", monkeypatch)
    compare(model, (1, 2, 8, 32, 65), (8, 65))
    compare_adapted(model, (1, 2, 8, 32, 65), tmp_path / "adapter")


def test_float_experts_do_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIG, "architectures": ["MixtralForCausalLM"], **FAMILIES["MixtralForCausalLM"]}
    model = loaded_on("cuda:0", write_random_model(tmp_path, config, torch.bfloat16), monkeypatch)
    compare(model, (1, 8, 32, 65), (8, 65))


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


def launches_with_adapters() -> int:
    """Launches so far that multiply by adapters."""
    counts: dict[str, int] = _native.cuda_launches()
    return sum(count for name, count in counts.items() if name.startswith(("lora_", "gemv_ring_adapted_")))


def compare_adapted(model: ExLlamaV2, steps: tuple[int, ...], folder: Path) -> None:
    """Compare the launches of steps whose rows all have an adapter of every matrix with the report."""
    plan, card, adapter = joined_launches_of(model), Card.device(0), adapter_of(model, folder)
    assert isinstance(plan, JoinedLaunches), plan
    for rows in steps:
        before = launches_with_adapters()
        found = run(model, plan, rows, 1, adapter)
        assert launches_with_adapters() > before
        uses = kernel_uses(model.config, card, rows=(rows,), prompts=(), adapter_rank=RANK)
        assert found == reported(uses), rows
