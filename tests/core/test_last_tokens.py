"""`last_id_only`: the logits of each row's last token are those of a pass with all logits, whoever watches the pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import FAMILIES, SIZES
from random_models import loaded_on, write_random_model
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache, Intervention, PagedParams
from exl_core.convert import quantize_model

PAGE, PAGES = 16, 5
LENGTHS = [40, 1, 17]
CASES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 32, "sliding_window": 16, "attn_logit_softcapping": 50.0},
    "Gemma3ForCausalLM": {"query_pre_attn_scalar": 32, "sliding_window": 16, "sliding_window_pattern": 2},
    "CohereForCausalLM": {"layer_norm_eps": 1e-5, "logit_scale": 0.1},
    "GPT2LMHeadModel": {},
    **FAMILIES,
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2:
    source = write_random_model(tmp_path, {**SIZES, "architectures": ["LlamaForCausalLM"]})
    return loaded_on("cpu", source, monkeypatch)


def passes(model: ExLlamaV2) -> tuple[Tensor, Tensor]:
    """Logits of all tokens of rows of different lengths; and, from a second pass, of the last token of each row."""
    table = torch.randperm(len(LENGTHS) * PAGES, generator=torch.Generator().manual_seed(2)).to(torch.int32)
    none = torch.zeros(len(LENGTHS), dtype=torch.int32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    params = PagedParams(len(LENGTHS), table.view(-1, PAGES), none, 0, PAGE, q_lens=lengths)
    ids = torch.randint(0, SIZES["vocab_size"], (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    cache = ExLlamaV2Cache(model, max_seq_len=len(LENGTHS) * PAGES * PAGE)
    every = model.forward_chunk(ids, cache, attn_params=params)["logits"].clone()
    return every, model.forward_chunk(ids, cache, attn_params=params, last_id_only=True)["logits"]


def assert_last(model: ExLlamaV2) -> None:
    every, last = passes(model)
    assert torch.equal(last, every[:, torch.tensor(LENGTHS).cumsum(0) - 1])


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", CASES)
def test_every_kind_of_layer(family: str, quantized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_random_model(tmp_path / "float", {**SIZES, "architectures": [family], **CASES[family]})
    if quantized:
        quantize_model(source, tmp_path / "quantized", bits=4.0)
        source = tmp_path / "quantized"
    assert_last(loaded_on("cpu", source, monkeypatch))


@pytest.mark.parametrize("at", ["attention", "mlp"])
def test_hooks_see_all_tokens(model: ExLlamaV2, at: str) -> None:
    seen: list[tuple[int, ...]] = []
    number = model.last_kv_layer_idx + (at == "mlp")

    def hook(state: Tensor, step: Any) -> Tensor:
        seen.append(tuple(state.shape))
        return state

    model.modules[number] = Intervention(model.modules[number], post_forward=hook)
    assert_last(model)
    assert seen == [(1, sum(LENGTHS), SIZES["hidden_size"])] * 2


def test_changed_code_sees_all_tokens(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    last = model.modules[model.last_kv_layer_idx + 1]
    seen: list[int] = []
    forward = last.forward

    def watched(x: Tensor, step: Any = None) -> Tensor:
        seen.append(len(x))
        return forward(x, step)

    monkeypatch.setattr(last, "forward", watched)
    assert_last(model)
    assert seen == [sum(LENGTHS)] * 2


@pytest.mark.parametrize("at", [-2, -1])
def test_states_are_those_of_all_tokens(model: ExLlamaV2, at: int) -> None:
    """Also the input of the head, which has fewer rows without `extract_state_indices`."""
    number = len(model.modules) + at
    ids = torch.randint(0, SIZES["vocab_size"], (3, 20), generator=torch.Generator().manual_seed(1))
    every = model.forward_chunk(ids, extract_state_indices=[number])
    last = model.forward_chunk(ids, extract_state_indices=[number], last_id_only=True)
    assert torch.equal(last["states"][number], every["states"][number])
    assert torch.equal(last["logits"], every["logits"][:, -1:])
