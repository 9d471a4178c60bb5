"""A model's `prompt_wait` reaches its generator: new prompts wait for others while streams run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from exl_generate import ExLlamaV2DynamicJob, bundled
from exl_generate.dynamic import prompt_wait
from exl_generate.testing import ScriptedModel
from exl_serve.cli import app
from exl_serve.config.load import ConfigError, parse
from exl_serve.config.model import ModelConfig, ServeConfig
from exl_serve.engine.load import load
from exl_serve.errors import ServeError
from exl_serve.super import logs, supervisor

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")
FOLDER = str(bundled.default_model_dir())
SECONDS = 0.0625


def config(**kw: Any) -> ModelConfig:
    return ModelConfig(id="m", path=FOLDER, engine="free", device="cpu", cache_tokens=32768, **kw)


@pytest.mark.parametrize(("target", "enough"), [(0.0, 1024), (1e-6, 512)])
def test_prompts_wait_while_streams_run_until_they_fill_a_step(
    monkeypatch: pytest.MonkeyPatch, target: float, enough: int
) -> None:
    """A step with a target computes fewer prompt tokens, so that fewer are enough."""
    now = 0.0
    monkeypatch.setattr(prompt_wait, "monotonic", lambda: now)
    made = config(prompt_wait=SECONDS, target_itl=target, max_batch_size=32, max_chunk_size=1024)
    generator = load(made).generator
    for number in range(16):
        generator.enqueue(ExLlamaV2DynamicJob(torch.tensor([[30 + number]]), 200))
    while not generator.snapshot().generated_tokens:
        generator.iterate()
    first, second = (ExLlamaV2DynamicJob(torch.full((1, 1 + enough // 2), id), 2) for id in (60, 61))
    generator.enqueue(first)
    generator.iterate()
    generator.iterate()
    assert generator.snapshot().prefilled_tokens == 0
    generator.enqueue(second)
    generator.iterate()
    assert generator.snapshot().prefilled_tokens == enough
    last = ExLlamaV2DynamicJob(torch.full((1, 21), 62), 2)
    generator.enqueue(last)
    generator.iterate()
    assert last.times.first_token is None
    now += SECONDS
    generator.iterate()
    assert last.times.first_token is not None


def test_no_prompt_waits_by_default() -> None:
    generator = load(config()).generator
    for number in range(10):
        generator.enqueue(ExLlamaV2DynamicJob(torch.tensor([[30 + number]]), 200))
    while not generator.snapshot().generated_tokens:
        generator.iterate()
    generator.enqueue(ExLlamaV2DynamicJob(torch.full((1, 21), 62), 2))
    generator.iterate()
    assert generator.snapshot().prefilled_tokens == 20


def test_a_model_in_lockstep_takes_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedModel, "in_lockstep", True)
    with pytest.raises(ServeError, match=r"prompt_wait is 0\.05.*set it to 0"):
        load(config(prompt_wait=0.05))


@pytest.mark.parametrize("bad", [-0.1, 3601.0, float("nan"), float("inf"), "0.05", True])
def test_waits_that_are_none_are_rejected(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"prompt_wait"):
        parse({"model": [{"id": "m", "path": "x", "prompt_wait": bad}]})


def test_the_command_of_the_guide_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[ServeConfig] = []
    monkeypatch.setattr(logs, "set_up", lambda *_: None)
    monkeypatch.setattr(supervisor.Supervisor, "__init__", lambda self, config, *_, **__: found.append(config))
    monkeypatch.setattr(supervisor.Supervisor, "run", lambda self: 0)
    (command,) = re.findall(r"^exl serve (-m DIR .*--prompt-wait.*)$", GUIDE, re.MULTILINE)
    assert CliRunner().invoke(app, command.replace("DIR", FOLDER).split()).exit_code == 0
    assert [(model.max_batch_size, model.prompt_wait) for model in found[0].model] == [(64, 0.05)]
    done = CliRunner().invoke(app, ["-m", FOLDER, "--prompt-wait", "-1"])
    assert done.exit_code == 1
    assert "model.prompt_wait is -1.0; allowed are 0 to 3600" in done.output
