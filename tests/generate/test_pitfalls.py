"""Known problems of similar engines that concern generation."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from counting import lines
from effort import trials

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_core.contracts import ForwardResult
from exl_filters import ExLlamaV2Filter, ExLlamaV2SelectFilter
from exl_filters.grammar import ExLlamaV2GrammarFilter
from exl_generate import (
    CapacityError,
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicGeneratorAsync,
    ExLlamaV2DynamicJob,
    ExLlamaV2DynamicJobAsync,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
    RequestError,
)
from exl_generate.bundled import default_model_dir
from exl_generate.testing import (
    ScriptedCache,
    ScriptedConfig,
    ScriptedLora,
    ScriptedModel,
    ScriptedTokenizer,
    check_pages,
    drain,
    streamed_text,
    streamed_tokens,
)
from exl_generate.testing.small import EOS, PAGE, PIECES, TOKENIZER, VOCAB, ids, job, make, naive, run, says, speculate

Settings = ExLlamaV2Sampler.Settings
GREEDY = Settings.greedy()


@pytest.fixture(scope="module")
def fable() -> ExLlamaV2DynamicGenerator:
    config = ExLlamaV2Config(str(default_model_dir()))
    model = ExLlamaV2(config)
    model.load()
    return ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=2048), ExLlamaV2Tokenizer(config))


@pytest.mark.covers("generators: base-stop-tokens", "generators: stream-stop-conditions")
def test_all_ids_of_an_eos_list_stop_generation() -> None:
    """Each id of the list ends the text, not only the first."""
    tokenizer = ScriptedTokenizer(PIECES)
    tokenizer.eos_token_ids = [EOS, 7]
    for eos in tokenizer.eos_token_ids:
        model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB), lambda c, eos=eos: eos if len(c) == 6 else 10)  # type: ignore[misc]
        cache = ScriptedCache(model)
        text = ExLlamaV2BaseGenerator(model, cache, tokenizer).generate_simple("abc", GREEDY, 9, completion_only=True)
        assert text == tokenizer.pieces[10].decode() * 3
        stream = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
        stream.begin_stream_ex(ids("abc"), GREEDY)
        assert [stream.stream_ex()["eos"] for _ in range(4)] == [False] * 3 + [True]
        generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
        last = run(generator, job("abc", 9, stop_conditions=tokenizer.eos_token_ids))[-1]
        assert (last["eos_reason"], last["eos_triggering_token_id"]) == ("stop_token", eos)


@pytest.mark.parametrize("vocab", [1, 31, 33, 40_001, 151_937])
def test_padded_ids_are_never_sampled(vocab: int) -> None:
    """Logits are padded to a multiple of 32, and ids past the vocabulary have no text."""

    class Hot(ScriptedModel):
        def forward_chunk(self, *args: Any, **kw: Any) -> ForwardResult:
            out = super().forward_chunk(*args, **kw)
            if "logits" in out:
                out["logits"][..., vocab:] = 60_000.0
            return out

    tokenizer = ScriptedTokenizer([f"{i} " for i in range(vocab - 3)], ScriptedConfig(vocab_size=vocab))
    tokenizer.pieces = tokenizer.pieces[:vocab]
    model = Hot(ScriptedConfig(vocab_size=vocab))
    generator = ExLlamaV2DynamicGenerator(model, ScriptedCache(model), tokenizer)
    wide = Settings(temperature=2.0, top_k=0, top_p=0, token_repetition_penalty=1.0)
    one = ExLlamaV2DynamicJob(torch.tensor([[0]]), 30, gen_settings=wide, seed=1)
    assert max(streamed_tokens(run(generator, one))) < vocab


# The default run has every pair of two of them.
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("how", "healing", "over"),
    [
        pytest.param(how, healing, over, marks=[pytest.mark.full] if (place + healing + over) % 2 else [])
        for place, how in enumerate(["none", "ngram", "model"])
        for healing in (False, True)
        for over in (-1, 0, 1)
    ],
)
def test_prompt_and_output_at_one_under_and_one_over_the_cache(how: str, healing: bool, over: int) -> None:
    """A job that fills the cache runs to its end; one more token is refused."""
    generator = speculate(how) if how != "none" else make(model_len=1024)
    room = generator.max_total_tokens if how == "none" else generator.max_seq_len
    one = job("ab" * 30, room - 60 + over, token_healing=healing)
    if over > 0:
        with pytest.raises(CapacityError):
            generator.enqueue(one)
        return
    assert run(generator, one)[-1]["new_tokens"] == room - 60 + over


def test_a_cfg_job_larger_than_the_cache_is_refused_at_enqueue() -> None:
    generator = make(cache_tokens=64)
    pair = ExLlamaV2DynamicJob([ids("ab" * 10), ids("cd" * 10)], 20, gen_settings=Settings(cfg_scale=2.0))
    with pytest.raises(CapacityError, match="6 pages"):
        generator.enqueue(pair)
    assert generator.num_remaining_jobs() == 0


def test_a_change_of_lora_does_not_hit_pages_made_under_another() -> None:
    """Names of pages include the adapters."""
    generator, adapter = make(), ScriptedLora(5)
    cold = run(generator, job("abcdefgh" * 6, 4))[-1]
    generator.set_loras(adapter)
    other = run(generator, job("abcdefgh" * 6, 4))
    assert (cold["cached_tokens"], other[-1]["cached_tokens"]) == (0, 0)
    assert streamed_tokens(other) == naive(generator, ids("abcdefgh" * 6)[0].tolist(), 4, [adapter])


PHASES = ["queued", "prefill", "decode", "draft", "held", "rewind"]


@pytest.mark.covers("generators: dynamic-queue")
@pytest.mark.parametrize("phase", PHASES)
def test_cancel_in_each_phase(phase: str) -> None:
    """The other jobs continue, and the pages return."""
    generator = speculate("model") if phase == "draft" else make(max_batch_size=2, max_chunk_size=PAGE)
    if phase == "rewind":
        said = ids("qabc")[0].tolist()
        generator.model.script = lambda c: next((w for i, w in enumerate(said) if c == said[:i]), None)  # type: ignore[attr-defined]
    if phase == "held":
        generator.model.script = says("xy" * 20, after=4)  # type: ignore[attr-defined]
    stays = job("the", 40)
    gone = {
        "queued": lambda: job("zz", 9),
        "prefill": lambda: job("ab" * 60, 9),
        "held": lambda: job("abcd", 30, stop_conditions=["xy" * 30]),
        "rewind": lambda: job("q", 30, banned_strings=["abc"]),
    }.get(phase, lambda: job("abc", 30))()
    if phase == "queued":
        generator.enqueue([stays, job("the", 40)])
        generator.iterate()
    else:
        generator.enqueue(stays)
    generator.enqueue(gone)
    reached = {
        "queued": lambda results: True,
        "prefill": lambda results: any(r["stage"] == "prefill" for r in results),
        "decode": lambda results: gone.new_tokens > 2,
        "draft": lambda results: gone.drafted_tokens > 0,
        "held": lambda results: gone.new_tokens > 3,
        "rewind": lambda results: any("suppressed_text" in r for r in results),
    }[phase]
    for _ in range(50):
        if reached([r for r in generator.iterate() if r["job"] is gone]):
            break
    else:
        raise AssertionError("the phase was never reached")
    generator.cancel(gone)
    check_pages(generator)
    last = [r for r in generator.iterate() if r["job"] is gone]
    assert [r["eos_reason"] for r in last] == ["cancelled"]
    drain(generator)
    check_pages(generator)
    assert stays.new_tokens == 40
    assert generator.page_table.unreferenced == generator.max_pages


def test_jobs_from_sixteen_threads_and_several_event_loops_and_other_tasks() -> None:
    """No job is lost, and none waits forever."""
    want = make().generate("abc", 6, gen_settings=GREEDY)
    got: list[str] = []

    async def consume(generator: ExLlamaV2DynamicGeneratorAsync) -> str:
        job = ExLlamaV2DynamicJobAsync(generator, ids("abc"), 6, gen_settings=GREEDY)
        return "abc" + "".join([result.get("text", "") async for result in job])

    def in_a_loop(generator: ExLlamaV2DynamicGeneratorAsync) -> None:
        async def main() -> None:
            first = asyncio.create_task(consume(generator))
            await asyncio.sleep(0)
            got.extend(await asyncio.gather(first, asyncio.create_task(consume(generator))))

        asyncio.run(main())

    async def everything() -> None:
        parts = make(cache_tokens=1024)
        generator = ExLlamaV2DynamicGeneratorAsync(parts.model, parts.cache, TOKENIZER, page_size=PAGE)
        threads = [threading.Thread(target=in_a_loop, args=(generator,)) for _ in range(16)]
        for thread in threads:
            thread.start()
        got.append(await consume(generator))
        for thread in threads:
            await asyncio.to_thread(thread.join, 30)
        await generator.close()

    asyncio.run(everything())
    assert got == [want] * 33


def test_a_bare_string_of_stop_conditions_is_an_error_and_a_special_stop_string_works() -> None:
    """A bare string would be read as a list of its characters."""
    with pytest.raises(RequestError, match="pass a list"):
        job("abc", stop_conditions="stop")
    with pytest.raises(RequestError, match="neither"):
        ExLlamaV2StreamingGenerator(*_parts()).set_stop_conditions([""])
    generator = make(says("ab", TOKENIZER.bos_token_id, "cd", after=1))
    last = run(generator, job("z", 9, decode_special_tokens=True, stop_conditions=["<s>"]))[-1]
    assert (last["full_completion"], last["eos_triggering_string"]) == ("ab", "<s>")


def _parts() -> tuple[Any, Any, Any]:
    model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=256))
    return model, ScriptedCache(model, max_seq_len=256), TOKENIZER


@pytest.mark.covers("generators: stream-stop-strings", "generators: stop-strings")
def test_a_stop_string_over_token_boundaries_never_leaks() -> None:
    """No part of the stop string is streamed before it is complete."""
    stop = "the end"
    for cut in range(1, 12):
        script = says("ab", " the"[1:], " end", "cd", after=cut)
        generator = make(script)
        results = run(generator, job("z" * cut, 20, stop_conditions=[stop]))
        assert (streamed_text(results), results[-1]["eos_reason"]) == ("ab", "stop_string")
        once = generator.generate("z" * cut, 20, gen_settings=GREEDY, stop_conditions=[stop], completion_only=True)
        assert once == "ab"
        stream = ExLlamaV2StreamingGenerator(
            generator.model,
            ScriptedCache(generator.model, max_seq_len=256),  # type: ignore[arg-type]
            TOKENIZER,
        )
        stream.set_stop_conditions([stop])
        stream.begin_stream_ex(ids("z" * cut), GREEDY)
        text, eos = "", False
        while not eos:
            result = stream.stream_ex()
            text, eos = text + result["chunk"], result["eos"]
        assert text == "ab"


@pytest.mark.covers("generators: stream-characters")
def test_characters_split_over_tokens_arrive_whole() -> None:
    """CJK characters and emoji do not become replacement characters."""
    raw = "日本語😀é한".encode()
    tokenizer = ScriptedTokenizer([bytes([b]) for b in sorted(set(raw))] + ["z"])
    answer = [tokenizer.pieces.index(bytes([b])) for b in raw]
    model = ScriptedModel(
        ScriptedConfig(vocab_size=tokenizer.get_vocab_size()),
        lambda c: answer[len(c) - 1] if len(c) <= len(answer) else tokenizer.eos_token_id,
    )
    generator = ExLlamaV2DynamicGenerator(model, ScriptedCache(model), tokenizer)
    one = ExLlamaV2DynamicJob(tokenizer.encode("z"), 40, gen_settings=GREEDY, stop_conditions=[2])
    results = run(generator, one)
    assert [r["text"] for r in results if "text" in r] == list("日本語😀é한")
    stream = ExLlamaV2StreamingGenerator(model, ScriptedCache(model), tokenizer)
    stream.begin_stream_ex(tokenizer.encode("z"), GREEDY)
    chunks = [stream.stream_ex()["chunk"] for _ in range(len(answer))]
    assert [c for c in chunks if c] == list("日本語😀é한")


class Only(ExLlamaV2Filter):
    """Allows these ids, always."""

    def __init__(self, *allowed: int) -> None:
        super().__init__(None, None)
        self.allowed = set(allowed)

    def clone(self, c: Any = None) -> Only:
        return Only(*self.allowed)

    def begin(self, prefix_str: Any = "") -> None: ...

    def feed(self, token: Any) -> None: ...

    def next(self) -> tuple[set[int], set[int]]:
        return self.allowed, set()


def test_a_filter_that_leaves_no_token_ends_its_job_with_a_reason() -> None:
    """The other jobs continue."""
    generator = make()
    bad, good = job("abc", 5, filters=[Only(5), Only(6)]), job("abc", 5)
    generator.enqueue([bad, good])
    results = drain(generator)
    assert (results[bad][-1]["eos"], results[bad][-1]["eos_reason"]) == (True, "filter_dead_end")
    assert results[good][-1]["new_tokens"] == 5


@pytest.mark.covers("generators: filter-ends", "generators: filter-prefix")
def test_a_select_filter_without_a_prefix_ends_with_an_option() -> None:
    """With and without regard to case."""
    for insensitive in (False, True):
        options = ["hello there", "hey", "Good day" if insensitive else "good day"]  # tokens are small letters
        chosen = ExLlamaV2SelectFilter(None, TOKENIZER, options, case_insensitive=insensitive)
        last = run(make(), job("z", 30, filters=[chosen], stop_conditions=[EOS]))[-1]
        assert last["full_completion"].lower() in [option.lower() for option in options]
        assert last["eos_reason"] in ("end_filter", "stop_token")


class Counted(Only):
    """Ids that leave another rest by 3 at every place: one token too many or too few, and it allows others."""

    def clone(self, c: Any = None) -> Counted:
        return Counted()

    def begin(self, prefix_str: Any = "") -> None:
        self.fed = 0

    def feed(self, token: Any) -> None:
        assert int(token) % 3 == self.fed % 3
        self.fed += 1

    def next(self) -> tuple[set[int], set[int]]:
        return set(range(3 + self.fed % 3, VOCAB, 3)), set()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [lambda: Only(*(i for i in range(3, VOCAB) if i % 3)), Counted])
@pytest.mark.parametrize("how", ["ngram", "model"])
def test_a_filter_with_drafts_is_the_filter_alone(how: str, kind: Any) -> None:
    """Byte for byte, and the guesses are made."""
    guessed = 0
    for seed in range(trials(6, 2)):
        wide = Settings(temperature=1.0, top_k=0, top_p=0)
        got = []
        for generator in (make(), speculate(how)):
            results = run(generator, job("abcabcab", 40, filters=[kind()], gen_settings=wide, seed=seed))
            assert "exception" not in results[-1]
            got.append(streamed_tokens(results))
            guessed += results[-1].get("accepted_draft_tokens", 0) + results[-1].get("rejected_draft_tokens", 0)
        assert got[0] == got[1]
    assert guessed > 20


@pytest.mark.covers("generators: filter-base", "filters: border-types")
def test_a_filter_of_the_old_interface_still_runs() -> None:
    """No clone, no masks, no background methods; sets; tokens as tensors."""

    class Old:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def begin(self, prefix_str: str) -> None:
            self.seen = []

        def feed(self, token: torch.Tensor) -> None:
            self.seen.append(int(token[0][0]))

        def next(self) -> tuple[set[int], set[int]]:
            return ({5, 6}, set()) if len(self.seen) < 3 else ({7}, {7})

    results = run(make(), job("abc", 20, filters=[Old()]))
    assert len(streamed_tokens(results)) == 4
    assert streamed_tokens(results)[-1] == 7
    assert results[-1]["eos_reason"] == "end_filter"


def test_a_json_filter_ends_in_valid_json_or_says_it_was_cut(fable: ExLlamaV2DynamicGenerator) -> None:
    """An object with closed properties."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    whole = cut = 0
    for new, seed in [(n, s) for n in (3, 9, 60) for s in range(4)]:
        one = ExLlamaV2GrammarFilter(fable.model, fable.tokenizer, json_schema=json.dumps(schema))
        text, last = fable.generate(
            "As JSON: ", new, seed=seed, filters=[one], completion_only=True, add_bos=True, return_last_results=True
        )
        if last["eos_reason"] == "max_new_tokens":
            cut += 1
        else:
            whole += 1
            assert set(json.loads(text)) == {"name", "age"}
    assert whole >= 3
    assert cut >= 3


