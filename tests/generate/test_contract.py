"""Signatures, page order, and filters that work in threads."""

from __future__ import annotations

import inspect
import random
import threading
import time
from typing import Any

import pytest
import torch

from exl_core import ExLlamaV2, ExLlamaV2Cache_Q4, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_filters import ExLlamaV2Filter
from exl_generate import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exl_generate.bundled import draft_model_dir
from exl_generate.testing import check_pages, drain, streamed_tokens
from exl_generate.testing.small import EOS, VOCAB, job, make, run

Settings = ExLlamaV2Sampler.Settings
REQUIRED = inspect.Parameter.empty

JOB = [
    *(("input_ids", REQUIRED), ("max_new_tokens", REQUIRED), ("min_new_tokens", 0), ("max_skips", 4)),
    *(("gen_settings", None), ("seed", None), ("stop_conditions", None), ("decode_special_tokens", False)),
    *(("return_top_tokens", 0), ("return_logits", False), ("return_probs", False), ("filters", None)),
    *(("filter_prefer_eos", False), ("token_healing", False), ("identifier", None), ("banned_strings", None)),
    ("embeddings", None),
]
GENERATOR = [
    *(("model", REQUIRED), ("cache", REQUIRED), ("tokenizer", REQUIRED), ("max_batch_size", None)),
    *(("max_seq_len", None), ("max_chunk_size", None), ("max_q_size", 8), ("draft_model", None)),
    *(("draft_cache", None), ("num_draft_tokens", 4), ("use_ngram_draft", False), ("max_ngram", 4)),
    *(("max_sampling_threads", 16), ("min_sampling_threads", 3), ("paged", True), ("filter_background_eval", True)),
]
GENERATE = [
    *(("prompt", REQUIRED), ("max_new_tokens", REQUIRED), ("min_new_tokens", 0), ("seed", None)),
    *(("gen_settings", None), ("token_healing", False), ("encode_special_tokens", False)),
    *(("decode_special_tokens", False), ("stop_conditions", None), ("add_bos", False), ("abort_event", None)),
    *(("completion_only", False), ("filters", None), ("filter_prefer_eos", False)),
    *(("return_last_results", False), ("embeddings", None), ("banned_strings", None)),
]
SIMPLE = [
    *(("prompt", REQUIRED), ("gen_settings", REQUIRED), ("num_tokens", REQUIRED), ("seed", None)),
    *(("token_healing", False), ("encode_special_tokens", False), ("decode_special_tokens", False), ("loras", None)),
    *(("stop_token", -1), ("add_bos", False), ("abort_event", None), ("input_embeddings", None)),
    *(("completion_only", False), ("filters", None), ("filter_prefer_eos", False)),
]
STREAM = [
    *(("input_ids", REQUIRED), ("gen_settings", REQUIRED), ("token_healing", False), ("loras", None)),
    *(("input_mask", None), ("position_offsets", None), ("return_probabilities", False), ("return_top_tokens", 0)),
    *(("return_logits", False), ("abort_event", None), ("input_embeddings", None), ("decode_special_tokens", False)),
    *(("banned_strings", None), ("filters", None), ("filter_prefer_eos", False)),
]


@pytest.mark.covers(
    "generators: dynamic-construction",
    "generators: generate-prompts",
    "generators: job-parameters",
    "generators: base-arguments",
    "generators: stream-begin",
)
@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (ExLlamaV2DynamicJob.__init__, JOB),
        (ExLlamaV2DynamicGenerator.__init__, GENERATOR),
        (ExLlamaV2DynamicGenerator.generate, GENERATE),
        (ExLlamaV2BaseGenerator.generate_simple, SIMPLE),
        (ExLlamaV2StreamingGenerator.begin_stream_ex, STREAM),
    ],
    ids=["job", "generator", "generate", "generate_simple", "begin_stream_ex"],
)
def test_parameters_their_order_and_defaults(function: Any, wanted: list[tuple[str, Any]]) -> None:
    """Positional calls written for exllamav2 mean the same here."""
    found = [(p.name, p.default) for p in inspect.signature(function).parameters.values()][1:]
    assert found[: len(wanted)] == wanted


# ---- pages in any order ----


