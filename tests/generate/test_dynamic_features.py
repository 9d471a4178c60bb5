"""Banned strings, guesses, healing, CFG, hooks and filters in the dynamic generator, on a scripted model."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from effort import trials
from internals import has_redirects

from exl_filters import ExLlamaV2Filter
from exl_generate import (
    CapacityError,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
    NoCandidatesError,
)
from exl_generate.testing import (
    check_pages,
    drain,
    streamed_text,
    streamed_tokens,
)
from exl_generate.testing.scripted import ScriptedCache, ScriptedConfig, ScriptedModel
from exl_generate.testing.small import (
    EOS,
    PAGE,
    PIECES,
    TOKENIZER,
    VOCAB,
    AsAsked,
    ids,
    job,
    make,
    naive,
    run,
    says,
    speculate,
)

Settings = ExLlamaV2Sampler.Settings


# ---- banned strings ----


@pytest.mark.covers("generators: banned-strings", "generators: scripted-model")
def test_banned_string_is_rewound_and_an_alternative_found() -> None:
    wanted = ids("qabc!")[0].tolist()
    generator = make(lambda context: next((w for i, w in enumerate(wanted) if context == wanted[:i]), None))
    results = run(generator, job("q", 12, banned_strings=["aBC"]))
    assert "abc" not in results[-1]["full_completion"].lower()
    hit = next(r for r in results if "suppressed_text" in r)
    assert (hit["suppressed_text"], hit["suppressed_tokens"].shape) == ("abc", (1, 3))
    assert results[-1]["new_tokens"] == len(streamed_tokens(results)) == 12


@pytest.mark.covers("generators: banned-strings")
def test_banned_string_at_the_limit_is_not_emitted() -> None:
    results = run(make(says("abc", after=1)), job("z", 3, banned_strings=["bc"]))
    assert "bc" not in results[-1]["full_completion"]
    assert results[-1]["new_tokens"] == 3


class Alternating(ExLlamaV2Filter):
    """Even ids at even places, odd ones at odd places: what it allows hangs on how many tokens it believes to be
    there."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.count = 0

    def clone(self, c: Any = None) -> Alternating:
        return type(self)()

    def begin(self, prefix_str: Any = "") -> None:
        self.count = 0

    def feed(self, token: Any) -> None:
        assert int(token) % 2 == self.count % 2, "a token at another place than it was allowed for"
        self.count += 1

    def next(self) -> tuple[set[int], set[int]]:
        return set(range(4 - self.count % 2, VOCAB, 2)), set()


class Undoing(Alternating):
    """One that can take tokens back itself, rather than being fed all of them again."""

    def rewind(self, n: int) -> None:
        self.count -= n


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Alternating, Undoing])
@pytest.mark.parametrize("how", ["plain", "ngram", "model"])
@pytest.mark.covers("generators: banned-strings", "filters: rewind")
def test_a_rewind_takes_the_filters_back(how: str, kind: type[Alternating]) -> None:
    rewinds, tries = 0, trials(8, 2)
    for seed in range(tries):
        settings = Settings(temperature=2.0, top_k=0, top_p=0.0)
        generator = make() if how == "plain" else speculate(how)
        bans = [a + b for a in "acegikmoqs" for b in "bdfhjlnprt"]
        one = job("abab", 40, gen_settings=settings, seed=seed, filters=[kind()], banned_strings=bans)
        results = run(generator, one)
        tokens = streamed_tokens(results)
        rewinds += sum("suppressed_text" in r for r in results)
        assert "exception" not in results[-1]
        assert [t % 2 for t in tokens] == [i % 2 for i in range(40)]
        assert not any(ban in streamed_text(results) for ban in bans)
    assert rewinds > tries


