"""`exl bench --report`: the object that an owner of a card attaches to an issue."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch

from exl_core import ExLlamaV2, ExLlamaV2Config
from exl_core.device import Device
from exl_generate.cli.random_model import SHAPES, write_random_model
from exl_generate.cli.report import choose
from exl_generate.errors import CapacityError

MODEL = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
QUICK = ("bench", "--report", "--prompt-tokens", "16", "--new-tokens", "4", "--device", "cpu")


def test_report_of_random_weights(exl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, out, err = exl(*QUICK)
    found = json.loads(out)
    assert code == 0
    assert "random weights" in err
    assert (found["report"], found["device"], found["card"], found["cache"]) == (1, "cpu", None, "fp16")
    assert found["model"]["random_weights"]
    assert found["read_bytes_per_second"] > 0
    assert found["prompt"]["tokens"] == 16
    assert [row["batch"] for row in found["decode"]] == [1, 8, 32]
    assert all(row["tokens_per_second"] > 0 and row["share_of_bandwidth"] > 0 for row in found["decode"])
    assert found["doctor"]["ok"]
    assert list(tmp_path.iterdir()) == []


def test_report_of_a_folder_holds_no_path(exl) -> None:
    out = exl(*QUICK, "-m", str(MODEL), "--batch", "2")[1]
    found = json.loads(out)
    assert found["model"]["name"] == MODEL.name
    assert not found["model"]["random_weights"]
    assert [row["batch"] for row in found["decode"]] == [2]
    assert str(MODEL.parent) not in out
    assert str(Path.home()) not in out


def test_report_rejects_what_the_model_has_no_room_for(exl) -> None:
    code, out, err = exl("bench", "--report", "--prompt-tokens", "9000", "--device", "cpu", "--batch", "1")
    assert (code, out) == (1, "")
    assert "the model's limit is 8192" in err


@pytest.mark.parametrize(
    ("gib", "expected"), [(80, "llama-8b"), (12, "llama-8b"), (8, "llama-3b"), (4, "llama-1b"), (2, "llama-30m")]
)
def test_the_largest_shape_that_fits_a_card_is_chosen(gib: int, expected: str) -> None:
    name, shape = choose(Device("cuda:0"), 32 * 640, gib * 2**30, 2**40)
    assert name == expected
    assert shape.weight_bytes() + 32 * 640 * shape.cache_bytes() < gib * 2**30
    assert choose(Device("cpu"), 32 * 640, gib * 2**30, 2**40)[0] == "llama-30m"


def test_a_card_or_disk_without_room_is_rejected() -> None:
    for free, disk in ((2**30, 2**40), (2**40, 2**20)):
        with pytest.raises(CapacityError, match="llama-30m with 640 tokens needs"):
            choose(Device("cuda:0"), 640, free, disk)
    assert choose(Device("cuda:0"), 640, None, 3 * 2**30)[0] == "llama-3b"


def test_random_weights_keep_activations_in_range(tmp_path: Path) -> None:
    shape = SHAPES["llama-30m"]
    write_random_model(tmp_path, shape)
    model = ExLlamaV2(ExLlamaV2Config(tmp_path))
    model.load()
    stored = (tmp_path / "model.safetensors").stat().st_size
    assert shape.weight_bytes() < stored < 1.2 * shape.weight_bytes()
    logits = model.forward(torch.arange(40)[None])
    assert logits.shape == (1, 40, shape.vocab)
    assert 0.1 < float(logits.std()) < 10
