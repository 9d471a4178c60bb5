"""The quantizer for every architecture through its command: routers and towers stay float, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import run

from exl_core import ExLlamaV2Config, errors
from exl_core.convert import folder_layout, quantize_model
from exl_kernels.errors import FormatError, UnsupportedError
from exl_kernels.quantize.command import main as kernels_command
from exl_kernels.quantize.folder import quantize_folder
from exl_kernels.quantize.layout import FolderMatrix
from exl_kernels.safetensors_file import read_safetensors_folder, read_tensor


def convert_command(arguments: list[str]) -> int:
    return kernels_command(arguments, quantize=quantize_model)


pytestmark = pytest.mark.covers("core: architectures")


def test_the_command(lab: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = lab.write(hidden_size=64, tie_word_embeddings=True)
    command = ["-m", "exl_core.convert", str(source), str(tmp_path / "out"), "--fast"]
    done = run([*command, "--bits", "4", "--format", "gptq", "--group-size", "32"])
    assert done.returncode == 0, done.stderr
    assert "4.000 bits" not in done.stdout  # scales and zeros count
    assert "bits per weight" in done.stdout
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (block["quant_method"], block["bits"], block["group_size"], block["desc_act"]) == ("gptq", 4, 32, True)
    assert lab.load(tmp_path / "out").is_quant()
    assert convert_command(command[2:]) == 1
    assert "must be new or empty" in capsys.readouterr().err


@pytest.mark.parametrize("command", [convert_command, kernels_command])
def test_impossible_arguments_are_an_error_of_one_line(
    command: Any, lab: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(lab.write())
    (tmp_path / "file").touch()
    assert command([source, str(tmp_path / "file" / "out")]) == 1
    assert "Traceback" not in (said := capsys.readouterr().err)
    assert said.splitlines()[-1].startswith("error: ")
    with pytest.raises(SystemExit) as stopped:
        command([source, str(tmp_path / "out"), "--group-size", "64"])
    assert stopped.value.code == 2
    assert "--format gptq" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_layout_of_llama_names_is_the_one_by_names(lab: Any, tmp_path: Path) -> None:
    """The matrices that exl_kernels finds alone and those of the architecture's tables give the same files."""
    source = lab.write(attention_bias=True)
    quantize_model(source, tmp_path / "tables", bits=5, fast=True)
    quantize_folder(source, tmp_path / "names", bits=5, fast=True)
    first, second = (read_safetensors_folder(tmp_path / name) for name in ("tables", "names"))
    assert first.keys() == second.keys()
    assert all(torch.equal(read_tensor(first[name]), read_tensor(second[name])) for name in first)


def test_padded_vocabularies_keep_their_rows(lab: Any, tmp_path: Path) -> None:
    config = {**lab.config, "vocab_size": 90}
    tensors = lab.random_tensors({**config, "vocab_size": 128})
    source = lab.write_model(tmp_path / "padded", config, tensors)
    quantize_model(source, tmp_path / "out", bits=6, fast=True)
    assert read_safetensors_folder(tmp_path / "out")["lm_head.q_weight"].shape[1] == 128
    lab.load(tmp_path / "out")


def test_a_refused_conversion_leaves_nothing(lab: Any, tmp_path: Path) -> None:
    source = lab.write()
    quantized = lab.write(kind="exl2")
    layout = folder_layout(ExLlamaV2Config(source))
    wrong = FolderMatrix("model.layers.0.self_attn.q_proj", "0", "q", "model.norm.weight", 64, 64)
    lost = FolderMatrix("model.layers.0.self_attn.q_proj", "0", "q", "nowhere", 64, 64)
    part = [layout[0], FolderMatrix("x", "1", "o", layout[0].tensor, 60, 64), layout[-1]]
    for options, kind, words in (
        ({"format": "gptq", "bits": 4.5}, FormatError, "GPTQ has 2, 3, 4, 8 bits"),
        ({"format": "gptq", "head_bits": 6}, FormatError, "float head"),
        ({"format": "awq"}, UnsupportedError, "exl2"),
        ({"format": "gptq", "group_size": 0}, FormatError, "group size"),
        ({"layout": [wrong]}, FormatError, "model.norm.weight has shape"),
        ({"layout": [lost]}, FormatError, "no tensor nowhere"),
        ({"layout": [layout[0], layout[0]]}, FormatError, "twice"),
        ({"layout": part}, FormatError, "quantized in part"),
        ({"layout": []}, UnsupportedError, "no matrices"),
    ):
        with pytest.raises(kind, match=words):
            quantize_folder(source, tmp_path / "x", **options)
        assert not (tmp_path / "x").exists()
    with pytest.raises(errors.FormatError, match="quantized already; start from the float model"):
        quantize_model(quantized, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    config = ExLlamaV2Config()
    config.model_dir = str(source)
    config.prepare(no_tensors=True)
    with pytest.raises(errors.ModelStateError, match="no_tensors"):
        folder_layout(config)