@pytest.mark.parametrize("before", range(2, 18))
@pytest.mark.covers("generators: page-publication", "generators: banned-strings")
def test_a_page_that_may_be_taken_back_is_not_published(before: int) -> None:
    """exllamav2 goes wrong where a banned string crosses a page: here it fills one, from every place."""
    ban, prompt = "abcdefghijklmnopqrstuvwx", "z" * before
    generator = make(says(ban, "the", after=before))
    one = job(prompt, 45, banned_strings=[ban])
    generator.enqueue(one)
    results: list[dict[str, Any]] = []
    while not one.is_finished:
        results += generator.iterate()
        check_pages(generator)
        shown = before + sum(r["token_ids"].shape[1] for r in results if "token_ids" in r)
        assert one.is_finished or len(one.sequence.labels) * 16 <= max(shown - 1, before - 1)
    assert [r["suppressed_text"] for r in results if "suppressed_text" in r] == [ban]
    assert ban not in streamed_text(results)
    generator.model.script = None  # type: ignore[attr-defined]
    for text in (prompt + ban + "zz", prompt + one.full_completion):
        tokens = ids(text)[0].tolist()
        assert streamed_tokens(run(generator, job(text, 4))) == naive(generator, tokens, 4)


@pytest.mark.covers("generators: empty-choice")
def test_banning_everything_ends_the_job_with_an_error() -> None:
    generator = make()
    everything = [p if isinstance(p, str) else "\ufffd" for p in PIECES]
    rest = Settings.greedy()
    rest.disallow_tokens(TOKENIZER, [0, 1, EOS, *range(VOCAB - 6, VOCAB)])
    one = job("z", 5, banned_strings=everything, min_new_tokens=5, stop_conditions=[0, 1, EOS], gen_settings=rest)
    last = run(generator, one)[-1]
    assert last["eos_reason"] == "error"
    assert isinstance(last["exception"], NoCandidatesError)


# ---- speculation ----


@pytest.mark.covers("generators: draft-model", "generators: result-statistics")
def test_a_perfect_draft_model_saves_four_passes_of_five() -> None:
    generator = speculate("model")
    results = run(generator, job("hello", 51))  # the pass over the prompt gives the first token
    assert streamed_tokens(results) == naive(generator, ids("hello")[0].tolist(), 51)
    last = results[-1]
    assert (last["accepted_draft_tokens"], last["rejected_draft_tokens"], last["new_tokens"]) == (40, 0, 51)
    assert sum(not pre for _, _, pre in generator.model.calls) == 10  # type: ignore[attr-defined]


@pytest.mark.covers("generators: ngram-drafts")
def test_ngram_drafts_catch_repetition() -> None:
    loop = ids("abcdefgh")[0].tolist()
    generator = speculate("ngram", lambda context: loop[len(context) % 8])
    last = run(generator, job("x", 80))[-1]
    assert last["new_tokens"] == 80
    assert last["accepted_draft_tokens"] > 50
    assert sum(not pre for _, _, pre in generator.model.calls) < 30  # type: ignore[attr-defined]