@pytest.mark.covers("generators: page-order")
def test_the_order_of_pages_in_memory_changes_nothing() -> None:
    """Logits are bitwise identical over pages in random order, so defrag_cache has nothing to do."""
    model = ExLlamaV2(ExLlamaV2Config(str(draft_model_dir())))
    model.load()
    tokenizer = ExLlamaV2Tokenizer(model.config)
    prompt = tokenizer.encode("Once upon a time, there was a small fox. " * 14, add_bos=True)
    seen = set()
    for seed in range(4):
        generator = ExLlamaV2DynamicGenerator(
            model, ExLlamaV2Cache_Q4(model, max_seq_len=1024), tokenizer, page_size=16
        )
        table = generator.page_table
        pages = [table.take(None) for _ in table.pages]
        if seed:
            random.Random(seed).shuffle(pages)
        for page in pages:
            table.release(page)
        one = ExLlamaV2DynamicJob(prompt, 40, seed=1, return_logits=True)
        generator.enqueue(one)
        results = drain(generator)[one]
        used = [page.index for page in table.pages if page.valid]
        assert len(used) > 5
        seen.add(torch.cat([r["logits"] for r in results if "logits" in r], 1).numpy().tobytes())
        generator.defrag_cache()
        check_pages(generator)
    assert len(seen) == 1


# ---- filters in threads ----


class Slow(ExLlamaV2Filter):
    """Takes its time, in whatever thread; remembers which. Raises at step `fault`."""

    def __init__(self, names: list[str], allowed: set[int], fault: int = -1, background: bool = True) -> None:
        super().__init__(None, None)
        self.names, self.allowed, self.fault, self.background, self.at = names, allowed, fault, background, 0

    def clone(self, c: Any = None) -> Slow:
        return Slow(self.names, self.allowed, self.fault, self.background)

    def begin(self, prefix_str: Any = "") -> None:
        self.at = 0

    def feed(self, token: Any) -> None:
        self.at += 1

    def use_background_worker(self) -> bool:
        return self.background

    def next(self) -> tuple[set[int], set[int]]:
        self.names.append(threading.current_thread().name)
        time.sleep(0.003)
        if self.at == self.fault:
            raise ZeroDivisionError("broken in a thread")
        return self.allowed, set()


@pytest.mark.covers("generators: filter-masks", "filters: background", "filters: combination")
def test_filters_work_in_threads_to_the_same_tokens() -> None:
    odd, even = set(range(3, VOCAB, 2)), set(range(4, VOCAB, 2))
    wide = Settings(temperature=1.0, top_k=0, top_p=0)
    outputs = []
    for background in (True, False):
        names: list[str] = []
        generator = make(filter_background_eval=background)
        jobs = [
            job("abc", 15, seed=i, gen_settings=wide, filters=[Slow(names, set(allowed)) for allowed in sets])
            for i, sets in enumerate([[odd], [even], [odd | even, odd], [even, set(range(3, 30))]])
        ]
        jobs.append(job("abc", 15, seed=9, gen_settings=wide, filters=[Slow(names, odd, background=False)]))
        generator.enqueue(jobs)
        results = drain(generator)
        outputs.append([streamed_tokens(results[one]) for one in jobs])
        assert any(name == "exl-filter" for name in names) == background
    assert outputs[0] == outputs[1]
    assert all(token % 2 for token in outputs[0][0])


@pytest.mark.covers("generators: failing-jobs", "generators: filter-masks")
def test_a_failure_in_a_thread_and_a_cancel_disturb_no_other_job() -> None:
    names: list[str] = []
    everything = set(range(3, VOCAB))
    generator = make()
    bad = job("abc", 20, filters=[Slow(names, everything, fault=4)])
    gone = job("abc", 20, filters=[Slow(names, everything)])
    good = job("abc", 20, filters=[Slow(names, everything)])
    generator.enqueue([bad, gone, good])
    for _ in range(3):
        generator.iterate()
    generator.cancel(gone)
    results = drain(generator)
    assert results[bad][-1]["eos_reason"] == "filter_error"
    assert "broken in a thread" in f"{results[bad][-1]['exception']} {results[bad][-1]['exception'].__cause__}"
    assert results[good][-1]["new_tokens"] == 20
    check_pages(generator)


@pytest.mark.covers("generators: filter-ends")
def test_prefer_eos_ends_as_soon_as_a_filter_allows_it() -> None:
    class Until(Slow):
        def clone(self, c: Any = None) -> Until:
            return Until(self.names, self.allowed)

        def next(self) -> tuple[set[int], set[int]]:
            return (self.allowed | {EOS} if self.at >= 3 else self.allowed), set()

    for prefer, ended in ((True, "stop_token"), (False, "max_new_tokens")):
        quiet = Settings.greedy()
        quiet.token_bias = torch.zeros(-(-VOCAB // 32) * 32)
        quiet.token_bias[EOS] = -50.0
        filters = [Until([], set(range(3, VOCAB)))]
        last = run(
            make(), job("abc", 9, filters=filters, filter_prefer_eos=prefer, stop_conditions=[EOS], gen_settings=quiet)
        )[-1]
        assert last["eos_reason"] == ended
        assert last["new_tokens"] == (4 if prefer else 9)
