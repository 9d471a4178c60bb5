"""The Pixtral tower: rows and logits are those of transformers, images are prepared as its processor does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from exl_core import ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2VisionTower, errors
from exl_core.architectures import SUPPORTED
from exl_core.vision.preprocess import output_size, preprocess
from exl_core.vision.tower import ENCODERS

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.covers("core: images", "core: multimodal")

TEXT = {
    "model_type": "mistral",
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "sliding_window": None,
}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 64,
}
IMAGE_TOKEN, BREAK, END = 10, 11, 12
PREPROCESSING = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 40}, "patch_size": 4}
KINDS: dict[str, dict[str, Any]] = {
    "Llava": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    "Llava-inner-layer": {"vision_feature_layer": -2, "vision_feature_select_strategy": "full"},
    "Mistral3": {"spatial_merge_size": 2, "vision_feature_layer": -1},
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, lab: Any) -> Any:
    """(transformers model, our tower, our language model)."""
    name = request.param.split("-")[0]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(1)
    activation = {"hidden_act": "silu"} if name == "Mistral3" else {}
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT,
        vision_config={**VISION, **activation},
        image_token_index=IMAGE_TOKEN,
        tie_word_embeddings=False,
        attn_implementation="eager",
        **KINDS[request.param],
    )
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            scale = 0.3 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            noise = torch.randn_like(parameter) * scale + (1.0 if parameter.dim() == 1 else 0.0)
            parameter.copy_(noise.half().float())
    theirs.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING))
    tower = ExLlamaV2VisionTower(ExLlamaV2Config(folder))
    tower.load()
    return theirs, tower, lab.load(folder)


def close(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max() / expected.abs().max()) < 2e-3


@torch.no_grad()
def test_rows_of_a_tower(pair: Any) -> None:
    theirs, tower, _ = pair
    for size in ((24, 40), (8, 16), (40, 16)):
        pixels = torch.randn(3, *size)
        sizes = torch.tensor([size])
        expected = theirs.get_image_features(pixels[None], image_sizes=sizes).pooler_output[0]
        found = tower.process(pixels)
        assert found.shape == expected.shape
        assert close(found, expected)


def tokenizer() -> Any:
    return SimpleNamespace(single_id={"[IMG_BREAK]": BREAK, "[IMG_END]": END}.get)


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    values = np.random.default_rng(3).integers(0, 256, (height, width, len(mode)), dtype=np.uint8)
    return Image.fromarray(values.squeeze(), mode)


@torch.no_grad()
def test_logits_after_an_image(pair: Any) -> None:
    """Text, an image with its breaks, text: in one piece and in chunks that cut the image."""
    theirs, tower, ours = pair
    image = picture(56, 30)
    embedding = tower.get_image_embeddings(ours, tokenizer(), image)
    columns, rows = embedding.metadata["patches_size"]
    assert embedding.metadata["original_size"] == (56, 30)
    before, after = [1, 20, 21], [30, 31, 32, 33]
    framed = [t for r in range(rows) for t in (*[IMAGE_TOKEN] * columns, END if r == rows - 1 else BREAK)]
    pixels = preprocess(image, tower.settings)
    expected = theirs(
        input_ids=torch.tensor([before + framed + after]),
        pixel_values=pixels[None],
        image_sizes=torch.tensor([pixels.shape[1:]]),
    ).logits
    ids = torch.tensor([before + embedding.get_ids() + after])
    found = ours.forward(ids, indexed_embeddings=[embedding])
    assert close(found[..., :90], expected)
    cache = ExLlamaV2Cache(ours, max_seq_len=256)
    parts = [
        ours.forward(ids[:, a : a + 13], cache, indexed_embeddings=[embedding]) for a in range(0, ids.shape[1], 13)
    ]
    assert torch.equal(torch.cat(parts, 1), found)


@pytest.mark.parametrize("size", [(40, 40), (100, 37), (3, 5), (39, 41), (200, 20)])
def test_images_are_prepared_as_transformers_does(pair: Any, size: tuple[int, int]) -> None:
    """Their processor, without torchvision: shrunk, rounded up to patches, resized by PIL, normalised."""
    _, tower, _ = pair
    step = tower.settings.patch_size * tower.settings.merge_size
    processor = transformers.models.pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil(
        size={"longest_edge": 40}, patch_size={"height": step, "width": step}
    )
    image = picture(*size)
    expected = torch.as_tensor(np.asarray(processor(image)["pixel_values"][0]))
    found = preprocess(image, tower.settings)
    assert found.shape[1:] == output_size(size[1], size[0], tower.settings)
    torch.testing.assert_close(found, expected.float().view(found.shape), atol=1e-4, rtol=0)


def test_transparent_images_lie_on_white(pair: Any) -> None:
    _, tower, _ = pair
    clear = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    assert torch.equal(preprocess(clear, tower.settings), preprocess(Image.new("RGB", (8, 8), "white"), tower.settings))
    grey = preprocess(Image.new("L", (8, 8), 128), tower.settings)
    assert torch.equal(grey, preprocess(Image.new("RGB", (8, 8), (128, 128, 128)), tower.settings))


def test_refusals(pair: Any, lab: Any, tmp_path: Path) -> None:
    _, tower, ours = pair
    with pytest.raises(errors.InputError, match="PIL image"):
        preprocess(torch.zeros(3, 8, 8), tower.settings)
    with pytest.raises(errors.InputError, match="factor of 200"):
        preprocess(Image.new("RGB", (401, 2)), tower.settings)
    with pytest.raises(errors.InputError, match="multiples of"):
        tower.process(torch.zeros(3, 9, 8))
    with pytest.raises(errors.UnsupportedError, match="no video"):
        tower.get_video_embeddings(ours, tokenizer(), [])
    with pytest.raises(errors.TokenizerError, match="IMG_BREAK"):
        tower.get_image_embeddings(ours, SimpleNamespace(single_id=lambda piece: None), picture(8, 8))
    with pytest.raises(errors.UnsupportedError, match="no vision tower"):
        ExLlamaV2VisionTower(ExLlamaV2Config(lab.write()))
    other = ExLlamaV2VisionTower(ours.config)
    with pytest.raises(errors.ModelStateError, match="not loaded"):
        other.process(torch.zeros(3, 8, 8))


def test_every_family_with_images_has_a_tower() -> None:
    assert {a.vision.encoder for a in SUPPORTED.values() if a.vision} == set(ENCODERS)


BROKEN: list[tuple[str, dict[str, Any], type[Exception]]] = [
    ("config", {"vision_config": {**VISION, "model_type": "clip"}}, errors.UnsupportedError),
    ("config", {"vision_config": {**VISION, "num_attention_heads": 3}}, errors.ConfigError),
    ("config", {"vision_config": {**VISION, "num_hidden_layers": 5}}, errors.MissingTensorError),
    ("config", {"vision_config": {**VISION, "hidden_size": 64}}, errors.FormatError),
    ("config", {"vision_feature_layer": 9}, errors.ConfigError),
    ("config", {"vision_feature_select_strategy": "default"}, errors.UnsupportedError),
    ("preprocessor_config", {"image_processor_type": "CLIPImageProcessor"}, errors.UnsupportedError),
    ("preprocessor_config", {"image_mean": [0.1, "x", 0.2]}, errors.ConfigTypeError),
    ("preprocessor_config", {"size": {"longest_edge": 10**9}}, errors.ConfigError),
]


@pytest.mark.parametrize(("file", "changes", "error"), BROKEN)
def test_broken_files(file: str, changes: dict[str, Any], error: Any, pair: Any) -> None:
    _, _, ours = pair
    path = Path(ours.config.model_dir) / f"{file}.json"
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), **changes}))
    try:
        with pytest.raises(error):
            ExLlamaV2VisionTower(ours.config).load()
    finally:
        path.write_text(before)
