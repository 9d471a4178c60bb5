"""Adapters on families whose matrices are fused, packed by group, transposed or scaled: logits are PEFT's."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core import ExLlamaV2Lora

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.covers("core: adapter-matrices", "core: lora"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SIZES = {
    **{"vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1},
}
GPT2 = {"vocab_size": 90, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2, ["c_attn", "c_fc", "c_proj"]),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", {**GPT2, "multi_query": False}, ["c_attn"]),
    "Phi3ForCausalLM": ("Phi3Config", {**SIZES, "eos_token_id": 2}, ["qkv_proj", "gate_up_proj", "o_proj"]),
    "CohereForCausalLM": ("CohereConfig", {**SIZES, "eos_token_id": 2}, ["q_proj", "up_proj", "down_proj"]),
    "Gemma2ForCausalLM": ("Gemma2Config", {**SIZES, "eos_token_id": 2, "head_dim": 16}, ["q_proj", "up_proj"]),
    "GraniteForCausalLM": ("GraniteConfig", {**SIZES, "eos_token_id": 2, "residual_multiplier": 0.3}, ["o_proj"]),
}


@cache
def peft() -> Any:
    """The library. Its import takes seconds, so a process that runs other tests does without."""
    return pytest.importorskip("peft")


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(CASES))
def test_logits_with_an_adapter(name: str, lab: Any, tmp_path: Path) -> None:
    config, sizes, targets = CASES[name]
    torch.manual_seed(5)
    theirs = getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()
    for parameter in theirs.parameters():
        scale = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.copy_((torch.randn_like(parameter) * scale).half().float())
    copy.deepcopy(theirs).half().save_pretrained(tmp_path / "model")
    options = peft().LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out=name == "GPT2LMHeadModel", task_type="CAUSAL_LM"
    )
    adapted = peft().get_peft_model(theirs, options).eval()
    for key, parameter in adapted.named_parameters():
        if "lora_" in key:
            parameter.copy_((torch.randn_like(parameter) * 0.2).half().float())
    adapted.save_pretrained(tmp_path / "adapter")
    ids = lab.ids(1, 30)
    expected = adapted(input_ids=ids).logits
    ours = lab.load(tmp_path / "model")
    lora = ExLlamaV2Lora.from_directory(ours, str(tmp_path / "adapter"))

    def error(logits: torch.Tensor) -> float:
        return float((logits[..., :90] - expected).abs().max() / expected.abs().max())

    assert error(ours.forward(ids, loras=[lora])) < 2e-3
    assert error(ours.forward(ids)) > 0.1
