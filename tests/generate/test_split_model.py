"""Tokens of a model that is split by layers, with captured steps, over devices that are the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from captured_on_cpu import captured_on_cpu
from internals import prelaunch
from test_decode_sections import PAGE, bundled, split

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.testing import drain, streamed_tokens


@pytest.mark.parametrize(
    "style", [ExLlamaV2Sampler.Settings.greedy(), ExLlamaV2Sampler.Settings()], ids=["greedy", "sampled"]
)
def test_tokens_of_a_split_model(style: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the generator, with next steps launched early and not."""
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    whole = bundled()
    whole.load()
    plain = said(whole, style, early=False)
    model = split((3, "cpu:1"))
    captured_on_cpu(monkeypatch)
    for early in (False, True):
        model.decode.clear()
        before = model.decode.steps
        assert said(model, style, early) == plain
        assert model.decode.steps > before


def said(model: ExLlamaV2, style: Any, early: bool) -> list[list[int]]:
    tokenizer = ExLlamaV2Tokenizer(model.config)
    ids = tokenizer.encode("def main(argv):\n    import os, sys\n")
    made = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer, page_size=PAGE)
    prelaunch(made, early)
    jobs = [ExLlamaV2DynamicJob(ids[:, :length], 30, gen_settings=style, seed=length) for length in (3, 12)]
    made.enqueue(jobs)
    results = drain(made)
    return [streamed_tokens(results[job]) for job in jobs]
