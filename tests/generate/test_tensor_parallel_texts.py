"""Texts of a model sharded over devices: those of one device, with drafts, from the command line, and by processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tp_texts

pytestmark = pytest.mark.covers("core.md: tensor-parallel")


@pytest.mark.parametrize(
    ("devices", "drafts"),
    [
        (2, "model"),
        (4, "ngram"),
        pytest.param(2, "ngram", marks=pytest.mark.full),
        pytest.param(3, "model", marks=pytest.mark.full),
    ],
)
def test_drafted_texts_are_those_of_one_device(monkeypatch: pytest.MonkeyPatch, devices: int, drafts: str) -> None:
    """Two key/value heads: with four devices two have none."""
    monkeypatch.setenv("EXL_DEVICE", ",".join(f"cpu:{i}" for i in range(devices)))
    found = tp_texts.texts(None, drafts)
    assert found["texts"] == tp_texts.texts(None, drafts, tp=False)["texts"]


def test_processes_of_torchrun_write_the_same_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guesses have a fixed length there, since each process measures other times."""
    target = tmp_path / "texts"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ,
        "EXL_DEVICE": "cpu:0,cpu:1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [*command, tp_texts.__file__, str(target), "model"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(Path(f"{target}.{rank}").read_text()) for rank in (0, 1))
    assert first == second
    assert sum(first["accepted"]) > 0
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    assert first["texts"] == tp_texts.texts(None, "model", tp=False)["texts"]


def test_generate_and_bench_and_plan_with_tp(exl) -> None:
    """The text is that of one device; the plan gives weights to every device."""
    options = ("-n", "8", "--seed", "1", "--json")
    for cache in ("fp16", "q4"):
        code, out, err = exl(
            "generate", "Once upon a time", *options, "--cache", cache, "--device", "cpu:0,cpu:1", "--tp"
        )
        assert code == 0, err
        assert (
            json.loads(out) | TIMES
            == json.loads(exl("generate", "Once upon a time", *options, "--cache", cache)[1]) | TIMES
        )
    code, out, err = exl(
        "bench", "--prompt-tokens", "8", "--new-tokens", "2", "--json", "--device", "cpu:0,cpu:1,cpu:2", "--tp"
    )
    assert code == 0, err
    assert json.loads(out)["decode_tps"] > 0
    code, out, err = exl("info", "--plan", "--tp", "--device", "cpu:0,cpu:1", "--cache-tokens", "1024", "--json")
    assert code == 0, err
    plan = json.loads(out)["plan"]
    assert plan["fits"]
    assert all(device["weights"] > 0 and device["cache"] > 0 for device in plan["devices"])


TIMES = {"time_prefill": 0, "time_generate": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "x", "--tp", "--device", "cpu"), "this run has one (cpu)"),
        (("bench", "--tp", "--device", "cpu"), "this run has one (cpu)"),
        (("bench", "--report", "--tp"), "leave out --tp"),
        (("info", "--plan", "--tp", "--device", "cpu"), "this run has one (cpu)"),
        (("info", "--tp"), "add --plan"),
    ],
)
def test_tp_without_devices_is_rejected(exl, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = exl(*arguments)
    assert code == 1
    assert message in err
