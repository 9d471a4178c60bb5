"""Images on a GPU against the CPU: towers, logits after pictures, captured steps at positions that are not places."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import loaded_on, write_random_model
from torch import Tensor
from vision_models import FAMILIES, error, picture

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2MMEmbedding, PagedParams
from exl_core.axes import marks_of
from exl_core.execution.environment import GRAPHS_VARIABLE
from exl_core.vision.encoder import Encoder
from exl_core.vision.qwen import QwenEncoder
from exl_core.vision.qwen_settings import read_qwen_settings
from exl_core.vision.siglip import SiglipEncoder, read_siglip_settings

VOCAB = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2VLForConditionalGeneration": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    },
    "Gemma3ForConditionalGeneration": {
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
    },
}
GRIDS = {"Qwen2VLForConditionalGeneration": (1, 8, 12), "Gemma3ForConditionalGeneration": (1, 4, 6)}
PAGE = 32
TEXT = [5 + 7 * i % 80 for i in range(24)]


@pytest.fixture(params=sorted(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    return write_random_model(tmp_path / name, {**SIZES, "architectures": [name], **MODELS[name]})


def pictures(model: ExLlamaV2) -> list[ExLlamaV2MMEmbedding]:
    """Two, of 24 rows between framing rows."""
    generator = torch.Generator().manual_seed(2)
    grid = GRIDS[model.config.architecture]
    rows = [torch.randn(26, 128, generator=generator) * 0.5 for _ in range(2)]
    return [ExLlamaV2MMEmbedding(model, r, thw_grid=grid, pre_tokens=1, post_tokens=1) for r in rows]


def prompt(images: list[ExLlamaV2MMEmbedding]) -> Tensor:
    return torch.tensor([TEXT[:4] + images[0].get_ids() + TEXT[4:9] + images[1].get_ids() + TEXT[9:]])


def divergence(reference: Tensor, found: Tensor) -> float:
    p, q = reference[..., :VOCAB].double().log_softmax(-1), found.cpu()[..., :VOCAB].double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).max())


def steps_over_pages(model: ExLlamaV2) -> Tensor:
    """Logits [2, 10, vocabulary] of single tokens after two images, and of a row without any, after prompts in
    chunks."""
    images = pictures(model)
    ids, text = prompt(images), torch.tensor([TEXT + TEXT])
    marks = marks_of(ids[0].numpy(), images)
    cache = ExLlamaV2Cache(model, max_seq_len=PAGE * 8)
    table = torch.tensor([[6, 1, 4], [0, 3, 5]], dtype=torch.int32)

    def run(tokens: Tensor, rows: list[int], past: list[int], **more: Any) -> Tensor:
        offsets = [0, 0]
        for place, offset in marks:
            offsets[0] = offset if past[0] >= place and rows[0] == 0 else offsets[0]
        params = PagedParams(
            batch_size=len(rows),
            block_index=table[rows],
            cache_seqlens=torch.tensor(past, dtype=torch.int32),
            max_cache_seqlen=max(past),
            page_size=PAGE,
            rope_offsets=torch.tensor(offsets[: len(rows)], dtype=torch.int32),
        )
        logits: Tensor = model.forward_chunk(tokens, cache, attn_params=params, **more)["logits"].cpu().clone()
        return logits

    begin = ids.shape[1] - 10
    for a, b in ((0, 33), (33, begin)):
        run(ids[:, a:b], [0], [a], indexed_embeddings=images)
    run(text[:, :20], [1], [0])
    parts = []
    for i in range(10):
        both = torch.cat([ids[:, begin + i : begin + i + 1], text[:, 20 + i : 21 + i]])
        parts.append(run(both, [0, 1], [begin + i, 20 + i]))
    # here, not at the caller's: captured steps die with the cache they are bound to
    expected = model.device is not None and model.device.type == "cuda" and os.environ.get(GRAPHS_VARIABLE) != "0"
    assert (model.decode.count > 0) == expected, model.decode.reason
    return torch.cat(parts, 1)


def test_steps_over_pages_on_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU reference: chunks are bitwise identical to whole passes."""
    model = loaded_on("cpu", folder, monkeypatch)
    images = pictures(model)
    found = steps_over_pages(model)
    assert torch.equal(found[:1], model.forward(prompt(images), indexed_embeddings=images)[:, -10:])
    assert torch.equal(found[1:], model.forward(torch.tensor([TEXT + TEXT]))[:, 20:30])


@pytest.mark.cuda
def test_logits_on_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded_on("cpu", folder, monkeypatch)
    images = pictures(model)
    expected = model.forward(prompt(images), indexed_embeddings=images)
    model = loaded_on("cuda:0", folder, monkeypatch)
    images = pictures(model)
    ids = prompt(images)
    assert divergence(expected, model.forward(ids, indexed_embeddings=images)) < 2e-3
    cache = ExLlamaV2Cache(model, max_seq_len=256)
    begin = ids.shape[1] - 6
    model.forward(ids[:, :begin], cache, preprocess_only=True, indexed_embeddings=images)
    parts = [model.forward(ids[:, i : i + 1], cache) for i in range(begin, ids.shape[1])]
    assert divergence(expected[:, begin:], torch.cat(parts, 1)) < 2e-3


@pytest.mark.cuda
def test_captured_steps_after_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise identical to eager steps, and close to the CPU's."""
    expected = steps_over_pages(loaded_on("cpu", folder, monkeypatch))
    monkeypatch.setenv(GRAPHS_VARIABLE, "0")
    eager = steps_over_pages(loaded_on("cuda:0", folder, monkeypatch))
    monkeypatch.delenv(GRAPHS_VARIABLE)
    model = loaded_on("cuda:0", folder, monkeypatch)
    captured = steps_over_pages(model)
    assert torch.equal(eager, captured)
    assert divergence(expected, captured) < 2e-3


class RandomWeights:
    """Weights of a tower that is in no file."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        drawn = torch.Generator().manual_seed(4)
        self._tensors = {
            key: torch.randn(shape, generator=drawn) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
            for key, shape in shapes.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def describe(self, name: str) -> str:
        return name


def encoder_of(family: str, folder: Path) -> Encoder:
    """A tower without transformers."""
    fields, processor = FAMILIES[family]
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if k != "text_config"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    if family == "Gemma3":
        made: Encoder = SiglipEncoder(read_siglip_settings(folder), 64)
    else:
        made = QwenEncoder(read_qwen_settings(folder, gated=family == "Qwen2_5_VL"), 64)
    return made


@pytest.mark.cuda
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_towers_on_a_gpu(family: str, tmp_path: Path) -> None:
    """float32 on both, in other orders of summation."""
    encoder = encoder_of(family, tmp_path)
    weights: Any = RandomWeights(encoder.shapes())
    for size in ((48, 32), (100, 37)):
        given = encoder.preprocess(picture(*size))
        encoder.load(weights, torch.device("cpu"))
        expected = encoder.forward(given.pixels, given.grid)
        encoder.load(weights, torch.device("cuda"))
        found = encoder.forward(given.pixels, given.grid).cpu()
        assert error(found, expected) < 1e-4
