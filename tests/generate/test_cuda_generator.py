"""The dynamic generator on a GPU: next steps launched early, 64 jobs, sampling there and here, no memory, two GPUs."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from internals import prelaunch, prelaunches

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
)
from exl_core.device import GIB, devices
from exl_core.errors import DeviceError
from exl_core.execution.environment import PROMPTS_VARIABLE
from exl_core.loading.plan import plan_modules
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.dynamic.draft_length import FixedDraftLength
from exl_generate.sampling import RequestSampler, Vocabulary
from exl_generate.testing import check_pages, drain, streamed_tokens

pytestmark = pytest.mark.cuda

FOLDER = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
TEXT = 'def main(argv):\n    """Read the file and return the number of lines in it, or raise."""\n    import os, sys\n'
Settings = ExLlamaV2Sampler.Settings
STYLES = [
    Settings.greedy(),
    Settings(),
    Settings(temperature=0.9, top_k=0, top_p=0.95, token_repetition_penalty=1.0),
    Settings(temperature=1.2, min_p=0.02, top_k=0, top_p=0, token_frequency_penalty=0.3, dry_multiplier=0.6),
    Settings(temperature=1.0, top_k=30, xtc_probability=0.4, mirostat=True),
    Settings(typical=0.9, top_k=0, top_p=0),
    Settings(temperature=1.0, top_k=0, top_p=0, xtc_probability=0.5, min_p=0.0001, token_repetition_penalty=1.1),
    Settings(tfs=0.9, top_k=0, top_p=0),
]


@cache
def tokenizer() -> ExLlamaV2Tokenizer:
    return ExLlamaV2Tokenizer(ExLlamaV2Config(FOLDER))


@cache
def loaded(devices: str = "cuda:0", how: str = "whole") -> ExLlamaV2:
    """The model on one GPU, its layers over two, or its matrices cut over two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXL_DEVICE", devices)
        model = ExLlamaV2(ExLlamaV2Config(FOLDER))
        if how == "cut":
            model.load_tp([6.0, 10.0])
        elif how == "layers":
            model.load(halves(model))
        else:
            model.load()
    return model


def halves(model: ExLlamaV2) -> list[float]:
    """GiB that put about half of the modules on each of two devices."""
    found = plan_modules(model.config, model.modules, devices()[:1], None, [64.0], None, True).devices[0]
    return [(found.weights * 0.62 + found.tables + found.scratch) / GIB, 8.0]


def ids(length: int, start: int = 0) -> torch.Tensor:
    return tokenizer().encode(TEXT * 3)[:, start : start + length]


def generator(model: ExLlamaV2 | None = None, early: bool = True, **kw: Any) -> ExLlamaV2DynamicGenerator:
    model = model or loaded()
    store = kw.pop("cache", None) or ExLlamaV2Cache(model, max_seq_len=kw.pop("tokens", 4096))
    made = ExLlamaV2DynamicGenerator(model, store, tokenizer(), page_size=16, **kw)
    assert prelaunches(made)
    prelaunch(made, early)
    return made


def job(at: int, new: int = 20, **kw: Any) -> ExLlamaV2DynamicJob:
    style = kw.pop("gen_settings", STYLES[at % len(STYLES)])
    return ExLlamaV2DynamicJob(ids(5 + at % 40, at % 7), new, gen_settings=style, seed=at, **kw)


def said(made: ExLlamaV2DynamicGenerator, jobs: list[ExLlamaV2DynamicJob]) -> list[tuple[list[int], str]]:
    made.enqueue(jobs)
    results = drain(made)
    check_pages(made)
    return [(streamed_tokens(results[one]), results[one][-1]["eos_reason"]) for one in jobs]


def test_steps_launched_early_change_nothing() -> None:
    stops = {"stop_conditions": ["return", tokenizer().eos_token_id]}
    found, expected = (
        said(generator(early=early, max_batch_size=5), [job(at, 8 + at, **stops) for at in range(12)])
        for early in (True, False)
    )
    assert found == expected
    assert {reason for _, reason in found} >= {"stop_string", "max_new_tokens"}


