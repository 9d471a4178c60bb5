"""Modules: the fused blocks against the same layer step by step, and matrices whose files pad their columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Cache_Q4
from exl_core.layers import Attention, GatedMLP
from exl_core.layers.sublayer import BY_OPERATOR

MODELS: dict[str, dict[str, Any]] = {
    "float": {},
    "exl2": {"kind": "exl2"},
    "gptq-bias": {"kind": "gptq-act-order", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"kind": "exl2", "architectures": ["Qwen2ForCausalLM"]},
    "window-gelu": {"architectures": ["MistralForCausalLM"], "sliding_window": 7, "hidden_act": "gelu_new"},
}


def blocks(model: ExLlamaV2) -> list[Any]:
    return [m for m in model.modules if isinstance(m, (Attention, GatedMLP))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["exact", "int8"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_fused_blocks_equal_the_steps(name: str, mode: str, lab: Any) -> None:
    model = lab.load(lab.write(**MODELS[name]), cpu_matmul=mode)
    assert all(m.own_pass is not BY_OPERATOR for m in blocks(model))
    ids = lab.ids(3, 24)
    mask = torch.zeros(3, 24)
    mask[1, :5] = float("-inf")

    def run(cache_class: Any) -> list[torch.Tensor]:
        cache = cache_class(model, batch_size=3, max_seq_len=32)
        parts = [model.forward(ids[:, a:b], cache, input_mask=mask) for a, b in ((0, 17), (17, 18), (18, 24))]
        return [*parts, *cache.all_tensors()]

    fused = [run(c) for c in (ExLlamaV2Cache, ExLlamaV2Cache_Q4)]
    for module in blocks(model):
        module.own_pass = BY_OPERATOR
    stepwise = [run(c) for c in (ExLlamaV2Cache, ExLlamaV2Cache_Q4)]
    for a, b in zip(fused, stepwise, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_padded_columns_are_cut_off(lab: Any) -> None:
    """One key/value head of 24: EXL2 stores 32 columns, so these layers run step by step."""
    changes = {"num_key_value_heads": 1, "head_dim": 24, "num_attention_heads": 4, "intermediate_size": 96}
    padded = lab.load(lab.write(kind="exl2", **changes))
    attention = padded.modules[1]
    assert attention.k_proj.quant.out_features == 32
    assert attention.k_proj.get_weight_tensor_dq().shape == (64, 24)
    assert attention.own_pass is BY_OPERATOR
    assert padded.modules[2].own_pass is not BY_OPERATOR
    plain = lab.load(lab.write(**changes))
    ids = lab.ids(1, 20)
    a, b = padded.forward(ids)[..., :90], plain.forward(ids)[..., :90]
    kl = (b.softmax(-1) * (b.log_softmax(-1) - a.log_softmax(-1))).sum(-1).mean()
    assert float(kl) < 0.1  # 4 to 6 bits against half precision; a wrong slice would be far off


def test_unloading_drops_the_fused_block(lab: Any) -> None:
    model = lab.load(lab.write(kind="exl2"))
    model.unload()
    assert all(m.own_pass is BY_OPERATOR for m in blocks(model))