@pytest.mark.parametrize("new", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("how", ["ngram", "model"])
@pytest.mark.covers("generators: job-lengths", "generators: draft-model", "generators: ngram-drafts")
def test_drafting_keeps_max_new_tokens_exact(how: str, new: int) -> None:
    assert run(speculate(how), job("ab", new))[-1]["new_tokens"] == new


@pytest.mark.parametrize("more", [-5, 40])
def test_a_draft_model_may_have_fewer_or_more_ids(more: int, caplog: pytest.LogCaptureFixture) -> None:
    """Models of one family differ by padding and added tokens: ids that a draft does not have are no error."""
    highest = [VOCAB - 1, 7, VOCAB - 5, 8]
    model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=256), lambda c: highest[len(c) % 4])
    config = ScriptedConfig(vocab_size=VOCAB + more, max_seq_len=256)
    draft = ScriptedModel(config, lambda c: highest[len(c) % 4] % config.vocab_size)
    caches = [ScriptedCache(one, max_seq_len=512) for one in (model, draft)]
    generator = ExLlamaV2DynamicGenerator(
        model, caches[0], TOKENIZER, page_size=PAGE, draft_model=draft, draft_cache=caches[1]
    )
    generator.drafter.length = AsAsked(generator.num_draft_tokens)
    prompt = torch.tensor([[VOCAB - 1, 5, VOCAB - 2]])
    results = run(generator, ExLlamaV2DynamicJob(prompt, 60, gen_settings=Settings.greedy()))
    assert streamed_tokens(results) == naive(generator, prompt[0].tolist(), 60)
    assert results[-1]["accepted_draft_tokens"] > 10
    assert not caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        Settings(temperature=2.0, top_k=0, top_p=0.0),
        Settings(temperature=1.5, top_k=8, token_repetition_penalty=1.3, dry_multiplier=0.8),
        Settings(top_k=1, token_repetition_penalty=2.0),
    ],
    ids=["sampled", "penalties", "greedy with a penalty"],
)
def test_a_draft_model_draws_with_the_random_numbers_of_the_tokens_it_guesses(settings: Any) -> None:
    """A draft model that equals the model is never wrong, whatever the settings."""
    last = run(speculate("model"), job("hello", 51, gen_settings=settings, seed=5))[-1]
    assert (last["accepted_draft_tokens"], last["rejected_draft_tokens"]) == (40, 0)


def test_a_failing_draft_model_costs_speed_only(caplog: pytest.LogCaptureFixture) -> None:
    generator = speculate("model")
    assert isinstance(generator.draft_model, ScriptedModel)
    generator.draft_model.faults[int(ids("a")[0, 0])] = RuntimeError("draft died")
    results = run(generator, job("hello, this is a", 30))
    assert streamed_tokens(results) == naive(generator, ids("hello, this is a")[0].tolist(), 30)
    assert "draft died" in caplog.text


# ---- healing, CFG, hooks ----


@pytest.mark.covers("generators: healing")
def test_healing_regenerates_the_last_token() -> None:
    generator = make(lambda c: int(ids("the")[0, 0]) if len(c) == 2 else None)
    results = run(generator, job("abt", 4, token_healing=True, return_probs=True))
    assert streamed_text(results)[:2] == "he"
    assert streamed_tokens(results)[0] == ids("the")[0, 0]
    last = results[-1]
    assert (last["new_tokens"], len(streamed_tokens(results)), last["prompt_tokens"]) == (4, 5, 3)


@pytest.mark.covers("generators: healing")
def test_healing_the_same_token_adds_no_text() -> None:
    generator = make(lambda c: int(ids("t")[0, 0]) if len(c) == 2 else None)
    healed = generator.generate("abt", 6, token_healing=True, gen_settings=Settings.greedy())
    assert healed == generator.generate("abt", 6, gen_settings=Settings.greedy())


@pytest.mark.covers("generators: healing", "filters: healing")
def test_healing_needs_two_tokens_and_works_with_filters() -> None:
    assert run(make(), job("a", 3, token_healing=True))[-1]["prompt_tokens"] == 1
    from exl_filters import ExLlamaV2SelectFilter

    generator = make()
    filters = [ExLlamaV2SelectFilter(None, TOKENIZER, ["hey", "hello"])]
    one = job("say t", 12, token_healing=True, filters=filters, stop_conditions=[EOS])
    results = run(generator, one)
    assert streamed_text(results) in ("hey", "hello")
    assert results[-1]["eos_reason"] == "end_filter"


def begin_alike(text: str) -> list[int]:
    """Ids whose bytes begin with those of the text's last token."""
    last = TOKENIZER.pieces[int(ids(text)[0, -1])]
    return [i for i, piece in enumerate(TOKENIZER.pieces) if i > 2 and piece.startswith(last)]


@pytest.mark.parametrize("text", ["say t", "qa ", "it is\n", "a fox", "so t", "x t", "mix", "a x"])
@pytest.mark.covers("generators: healing")
def test_healing_chooses_the_best_of_the_ids_that_begin_alike(text: str) -> None:
    generator = make()
    first = streamed_tokens(run(generator, job(text, 3, token_healing=True)))[0]
    row = generator.model.logits(ids(text)[0, :-1].numpy())  # type: ignore[attr-defined]
    assert first == max(begin_alike(text), key=lambda i: row[i])


