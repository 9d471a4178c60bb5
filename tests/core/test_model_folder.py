"""Paths that are no model folder: the error says what they are, and what to do."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from exl_core import ExLlamaV2Config, errors, model_init

pytestmark = pytest.mark.covers("core: loading")


def refusal(path: Path | str) -> str:
    with pytest.raises(errors.ConfigFileError) as caught:
        ExLlamaV2Config(path)
    args = argparse.Namespace(model_dir=str(path))
    with pytest.raises(errors.ConfigFileError) as again:
        model_init.check_args(args)
    assert str(again.value) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["model.Q4_K_M.gguf", "MODEL.GGUF"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_gguf_file(tmp_path: Path, name: str, exists: bool) -> None:
    file = tmp_path / name
    if exists:
        file.write_bytes(b"GGUF")
    text = refusal(file)
    assert str(file) in text
    assert "GGUF is not read here: get the model as EXL2, GPTQ or float safetensors" in text


def test_a_folder_of_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "README.md").touch()
    assert "the folder holds model.gguf, and GGUF is not read here" in refusal(tmp_path)


def test_a_file_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the whole path of the folder, also for a bare file name, whose folder is "."."""
    file = tmp_path / "model.safetensors"
    file.touch()
    said = "give the folder that holds the weights, the tokenizer and config.json; "
    assert refusal(file) == f"'{file}' is a file, not a model folder: {said}'{tmp_path}' holds no config.json"
    assert "the folder holds weights without their config.json" in refusal(tmp_path)
    (tmp_path / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("model.safetensors", "config.json"):
        said = f"give the folder that holds it, '{tmp_path}'"
        assert refusal(Path(name)) == f"'{name}' is a file, not a model folder: {said}"


@pytest.mark.parametrize("inner", ["llama-4bpw", "snapshots/0123abc"])
def test_a_folder_around_the_model(tmp_path: Path, inner: str) -> None:
    folder = tmp_path / inner
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert f"but {folder} is one" in refusal(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path).endswith("the folder holds no model, it is empty")


def test_the_name_of_a_model_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = refusal("some-maker/Model-8B-exl2")
    assert "nothing is downloaded here: hf download some-maker/Model-8B-exl2 --local-dir Model-8B-exl2" in text
    os.mkdir("some-maker")
    for path in ("some-maker/Model-8B-exl2", "./some/model", "/some/model", "some/long/path", "model", "~/model"):
        assert "hf download" not in refusal(path)


def test_a_name_that_no_file_can_have() -> None:
    text = refusal("x" * 5000)
    assert "File name too long" in text
    assert len(text) < 300
