"""The generator over captured steps, without a GPU: tokens are those of a model without, whatever is captured when."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from captured_on_cpu import captured_on_cpu
from internals import prelaunch

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer, Intervention
from exl_core.execution.environment import PROMPTS_VARIABLE
from exl_core.execution.forward_pass import ForwardPass
from exl_core.execution.select import Selected, Way, select
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.testing import check_pages, drain, streamed_tokens

FOLDER = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
Settings = ExLlamaV2Sampler.Settings


@cache
def loaded() -> tuple[ExLlamaV2, ExLlamaV2Tokenizer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXL_DEVICE", "cpu")
        model = ExLlamaV2(ExLlamaV2Config(FOLDER))
        model.load()
    return model, ExLlamaV2Tokenizer(model.config)


def said(lengths: list[int], style: Any, new: int, early: bool) -> list[list[int]]:
    model, tokenizer = loaded()
    model.decode.clear()
    ids = tokenizer.encode("def main(argv):\n    import os, sys\n")
    cache = ExLlamaV2Cache(model, max_seq_len=1024)
    made = ExLlamaV2DynamicGenerator(model, cache, tokenizer, page_size=16)
    prelaunch(made, early)
    jobs = [ExLlamaV2DynamicJob(ids[:, :length], new, gen_settings=style, seed=length) for length in lengths]
    made.enqueue(jobs)
    results = drain(made)
    check_pages(made)
    return [streamed_tokens(results[job]) for job in jobs]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("style", [Settings.greedy(), Settings()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [[5], [3, 12]], ids=["one", "two"])
def test_steps_captured_while_logits_wait(lengths: list[int], style: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences grow over many pages, so that again and again the next step is one that has not been captured yet."""
    plain = said(lengths, style, 60, early=False)
    captured_on_cpu(monkeypatch)
    for early in (False, True):
        assert said(lengths, style, 60, early) == plain
        assert loaded()[0].decode.steps > 0


def test_prompts_are_captured_steps_from_the_second_of_their_kind_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different prompts, one after the other and several at a time, have the tokens of eager prompts."""
    monkeypatch.setenv(PROMPTS_VARIABLE, "1")
    model, tokenizer = loaded()
    ids = tokenizer.encode(
        "def main(argv):\n    import os, sys\n    for name in os.listdir(argv[1]):\n        print(name)\n"
    )
    ways: list[Way] = []
    found: list[list[list[int]]] = []

    def watched(model: Any, asked: ForwardPass, **given: Any) -> Selected:
        selected = select(model, asked, **given)
        if asked.preprocess_only or asked.last_id_only:
            ways.append(selected.way)
        return selected

    monkeypatch.setattr("exl_core.execution.forward.select", watched)
    for early in (False, True):
        if early:
            captured_on_cpu(monkeypatch)
            model.decode.clear()
        cache = ExLlamaV2Cache(model, max_seq_len=1024)
        made = ExLlamaV2DynamicGenerator(model, cache, tokenizer, page_size=16)
        prelaunch(made, early)
        for prompts in (
            [ids[:, 1:20]],
            [ids[:, 2:24]],
            [ids[:, 3:21]],
            [ids[:, 4:9], ids[:, 5:9]],
            [ids[:, 6:11], ids[:, 7:12]],
        ):
            jobs = [ExLlamaV2DynamicJob(prompt, 8, gen_settings=Settings.greedy()) for prompt in prompts]
            made.enqueue(jobs)
            results = drain(made)
            found.append([streamed_tokens(results[job]) for job in jobs])
        expected: list[Way] = ["eager", "captured", "captured", "eager", "captured"] if early else ["eager"] * 5
        assert ways == expected, "the second and third prompt, the second pair"
        ways.clear()
    assert found[:5] == found[5:]
    assert all(len(tokens) == 8 for group in found for tokens in group)


def test_a_hook_takes_effect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook put in between two steps: the step that is queued already was computed without it."""
    model, tokenizer = loaded()
    inner = model.modules[3]
    hook = Intervention(inner, post_forward=lambda state, step: state.flip(-1))
    found = []
    for early in (False, True):
        if early:
            captured_on_cpu(monkeypatch)
            model.decode.clear()
        cache = ExLlamaV2Cache(model, max_seq_len=256)
        made = ExLlamaV2DynamicGenerator(model, cache, tokenizer, page_size=16)
        prelaunch(made, early)
        made.enqueue(ExLlamaV2DynamicJob(tokenizer.encode("import os"), 20, gen_settings=Settings.greedy()))
        results: list[Any] = []
        try:
            for round_ in range(30):
                if round_ in (5, 11):
                    model.modules[3] = hook if round_ == 5 else inner
                results += made.iterate()
        finally:
            model.modules[3] = inner
        found.append(streamed_tokens(results))
    assert len(found[0]) == 20
    assert found[0] == found[1]
