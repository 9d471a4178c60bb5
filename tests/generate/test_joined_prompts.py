"""Prompts that one step computes go through the model together: how many passes, whose tokens, whose failure."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer, Intervention
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler, RequestError
from exl_generate.bundled import draft_model_dir
from exl_generate.dynamic.pages import PageTable
from exl_generate.testing import ScriptedLora, check_pages, drain, streamed_tokens
from exl_generate.testing.small import VOCAB, ids, job, make, naive, speculate

PROMPTS = ["hello there", "abc def abc", "xyz, you and me", "q"]


def passes(generator: ExLlamaV2DynamicGenerator) -> list[int]:
    """Tokens of each pass over prompts so far."""
    return [q for _, q, preprocess in generator.model.calls if preprocess]  # type: ignore[attr-defined]


def said(generator: ExLlamaV2DynamicGenerator, jobs: list[ExLlamaV2DynamicJob]) -> list[list[int]]:
    generator.enqueue(jobs)
    results = drain(generator)
    check_pages(generator)
    return [streamed_tokens(results[one]) for one in jobs]


def expected(generator: ExLlamaV2DynamicGenerator, new: int, **kw: Any) -> list[list[int]]:
    return [naive(generator, ids(prompt)[0].tolist(), new, **kw) for prompt in PROMPTS]


@pytest.mark.covers("generators: prompt-chunks")
def test_prompts_of_one_round_share_a_pass() -> None:
    generator = make()
    assert said(generator, [job(prompt, 5) for prompt in PROMPTS]) == expected(generator, 5)
    lengths = [ids(prompt).shape[1] for prompt in PROMPTS]
    assert passes(generator) == [sum(length for length in lengths if length > 1)]


def test_a_round_computes_no_more_than_its_budget() -> None:
    generator = make(max_chunk_size=16)
    prompts = ["abcdefgh" * 3, "hgfedcba" * 4]
    found = said(generator, [job(prompt, 3) for prompt in prompts])
    assert found == [naive(generator, ids(prompt)[0].tolist(), 3) for prompt in prompts]
    assert max(passes(generator)) <= 16


def test_tokens_whose_bits_do_not_depend_on_others_stay_among_themselves() -> None:
    """Short prompts run together up to so many tokens, longer ones together, as on a GPU."""
    generator = make()
    generator.model.invariant_tokens = lambda: 12  # type: ignore[method-assign]
    prompts = ["abc def abc", "hello there", "x" * 22, "qr", "z" * 24]
    jobs = [job(prompt, 3) for prompt in prompts]
    assert said(generator, jobs) == [naive(generator, ids(prompt)[0].tolist(), 3) for prompt in prompts]
    lengths = [ids(prompt).shape[1] - 1 for prompt in prompts]
    assert lengths == [10, 7, 21, 1, 23]
    assert sorted(passes(generator)) == [8 + 2, 11, 21 + 23], "long ones without the last token"


def test_adapters_part_them() -> None:
    generator, adapter = make(), ScriptedLora(3)
    jobs = [job(prompt, 4, loras=[adapter] if i % 2 else []) for i, prompt in enumerate(PROMPTS)]
    plain, adapted = expected(generator, 4), expected(generator, 4, loras=[adapter])
    assert said(generator, jobs) == [adapted[i] if i % 2 else plain[i] for i in range(len(PROMPTS))]
    assert len(passes(generator)) == 2


def hooked_model(pooled: list[list[int]]) -> ExLlamaV2:
    """A model with a hook that adds the content before its pass to everything in the pass."""
    model = ExLlamaV2(ExLlamaV2Config(str(draft_model_dir())))
    model.load()

    def pool(state: torch.Tensor, step: Any) -> torch.Tensor:
        pooled.append(list(state.shape))
        return state + state[:, :1]

    model.modules[3] = Intervention(model.modules[3], pre_forward=pool)
    return model


@pytest.mark.covers("core: helpers")
@pytest.mark.parametrize("role", ["model", "draft"])
def test_hooks_that_look_along_a_sequence_see_one_users_prompt(role: str) -> None:
    shapes: list[list[int]] = []
    hooked = hooked_model(shapes)
    other = ExLlamaV2(hooked.config)
    other.load()
    tokenizer = ExLlamaV2Tokenizer(hooked.config)
    prompts = [tokenizer.encode(text) for text in ("Once upon a time", "The dog, who", "Far away there was a big red")]

    def tokens(*some: torch.Tensor) -> list[list[int]]:
        model, draft = (other, hooked) if role == "draft" else (hooked, other)
        draft_cache = ExLlamaV2Cache(draft, max_seq_len=512)
        generator = ExLlamaV2DynamicGenerator(
            *(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer),
            page_size=16,
            draft_model=draft,
            draft_cache=draft_cache,
        )
        greedy = ExLlamaV2Sampler.Settings.greedy()
        return said(generator, [ExLlamaV2DynamicJob(prompt, 8, gen_settings=greedy) for prompt in some])

    together = tokens(*prompts)
    assert [q for batch, q, _ in shapes if batch == 1][:3] == [prompt.shape[1] - 1 for prompt in prompts]
    assert together == [tokens(prompt)[0] for prompt in prompts]


@pytest.mark.covers("generators: page-sharing")
def test_a_prompt_waits_for_what_another_computes() -> None:
    """Pages in common, a head in common, and the same prompt twice: each computed once, the rest in one pass."""
    generator = make()
    prompts = ["abcdefgh" * 4 + tail for tail in ("xyz", "uvw", "")] + ["hello you", "hello yes"]
    found = said(generator, [job(prompt, 3) for prompt in [*prompts, prompts[0]]])
    assert found == [naive(generator, ids(prompt)[0].tolist(), 3) for prompt in [*prompts, prompts[0]]]
    assert sum(passes(generator)) <= len("abcdefgh" * 4) + 2 * len("xyz") + len("hello you") + len("yes")


@pytest.mark.covers("generators: page-sharing")
def test_many_prompts_with_one_beginning_look_for_it_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a cached beginning there is a page of every earlier job, and only the best of these pages is copied."""
    looked: list[int] = []
    partial = PageTable.partial

    def counting(table: PageTable, parent: bytes, some: Any) -> Any:
        looked.append(len(some))
        return partial(table, parent, some)

    monkeypatch.setattr(PageTable, "partial", counting)
    generator = make(cache_tokens=4096, max_batch_size=64)
    beginning = "abcdefgh" * 5 + "xyz"
    generator.generate(beginning, 1)
    letters = "abcdefgh"
    prompts = [f"{beginning}{one}{two}{one}q" for one in letters for two in letters]
    looked.clear()
    generator.model.calls.clear()  # type: ignore[attr-defined]
    found = said(generator, [job(prompt, 2) for prompt in prompts])
    assert found == [naive(generator, ids(prompt)[0].tolist(), 2) for prompt in prompts]
    assert len(looked) <= len(prompts)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=16), max_size=12), st.text("ab", min_size=1, max_size=16))
