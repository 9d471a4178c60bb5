"""Captured prompts and steps of several families launch what gives the results of eager passes, on a GPU.

The interpreter of PTX has no CUDA graphs. There a replay repeats the launches over the same static inputs, so windows
of prompts, padding and buckets are tested without a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import FAMILIES, SIZES
from random_models import loaded_on, write_random_model
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2CacheBase, PagedParams
from exl_core.convert import quantize_model
from exl_core.execution.environment import GRAPHS_VARIABLE, PROMPTS_VARIABLE
from exl_core.execution.recorder import Body, Recorded, Recorder
from exl_core.layers import MoE
from exl_core.layers.sublayer import BY_OPERATOR

pytestmark = pytest.mark.cuda

CASES: dict[str, tuple[type[ExLlamaV2CacheBase], dict[str, Any]]] = {
    "LlamaForCausalLM": (ExLlamaV2Cache_Q4, {}),
    "Gemma2ForCausalLM": (
        ExLlamaV2Cache,
        {"query_pre_attn_scalar": 32, "sliding_window": 16, "attn_logit_softcapping": 50.0},
    ),
    "CohereForCausalLM": (ExLlamaV2Cache, {"layer_norm_eps": 1e-5, "logit_scale": 0.1}),
    **{
        family: (ExLlamaV2Cache, FAMILIES[family])
        for family in ("Qwen2MoeForCausalLM", "GraniteMoeForCausalLM", "OlmoeForCausalLM")
    },
}
PAGE, PAGES, ROWS = 16, 6, 3
PROMPTS = [[(0, 0, 40)], [(1, 0, 33), (2, 0, 5)], [(0, 40, 47), (1, 33, 38), (2, 5, 8)]]
"""Prompts of each pass: row, first and end."""
STORED = [47, 38, 8]


class Repeated:
    """Launches that are made again at each replay, in the place of a graph."""

    def __init__(self, body: Body, logits: Tensor | None, result: Tensor) -> None:
        self._body, self._logits, self._result = body, logits, result

    def replay(self) -> None:
        found = self._body(self._logits)
        if self._logits is None:
            self._result.copy_(found)


def repeated(recorder: Recorder, body: Body, logits: Tensor | None, memory: Tensor) -> Any:
    """Stand in for `Recorder.capture`: (graph, result of a first run, memory that it keeps)."""
    result = body(None if logits is None else torch.empty_like(logits))
    return Recorded(Repeated(body, logits, result), result, memory)  # type: ignore[arg-type]


def params(rows: list[int], stored: list[int], tables: Tensor, q_len: int = 0) -> PagedParams:
    return PagedParams(len(rows), tables[rows], torch.tensor(stored, dtype=torch.int32), max(stored), PAGE, q_len)


def results(model: ExLlamaV2, kind: type[ExLlamaV2CacheBase]) -> tuple[list[Tensor], int]:
    """Logits of the last token of each prompt and of steps of one and of three tokens after the prompts, and the cache;
    and the number of captured steps.

    Each pass of prompts runs twice."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SIZES["vocab_size"], (ROWS, PAGES * PAGE), generator=generator)
    tables = torch.randperm(ROWS * PAGES, generator=generator).to(torch.int32).view(ROWS, PAGES)
    cache = kind(model, max_seq_len=ROWS * PAGES * PAGE)
    for tensor in cache.all_tensors():
        tensor.zero_()
    found = []
    for prompts in PROMPTS:
        places = params([row for row, *_ in prompts], [first for _, first, _ in prompts], tables)
        if len(prompts) > 1:
            places.q_lens = torch.tensor([end - first for _, first, end in prompts], dtype=torch.int32)
        together = torch.cat([ids[row, first:end] for row, first, end in prompts])[None]
        for _ in range(2):
            model.forward_chunk(together, cache, attn_params=places, preprocess_only=True)
        every = model.forward_chunk(together, cache, attn_params=places)["logits"].clone()
        ends = torch.tensor([end - first for _, first, end in prompts]).cumsum(0) - 1
        for _ in range(2):
            last = model.forward_chunk(together, cache, attn_params=places, last_id_only=True)["logits"]
            assert torch.equal(last, every[:, ends])
        found.append(last)
    for q_len in (1, 3):
        windows = torch.stack([ids[row, first : first + q_len] for row, first in enumerate(STORED)])
        places = params(list(range(ROWS)), STORED, tables, q_len)
        found.append(model.forward_chunk(windows, cache, attn_params=places)["logits"].clone())
    return [*found, *(tensor.clone() for tensor in cache.all_tensors())], model.decode.count


@pytest.mark.parametrize("family", ["Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"])
def test_captured_steps_with_float_experts_are_those_of_one_expert_after_the_other(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**SIZES, **FAMILIES[family], "num_hidden_layers": 2, "architectures": [family]}
    model = loaded_on("cuda:0", write_random_model(tmp_path, config, torch.bfloat16), monkeypatch)
    if "emulated_plugin" in sys.modules:
        monkeypatch.setattr(Recorder, "capture", repeated)
    captured, steps = results(model, ExLlamaV2Cache)
    assert model.decode.reason is None
    assert steps >= 2
    monkeypatch.setenv(GRAPHS_VARIABLE, "0")
    for module in model.modules:
        if isinstance(module, MoE):
            monkeypatch.setattr(module, "own_pass", BY_OPERATOR)
    apart, _ = results(model, ExLlamaV2Cache)
    for one, other in zip(captured, apart, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", CASES)
def test_captured_passes_are_the_eager_ones(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, fields = CASES[family]
    sizes = {**SIZES, "num_hidden_layers": 2, "architectures": [family]}
    source = write_random_model(tmp_path / "float", {**sizes, **fields})
    quantize_model(source, tmp_path / "quantized", bits=4.0)
    model = loaded_on("cuda:0", tmp_path / "quantized", monkeypatch)
    if "emulated_plugin" in sys.modules:
        monkeypatch.setattr(Recorder, "capture", repeated)
    monkeypatch.setenv(PROMPTS_VARIABLE, "1")
    monkeypatch.setenv(GRAPHS_VARIABLE, "0")
    eager, steps = results(model, kind)
    assert steps == 0
    monkeypatch.setenv(GRAPHS_VARIABLE, "1")
    captured, steps = results(model, kind)
    assert model.decode.reason is None
    assert steps >= 2 + (family not in FAMILIES), "of a float router, only steps with logits"
    for one, other in zip(eager, captured, strict=True):
        assert torch.equal(one, other)
