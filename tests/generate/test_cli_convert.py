"""`exl convert`: a float folder becomes a quantized one; errors and Ctrl-C leave nothing behind."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from terminal import Terminal

from exl_generate.cli import convert

DATA = Path(__file__).parents[1] / "golden" / "data"
FLOAT = str(DATA / "pylib-4m-fp16")
QUANTIZED = str(DATA / "pylib-4m-exl2-4.5")


def test_a_converted_folder_generates(exl, tmp_path: Path) -> None:
    target = tmp_path / "out"
    code, out, err = exl("convert", FLOAT, str(target), "--bits", "4.5", "--head-bits", "8", "--fast", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["bits_per_weight"] == pytest.approx(4.5, abs=0.1)
    assert report["bytes"] == sum((target / name).stat().st_size for name in report["files"])
    lines = err.splitlines()
    assert lines[0] == "1/29 model.layers.0.self_attn.q_proj"
    assert lines[-1] == "29/29 lm_head"
    assert len(lines) == 29
    assert exl("generate", "import os", "-m", str(target), "-n", "2")[0] == 0


def test_gptq_groups(exl, tmp_path: Path) -> None:
    target = tmp_path / "out"
    common = ("convert", FLOAT, str(target), "--format", "gptq", "--bits", "4")
    code, out, _ = exl(*common, "--group-size", "32", "--no-reorder")
    assert code == 0
    assert out.startswith(f"{target}: ")
    assert out.count("\n") == 1
    block = json.loads((target / "config.json").read_text())["quantization_config"]
    assert (block["quant_method"], block["group_size"], block["desc_act"]) == ("gptq", 32, False)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nowhere", (), "nowhere [config_file]"),
        (QUANTIZED, (), "lm_head.q_weight is quantized already; start from the float model [format]"),
        (FLOAT, ("--bits", "99"), "bits 99.0; expected an average between about 2.2 and 8.1"),
        (FLOAT, ("--head-bits", "7"), "head_bits 7; expected one of"),
        (FLOAT, ("--format", "gptq", "--bits", "4.5"), "bits 4.5"),
        (FLOAT, ("--group-size", "32"), "--group-size 32 is for --format gptq"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    exl, tmp_path: Path, source: str, options: tuple[str, ...], message: str
) -> None:
    code, out, err = exl("convert", source, str(tmp_path / "out"), *options)
    assert (code, out) == (1, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_written_is_one_line(exl, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = exl("convert", FLOAT, str(tmp_path / "file" / "out"))
    assert code == 1
    assert "Not a directory; nothing was written to" in err
    assert len(err.splitlines()) == 1
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    code, _, err = exl("convert", FLOAT, str(tmp_path / "full"))
    assert code == 1
    assert "must be new or empty" in err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


def test_parents_that_were_made_are_removed_again(exl, tmp_path: Path) -> None:
    """Folders that were there, or that hold something by then, stay."""
    broken = tmp_path / "broken"
    shutil.copytree(FLOAT, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 1e5, dtype=torch.float32)
    save_file(weights, broken / "model.safetensors")
    (tmp_path / "old").mkdir()
    code, _, err = exl("convert", str(broken), str(tmp_path / "old" / "new" / "parent" / "out"), "--fast")
    assert code == 1
    assert "does not fit half precision" in err
    assert list((tmp_path / "old").iterdir()) == []
    code, _, err = exl("convert", FLOAT, str(tmp_path / "new" / ("x" * 300)))
    assert code == 1
    assert "File name too long; nothing was written to" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "old"]


@contextmanager
def interrupting_progress(_: str) -> Iterator[Callable[[int, int, str], None]]:
    """Press Ctrl-C when the last matrix is done."""
    yield lambda done, total, _key: signal.raise_signal(signal.SIGINT) if done == total else None


@pytest.mark.parametrize("existing", [False, True])
def test_ctrl_c_leaves_no_half_written_folder(
    exl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, existing: bool
) -> None:
    """Also if it is pressed again while the files are removed."""
    target = tmp_path / "out"
    if existing:
        target.mkdir()
    before, unlink, removed = signal.getsignal(signal.SIGINT), Path.unlink, []

    def impatient(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        signal.raise_signal(signal.SIGINT)
        unlink(path, missing_ok)

    monkeypatch.setattr(convert, "conversion_progress", interrupting_progress)
    monkeypatch.setattr(Path, "unlink", impatient)
    # Small files, so that some are written before the interrupt.
    quantize = convert.quantize_model
    monkeypatch.setattr(convert, "quantize_model", lambda *a, **options: quantize(*a, **options, shard_bytes=1 << 18))
    code, out, err = exl("convert", FLOAT, str(target), "--fast")
    assert (code, out, err) == (130, "", "")
    assert removed
    assert not target.exists() or (existing and not any(target.iterdir()))
    assert signal.getsignal(signal.SIGINT) is before


def test_a_terminal_shows_a_bar_with_the_time_left(tmp_path: Path) -> None:
    command = ["-m", "exl_generate", "convert", FLOAT, str(tmp_path / "out"), "--fast"]
    with Terminal(*command, env={"TERM": "xterm", "COLUMNS": "120"}) as terminal:
        code, shown = terminal.end()
    assert code == 0
    assert "converting to out" in shown
    assert "29/29" in shown
    assert "0:00:0" in shown
    assert "bits per weight" in shown.splitlines()[-1]