@pytest.mark.parametrize("negative", ["no t", "a", "the quick"])
@pytest.mark.covers("generators: healing", "generators: cfg-pairs")
def test_healing_a_pair_takes_the_last_token_of_both_prompts_away(negative: str) -> None:
    """Both prompts are healed, as in exllamav2; a prompt of one token cannot be healed."""
    from exl_generate.sampling import transforms

    generator, rows = make(), [ids("say t"), ids(negative)]
    one = ExLlamaV2DynamicJob(rows, 3, token_healing=True, gen_settings=Settings.greedy(cfg_scale=1.8))
    got = streamed_tokens(run(generator, one))
    heals = rows[1].shape[1] > 1
    cut = [row[0, :-1] if heals else row[0] for row in rows]
    for place, token in enumerate(got):
        contexts = [np.array([*row.tolist(), *got[:place]]) for row in cut]
        mixed = transforms.cfg_mix(*(generator.model.logits(c) for c in contexts), 1.8)[:VOCAB]  # type: ignore[attr-defined, call-arg]
        assert token == max(begin_alike("say t") if heals and not place else range(VOCAB), key=lambda i: mixed[i])
    assert one.new_tokens == 3
    assert len(got) == 3 + heals


def test_prompt_plus_output_at_the_limit_with_healing() -> None:
    assert run(make(cache_tokens=64), job("a" * 40, 24, token_healing=True))[-1]["new_tokens"] == 24


@pytest.mark.covers("generators: cfg-pairs", "generators: cfg-mix")
def test_cfg_pair_against_the_definition() -> None:
    from exl_generate.sampling import transforms

    generator = make()
    positive, negative, scale = ids("the quick fox"), ids("a"), 1.8
    one = ExLlamaV2DynamicJob([positive, negative], 25, gen_settings=Settings.greedy(cfg_scale=scale))
    got = streamed_tokens(run(generator, one))
    output: list[int] = []
    for _ in range(25):
        rows = [generator.model.logits(np.array(p[0].tolist() + output)) for p in (positive, negative)]  # type: ignore[attr-defined]
        output.append(int(transforms.cfg_mix(rows[0], rows[1], scale)[:VOCAB].argmax()))
    assert got == output
    text = generator.generate(("the quick fox", "a"), 25, gen_settings=Settings.greedy(cfg_scale=scale))
    assert text == "the quick fox" + one.full_completion


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("torn", ["the quick fox", "a"])
@pytest.mark.covers("generators: cfg-pairs", "generators: failing-jobs", "generators: cfg-mix")
def test_a_broken_logit_of_either_prompt_ends_the_pair_alone(odd: float, torn: str, monkeypatch: Any) -> None:
    """Also where a filter would not allow that id: the mix of a pair goes over all of them."""
    from exl_filters import ExLlamaV2SelectFilter

    generator, start = make(), ids(torn)[0].tolist()
    model: Any = generator.model
    contexts: list[list[int]] = []
    whole, model.script = model.logits_of, contexts.append

    def logits(hashes: Any, wanted: Any) -> Any:
        rows = whole(hashes, wanted)
        for row, context in zip(rows, contexts[-len(rows) :], strict=True):
            if len(context) == len(start) + 2 and context[: len(start)] == start:
                row[VOCAB - 1] = odd
        return rows

    monkeypatch.setattr(model, "logits_of", logits)
    allowed = [ExLlamaV2SelectFilter(None, TOKENIZER, ["hello you there"])]
    settings = Settings.greedy(cfg_scale=1.5)
    pair = ExLlamaV2DynamicJob([ids("the quick fox"), ids("a")], 12, gen_settings=settings, filters=allowed)
    other = job("fox", 9)
    generator.enqueue([pair, other])
    results = drain(generator)
    assert len(streamed_tokens(results[pair])) == 2
    assert "NaN" in str(results[pair][-1]["exception"])
    assert len(streamed_tokens(results[other])) == 9
    check_pages(generator)


