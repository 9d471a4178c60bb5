"""Tiny random models made by transformers: our logits are its logits, in one piece, in chunks and token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core import ExLlamaV2Cache, ExLlamaV2Config
from exl_core.rope import RopeTable

transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-3  # of the largest logit
TOKENS = 40

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha-bias": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-mqa-tied-head-dim": ("Llama", {"num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": True}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-linear": ("Llama", rope(rope_type="linear", factor=4.0)),
    "llama3": (
        "Llama",
        rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-yarn": ("Llama", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-yarn-mscale": (
        "Llama",
        rope(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            mscale=0.7,
            mscale_all_dim=1.3,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
    ),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
}


def build(case: str, folder: Path) -> tuple[Any, Path]:
    """The transformers model, saved to `folder` in half precision and computing with those very weights in float32."""
    family, changes = CASES[case]
    torch.manual_seed(sum(map(ord, case)))
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            offset = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_((torch.randn_like(parameter) * scale + offset).half().float())
    saved = getattr(transformers, f"{family}ForCausalLM")(config).half()
    saved.load_state_dict({k: v.half() for k, v in model.state_dict().items()})
    saved.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module", params=sorted(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, lab: Any) -> tuple[Any, Any]:
    """(transformers model, our model)."""
    theirs, folder = build(request.param, tmp_path_factory.mktemp(request.param))
    return theirs, lab.load(folder)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(3, 90, (2, TOKENS), generator=torch.Generator().manual_seed(5))


def assert_close(found: Tensor, expected: Tensor) -> None:
    found = found[..., : expected.shape[-1]]
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < TOLERANCE, f"relative error {error:.2e}"


@torch.no_grad()
def expected_logits(theirs: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    logits: Tensor = theirs(input_ids=ids, **kwargs).logits
    return logits


def test_whole_prompt(pair: tuple[Any, Any], ids: Tensor) -> None:
    theirs, ours = pair
    assert_close(ours.forward(ids), expected_logits(theirs, ids) if ids.shape[0] == 1 else _rowwise(theirs, ids))


def _rowwise(theirs: Any, ids: Tensor) -> Tensor:
    return torch.cat([expected_logits(theirs, row[None]) for row in ids])


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_in_chunks_and_token_by_token(pair: tuple[Any, Any], ids: Tensor, chunk: int) -> None:
    theirs, ours = pair
    cache = ExLlamaV2Cache(ours, batch_size=2, max_seq_len=64)
    parts = [ours.forward(ids[:, i : i + chunk], cache) for i in range(0, TOKENS, chunk)]
    assert_close(torch.cat(parts, dim=1), _rowwise(theirs, ids))


def test_left_padded_batch(pair: tuple[Any, Any], ids: Tensor) -> None:
    """Row 0 is 13 tokens shorter: with mask and offsets its logits are those of the bare row."""
    theirs, ours = pair
    padding = 13
    padded = ids.clone()
    padded[0, :padding] = 0
    mask = torch.zeros(2, TOKENS, dtype=torch.half)
    mask[0, :padding] = float("-inf")
    offsets = torch.tensor([[-padding], [0]], dtype=torch.int32)
    cache = ExLlamaV2Cache(ours, batch_size=2, max_seq_len=64)
    first = ours.forward(padded[:, :30], cache, input_mask=mask, position_offsets=offsets)
    second = ours.forward(padded[:, 30:], cache, input_mask=mask, position_offsets=offsets)
    logits = torch.cat([first, second], dim=1)
    assert torch.isfinite(logits).all()
    assert_close(logits[0, padding:], expected_logits(theirs, ids[:1, padding:])[0])
    assert_close(logits[1], expected_logits(theirs, ids[1:])[0])


@pytest.mark.parametrize("case", ["llama", "llama-linear", "llama3", "llama-yarn", "llama-yarn-mscale"])
def test_rope_tables(case: str, tmp_path: Path) -> None:
    """cos and sin at far positions, against transformers' rotary module."""
    theirs, folder = build(case, tmp_path)
    config = ExLlamaV2Config(folder)
    config.max_seq_len = 5000
    cos, sin = RopeTable(config.rope_settings()).upto(5000)
    positions = torch.arange(5000)[None]
    expected_cos, expected_sin = theirs.model.rotary_emb(torch.zeros(1, 1), positions)
    half = cos.shape[1]
    torch.testing.assert_close(cos[:5000], expected_cos[0, :, :half], atol=1e-5, rtol=0)
    torch.testing.assert_close(sin[:5000], expected_sin[0, :, :half], atol=1e-5, rtol=0)