@pytest.mark.parametrize("batch", [1, 3])
def test_a_captured_step_launched_early_changes_nothing(batch: int) -> None:
    """Sequences grow over many pages, so that again and again the next step is one that has not been captured yet."""
    found = []
    for early in (True, False):
        made = generator(early=early, max_batch_size=batch)
        found.append(said(made, [job(6 * at, 90) for at in range(batch)]))
        assert made.model.decode.reason is None  # type: ignore[attr-defined]
        assert made.model.decode.count >= 5  # type: ignore[attr-defined]
    assert found[0] == found[1]


def test_generators_that_share_a_model_take_turns() -> None:
    """One step of each in turn, so that captured steps of the same size write over each other's logits."""
    alone = [said(generator(), [job(at)]) for at in range(3)]
    made, results = [generator() for _ in alone], [[] for _ in alone]  # type: ignore[var-annotated]
    for at, one in enumerate(made):
        one.enqueue(job(at))
    while any(one.num_remaining_jobs() for one in made):
        for one, said_by_it in zip(made, results, strict=True):
            if one.num_remaining_jobs():
                said_by_it += one.iterate()
    assert [streamed_tokens(found) for found in results] == [tokens for [(tokens, _)] in alone]


def test_64_jobs_at_once_give_the_results_of_each_alone() -> None:
    """Logits are bitwise identical at any row of any batch."""
    jobs = [job(at, 4 + at % 13, return_logits=True) for at in range(64)]
    made = generator(max_batch_size=64, tokens=64 * 64)
    made.enqueue(jobs)
    together = drain(made)
    assert made.model.decode.reason is None  # type: ignore[attr-defined]
    for at in (0, 1, 17, 40, 63):
        alone = job(at, 4 + at % 13, return_logits=True)
        lonely = generator()
        lonely.enqueue(alone)
        results = drain(lonely)[alone]
        mine = together[jobs[at]]
        assert streamed_tokens(results) == streamed_tokens(mine)
        logits = [torch.cat([r["logits"] for r in part if "logits" in r], 1) for part in (results, mine)]
        assert torch.equal(*logits)