@pytest.mark.covers("generators: job-checks", "generators: cfg-pairs")
def test_cfg_pair_larger_than_the_cache_is_refused() -> None:
    """exllamav2 counted only the last sequence, and such a job waited for ever."""
    generator = make(cache_tokens=64)
    pair = ExLlamaV2DynamicJob([ids("ab" * 10), ids("cd" * 10)], 20, gen_settings=Settings(cfg_scale=2.0))
    with pytest.raises(CapacityError, match="6 pages"):
        generator.enqueue(pair)


@pytest.mark.covers("generators: hooks")
def test_hooks_see_and_replace_tokens() -> None:
    seen: list[tuple[int, float]] = []
    x = int(ids("x")[0, 0])

    def hook(result: Any) -> None:
        seen.append((int(result.sampled_token), float(result.sampled_prob)))
        assert result.logits.shape == (1, 1, 64)
        if len(seen) == 2:
            result.sampled_token = torch.tensor([[x]])

    for generator in (make(), speculate("model")):
        seen.clear()
        one = job("the", 6, gen_settings=Settings.greedy(post_sampling_hooks=[hook]))
        tokens = streamed_tokens(run(generator, one))
        assert tokens[1] == x != seen[1][0]
        assert tokens[2:] == naive(generator, ids("the")[0].tolist() + tokens[:2], 4)


@pytest.mark.covers("generators: hooks")
def test_hooks_run_in_order_and_each_sees_what_the_one_before_made() -> None:
    seen: list[tuple[str, int]] = []
    x, y = int(ids("x")[0, 0]), int(ids("y")[0, 0])

    def first(result: Any) -> None:
        seen.append(("first", int(result.sampled_token)))
        result.sampled_token = torch.tensor([[x]])

    def second(result: Any) -> None:
        seen.append(("second", int(result.sampled_token)))
        result.sampled_token = torch.tensor([[y]])

    one = job("the", 3, gen_settings=Settings.greedy(post_sampling_hooks=[first, second]))
    assert streamed_tokens(run(make(), one)) == [y, y, y]
    assert [name for name, _ in seen] == ["first", "second"] * 3
    assert [token for name, token in seen if name == "second"] == [x, x, x]


@pytest.mark.parametrize("fed", [True, False])
@pytest.mark.covers("generators: hooks")
def test_a_hook_says_whether_filters_see_the_token(fed: bool) -> None:
    """A token that no filter would allow, put in by a hook: filters that see it fail over it, others go on."""
    odd = 5

    def hook(result: Any) -> None:
        if int(result.sampled_token) == 7:
            result.sampled_token, result.feed_filters = torch.tensor([[odd]]), fed

    steps = [{6}, {7}, {8}, {9}]
    one = job("z", 10, filters=[AllowFilter(*steps)], gen_settings=Settings.greedy(post_sampling_hooks=[hook]))
    results = run(make(), one)
    if fed:
        assert (streamed_tokens(results), results[-1]["eos_reason"]) == ([6], "filter_error")
        assert "token 5 is not allowed" in str(results[-1]["exception"])
    else:  # it still waits at its second step, which the hook puts `odd` in the place of, to the end
        assert streamed_tokens(results) == [6, *[odd] * 9]


@pytest.mark.covers("generators: hooks")
def test_a_hook_that_substitutes_a_stop_token_stops() -> None:
    def hook(result: Any) -> None:
        result.sampled_token = torch.tensor([[EOS]])

    one = job("the", 6, stop_conditions=[EOS], gen_settings=Settings.greedy(post_sampling_hooks=[hook]))
    assert run(make(), one)[-1]["eos_reason"] == "stop_token"


# ---- filters ----