@pytest.mark.covers("generators: random-numbers")
def test_random_streams_of_a_batch_are_independent() -> None:
    """Equal prompts under different seeds do not move together."""
    flat = Settings(temperature=1.0, top_k=0, top_p=0, token_repetition_penalty=1.0)
    generator = make(cache_tokens=4096, max_batch_size=16)
    generator.model.scale = 0.0  # type: ignore[attr-defined]
    jobs = [job("a", 200, gen_settings=flat, seed=i) for i in range(16)]
    generator.enqueue(jobs)
    results = drain(generator)
    rows = np.array([streamed_tokens(results[one]) for one in jobs])
    correlation = np.corrcoef(rows)[~np.eye(16, dtype=bool)]
    assert np.abs(correlation).max() < 0.35
    assert abs(correlation.mean()) < 0.03
    alike = np.mean([rows[i] == rows[j] for i in range(16) for j in range(i)])
    assert alike < 3 / VOCAB


def test_bitwise_equality_of_repeat_batch_chunks_and_cache(fable: ExLlamaV2DynamicGenerator) -> None:
    """The same request gives the same bytes in any batch, with any chunk size, and from the cache."""
    prompt = fable.tokenizer.encode("Once upon a time, there was a small fox. " * 12, add_bos=True)
    seen = set()
    for batch, chunk, warm in ((1, None, False), (1, None, True), (32, None, True), (1, 256, False), (5, 256, True)):
        generator = ExLlamaV2DynamicGenerator(
            fable.model,
            ExLlamaV2Cache(fable.model, max_seq_len=256 * 64),  # type: ignore[arg-type]
            fable.tokenizer,
            max_chunk_size=chunk,
        )
        for _ in range(1 + warm):
            one = ExLlamaV2DynamicJob(prompt, 16, seed=3, return_logits=True, return_probs=True)
            others = [ExLlamaV2DynamicJob(prompt[:, : 20 + i], 16, seed=i) for i in range(batch - 1)]
            generator.enqueue([*others, one])
            results = drain(generator)[one]
        parts = [torch.cat([r[k] for r in results if k in r], 1) for k in ("token_ids", "token_probs", "logits")]
        seen.add(b"".join(part.contiguous().numpy().tobytes() for part in parts))
    assert len(seen) == 1


