"""Folders of vision-language models as they were published before and as transformers writes them: one and the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Config, ExLlamaV2VisionTower, errors
from exl_core.vision.encoder import Encoder
from exl_core.vision.qwen import QwenEncoder
from exl_core.vision.qwen_settings import read_qwen_settings
from exl_core.vision.siglip import SiglipEncoder, read_siglip_settings

pytest.importorskip("transformers")
from vision_models import FAMILIES, QWEN, picture, write_model

pytestmark = [pytest.mark.covers("core: multimodal-other")]

Json = dict[str, Any]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    write_model(request.param, folder)
    return request.param, folder


def outputs(folder: Path) -> list[Tensor]:
    """Rows of an image, and logits of a text."""
    config = ExLlamaV2Config(folder)
    tower, model = ExLlamaV2VisionTower(config), ExLlamaV2(config)
    tower.load()
    model.load()
    given = tower.encoder.preprocess(picture(60, 33))
    rows = tower.process(given.pixels, thw_grid=given.grid)
    assert rows is not None
    return [rows, model.forward(torch.tensor([[1, 2, 3, 50, 60]]))]


def again(saved: Path, to: Path, names: Callable[[str], str] = str, **parts: Json | None) -> Path:
    """The folder with tensors renamed; `parts` replace JSON files, None removes one."""
    tensors = load_file(saved / "model.safetensors")
    save_file({names(key): tensor for key, tensor in tensors.items()}, to / "model.safetensors")
    for name in ("config", "preprocessor_config"):
        parts.setdefault(name, json.loads((saved / f"{name}.json").read_text()))
    for name, data in parts.items():
        if data is not None:
            (to / f"{name}.json").write_text(json.dumps(data))
    return to


def bare(key: str) -> str:
    """Return which part of the model a tensor belongs to, under any naming: text, tower or projector."""
    for prefix in ("language_model.model.", "model.language_model.", "model."):
        if key.startswith(prefix) and not key.startswith(("model.visual", "model.vision", "model.multi")):
            return "text." + key.removeprefix(prefix)
    return (
        key.removeprefix("language_model.")
        .removeprefix("model.")
        .replace("vision_tower.vision_model.", "vision_tower.")
    )


def inside_model(key: str) -> str:
    """Return the name that newer versions use in memory, and some files."""
    key = bare(key)
    if key.startswith("text."):
        return "model.language_model." + key.removeprefix("text.")
    return key if key.startswith("lm_head") else f"model.{key}"


def outside(key: str) -> str:
    """Return the name in the files of Gemma 3."""
    key = bare(key)
    if key.startswith("text."):
        return "language_model.model." + key.removeprefix("text.")
    if key.startswith("lm_head"):
        return f"language_model.{key}"
    return key.replace("vision_tower.", "vision_tower.vision_model.")


def published(family: str, config: Json) -> Json:
    """config.json in the older spelling."""
    text = {**config["text_config"]}
    if family in QWEN:
        rope = text.pop("rope_parameters")
        scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        vision = {**config["vision_config"], "in_chans": 3, "spatial_patch_size": 4}
        flat = {k: v for k, v in {**config, **text}.items() if k != "text_config"}
        return {**flat, "rope_theta": rope["rope_theta"], "rope_scaling": scaling, "vision_config": vision}
    for key in ("layer_types", "rope_parameters", "_sliding_window_pattern", "tie_word_embeddings"):
        text.pop(key)
    return {**config, "text_config": {**text, "rope_theta": 1e6, "rope_local_base_freq": 10000.0}}


def test_published_spelling(saved: tuple[str, Path], tmp_path: Path) -> None:
    family, folder = saved
    config = published(family, json.loads((folder / "config.json").read_text()))
    other = again(folder, tmp_path, str if family in QWEN else outside, config=config)
    for found, expected in zip(outputs(other), outputs(folder), strict=True):
        assert torch.equal(found, expected)


def test_tensors_under_model(saved: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = saved
    for found, expected in zip(outputs(again(folder, tmp_path, inside_model)), outputs(folder), strict=True):
        assert torch.equal(found, expected)


def test_processors_in_one_file(saved: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = saved
    images = json.loads((folder / "preprocessor_config.json").read_text())
    other = again(folder, tmp_path, preprocessor_config=None, processor_config={"image_processor": images})
    assert torch.equal(outputs(other)[0], outputs(folder)[0])
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(errors.ConfigFileError, match="preprocessor_config"):
        ExLlamaV2VisionTower(ExLlamaV2Config(tmp_path))


def test_the_language_parts_vocabulary_counts(saved: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    other = again(folder, tmp_path, config={**config, "vocab_size": 77})
    assert ExLlamaV2Config(other).vocab_size == 90
    assert torch.equal(outputs(other)[1], outputs(folder)[1])


@pytest.mark.parametrize("rows", [70, 101])
def test_more_or_fewer_rows_than_the_vocabulary(saved: tuple[str, Path], tmp_path: Path, rows: int) -> None:
    """Both are rejected with an error that names them, as in transformers."""
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = rows
    with pytest.raises(errors.FormatError, match=r"embed_tokens.*90"):
        outputs(again(folder, tmp_path, config=config))


def test_ids_of_the_language_part(saved: tuple[str, Path]) -> None:
    """Newer files hold them there."""
    _, folder = saved
    text = json.loads((folder / "config.json").read_text())["text_config"]
    config = ExLlamaV2Config(folder)
    assert (config.bos_token_id, config.eos_token_id) == (text["bos_token_id"], text["eos_token_id"])


BROKEN: list[tuple[str, str, Json, type[Exception]]] = [
    ("Qwen2VL", "vision", {"patch_size": 0}, errors.ConfigError),
    ("Qwen2VL", "vision", {"num_heads": 3}, errors.ConfigError),
    ("Qwen2VL", "vision", {"depth": 4}, errors.MissingTensorError),
    ("Qwen2VL", "vision", {"embed_dim": 64}, errors.FormatError),
    ("Qwen2VL", "vision", {"depth": 1 << 40}, errors.ConfigError),
    ("Qwen2VL", "vision", {"in_channels": 4}, errors.ConfigError),
    ("Qwen2VL", "vision", {"mlp_ratio": 1e308}, errors.ConfigError),
    ("Qwen2VL", "vision", {"mlp_ratio": -1}, errors.ConfigError),
    ("Qwen2VL", "vision", {"hidden_act": "relu6"}, errors.UnsupportedError),
    ("Qwen2VL", "vision", {"spatial_merge_size": 4}, errors.ConfigError),
    ("Qwen2_5_VL", "vision", {"window_size": 3}, errors.ConfigError),
    ("Qwen2_5_VL", "vision", {"fullatt_block_indexes": ["a"]}, errors.ConfigTypeError),
    ("Qwen2_5_VL", "processor", {"patch_size": 8}, errors.ConfigError),
    ("Qwen2_5_VL", "processor", {"min_pixels": 9000}, errors.ConfigError),
    ("Qwen2_5_VL", "processor", {"max_pixels": 1 << 60}, errors.ConfigError),
    ("Qwen2_5_VL", "processor", {"image_std": [1.0, 0.0, 1.0]}, errors.ConfigError),
    ("Qwen2_5_VL", "processor", {"image_mean": [10**400, 0.0, 1.0]}, errors.ConfigError),
    ("Qwen2_5_VL", "processor", {"do_resize": False}, errors.UnsupportedError),
    ("Gemma3", "vision", {"model_type": "clip_vision_model"}, errors.UnsupportedError),
    ("Gemma3", "vision", {"image_size": 52}, errors.ConfigError),
    ("Gemma3", "vision", {"image_size": 1 << 30}, errors.ConfigError),
    ("Gemma3", "top", {"mm_tokens_per_image": 15}, errors.ConfigError),
    ("Gemma3", "top", {"vision_config": None}, errors.ConfigError),
    ("Gemma3", "processor", {"size": {"height": 56, "width": 48}}, errors.ConfigError),
    ("Gemma3", "processor", {"do_pan_and_scan": True}, errors.UnsupportedError),
    ("Gemma3", "processor", {"image_processor_type": "CLIPImageProcessor"}, errors.UnsupportedError),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("saved", "where", "changes", "error"), BROKEN, indirect=["saved"])
def test_broken_settings(saved: Any, where: str, changes: Json, error: Any, tmp_path: Path) -> None:
    parts = {name: json.loads((saved[1] / f"{name}.json").read_text()) for name in ("config", "preprocessor_config")}
    spot = {
        "top": parts["config"],
        "vision": parts["config"]["vision_config"],
        "processor": parts["preprocessor_config"],
    }
    spot[where].update(changes)
    with pytest.raises(error):
        ExLlamaV2VisionTower(ExLlamaV2Config(again(saved[1], tmp_path, **parts))).load()


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 1 << 70),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-1, 9), max_size=4),
    st.dictionaries(st.sampled_from(["height", "width", "longest_edge", "shortest_edge", "rope_theta"]), st.integers()),
)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@examples(150, 9, suppress=list(HealthCheck))
@given(st.data())
def test_any_values_give_settings_or_a_typed_error(family: str, tmp_path: Path, data: st.DataObject) -> None:
    """And settings that are taken name tensors of sizes that can be."""
    fields, processor = FAMILIES[family]
    vision, images = {**fields["vision_config"]}, {**processor}
    keys = [(vision, key) for key in vision] + [(images, key) for key in (*images, "image_mean", "resample")]
    for part, key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=2)):
        part[key] = data.draw(JUNK)
    (tmp_path / "config.json").write_text(json.dumps({**fields, "vision_config": vision}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    try:
        if family == "Gemma3":
            made: Encoder = SiglipEncoder(read_siglip_settings(tmp_path), 64)
        else:
            made = QwenEncoder(read_qwen_settings(tmp_path, gated=family == "Qwen2_5_VL"), 64)
    except (errors.ConfigError, errors.UnsupportedError):
        return
    assert all(min(shape) > 0 for shape in made.shapes().values())
