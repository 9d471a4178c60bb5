"""Block types on a GPU against the same model on the CPU: norms, experts, parallel blocks, positions; needs a GPU.

Which experts a row goes to is a jump: where two are nearly as likely, the half hidden states of a GPU may turn a choice
around, and a logit with it. So the GPU's choices are compared with the CPU's where they are made, and what follows is
computed with the CPU's, by one expert after the other: where experts share launches, a kernel chooses. Captured steps
and test_cuda_experts.py have shared launches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import loaded_on, write_random_model
from torch import Tensor

from exl_core import ExLlamaV2Cache, PagedParams
from exl_core.layers import MoE
from exl_core.layers.sublayer import BY_OPERATOR

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
}
MOE = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
    "Gemma2ForCausalLM": {"sliding_window": 16, "query_pre_attn_scalar": 32},
    "CohereForCausalLM": {"use_qk_norm": True, "logit_scale": 1.0},
    "Cohere2ForCausalLM": {"sliding_window": 16, "logit_scale": 1.0},
    "GPT2LMHeadModel": {"n_inner": 160, "num_key_value_heads": 4},
    "MixtralForCausalLM": MOE,
    "Qwen2MoeForCausalLM": {**MOE, "shared_expert_intermediate_size": 64},
    "DbrxForCausalLM": {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}, "attn_config": {"clip_qkv": 1.5}},
    "Olmo2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0, 1, 0]},
    "Glm4ForCausalLM": {},
    "Starcoder2ForCausalLM": {},
}


def divergence(reference: Tensor, found: Tensor) -> float:
    p, q = reference[..., :96].double().log_softmax(-1), found.cpu()[..., :96].double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).max())


class Choices:
    """The CPU's choices of experts, kept by layer; on a GPU they are made again, and its own ones judged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: dict[str, tuple[Tensor, Tensor]] = {}
        self.tokens: slice | torch.Tensor = slice(None)
        """Which of the kept rows the next GPU call computes."""
        self.turned: list[float] = []
        """How much likelier the CPU found its own expert than the GPU's other one."""
        self._route = MoE.route
        monkeypatch.setattr(MoE, "route", lambda moe, *given, **more: self.route(moe, *given, **more))

    def route(self, moe: MoE, h: Tensor, loras: Any = (), *, invariant: bool | None = None) -> tuple[Tensor, Tensor]:
        weights, own = self._route(moe, h, loras, invariant=invariant)
        probabilities = moe.router.forward_precise(h, loras).softmax(-1)
        if not h.is_cuda:
            self.kept[moe.key] = probabilities, own
            return weights, own
        expected, wanted = (t[self.tokens] for t in self.kept[moe.key])
        assert (probabilities.cpu() - expected).abs().max() < CLOSE
        for row in (own.cpu().sort(-1).values != wanted.sort(-1).values).any(-1).nonzero().flatten():
            ours, theirs = set(wanted[row].tolist()), set(own[row].tolist())
            least = min(float(expected[row, e]) for e in ours - theirs)
            self.turned.append(least - max(float(expected[row, e]) for e in theirs - ours))
        there = wanted.to(h.device)
        weights = probabilities.gather(1, there)
        return weights / weights.sum(-1, keepdim=True) if moe.normalize else weights, there


CLOSE = 4e-3
"""Probabilities of experts on the two devices differ by less; so choices may turn between experts as close."""


