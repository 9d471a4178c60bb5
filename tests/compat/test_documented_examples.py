"""Scripts in the form of exllamav2's documented examples run unmodified through the `exllamav2` namespace."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from exl_generate.bundled import default_model_dir, draft_model_dir

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


@pytest.mark.covers(
    "generators: filter-third-party",
    "generators: example-programs",
    "core: example-programs",
    "filters: foreign-classes",
)
@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_script_runs(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the folders of a model and of a draft model, and asserts what it shows."""
    monkeypatch.setattr(sys, "argv", [str(script), str(default_model_dir()), str(draft_model_dir())])
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.full
@pytest.mark.covers("core: multimodal-other", "generators: embeddings-mrope")
@pytest.mark.parametrize("name", ["multimodal", "multimodal_video"])
@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL"])
def test_scripts_with_images(family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On random models: each takes a model's folder and files of images."""
    pytest.importorskip("transformers")
    from vision_models import QWEN_TEXT, picture, write_model, write_tokenizer

    own = {"vocab_size": 288, "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": 260}
    write_model(family, tmp_path, text_config={**QWEN_TEXT, **own})
    write_tokenizer(tmp_path)
    files = [tmp_path / "one.png", tmp_path / "other.png"]
    for file, size in zip(files, ((60, 24), (37, 41)), strict=True):
        picture(*size).save(file)
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path), *map(str, files)])
    runpy.run_path(str(Path(__file__).parent / "scripts_vision" / f"{name}.py"), run_name="__main__")