def test_the_page_found_begins_like_the_prompt_for_longest(heads: list[str], wanted: str) -> None:
    table = PageTable(16, 16)
    for head in heads:
        table.fill(table.take(b"parent"), 0, np.array([ord(letter) for letter in head]))
    common = [next((n for n in range(len(head)) if head[n] != wanted[n : n + 1]), len(head)) for head in heads]
    found = table.partial(b"parent", np.array([ord(letter) for letter in wanted]))
    if max(common, default=0) < 2:
        assert found is None
    else:
        assert found is not None
        assert found[1] == max(common)
        assert found[0].index == common.index(max(common))


@pytest.mark.covers("generators: failing-jobs")
@pytest.mark.parametrize("how", ["none", "model"])
def test_one_that_fails_fails_alone(how: str) -> None:
    generator = make() if how == "none" else speculate("model")
    seen = {token for prompt in PROMPTS for token in ids(prompt)[0].tolist()}.union(*expected(generator, 4))
    bad = next(token for token in range(3, VOCAB) if token not in seen)
    generator.model.faults[bad] = MemoryError("no room")  # type: ignore[attr-defined]
    jobs = [job(prompt, 4) for prompt in PROMPTS]
    poisoned = ExLlamaV2DynamicJob(ids("abc").clone().fill_(bad), 4)
    generator.enqueue([*jobs[:2], poisoned, *jobs[2:]])
    results = drain(generator)
    check_pages(generator)
    last = results[poisoned][-1]
    assert (last["eos_reason"], type(last["exception"])) == ("error", MemoryError)
    assert [streamed_tokens(results[one]) for one in jobs] == expected(generator, 4)


