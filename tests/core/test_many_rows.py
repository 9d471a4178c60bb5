"""Work that depends on a prompt pass alone is done once for all layers; test_decode_plan.py compares results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from joined_on_cpu import joined_on_cpu
from random_models import loaded_on, write_random_model
from torch import Tensor
from torch.overrides import TorchFunctionMode

from exl_core import ExLlamaV2Cache, PagedParams
from exl_core.execution import many_rows
from exl_core.execution.build_step import Chunk, build_step
from exl_core.execution.fused import JoinedLaunches, joined_launches_of
from exl_kernels.attention.prompt import PromptAttention

PAGE, TOKENS = 256, 80
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Gemma3ForCausalLM": {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
}
PARALLEL: dict[str, dict[str, Any]] = {
    "CohereForCausalLM": {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "intermediate_size": 512},
    "PhiForCausalLM": {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "intermediate_size": 512},
}
"""Attention and MLP side by side; the MLP is wider than all that attention holds."""


class Allocations(TorchFunctionMode):
    """Count new tensors of at least one element a token."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.empty_like, Tensor.new_empty) and found.numel() >= TOKENS:
            self.count += 1
        return found


def prompt(family: str, layers: int, folder: Path, patch: pytest.MonkeyPatch) -> tuple[int, list[int]]:
    """Store a prompt; returns the tensors allocated, and the layers that used each attention."""
    config = {**SIZES, **(FAMILIES | PARALLEL)[family], "architectures": [family], "num_hidden_layers": layers}
    model = loaded_on("cpu", write_random_model(folder / f"{family}-{layers}", config), patch)
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches), plan
    cache = ExLlamaV2Cache(model, max_seq_len=PAGE)
    params = PagedParams(1, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0, PAGE, TOKENS)
    step = build_step(model, Chunk(cache, params, 1, TOKENS), torch.device("cpu"))
    uses: list[int] = []

    class Counted(PromptAttention):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.number = len(uses)
            uses.append(0)

        def __call__(self, pages: Any) -> Tensor:
            uses[self.number] += 1
            return super().__call__(pages)

    patch.setattr(many_rows, "PromptAttention", Counted)
    ids = torch.arange(TOKENS) % model.config.vocab_size
    with torch.inference_mode(), Allocations() as allocations:
        plan.store(ids, step)
    patch.undo()
    return allocations.count, uses


@pytest.mark.parametrize("family", PARALLEL)
def test_a_parallel_mlp_may_be_wider_than_attention(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        joined_on_cpu(patch)
        _, uses = prompt(family, 3, tmp_path, patch)
    assert uses == [2]


@pytest.mark.parametrize("family", FAMILIES)
def test_more_layers_need_no_more_memory_nor_preparation(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's windows and rotations are of two kinds, which layers take in turns; the last layer only stores."""
    found = []
    for layers in (5, 9):
        with monkeypatch.context() as patch:
            joined_on_cpu(patch)
            found.append(prompt(family, layers, tmp_path, patch))
    (few, of_few), (many, of_many) = found
    if not family.startswith("Gemma"):  # on the CPU norms of results take memory
        assert few == many
    assert len(of_few) == len(of_many) == (2 if family.startswith("Gemma") else 1)
    assert (sum(of_few), sum(of_many)) == (4, 8)


def test_a_decode_step_of_many_sequences_stores_what_each_stores_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of decode steps is that of the half itself, on results in the memory that halves share."""
    joined_on_cpu(monkeypatch)
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3}
    model = loaded_on("cpu", write_random_model(tmp_path / "model", config), monkeypatch)
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches), plan
    ids = torch.arange(TOKENS) % model.config.vocab_size

    def keys(rows: Tensor) -> list[Tensor]:
        """Store one token of each sequence; returns its keys and values."""
        batch = len(rows)
        cache = ExLlamaV2Cache(model, max_seq_len=PAGE * batch)
        pages = torch.arange(batch, dtype=torch.int32)[:, None]
        params = PagedParams(batch, pages, torch.zeros(batch, dtype=torch.int32), 0, PAGE, 1)
        step = build_step(model, Chunk(cache, params, batch, 1), torch.device("cpu"))
        with torch.inference_mode():
            plan.store(rows, step)
        return [t.view(batch, PAGE, -1)[:, 0] for t in cache.all_tensors()]

    together, alone = keys(ids), [keys(ids[i : i + 1]) for i in range(0, TOKENS, 16)]
    for i, one in zip(range(0, TOKENS, 16), alone, strict=True):
        for got, want in zip(together, one, strict=True):
            assert bool(want.any())
            torch.testing.assert_close(got[i], want[0], atol=5e-3, rtol=5e-3)
