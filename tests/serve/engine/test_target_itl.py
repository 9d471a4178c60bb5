"""A model's `target_itl` reaches its generator: streams do not wait for whole chunks of long prompts."""

from __future__ import annotations

import pytest
import torch

from exl_generate import ExLlamaV2DynamicJob, bundled
from exl_generate.testing import ScriptedModel
from exl_serve.config.model import ModelConfig
from exl_serve.engine.load import load
from exl_serve.errors import ServeError


@pytest.mark.parametrize(("seconds", "most"), [(1e-6, 512), (0.0, 1009)])
def test_prompt_tokens_of_a_step_during_a_stream(seconds: float, most: int) -> None:
    folder = str(bundled.default_model_dir())
    config = ModelConfig(
        id="m", path=folder, engine="free", device="cpu", max_chunk_size=1024, cache_tokens=8192, target_itl=seconds
    )
    generator = load(config).generator
    stream, long = ExLlamaV2DynamicJob(torch.full((1, 8), 30), 200), ExLlamaV2DynamicJob(torch.full((1, 1010), 40), 2)
    generator.enqueue(stream)
    while not generator.snapshot().generated_tokens:
        generator.iterate()
    generator.enqueue(long)
    steps, before = [], generator.snapshot().prefilled_tokens
    while not long.is_finished:
        generator.iterate()
        now = generator.snapshot().prefilled_tokens
        steps.append(now - before)
        before = now
    assert max(steps) == most  # 512 before any step is measured


def test_a_model_in_lockstep_takes_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedModel, "in_lockstep", True)
    config = ModelConfig(id="m", path=str(bundled.default_model_dir()), engine="free", device="cpu", target_itl=0.05)
    with pytest.raises(ServeError, match=r"target_itl is 0\.05.*set it to 0"):
        load(config)