@pytest.mark.parametrize("fails", ["prompts", "steps"])
def test_memory_of_a_failed_pass_is_free_when_it_is_repeated(fails: str) -> None:
    """The memory that it lacked may be its own; also that of an error which is kept."""
    generator = make()
    held: list[Any] = []
    alive: list[Any] = []
    forward = generator.model.forward_chunk

    class Big:
        pass

    def full(ids: torch.Tensor, *args: Any, **kw: Any) -> Any:
        alive.append(any(one() is not None for one in held))
        prompts = bool(kw.get("last_id_only"))
        several = kw["attn_params"].q_lens is not None if prompts else ids.shape[0] > 1
        if prompts == (fails == "prompts") and (several or ids.shape[1] == 8):
            big = Big()
            held.append(weakref.ref(big))
            try:
                raise MemoryError("no room")
            except MemoryError as error:
                raise RuntimeError("typed") from error
        return forward(ids, *args, **kw)

    generator.model.forward_chunk = full  # type: ignore[assignment, method-assign]
    jobs = [job(prompt, 3) for prompt in PROMPTS]
    generator.enqueue(jobs)
    gc.disable()
    try:
        results = drain(generator)
    finally:
        gc.enable()
    assert held
    assert not any(alive)
    reasons = {results[one][-1]["eos_reason"] for one in jobs}
    assert reasons == ({"max_new_tokens", "error"} if fails == "prompts" else {"max_new_tokens"})


def test_a_wrapped_pass_that_drops_last_id_only_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = make()
    forward = generator.model.forward_chunk

    def wrapped(*args: Any, last_id_only: bool, **kw: Any) -> Any:
        return forward(*args, **kw)

    monkeypatch.setattr(generator.model, "forward_chunk", wrapped)
    one = job("hello there", 3)
    generator.enqueue(one)
    error = drain(generator)[one][-1]["exception"]
    assert isinstance(error, RequestError)
    assert "8 rows of logits for last_id_only=True, must be 1, one a prompt" in str(error)


@pytest.mark.parametrize("how", ["ngram", "model"])
def test_a_first_token_needs_no_step_with_drafts(how: str) -> None:
    """Another job's drafts do not make it wait for a pass."""
    generator = speculate(how)
    calls = generator.model.calls  # type: ignore[attr-defined]
    first, second = job("abcabcabcabc", 6), job("xyxyxyxyxyxy", 6)
    generator.enqueue(first)
    generator.iterate()
    assert calls == [(1, 12, True)]
    assert first.new_tokens == 1
    calls.clear()
    generator.enqueue(second)
    generator.iterate()
    assert second.new_tokens == 1
    assert [(batch, is_prompt) for batch, _, is_prompt in calls] == [(1, True), (1, False)]
    drain(generator)
    prompts = [ids(text)[0].tolist() for text in ("abcabcabcabc", "xyxyxyxyxyxy")]
    told = [one.sequence.ids[len(prompt) :].tolist() for one, prompt in zip((first, second), prompts, strict=True)]
    assert told == [naive(generator, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize(("state", "tokens"), [(False, 8), (True, 7)])
def test_only_prompts_whose_logits_are_enough_are_closed(state: bool, tokens: int) -> None:
    generator = make()
    said(generator, [job("hello there", return_hidden_state=state)])
    assert passes(generator) == [tokens]
