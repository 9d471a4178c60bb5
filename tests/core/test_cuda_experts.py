"""Mixtures of experts on a GPU: captured steps, batches and chunks, bitwise equal to one expert after
the other; needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import FAMILIES, SIZES
from random_models import loaded_on, write_random_model
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache, PagedParams
from exl_core.convert import quantize_model
from exl_core.layers import MoE
from exl_core.layers.sublayer import BY_OPERATOR

pytestmark = pytest.mark.cuda


FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16}
KINDS = [(family, bits) for family in FAMILIES for bits in ("4.0", "gptq", *FLOATS)]


@pytest.fixture(params=KINDS, ids=lambda p: "-".join(p))
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2:
    family, bits = request.param
    config = {**SIZES, "architectures": [family], **FAMILIES[family]}
    source = write_random_model(tmp_path / "float", config, FLOATS.get(bits, torch.float16))
    if bits in FLOATS:
        return loaded_on("cuda:0", source, monkeypatch)
    options: dict[str, Any] = {"format": "gptq", "bits": 4, "group_size": 32} if bits == "gptq" else {"bits": 4.0}
    quantize_model(source, tmp_path / "quantized", **options)
    return loaded_on("cuda:0", tmp_path / "quantized", monkeypatch)


def steps(model: ExLlamaV2, rows: int, ids: Tensor, *, captured: bool = True) -> list[Tensor]:
    """Logits of a prompt in two chunks and of single tokens after it, in a cache of their own."""
    tables = torch.arange(rows, dtype=torch.int32).flip(0)[:, None].contiguous()
    cache, found = ExLlamaV2Cache(model, max_seq_len=256 * rows), []
    model.decode.clear()
    for begin, end in ((0, 20), (20, 31), (31, 32), (32, 33), (33, 37), (37, 38)):
        params = PagedParams(rows, tables, torch.full((rows,), begin, dtype=torch.int32), begin, 256)
        found.append(model.forward_chunk(ids[:, begin:end], cache, attn_params=params)["logits"].clone())
    assert (model.decode.count > 0) == captured, model.decode.reason
    return found


def test_steps_are_captured_and_the_same_as_expert_after_expert(
    model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(0, 96, (3, 40), generator=torch.Generator().manual_seed(2))
    captured = steps(model, 3, ids)
    monkeypatch.setenv("EXL_CUDA_GRAPHS", "0")
    eager = steps(model, 3, ids, captured=False)
    for module in model.modules:
        if isinstance(module, MoE):
            monkeypatch.setattr(module, "own_pass", BY_OPERATOR)
    apart = steps(model, 3, ids, captured=False)
    for found in (eager, apart):
        assert all(torch.equal(a, b) for a, b in zip(captured, found, strict=True))


def test_a_row_alone_and_in_any_batch(model: ExLlamaV2) -> None:
    """With prompts that are multiplied on packed weights: of up to 64 rows."""
    ids = torch.randint(0, 96, (3, 40), generator=torch.Generator().manual_seed(3))
    together = steps(model, 3, ids)
    for row in range(3):
        alone = steps(model, 1, ids[row : row + 1])
        assert all(torch.equal(a[row], b[0]) for a, b in zip(together, alone, strict=True))


def test_a_reloaded_model_is_grouped_anew(model: ExLlamaV2) -> None:
    ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(4))
    before = steps(model, 1, ids)
    model.unload()
    experts = [module for module in model.modules if isinstance(module, MoE)]
    assert not any(module.capturable for module in experts)
    model.device = None
    model.load()
    assert all(module.capturable for module in experts)
    assert all(torch.equal(a, b) for a, b in zip(before, steps(model, 1, ids), strict=True))
