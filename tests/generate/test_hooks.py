"""Interventions and the prefix cache: nothing that was computed without a hook is used with it, nor the other way."""

from __future__ import annotations

from pathlib import Path

import pytest

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer, Intervention
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.testing import check_pages, drain, streamed_tokens

FOLDER = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
TEXT = 'def main(argv):\n    """Read the file and return the number of lines in it, or raise."""\n    import os, sys\n'


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2:
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    model = ExLlamaV2(ExLlamaV2Config(FOLDER))
    model.load()
    return model


def generator(model: ExLlamaV2) -> ExLlamaV2DynamicGenerator:
    cache = ExLlamaV2Cache(model, max_seq_len=512)
    return ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(model.config), page_size=16, max_batch_size=1)


def job(made: ExLlamaV2DynamicGenerator, new: int = 8) -> ExLlamaV2DynamicJob:
    style = ExLlamaV2Sampler.Settings.greedy()
    return ExLlamaV2DynamicJob(made.tokenizer.encode(TEXT), new, gen_settings=style, return_logits=True)


def said(made: ExLlamaV2DynamicGenerator) -> tuple[list[int], int]:
    """What is said, and how many of its tokens were found in the cache."""
    one = job(made)
    made.enqueue(one)
    results = drain(made)[one]
    check_pages(made)
    return streamed_tokens(results), results[-1]["cached_tokens"]


def test_what_was_computed_without_a_hook_is_not_used_with_it(model: ExLlamaV2) -> None:
    inner = model.modules[3]
    hooks = [Intervention(inner, post_forward=lambda state, step, by=by: state.roll(by, -1)) for by in (1, 7)]
    expected = []
    for module in (inner, *hooks):
        model.modules[3] = module
        expected.append(said(generator(model)))
    assert len({tuple(tokens) for tokens, _ in expected}) == 3
    made = generator(model)
    for which in (0, 1, 2, 0, 1):
        model.modules[3] = (inner, *hooks)[which]
        assert said(made) == expected[which]
        tokens, cached = said(made)
        assert tokens == expected[which][0]
        assert cached > 16, "nothing was found though nothing has changed"


def test_jobs_that_wait_begin_as_the_model_is_then(model: ExLlamaV2) -> None:
    """One job runs, another waits with the same prompt, and both go on behind a change; a third comes when the change
    has been taken back."""
    inner = model.modules[3]
    hook = Intervention(inner, post_forward=lambda state, step: state.roll(1, -1))
    plain = said(generator(model))
    model.modules[3] = hook
    hooked = said(generator(model))
    model.modules[3] = inner
    made = generator(model)
    first, second = job(made, 40), job(made)
    made.enqueue([first, second])
    for _ in range(3):
        made.iterate()
    assert made.num_pending_jobs() == 1
    model.modules[3] = hook
    results = drain(made)
    assert streamed_tokens(results[second]) == hooked[0]
    model.modules[3] = inner
    assert said(made) == plain


@pytest.mark.parametrize("at", [3, 4, 6])
def test_a_job_that_has_begun_takes_no_page_of_before(model: ExLlamaV2, at: int) -> None:
    """What it says is the same whether or not another job left pages of the same ids, computed without the hook."""
    inner = model.modules[3]
    hook = Intervention(inner, post_forward=lambda state, step: state.roll(1, -1))
    spoken = []
    for first in (False, True):
        model.modules[3] = inner
        made = generator(model)
        jobs = [
            ExLlamaV2DynamicJob(
                made.tokenizer.encode(TEXT)[:, :12], 24, gen_settings=ExLlamaV2Sampler.Settings.greedy()
            )
            for _ in range(1 + first)
        ]
        if first:
            made.enqueue(jobs[0])
            drain(made)
        made.enqueue(jobs[-1])
        results = []
        for _ in range(at):
            results += made.iterate()
        model.modules[3] = hook
        results += drain(made)[jobs[-1]]
        check_pages(made)
        spoken.append(streamed_tokens(results))
    assert spoken[0] == spoken[1]
