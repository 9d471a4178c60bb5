"""Quantized models of every layer layout on a GPU: captured steps of the plan against the modules' own passes, bitwise;
needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import loaded_on, write_random_model
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache, PagedParams
from exl_core.convert import quantize_model

pytestmark = pytest.mark.cuda

PAGE = 256
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
}
WINDOW = {"sliding_window": 16, "query_pre_attn_scalar": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {},
    "Gemma2ForCausalLM": WINDOW,
    "Gemma3ForCausalLM": {**WINDOW, "sliding_window_pattern": 2},
    "Glm4ForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Exaone4ForCausalLM": {"sliding_window": 16},
    "CohereForCausalLM": {"use_qk_norm": True, "logit_scale": 1.0},
    "Cohere2ForCausalLM": {"sliding_window": 16, "logit_scale": 1.0},
    "PhiForCausalLM": {"num_key_value_heads": 4},
    "StableLmForCausalLM": {},
    "Starcoder2ForCausalLM": {},
}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2:
    config = {**SIZES, "architectures": [request.param], **FAMILIES[request.param]}
    source = write_random_model(tmp_path / "float", config)
    quantize_model(source, tmp_path / "quantized", bits=4.0)
    return loaded_on("cuda:0", tmp_path / "quantized", monkeypatch)


def steps(model: ExLlamaV2, rows: int, ids: Tensor, *, planned: bool) -> list[Tensor]:
    """Logits of tokens after a prompt, then the cache, which is their own."""
    tables = torch.arange(rows, dtype=torch.int32).flip(0)[:, None].contiguous()
    cache, found = ExLlamaV2Cache(model, max_seq_len=PAGE * rows), []
    model.decode.clear()
    for row in range(rows):  # together they would be more rows than have results of their own
        params = PagedParams(1, tables[row : row + 1], torch.zeros(1, dtype=torch.int32), 0, PAGE, 31)
        model.forward_chunk(ids[row : row + 1, :31], cache, attn_params=params, preprocess_only=True)
    for begin, end in ((31, 32), (32, 33), (33, 36)) if rows < 20 else ((31, 32), (32, 33)):
        params = PagedParams(rows, tables, torch.full((rows,), begin, dtype=torch.int32), begin, PAGE)
        found.append(model.forward_chunk(ids[:, begin:end], cache, attn_params=params)["logits"].clone())
    assert model.decode.count > 0, model.decode.reason
    assert (model.decode.apart_reason is None) == planned
    return [*found, *(tensor.clone() for tensor in cache.all_tensors())]


def test_the_plan_is_the_modules_own_pass(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, 96, (33, 40), generator=torch.Generator().manual_seed(2))
    batches = (1, 2, 5, 12, 33)
    planned = [steps(model, rows, ids[:rows], planned=True) for rows in batches]
    assert torch.equal(planned[0][0][0], planned[-1][0][0]), "a row depends on its batch"
    monkeypatch.setattr("exl_core.execution.captured.joined_launches_of", lambda _: "not covered")
    model.decode.clear()
    for rows, found in zip(batches, planned, strict=True):
        for index, (a, b) in enumerate(zip(found, steps(model, rows, ids[:rows], planned=False), strict=True)):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"{rows} rows, tensor {index}"
