"""Texts of a model sharded over devices: those of one device, with drafts, from the command line, and by processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tp_texts
from preloaded import run_ranks
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache_TP, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_core.errors import PeerError
from exl_core.execution.sharded.exchange import LocalExchange, Parts
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.bundled import default_model_dir
from exl_generate.testing import drain

pytestmark = pytest.mark.covers("core: tensor-parallel")


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


@pytest.mark.full
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


SAMPLED = ("generate", "Once upon a time", "-n", "8", "--temperature", "1.5", "--json")


def check_one_output(exl: Any, text: str) -> None:
    """The output of a group of processes, which drew a seed and name it, is that of one process with the seed."""
    (line,) = text.splitlines()
    found = json.loads(line)
    code, out, _ = exl(*SAMPLED, "--seed", str(found["seed"]), "--device", "cpu")
    assert code == 0
    assert found | TIMES == json.loads(out) | TIMES


def test_generate_in_processes_writes_one_output(exl: Any) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    first, second = run_ranks(["-m", "exl_generate", *SAMPLED, "--device", "cpu:0,cpu:1", "--tp"], 2, environment)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    check_one_output(exl, first.stdout)


@pytest.mark.full
def test_generate_of_torchrun_writes_one_output(exl: Any) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "exl_generate", *SAMPLED, "--device", "cpu:0,cpu:1", "--tp"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check_one_output(exl, done.stdout)


def test_processes_do_not_share_standard_input(exl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, _, err = exl("generate", "-", "--device", "cpu:0,cpu:1", "--tp", stdin="x")
    assert code == 1
    assert "give the prompt as an argument" in err


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


class Losing(LocalExchange):
    """An exchange whose other process is lost as soon as `lost` is set."""

    lost = False

    def collect(self, parts: Parts, made: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        if self.lost:
            raise PeerError("another process is lost")
        return super().collect(parts, made, like)


def test_a_lost_process_ends_every_job_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of their texts; the generator itself stays usable, and its pages are free again."""
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1")
    model, exchange = ExLlamaV2(ExLlamaV2Config(default_model_dir())), Losing(2)
    model.load_tp(exchange=exchange)
    cache = ExLlamaV2Cache_TP(model, max_seq_len=1024)
    generator = ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(model.config))
    ids = [generator.tokenizer.encode(prompt, add_bos=True) for prompt in tp_texts.PROMPTS]
    jobs = [ExLlamaV2DynamicJob(row, 24, gen_settings=ExLlamaV2Sampler.Settings.greedy()) for row in ids]
    generator.enqueue(jobs)
    while not all(job.new_tokens for job in jobs):
        generator.iterate()
    exchange.lost = True
    results = drain(generator)
    assert all(isinstance(results[job][-1]["exception"], PeerError) for job in jobs)
    exchange.lost = False
    assert all(page.ref_count == 0 for page in generator.page_table.pages)
    again = ExLlamaV2DynamicJob(ids[0], 4, gen_settings=ExLlamaV2Sampler.Settings.greedy())
    generator.enqueue(again)
    assert drain(generator)[again][-1]["new_tokens"] == 4