class AllowFilter(ExLlamaV2Filter):
    """Allows a fixed list of ids per step, then ends."""

    def __init__(self, *steps: set[int], fault: int = -1) -> None:
        super().__init__(None, None)
        self.steps, self.fault, self.at = steps, fault, 0

    def clone(self, c: Any = None) -> AllowFilter:
        return AllowFilter(*self.steps, fault=self.fault)

    def begin(self, prefix_str: Any = "") -> None:
        self.at = 0

    def feed(self, token: Any) -> None:
        self.at += 1

    def next(self) -> tuple[set[int], set[int]]:
        if self.at == self.fault:
            raise ZeroDivisionError("broken plugin")
        allowed = self.steps[min(self.at, len(self.steps) - 1)]
        return allowed, allowed if self.at == len(self.steps) - 1 else set()


@pytest.mark.covers("generators: filter-ends", "filters: call-order")
def test_filter_constrains_and_ends_the_job() -> None:
    steps = [{5, 6}, {7}, {8, 9}]
    results = run(make(), job("z", 10, filters=[AllowFilter(*steps)]))
    tokens = streamed_tokens(results)
    assert results[-1]["eos_reason"] == "end_filter"
    assert all(t in allowed for t, allowed in zip(tokens, steps, strict=True))


@pytest.mark.covers("generators: generate-prompts", "filters: sessions")
def test_one_list_of_filters_serves_several_prompts() -> None:
    generator = make()
    texts = generator.generate(["ab", "cd"], 10, filters=[[AllowFilter({5}, {6})], None], completion_only=True)
    assert texts[0] == "cd"
    assert len(texts[1]) > 2


@pytest.mark.parametrize(
    ("filters", "reason", "cause"),
    [
        ([AllowFilter({5}, {6}, {7}, fault=2)], "filter_error", "broken plugin"),
        ([AllowFilter({5}), AllowFilter({6})], "filter_dead_end", "no token"),
    ],
)
@pytest.mark.covers("generators: failing-jobs", "filters: failing-filters")
def test_a_failing_filter_ends_its_own_job_only(filters: list[Any], reason: str, cause: str) -> None:
    alone = streamed_tokens(run(make(), job("the", 12)))
    generator = make()
    good, bad = job("the", 12), job("ab", 12, filters=filters)
    generator.enqueue([bad, good])
    results = drain(generator)
    check_pages(generator)
    last = results[bad][-1]
    assert (last["eos"], last["eos_reason"]) == (True, reason)
    assert cause in f"{last['exception']} {last['exception'].__cause__}"
    assert streamed_tokens(results[good]) == alone


@pytest.mark.covers("generators: failing-jobs")
def test_a_failing_forward_ends_only_the_jobs_that_fail_alone() -> None:
    generator = make()
    poison = int(ids("!")[0, 0])
    generator.model.faults[poison] = RuntimeError("device lost a row")  # type: ignore[attr-defined]
    good, bad, prefilling = job("the", 6), job("a!", 6), job("ab!c", 6)
    generator.enqueue([good, bad, prefilling])
    results = drain(generator)
    check_pages(generator)
    for failed in (bad, prefilling):
        assert results[failed][-1]["eos_reason"] == "error"
        assert "device lost" in str(results[failed][-1]["exception"])
    assert results[good][-1]["new_tokens"] == 6


def test_finished_jobs_leave_nothing_behind() -> None:
    """Memory and time do not grow with the number of requests, with guesses and filters too."""
    for generator in (make(), speculate("ngram"), speculate("model")):
        for round_ in range(3):
            jobs = [job("abc" * n, 9, filters=[AllowFilter({5}, {6}, {7})], identifier=n) for n in range(1, 6)]
            generator.enqueue(jobs)
            if round_ == 1:
                generator.cancel(jobs[2])
            drain(generator)
            generator.generate(["abc", "the"], 5)
        alive = [weakref.ref(one) for one in jobs]
        del jobs
        gc.collect()
        assert [ref() for ref in alive] == [None] * 5
        assert not has_redirects(generator)
        check_pages(generator)