@pytest.mark.full
def test_ten_thousand_requests_leave_nothing_and_get_no_slower() -> None:
    """With n-gram guesses."""
    model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=64))
    generator = ExLlamaV2DynamicGenerator(
        model,
        ScriptedCache(model, max_seq_len=1024),
        TOKENIZER,
        page_size=PAGE,
        max_batch_size=32,
        use_ngram_draft=True,
    )
    prompts = [ids(text) for text in ("ababab", "the fox", "xyxyxyxy", "z")]

    def serve(requests: int) -> float:
        """Seconds of the processor."""
        start = time.thread_time()
        generator.enqueue([ExLlamaV2DynamicJob(prompts[i % 4], 2, gen_settings=GREEDY) for i in range(requests)])
        drain(generator)
        return time.thread_time() - start

    tracemalloc.start()
    serve(1000)
    gc.collect()
    for _ in range(3):  # other threads of the process allocate too, but not each time
        before = tracemalloc.get_traced_memory()[0]
        serve(1000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        if grown < 50_000:
            break
    tracemalloc.stop()
    assert grown < 50_000, f"{grown} bytes stay from 1,000 requests"
    work, times = lines(lambda: serve(100)), [serve(1000) for _ in range(4)]
    for _ in range(4):
        times += [serve(1000) for _ in range(4)]
        if min(times[-4:]) < 2 * min(times[:4]):  # else the machine is in the way, or the next ones are slower still
            break
    else:
        pytest.fail(f"every four of these thousands take twice as long as the first: {times}")
    assert lines(lambda: serve(100)) < 1.02 * work
    check_pages(generator)


def test_samplers_do_not_stop_early(fable: ExLlamaV2DynamicGenerator) -> None:
    """XTC, DRY and the cuts never end a text by themselves."""
    assert isinstance(fable.model, ExLlamaV2)
    eos = fable.model.config.eos_token_ids[0]
    for extra in (
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"dry_multiplier": 1.0},
        {"min_p": 0.2, "tfs": 0.9, "typical": 0.9, "top_a": 0.2},
        {"mirostat": True},
    ):
        wide = Settings(temperature=1.0, top_k=0, top_p=0.95, **extra)
        wide.disallow_tokens(fable.tokenizer, [eos])
        one = ExLlamaV2DynamicJob(fable.tokenizer.encode("Once"), 60, gen_settings=wide, seed=1, stop_conditions=[eos])
        assert run(fable, one)[-1]["new_tokens"] == 60


