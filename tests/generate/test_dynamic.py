"""The dynamic generator's promises, one at a time, on a scripted model that checks where every K/V comes from."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from counting import lines

from exl_generate import (
    CapacityError,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
    JobStateError,
    RequestError,
)
from exl_generate.testing import (
    ScriptedCache,
    ScriptedConfig,
    ScriptedModel,
    check_pages,
    drain,
    streamed_text,
    streamed_tokens,
)
from exl_generate.testing.small import EOS, TOKENIZER, VOCAB, ids, job, make, naive, run, says

Settings = ExLlamaV2Sampler.Settings


# ---- results ----


@pytest.mark.covers("generators: scripted-model")
def test_tokens_are_the_models_own() -> None:
    generator = make()
    results = run(generator, job("hello there, you", 20))
    assert streamed_tokens(results) == naive(generator, ids("hello there, you")[0].tolist(), 20)


@pytest.mark.covers(
    "generators: job-attributes",
    "generators: job-extra-outputs",
    "generators: result-keys",
    "generators: result-statistics",
)
def test_stages_and_keys_of_a_whole_life() -> None:
    generator = make(max_chunk_size=32)
    prompt = "abcdefghij" * 7
    one = job(prompt, 3, identifier="me", return_probs=True, return_top_tokens=3, return_logits=True)
    serial = generator.enqueue(one)
    results = drain(generator)[one]
    assert [r["stage"] for r in results] == ["started"] + ["prefill"] * 3 + ["streaming"] * 3
    assert {(r["serial"], r["identifier"], r["job"]) for r in results} == {(serial, "me", one)}
    assert [(r["curr_progress"], r["max_progress"]) for r in results[1:4]] == [(32, 69), (64, 69), (69, 69)]
    token = results[4]
    assert set(token) == {
        *("job", "stage", "eos", "serial", "identifier", "text", "token_ids"),
        *("token_probs", "top_k_tokens", "top_k_probs", "logits"),
    }
    assert token["token_ids"].shape == token["token_probs"].shape == (1, 1)
    assert token["top_k_tokens"].shape == token["top_k_probs"].shape == (1, 1, 3)
    assert token["logits"].shape == (1, 1, generator.padded_vocab_size)
    want = generator.model.logits(ids(prompt)[0].numpy())  # type: ignore[attr-defined]
    assert torch.equal(token["logits"][0, 0], torch.from_numpy(want)), "raw logits, before penalties"
    last = results[-1]
    assert set(last) - set(token) == {
        *("eos_reason", "full_completion", "new_tokens", "prompt_tokens", "time_enqueued", "time_prefill"),
        *("time_generate", "cached_pages", "cached_tokens"),
    }
    assert (last["eos"], last["eos_reason"], last["new_tokens"], last["prompt_tokens"]) == (
        True,
        "max_new_tokens",
        3,
        70,
    )
    assert last["full_completion"] == streamed_text(results) == one.full_completion
    assert min(last["time_enqueued"], last["time_prefill"], last["time_generate"]) >= 0


@pytest.mark.covers("generators: result-ends", "generators: scripted-model")
def test_stop_token_flushes_held_text_and_reports_itself_as_held() -> None:
    generator = make(says("hi\n", EOS, after=2))
    last = run(generator, job("ab", 10, stop_conditions=["\nuser", EOS]))[-1]
    assert last["full_completion"] == "hi\n"
    assert (last["eos_reason"], last["eos_triggering_token_id"], last["eos_triggering_token_str"]) == (
        "stop_token",
        EOS,
        "</s>",
    )
    assert last["held"]["token_ids"].tolist() == [[EOS]]
    assert last["new_tokens"] == 4


@pytest.mark.covers("generators: result-ends", "generators: stop-strings", "generators: scripted-model")
def test_stop_string_across_tokens_is_found_before_the_limit() -> None:
    results = run(
        make(says("hi", int(ids("x")[0, 0]), int(ids("y")[0, 0]), after=2)), job("ab", 4, stop_conditions=["xy"])
    )
    assert streamed_text(results) == "hi"
    last = results[-1]
    assert (last["eos_reason"], last["eos_triggering_string"], last["held"]) == ("stop_string", "xy", {"text": "xy"})
    assert len(streamed_tokens(results)) == last["new_tokens"] == 4


@pytest.mark.covers("generators: stop-strings")
def test_a_longer_stop_string_does_not_hide_a_shorter_one() -> None:
    results = run(make(says("abcq", after=1)), job("z", 10, stop_conditions=["abcd", "bc"]))
    assert (streamed_text(results), results[-1]["eos_triggering_string"]) == ("a", "bc")


@pytest.mark.covers("generators: result-keys")
def test_held_text_is_a_bare_streaming_result() -> None:
    results = run(make(says("hxqq", after=1)), job("z", 4, stop_conditions=["xylophone"]))
    streaming = [r.get("text") for r in results if r["stage"] == "streaming"]
    assert streaming == ["h", None, "xq", "q"]


def test_characters_split_over_tokens_arrive_whole() -> None:
    results = run(make(says("aé😀b", after=1)), job("z", 8))
    assert [r["text"] for r in results if "text" in r] == ["a", "é", "😀", "b"]
    assert [len(r["token_ids"][0]) for r in results if "token_ids" in r] == [1, 2, 4, 1]


def test_limit_inside_a_character_flushes_a_replacement() -> None:
    assert run(make(says("a😀", after=1)), job("z", 3))[-1]["full_completion"] == "a\ufffd"


@pytest.mark.covers("generators: job-lengths")
def test_min_new_tokens_holds_stop_tokens_off() -> None:
    results = run(make(says(EOS, EOS, EOS, EOS, after=1)), job("z", 9, min_new_tokens=3, stop_conditions=[EOS]))
    assert results[-1]["new_tokens"] == 4
    assert EOS not in streamed_tokens(results)


@pytest.mark.parametrize("new", [0, 1, 2, 31, 32, 33])
@pytest.mark.covers("generators: job-lengths")
def test_max_new_tokens_is_exact(new: int) -> None:
    last = run(make(), job("abc", new))[-1]
    assert (last["new_tokens"], last["eos_reason"]) == (new, "max_new_tokens")


def test_special_tokens_are_shown_only_on_request() -> None:
    script = says("a", TOKENIZER.bos_token_id, "b", after=1)
    assert run(make(script), job("z", 3))[-1]["full_completion"] == "ab"
    assert run(make(script), job("z", 3, decode_special_tokens=True))[-1]["full_completion"] == "a<s>b"


# ---- pages ----


@pytest.mark.covers(
    "generators: result-statistics",
    "generators: page-reuse",
    "generators: page-head-copy",
    "generators: scripted-model",
)
def test_prefix_cache_counts() -> None:
    generator = make()
    prompt = ("abcdefghijklmnop" * 5)[:70]
    cold, warm = (run(generator, job(prompt, 1))[-1] for _ in range(2))
    other = run(generator, job(prompt[:60] + "zzzzzzzzzz", 1))[-1]
    assert (cold["cached_tokens"], warm["cached_tokens"], other["cached_tokens"]) == (0, 69, 60)
    assert (cold["cached_pages"], warm["cached_pages"], other["cached_pages"]) == (0, 4, 3)


def test_a_prompt_is_one_pass_and_a_warm_one_its_last_token() -> None:
    """The pass over a prompt has the logits for the first token."""
    generator = make()
    for expected in ((1, 48, True), (1, 1, False)):
        generator.model.calls.clear()  # type: ignore[attr-defined]
        run(generator, job("abcdefgh" * 6, 1))
        assert generator.model.calls == [expected]  # type: ignore[attr-defined]


@pytest.mark.covers("generators: page-sharing")
def test_jobs_started_together_compute_a_common_prefix_once() -> None:
    generator = make()
    jobs = [job("abcdefgh" * 6 + tail, 2) for tail in ("a", "bb", "ccc")]
    generator.enqueue(jobs)
    drain(generator)
    prefilled = sum(q for _, q, preprocess in generator.model.calls if preprocess)  # type: ignore[attr-defined]
    assert prefilled == 48 + 1 + 2 + 3


@pytest.mark.covers("generators: page-reuse", "generators: page-duplicates")
def test_generated_text_is_reused_as_a_prompt() -> None:
    generator = make()
    first = run(generator, job("hello there", 60))[-1]
    tokens = ids("hello there")[0].tolist() + naive(generator, ids("hello there")[0].tolist(), 60)
    again = ExLlamaV2DynamicJob(torch.tensor([tokens]), 1, gen_settings=Settings.greedy())
    last = run(generator, again)[-1]
    assert first["cached_tokens"] == 0
    assert last["cached_tokens"] == len(tokens) - 1


@pytest.mark.covers("generators: page-reuse")
def test_a_prefix_is_evicted_after_what_follows_it() -> None:
    generator = make(cache_tokens=96)
    run(generator, job("abcdefgh" * 8, 8))
    run(generator, job("zyxw" * 8, 8))
    assert run(generator, job("abcdefgh" * 8, 8))[-1]["cached_pages"] >= 2


@pytest.mark.covers("generators: page-reuse")
def test_an_unused_reservation_evicts_nothing() -> None:
    generator = make(says(EOS, after=8), cache_tokens=160)
    run(generator, job("abcdefgh" * 8, 1))
    assert run(generator, job("z" * 8, 120, stop_conditions=[EOS]))[-1]["new_tokens"] == 1
    assert run(generator, job("abcdefgh" * 8, 1))[-1]["cached_tokens"] == 63


@pytest.mark.parametrize(("over", "fits"), [(-1, True), (0, True), (1, False)])
@pytest.mark.covers("generators: job-checks")
def test_prompt_and_output_exactly_at_the_cache_size(over: int, fits: bool) -> None:
    """Page arithmetic is exact at the limit."""
    generator = make(cache_tokens=64)
    one = job("abcdefgh" * 5, 24 + over)
    if not fits:
        with pytest.raises(CapacityError, match="takes 5 pages of 16; the cache has 4"):
            generator.enqueue(one)
        return
    assert run(generator, one)[-1]["new_tokens"] == 24 + over


@pytest.mark.covers("generators: unpaged")
def test_unpaged_mode_reuses_the_last_sequence() -> None:
    generator = make(paged=False)
    for text, cached in (("abcdefgh" * 6, 0), ("abcdefgh" * 6 + "more", 48), ("abcdefzz", 6)):
        results = run(generator, job(text, 4))
        assert results[-1]["cached_tokens"] == cached
        assert streamed_tokens(results) == naive(generator, ids(text)[0].tolist(), 4)


# ---- scheduling ----


@pytest.mark.covers("generators: dynamic-queue", "generators: dynamic-counts")
def test_jobs_queue_up_and_all_finish() -> None:
    generator = make(cache_tokens=128, max_batch_size=3)
    jobs = [job("abc" * (1 + i % 5), 5 + i % 11) for i in range(40)]
    generator.enqueue(jobs)
    most = 0
    finished = 0
    while generator.num_remaining_jobs():
        finished += sum(r["eos"] for r in generator.iterate())
        check_pages(generator)
        most = max(most, generator.num_active_jobs())
    assert (finished, most) == (40, 3)


@pytest.mark.covers("generators: prompt-chunks")
def test_a_long_prompt_does_not_stall_running_streams() -> None:
    generator = make(max_chunk_size=16)
    stream = job("a", 30)
    generator.enqueue(stream)
    generator.iterate()
    prompts = [job(letter * 80, 1) for letter in "xyz"]
    generator.enqueue(prompts)
    calls: list[tuple[int, int, bool]] = generator.model.calls  # type: ignore[attr-defined]
    for _ in range(12):
        before = len(calls)
        results = generator.iterate()
        assert [r["stage"] for r in results if r["job"] is stream] == ["streaming"]
        assert 0 < sum(q for _, q, pre in calls[before:] if pre) <= 16
    assert not all(one.is_finished for one in prompts)


@pytest.mark.covers("generators: page-duplicates")
def test_pages_that_two_jobs_complete_alike_become_one() -> None:
    generator = make()
    twins = [job("hello", 60) for _ in range(2)]
    generator.enqueue(twins)
    for _ in range(50):
        generator.iterate()
        check_pages(generator)
    full = (len(twins[0].sequence) - 1) // 16
    blocks = [one.sequence.block.tolist() for one in twins]
    assert full == 3
    assert blocks[0][:full] == blocks[1][:full]
    assert blocks[0][full:] != blocks[1][full:]
    assert len({page.index for one in twins for page in one.sequence.allocated_pages}) == full + 2


@pytest.mark.parametrize(("max_skips", "overtaken"), [(0, 0), (2, 2), (None, 5)])
@pytest.mark.covers("generators: job-overtaking")
def test_small_jobs_overtake_a_big_one_a_limited_number_of_times(max_skips: int | None, overtaken: int) -> None:
    generator = make(cache_tokens=96, max_batch_size=8)
    generator.enqueue(job("abc", 40))
    generator.iterate()
    big = job("d" * 40, 40, max_skips=max_skips)
    small = [job("e", 6) for _ in range(5)]
    generator.enqueue([big, *small])
    started = [r["job"] for _ in range(60) for r in generator.iterate() if r["stage"] == "started"]
    assert started.index(big) == overtaken


@pytest.mark.covers("generators: job-overtaking")
def test_a_waiting_prompt_costs_a_step_little_however_long_it_is() -> None:
    """The generator looks at it in every step, but not page by page."""
    generator = make(cache_tokens=4096, model_len=4096)
    generator.enqueue(job("abc", 1000))
    for _ in range(3):
        generator.iterate()
    alone = lines(generator.iterate)
    generator.enqueue([job(letter * 3500, 8, max_skips=None) for letter in "defghijklmnopqrst"])
    generator.iterate()
    assert lines(generator.iterate) - alone < 17 * 250  # 57,000 page by page
    assert generator.num_pending_jobs() == 17


# ---- generate ----


@pytest.mark.covers("generators: generate-prompts", "generators: random-numbers")
def test_prompt_i_draws_with_seed_plus_i() -> None:
    generator, wide = make(), Settings(temperature=2.0, top_k=0, top_p=0.0)
    together = generator.generate(["abc", "abc", "the"], 12, gen_settings=wide, seed=5)
    alone = [
        generator.generate(text, 12, gen_settings=wide, seed=5 + i) for i, text in enumerate(["abc", "abc", "the"])
    ]
    assert together == alone
    assert together[0] != together[1]


@pytest.mark.covers("generators: generate-prompts", "generators: generate-results")
def test_generate_shapes() -> None:
    generator = make()
    text = generator.generate("abc", 5, gen_settings=Settings.greedy())
    assert text.startswith("abc")
    only = generator.generate("abc", 5, gen_settings=Settings.greedy(), completion_only=True)
    assert text == "abc" + only
    texts, last = generator.generate(
        ["abc", "the"], 5, gen_settings=[Settings.greedy(), Settings()], return_last_results=True
    )
    assert texts[0] == text
    assert [r["eos_reason"] for r in last] == ["max_new_tokens"] * 2
    assert generator.generate([], 5) == []
    one, result = generator.generate("abc", 5, seed=1, return_last_results=True, return_probs=True, identifier=7)
    assert isinstance(one, str)
    assert (result["identifier"], result["token_probs"].shape) == (7, (1, 1))


@pytest.mark.covers("generators: random-numbers")
def test_seeds_count_up_over_the_prompts() -> None:
    generator = make()
    batch = generator.generate(["abc"] * 4, 12, seed=40)
    assert batch == [generator.generate("abc", 12, seed=40 + i) for i in range(4)]
    assert len(set(batch)) > 1


@pytest.mark.covers("generators: generate-isolation")
def test_generate_leaves_other_jobs_their_results() -> None:
    generator = make()
    other = job("the", 4)
    generator.enqueue(other)
    generator.generate("abc", 12)
    results = drain(generator)[other]
    assert [r["stage"] for r in results] == ["started", "prefill"] * 0 + ["started"] + ["streaming"] * 4


@pytest.mark.covers("generators: generate-isolation")
def test_a_refused_prompt_leaves_nothing_in_the_queue() -> None:
    generator = make()
    with pytest.raises(CapacityError):
        generator.generate(["abc", "a" * 300], 5)
    with pytest.raises(RequestError):
        generator.generate(["abc", ""], 5)
    assert generator.num_remaining_jobs() == 0
    check_pages(generator)


@pytest.mark.covers("generators: generate-results")
def test_abort_before_and_during() -> None:
    generator = make()
    event = threading.Event()
    event.set()
    assert generator.generate("abc", 5, abort_event=event, return_last_results=True) is None
    event.clear()
    seen: list[int] = []

    def script(context: list[int]) -> None:
        seen.append(len(context))
        if len(context) > 10:
            event.set()

    generator.model.script = script  # type: ignore[attr-defined]
    other = job("the", 4)
    generator.enqueue(other)
    assert generator.generate(["abc", "ab"], 100, abort_event=event) is None
    assert max(seen) < 14
    assert drain(generator)[other][-1]["new_tokens"] == 4
    check_pages(generator)


@pytest.mark.covers("generators: generate-isolation")
def test_generate_refuses_unknown_arguments() -> None:
    with pytest.raises(TypeError, match="temperatur"):
        make().generate("abc", 5, temperatur=1)


@pytest.mark.covers("generators: dynamic-warmup-reset")
def test_warmup_leaves_a_cold_cache() -> None:
    generator = make()
    generator.warmup()
    assert all(page.valid == 0 for page in generator.page_table.pages)


# ---- cancel ----


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 6])
@pytest.mark.covers("generators: dynamic-queue")
def test_cancel_in_every_phase(rounds: int) -> None:
    """Queued, prefill, first token, decode: the others go on, the pages return."""
    generator = make(max_chunk_size=16, max_batch_size=2)
    gone, stays = job("abcdefgh" * 6, 50, stop_conditions=["no such thing"]), job("the", 9)
    generator.enqueue([gone, stays])
    for _ in range(rounds):
        generator.iterate()
    generator.cancel(gone)
    check_pages(generator)
    last = [r for r in generator.iterate() if r["job"] is gone]
    assert [(r["eos"], r["eos_reason"]) for r in last] == [(True, "cancelled")]
    drain(generator)
    assert stays.new_tokens == 9
    generator.cancel(gone)
    generator.cancel(stays)
    assert generator.iterate() == []
    check_pages(generator)


@pytest.mark.covers("generators: dynamic-queue")
def test_clear_queue_returns_everything() -> None:
    generator = make(max_batch_size=2)
    generator.enqueue([job("abc", 9) for _ in range(5)])
    generator.iterate()
    generator.clear_queue()
    assert (generator.num_remaining_jobs(), generator.iterate()) == (0, [])
    check_pages(generator)


# ---- refusals ----


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: ExLlamaV2DynamicJob(torch.zeros(1, 0, dtype=torch.int64), 5), RequestError, "empty"),
        (lambda: ExLlamaV2DynamicJob(torch.zeros(2, 3, dtype=torch.int64), 5), RequestError, "shape"),
        (lambda: ExLlamaV2DynamicJob(torch.zeros(1, 3), 5), RequestError, "float32"),
        (lambda: ExLlamaV2DynamicJob("text", 5), RequestError, "str"),  # type: ignore[arg-type]
        (lambda: job("a", -1), RequestError, "max_new_tokens"),
        (lambda: job("a", 1, stop_conditions="text"), RequestError, "text"),
        (lambda: job("a", 1, stop_conditions=["ok", ""]), RequestError, "''"),
        (lambda: job("a", 1, stop_conditions=[None]), RequestError, "None"),
        (lambda: job("a", 1, banned_strings="text"), RequestError, "banned_strings"),
        (lambda: job("a", 1, banned_strings=5), RequestError, "banned_strings"),
        (lambda: job("a", 1, filters=object()), RequestError, "filters"),
        (lambda: job("a", 1, token_healing="false"), RequestError, "token_healing"),
        (lambda: job("a", 1, return_probs="yes"), RequestError, "return_probs"),
        (lambda: job("a", 1, decode_special_tokens=2), RequestError, "decode_special_tokens"),
        (lambda: job("a", 1, embeddings=[object()]), RequestError, "embeddings"),
        (lambda: ExLlamaV2DynamicJob([ids("a"), ids("b")], 5), RequestError, "cfg_scale"),
        (lambda: ExLlamaV2DynamicJob([ids("a")] * 3, 5), RequestError, "3 sequences"),
        (lambda: job("a", 1, gen_settings=Settings(cfg_scale=2.0)), RequestError, "go together"),
    ],
)
@pytest.mark.covers("generators: job-checks")
def test_malformed_jobs_are_refused_at_construction(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


@pytest.mark.covers("generators: job-checks")
def test_enqueue_refuses_what_can_never_run() -> None:
    generator = make(model_len=64)
    with pytest.raises(CapacityError, match="limit is 64"):
        generator.enqueue(job("a" * 60, 5))
    with pytest.raises(RequestError, match=f"token id {VOCAB}"):
        generator.enqueue(ExLlamaV2DynamicJob(torch.tensor([[3, VOCAB]]), 5))
    with pytest.raises(RequestError, match="token id -1"):
        generator.enqueue(ExLlamaV2DynamicJob(torch.tensor([[3, -1]]), 5))
    with pytest.raises(RequestError, match="jobs"):
        generator.enqueue("abc")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="jobs, not NoneType"):
        generator.enqueue(None)  # type: ignore[arg-type]
    used = job("abc", 2)
    run(generator, used)
    with pytest.raises(JobStateError, match="enqueued before"):
        generator.enqueue(used)
    fresh = job("abc", 2)
    with pytest.raises(CapacityError):
        generator.enqueue([fresh, job("a" * 60, 5)])
    assert (generator.num_remaining_jobs(), fresh.serial_number) == (0, None)
    assert run(generator, fresh)[-1]["new_tokens"] == 2


@pytest.mark.covers("generators: dynamic-construction")
def test_generator_refuses_wrong_sizes() -> None:
    model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB))
    other = ScriptedModel(ScriptedConfig(vocab_size=VOCAB + 1025))
    cases: list[tuple[dict[str, Any], int, int, type[Exception], str]] = [
        ({}, 1, 300, CapacityError, "multiple of 256"),
        ({}, 1, 128, CapacityError, "use 256"),
        ({}, 2, 256, RequestError, "batch_size 2"),
        ({"max_chunk_size": 50, "page_size": 16}, 1, 256, RequestError, "multiple of 16"),
        ({"max_chunk_size": 1024, "page_size": 16}, 1, 256, RequestError, "at most 64"),
        ({"max_seq_len": 1024, "page_size": 16}, 1, 256, RequestError, "512"),
        ({"max_batch_size": 1000, "page_size": 16}, 1, 256, RequestError, "max_q_size"),
        ({"use_ngram_draft": True, "num_draft_tokens": 8}, 1, 256, RequestError, "max_q_size - 1 = 7"),
        ({"use_ngram_draft": True, "max_ngram": 1}, 1, 256, RequestError, "max_ngram"),
        ({"draft_model": model}, 1, 256, RequestError, "go together"),
        ({"draft_model": model, "draft_cache": ScriptedCache(model, 1, 512)}, 1, 256, RequestError, "must be equal"),
        ({"draft_model": other, "draft_cache": ScriptedCache(other, 1, 256)}, 1, 256, RequestError, "at most 1024"),
    ]
    for kw, batch, length, error, message in cases:
        with pytest.raises(error, match=message):
            ExLlamaV2DynamicGenerator(model, ScriptedCache(model, batch, length), TOKENIZER, **kw)
    with pytest.raises(RequestError, match="another model"):
        ExLlamaV2DynamicGenerator(model, ScriptedCache(ScriptedModel()), TOKENIZER)
    with pytest.raises(TypeError):
        ExLlamaV2DynamicGenerator(model, ScriptedCache(model), TOKENIZER, max_sequence=3)  # type: ignore[call-arg]


def test_state_changes_that_do_not_fit_are_refused() -> None:
    generator = make()
    generator.enqueue(job("abc", 5))
    generator.iterate()
    with pytest.raises(JobStateError, match="1 jobs are running"):
        generator.reset_page_table()


def test_many_threads_may_submit_at_once() -> None:
    """Jobs come from sixteen threads."""
    generator = make(cache_tokens=1024)
    want = generator.generate("abc", 6, gen_settings=Settings.greedy())
    got: list[str] = []
    threads = [
        threading.Thread(target=lambda: got.append(generator.generate("abc", 6, gen_settings=Settings.greedy())))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [want] * 16
    check_pages(generator)