@pytest.fixture(params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = {**SIZES, "architectures": [request.param], **FAMILIES[request.param]}
    return write_random_model(tmp_path / request.param, config)


def test_chunks_on_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU reference alone: equal in one piece and in chunks, and not uniform."""
    model = loaded_on("cpu", folder, monkeypatch)
    ids = torch.randint(0, 96, (2, 45), generator=torch.Generator().manual_seed(1))
    whole = model.forward(ids)
    cache = ExLlamaV2Cache(model, batch_size=2, max_seq_len=64)
    assert torch.equal(torch.cat([model.forward(ids[:, a : a + 20], cache) for a in (0, 20, 40)], 1), whole)
    assert float(whole[..., :96].std()) > 0.05


@pytest.mark.cuda
def test_logits_on_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices, flat = Choices(monkeypatch), torch.arange(90).view(2, 45)
    ids = torch.randint(0, 96, (2, 45), generator=torch.Generator().manual_seed(1))
    expected = loaded_on("cpu", folder, monkeypatch).forward(ids)
    model = loaded_on("cuda:0", folder, monkeypatch)
    mixtures = [module for module in model.modules if isinstance(module, MoE)]
    for module in mixtures:
        module.own_pass = BY_OPERATOR
        monkeypatch.setenv("EXL_CUDA_GRAPHS", "0")
    whole = divergence(expected, model.forward(ids))
    cache = ExLlamaV2Cache(model, batch_size=2, max_seq_len=64)
    parts = []
    for a, b in ((0, 20), (20, 40), *((i, i + 1) for i in range(40, 45))):
        choices.tokens = flat[:, a:b].flatten()
        parts.append(model.forward(ids[:, a:b], cache).cpu())
    chunks = divergence(expected, torch.cat(parts, 1))
    pages = ExLlamaV2Cache(model, max_seq_len=1024)
    for row, length in ((0, 44), (1, 30)):
        table = torch.tensor([[row * 2 + 1]], dtype=torch.int32)
        start = PagedParams(1, table, torch.zeros(1, dtype=torch.int32), 0, 256)
        choices.tokens = flat[row, :length]
        model.forward_chunk(ids[row : row + 1, :length], pages, attn_params=start, preprocess_only=True)
    table, seen = torch.tensor([[1], [3]], dtype=torch.int32), torch.tensor([44, 30], dtype=torch.int32)
    choices.tokens = torch.tensor([44, 45 + 30])
    steps = 0.0
    for _ in range(2):  # the second time from what the first captured
        step = torch.stack([ids[0, 44:45], ids[1, 30:31]])
        logits = model.forward_chunk(step, pages, attn_params=PagedParams(2, table, seen, 44, 256))["logits"].cpu()
        steps = max(steps, divergence(expected[0, 44:45], logits[0]), divergence(expected[1, 30:31], logits[1]))
    print(folder.name, f"whole {whole:.1e}, chunks {chunks:.1e}, steps {steps:.1e},", end=" ")
    print("captured:", model.decode.reason or "yes", "turned:", [f"{gap:.1e}" for gap in choices.turned])
    assert max(whole, chunks, steps) < 2e-3
    assert max(choices.turned, default=0.0) < CLOSE
    assert bool(choices.kept) == bool(mixtures)


@pytest.mark.cuda
def test_captured_steps_are_the_eager_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise, whichever halves of a layer are joined."""
    model = loaded_on("cuda:0", folder, monkeypatch)
    ids = torch.randint(0, 96, (3, 40), generator=torch.Generator().manual_seed(2))
    tables = torch.tensor([[4], [0], [2]], dtype=torch.int32)
    found = []
    for graphs in ("0", "1"):
        monkeypatch.setenv("EXL_CUDA_GRAPHS", graphs)
        model.decode.clear()
        cache, out = ExLlamaV2Cache(model, max_seq_len=1536), []
        for begin, end in ((0, 30), (30, 31), (31, 32), (32, 36), (36, 37)):
            seen = torch.full((3,), begin, dtype=torch.int32)
            params = PagedParams(3, tables, seen, begin, 256)
            out.append(model.forward_chunk(ids[:, begin:end], cache, attn_params=params)["logits"].clone())
        found.append((out, [tensor.clone() for tensor in cache.all_tensors()]))
        assert (model.decode.count > 0) == (graphs == "1"), model.decode.reason
    print(folder.name, "plan:", model.decode.apart_reason or "yes")
    for eager, captured in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))