@pytest.mark.covers("generators: async", "generators: draft-model")
def test_an_async_generator_with_a_draft_model() -> None:
    """The text is that of the model alone."""

    async def main() -> list[str]:
        config = ScriptedConfig(vocab_size=VOCAB, max_seq_len=256)
        model, draft = ScriptedModel(config), ScriptedModel(config)
        async with ExLlamaV2DynamicGeneratorAsync(
            model,
            ScriptedCache(model, max_seq_len=512),
            TOKENIZER,
            draft_model=draft,
            draft_cache=ScriptedCache(draft, max_seq_len=512),
            page_size=PAGE,
        ) as generator:
            jobs = [ExLlamaV2DynamicJobAsync(generator, ids("abc"), n, gen_settings=GREEDY) for n in (5, 17, 30)]
            return ["".join([r.get("text", "") async for r in job]) for job in jobs]

    assert asyncio.run(main()) == [
        make().generate("abc", n, gen_settings=GREEDY, completion_only=True) for n in (5, 17, 30)
    ]


def test_text_of_a_job_is_the_tokenizers_own(fable: ExLlamaV2DynamicGenerator) -> None:
    """The tokenizer alone decides how special tokens appear in the text."""
    tokenizer = fable.tokenizer
    for shown in (False, True):
        one = ExLlamaV2DynamicJob(tokenizer.encode("One day,", add_bos=True), 60, seed=2, decode_special_tokens=shown)
        results = run(fable, one)
        assert streamed_text(results) == tokenizer.decode(torch.tensor(streamed_tokens(results)), shown)
