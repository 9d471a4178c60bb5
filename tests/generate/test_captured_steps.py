"""The generator over captured steps, without a GPU: tokens are those of a model without, whatever is captured when."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.testing import check_pages, drain, streamed_tokens

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from captured_on_cpu import captured_on_cpu

FOLDER = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
Settings = ExLlamaV2Sampler.Settings


@cache
def loaded() -> tuple[ExLlamaV2, ExLlamaV2Tokenizer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXL_DEVICE", "cpu")
        model = ExLlamaV2(ExLlamaV2Config(FOLDER))
        model.load()
    return model, ExLlamaV2Tokenizer(model.config)


def said(lengths: list[int], style: Any, new: int, ahead: bool) -> list[list[int]]:
    model, tokenizer = loaded()
    model.decode.clear()
    ids = tokenizer.encode("def main(argv):\n    import os, sys\n")
    cache = ExLlamaV2Cache(model, max_seq_len=1024)
    made = ExLlamaV2DynamicGenerator(model, cache, tokenizer, page_size=16)
    made._engine._runner.asynchronous = ahead
    jobs = [ExLlamaV2DynamicJob(ids[:, :length], new, gen_settings=style, seed=length) for length in lengths]
    made.enqueue(jobs)
    results = drain(made)
    check_pages(made)
    return [streamed_tokens(results[job]) for job in jobs]


@pytest.mark.parametrize("style", [Settings.greedy(), Settings()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [[5], [3, 12]], ids=["one", "two"])
def test_steps_captured_while_logits_wait(lengths: list[int], style: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences grow over many pages, so that again and again the next step is one that has not been captured yet."""
    plain = said(lengths, style, 60, ahead=False)
    captured_on_cpu(monkeypatch)
    for ahead in (False, True):
        assert said(lengths, style, 60, ahead) == plain
        assert loaded()[0].decode.steps > 0
