"""model_init: every flag reaches the config, folders are checked, splits are obeyed."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core import ExLlamaV2Cache, errors, model_init

pytestmark = pytest.mark.covers("core: config")

FIXTURE = Path(__file__).parent.parent / "golden" / "data" / "pylib-4m-fp16"


@pytest.fixture
def folder(lab: Any) -> Path:
    place: Path = lab.write()
    shutil.copy(FIXTURE / "tokenizer.json", place)
    return place


def parse(*flags: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    model_init.add_args(parser)
    return parser.parse_args([str(f) for f in flags])


def test_flags_reach_the_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(
        *(
            "-m",
            folder,
            "-l",
            256,
            "-rs",
            2.0,
            "-ra",
            1.5,
            "-nfa",
            "-nxf",
            "-nsdpa",
            "-ng",
            "-chunk",
            64,
            "-fst",
            "-ic",
        ),
    )
    model_init.check_args(args)
    model_init.print_options(args)
    printed = capsys.readouterr().out
    assert str(folder) in printed
    assert "rope_alpha: 1.5" in printed
    model, tokenizer = model_init.init(args, quiet=True, skip_load=True, max_batch_size=3, max_output_len=7)
    c = model.config
    assert (c.max_seq_len, c.scale_pos_emb, c.scale_alpha_value) == (256, 2.0, 1.5)
    assert (c.max_input_len, c.max_attention_size, c.max_batch_size, c.max_output_len) == (64, 64**2, 3, 7)
    assert c.no_flash_attn
    assert c.no_xformers
    assert c.no_sdpa
    assert c.no_graphs
    assert not model.loaded
    assert tokenizer.encode("x").shape[0] == 1
    assert capsys.readouterr().out == ""


def test_low_memory_and_yarn(folder: Path) -> None:
    model, _ = model_init.init(parse("-m", folder, "-lm", "-ry", 4.0, "-l", 1024), quiet=True, skip_load=True)
    c = model.config
    assert (c.max_input_len, c.max_attention_size) == (1024, 1024**2)
    assert (c.alt_rope_method, c.yarn_rope_factor) == ("yarn", 4.0)
    assert (c.yarn_rope_original_max_position_embeddings, c.max_seq_len) == (512, 1024)


def test_loading_and_its_time(folder: Path, capsys: pytest.CaptureFixture[str], lab: Any) -> None:
    model, _ = model_init.init(parse("-m", folder), benchmark=True)
    assert model.loaded
    assert "Loaded model in" in capsys.readouterr().out
    spread, _ = model_init.init(parse("-m", folder, "-tp"), quiet=True)
    assert torch.equal(spread.forward(lab.ids(1, 5)), model.forward(lab.ids(1, 5)))


def test_splits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1")
    with pytest.raises(errors.InputError, match="Auto split not allowed"):
        model_init.init(parse("-m", folder, "-gs", "auto"), quiet=True)
    model, _ = model_init.init(parse("-m", folder, "-gs", "auto"), quiet=True, allow_auto_split=True)
    assert not model.loaded
    model.load_autosplit(ExLlamaV2Cache(model, lazy=True))
    split, _ = model_init.init(parse("-m", folder, "-gs", "0.0295,4"), quiet=True)
    assert split.loaded
    for bad in ("a,b", "1,,2", "1,2,3", "-1"):
        with pytest.raises(errors.InputError, match="gpu_split"):
            model_init.init(parse("-m", folder, f"--gpu_split={bad}"), quiet=True)


def test_folders_that_are_no_models(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigFileError, match="no model folder"):
        model_init.check_args(parse())
    with pytest.raises(errors.ConfigFileError, match="Can't find model directory"):
        model_init.check_args(parse("-m", tmp_path / "nowhere"))
    for missing in ("model.safetensors", "tokenizer.json", "config.json"):
        (folder / missing).unlink()
        with pytest.raises(errors.ConfigFileError, match=r"safetensors|tokenizer\.model|config\.json"):
            model_init.check_args(parse("-m", folder))


def test_a_flag_without_code_is_refused(folder: Path) -> None:
    with pytest.raises(errors.UnsupportedError, match="load_in_q4"):
        model_init.init(parse("-m", folder, "-lq4"), quiet=True)