@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("counts", [(1, 2, 5), pytest.param((20, 48), marks=pytest.mark.needs("wgmma"))], ids=str)
def test_pairs_and_drafts_give_the_results_of_each_job_alone(drafter: str, counts: tuple[int, ...]) -> None:
    """Steps of many rows, some of them of a negative prompt, launched early; alone and without drafts, one by one."""
    more: dict[str, Any] = {}
    if drafter == "ngram":
        more = {"use_ngram_draft": True, "num_draft_tokens": 4}
    elif drafter == "model":
        draft = loaded(how="draft")
        more = {"draft_model": draft, "draft_cache": ExLlamaV2Cache(draft, max_seq_len=8192), "num_draft_tokens": 4}

    def ask(at: int) -> ExLlamaV2DynamicJob:
        if at % 4:
            return job(at, 24)
        pair: Any = [ids(5 + at, at % 7), ids(3, at)]
        return ExLlamaV2DynamicJob(pair, 24, gen_settings=Settings(cfg_scale=1.5, top_k=20), seed=at)

    for count in counts:
        made = generator(max_batch_size=20 if drafter != "none" else 2 * count, tokens=8192, **more)
        if drafter != "none":
            made.drafter.length = FixedDraftLength(4)
        together = said(made, [ask(at) for at in range(count)])
        assert made.model.decode.reason is None, made.model.decode.reason  # type: ignore[attr-defined]
        for at in range(0, count, 1 + count // 6):
            assert said(generator(early=False), [ask(at)]) == together[at : at + 1], at


def test_tokens_are_those_the_cpu_samples_from_the_same_logits() -> None:
    vocabulary = Vocabulary.of(tokenizer())
    for at, style in enumerate(STYLES):
        one = job(at, 24, gen_settings=style, return_logits=True)
        made = generator()
        made.enqueue(one)
        results = drain(made)[one]
        logits = torch.cat([r["logits"] for r in results if "logits" in r], 1)[0]
        tokens = streamed_tokens(results)
        context = ids(5 + at % 40, at % 7)[0].numpy()
        sampler = RequestSampler(style, vocabulary, at)
        for place, token in enumerate(tokens):
            so_far = torch.cat([torch.from_numpy(context), torch.tensor(tokens[:place], dtype=torch.int64)]).numpy()
            assert sampler.sample(logits[place].cpu(), so_far, place).token == token, (at, place)


def test_a_prompt_that_does_not_fit_into_memory_ends_its_own_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROMPTS_VARIABLE, "0")  # a captured prompt allocates nothing
    made = generator(max_chunk_size=64)
    running, asking = job(1, 30, gen_settings=Settings.greedy()), job(2, 30, gen_settings=Settings.greedy())
    expected = said(generator(), [job(1, 30, gen_settings=Settings.greedy())])[0][0]
    made.enqueue(running)
    results = [made.iterate() for _ in range(4)]

    def full(*args: Any, **kw: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("exl_core.execution.eager.build_step", full)
        made.enqueue(asking)
        results += [made.iterate() for _ in range(3)]
    results.append([r for part in drain(made).values() for r in part])
    mine = [r for part in results for r in part if r["job"] is running]
    failed = [r for part in results for r in part if r["job"] is asking][-1]
    assert streamed_tokens(mine) == expected
    assert failed["eos_reason"] == "error"
    assert isinstance(failed["exception"], DeviceError)
    assert "not enough GPU memory" in str(failed["exception"])
    check_pages(made)


def fill_holes() -> list[torch.Tensor]:
    """Take all memory that torch's allocator may still give out."""
    held: list[torch.Tensor] = []
    for size in (1 << n for n in range(24, 8, -1)):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda:0"))
    return held


def test_a_generator_outlives_a_load_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    expected = said(generator(), [job(1, 30, gen_settings=Settings.greedy())])[0][0]
    made, running = generator(), job(1, 30, gen_settings=Settings.greedy())
    made.enqueue(running)
    results = [made.iterate() for _ in range(4)]
    second = ExLlamaV2(ExLlamaV2Config(FOLDER))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
        held = fill_holes()
        with pytest.raises(DeviceError, match="not enough GPU memory to load"):
            second.load()
        assert not second.loaded
        held.clear()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / total)
        with pytest.raises(DeviceError, match="smaller max_seq_len or a quantized cache"):
            ExLlamaV2Cache(loaded(), max_seq_len=256 * 2048)
        results.append([r for part in drain(made).values() for r in part])
        smaller = generator(cache=ExLlamaV2Cache_Q4(loaded(), max_seq_len=512))
        assert len(said(smaller, [job(1, 30, gen_settings=Settings.greedy())])[0][0]) == 30
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert streamed_tokens([r for part in results for r in part if r["job"] is running]) == expected
    check_pages(made)
    second.load()
    assert second.loaded


@pytest.mark.parametrize("how", ["layers", "cut"])
@pytest.mark.parametrize("kind", [ExLlamaV2Cache, ExLlamaV2Cache_Q4])
def test_a_model_split_over_two_gpus_gives_the_text_of_one(how: str, kind: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here: this test runs on a machine with two")
    model = loaded("cuda:0,cuda:1", how)
    assert how == "cut" or set(model.placement.names) == {"cuda:0", "cuda:1"}
    store = ExLlamaV2Cache_TP(model, kind, max_seq_len=2048) if how == "cut" else kind(model, max_seq_len=2048)
    found = said(generator(model, cache=store, max_batch_size=4), [job(at) for at in range(8)])
    apart = how == "cut" and not torch.cuda.can_device_access_peer(0, 1)
    assert model.decode.count > 0 or apart, model.decode.reason
    one = generator(cache=kind(loaded(), max_seq_len=2048), max_batch_size=4)
    assert found == said(one, [job(at) for at in range(8)])
