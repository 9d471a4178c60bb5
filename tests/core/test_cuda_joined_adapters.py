"""Joined launches with adapters against the modules' own passes, bitwise; needs a GPU or the interpreter of PTX."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Lora, PagedParams
from exl_core.execution.attention_half import AttentionHalf
from exl_core.execution.build_step import Chunk, build_step
from exl_core.execution.fused import JoinedLaunches, joined_launches_of
from exl_core.execution.kernels import kernel_uses
from exl_core.execution.mlp_half import MlpHalf
from exl_core.lora.rows import RowAdapters
from exl_kernels import _native
from exl_kernels.safetensors_file import write_safetensors
from exl_kernels.selection import FEW_ROWS, Card

pytestmark = [pytest.mark.cuda, pytest.mark.covers("core: lora")]

PAGE, PAST = 16, 5
HIDDEN, INNER, HEAD_DIM = 128, 192, 64
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "head_dim": HEAD_DIM,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 96,
}
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, HEAD_DIM),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
ALL = tuple(SHAPES)
# Adapters by rank and matrices, and the sets of them that rows have in turn.
CASES: dict[str, tuple[tuple[tuple[int, tuple[str, ...]], ...], tuple[tuple[int, ...], ...]]] = {
    "all": (((16, ALL),), ((0,),)),
    "mixed": (((6, ALL), (20, ALL[:3] + ALL[4:5]), (1, ALL[6:])), ((0,), (), (2, 0), (0, 2), (1,))),
    "down": (((4, ALL[6:]),), ((0,), ())),
    "up": (((4, ALL[5:6]),), ((), (0,))),
    "o": (((4, ALL[3:4]),), ((0,), ())),
    "k": (((4, ALL[1:2]),), ((0,), ())),
}


def write_adapter(folder: Path, rank: int, parts: tuple[str, ...]) -> Path:
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for layer in range(2):
        for part in parts:
            inputs, outputs = SHAPES[part]
            key = f"base_model.model.model.layers.{layer}.{part}"
            tensors[f"{key}.lora_A.weight"] = (torch.randn(rank, inputs, generator=generator) * 0.1).half()
            tensors[f"{key}.lora_B.weight"] = (torch.randn(outputs, rank, generator=generator) * 0.1).half()
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {2 * rank}}}')
    return folder


@pytest.fixture
def model(lab: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ExLlamaV2:
    folder = lab.write(kind=request.param, **SIZES)
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    loaded = ExLlamaV2(ExLlamaV2Config(folder))
    loaded.load()
    return loaded


def results(
    model: ExLlamaV2, sets: list[tuple[ExLlamaV2Lora, ...]], q_len: int, joined: bool
) -> tuple[Tensor, list[Tensor]]:
    """Logits of a step after PAST tokens, and what the cache holds then; by joined launches or module by module."""
    batch, device = len(sets), model.device
    assert device is not None
    table = torch.arange(batch, dtype=torch.int32)[:, None]
    ids = torch.randint(0, 96, (batch, PAST + q_len), generator=torch.Generator().manual_seed(batch))
    cache = ExLlamaV2Cache(model, max_seq_len=PAGE * batch)
    begin = PagedParams(batch, table, torch.zeros(batch, dtype=torch.int32), 0, PAGE, PAST)
    model.forward_chunk(ids[:, :PAST], cache, attn_params=begin, preprocess_only=True)
    params = PagedParams(batch, table, torch.full((batch,), PAST, dtype=torch.int32), PAST, PAGE, q_len)
    different = [found for found in dict.fromkeys(sets) if found]
    numbers = [different.index(found) if found else -1 for found in sets]
    rows = RowAdapters(different, torch.tensor(numbers, dtype=torch.int32).repeat_interleave(q_len).to(device), q_len)
    step = build_step(model, Chunk(cache, params, batch, q_len, adapters=(rows,)), device, invariant=True)
    flat = ids[:, PAST:].reshape(-1).to(device)
    logits = torch.empty(batch * q_len, model.config.padded_vocab_size, device=device)
    with torch.inference_mode():
        if joined:
            plan = joined_launches_of(model)
            assert isinstance(plan, JoinedLaunches), plan
            halves = [half for half in plan.halves if isinstance(half, AttentionHalf | MlpHalf)]
            assert len(halves) == 4
            assert all(half.takes_adapters(step) for half in halves)
            # More rows share a launch only where matrices have one permutation and the card has `gemm_batch`.
            assert batch * q_len > FEW_ROWS or all(half.joins(batch * q_len) for half in halves)
            plan.run(flat, step, logits)
        else:
            x = flat
            for module in model.modules:
                x = module.forward(x, step)
            logits.copy_(x)
    return logits.cpu(), [tensor.cpu() for tensor in cache.all_tensors()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("batch", "q_len"), [(1, 1), (2, 1), (5, 1), (3, 2), (12, 1)])
@pytest.mark.parametrize("model", ["exl2"], indirect=True)
def test_joined_launches_add_adapters(model: ExLlamaV2, tmp_path: Path, case: str, batch: int, q_len: int) -> None:
    assert_identical(model, tmp_path, case, batch, q_len)


@pytest.mark.parametrize("batch", [1, 4, 64, 65])
@pytest.mark.parametrize("model", ["gptq", "gptq-act-order"], indirect=True)
def test_joined_launches_add_adapters_of_gptq(model: ExLlamaV2, tmp_path: Path, batch: int) -> None:
    assert_identical(model, tmp_path, "mixed", batch, 1)


def assert_identical(model: ExLlamaV2, folder: Path, case: str, batch: int, q_len: int) -> None:
    adapters, chosen = CASES[case]
    loras = [
        ExLlamaV2Lora.from_directory(model, write_adapter(folder / str(number), *adapter))
        for number, adapter in enumerate(adapters)
    ]
    sets = [tuple(loras[i] for i in chosen[row % len(chosen)]) for row in range(batch)]
    want, want_cache = results(model, sets, q_len, joined=False)
    got, got_cache = results(model, sets, q_len, joined=True)
    assert bool(torch.isfinite(want[:, :90]).all())
    assert torch.equal(got, want)
    for a, b in zip(got_cache, want_cache, strict=True):
        assert torch.equal(a, b)
    if any(sets):
        plain, _ = results(model, [()] * batch, q_len, joined=False)
        changed = [row for row, found in enumerate(sets) if found]
        rows = [row * q_len + token for row in changed for token in range(q_len)]
        assert not torch.equal(plain[rows], want[rows])


@pytest.mark.parametrize("batch", [1, 4, 12])
@pytest.mark.parametrize("model", ["exl2", "gptq"], indirect=True)
def test_the_report_of_kernels_has_the_launches_of_adapters(model: ExLlamaV2, tmp_path: Path, batch: int) -> None:
    """The report equals a captured step whose rows all have adapters of every matrix."""
    adapters = ExLlamaV2Lora.from_directory(model, write_adapter(tmp_path / "all", 16, ALL))
    before: dict[str, int] = _native.cuda_launches()
    results(model, [(adapters,)] * batch, 1, joined=True)
    now: dict[str, int] = _native.cuda_launches()
    launched: Counter[str] = Counter()
    for name in now:
        if name.startswith(("lora_", "gemv_ring_adapted_")):
            launched["gemv_ring_adapted" if name.startswith("gemv") else name] += now[name] - before.get(name, 0)
    reported: Counter[str] = Counter()
    for use in kernel_uses(model.config, Card.device(0), rows=(batch,), prompts=(), adapter_rank=16):
        for names, calls in zip(use.kernel.split(", "), use.calls, strict=True):
            if use.operation == "adapters" or names == "gemv_ring_adapted":
                reported.update(dict.fromkeys(names.split(" + "), calls))
    assert reported == +launched
    # Four joined matmuls in each of two layers; of more rows seven matrices, where they do not share a permutation.
    assert sum(reported.values()) in ((8,) if "gemv_ring_adapted" in reported else (16, 28))
