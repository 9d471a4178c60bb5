"""Log-probabilities of prompts: those of the model, whatever the cache, the batch and the chunks are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exl_generate import ExLlamaV2DynamicJob, ExLlamaV2Sampler, RequestError
from exl_generate.dynamic.prompt_scores import scores_of
from exl_generate.testing import ScriptedEmbedding, ScriptedLora, check_pages, drain
from exl_generate.testing.small import VOCAB, ids, job, make, speculate

TEXT = "the fox, the xyxy and the crow! " * 3


def expected(model: Any, prompt: list[int], top: int, loras: Any = ()) -> list[tuple[Any, ...]]:
    """(token, log-probability, best tokens) by one call of the model for each place."""
    found: list[tuple[Any, ...]] = [(prompt[0], None, [])]
    for at, token in enumerate(prompt[1:], 1):
        raw = torch.from_numpy(model.logits(torch.tensor(prompt[:at]).numpy(), loras))[:VOCAB].double()
        row = torch.log_softmax(raw, -1).tolist()
        best = sorted(range(VOCAB), key=lambda i: (-row[i], i))[:top]
        found.append((token, pytest.approx(row[token]), best))
    return found


def told(scored: ExLlamaV2DynamicJob) -> list[tuple[Any, ...]]:
    return [(one.token, one.logprob, [token for token, _ in one.top]) for one in scored.prompt_scores]


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    new=st.sampled_from([0, 1, 5]),
    top=st.integers(0, 4),
    chunk=st.sampled_from([16, 48, 64]),
    before=st.booleans(),
)
def test_scores_are_the_model_s(lengths: list[int], new: int, top: int, chunk: int, before: bool) -> None:
    """Prompts run together and with one that only asks for tokens; some of them are in the cache already."""
    generator = make(cache_tokens=1024, max_chunk_size=chunk)
    if before:
        generator.enqueue(job(TEXT, 3))
        drain(generator)
    jobs = [job(TEXT[:length], new, prompt_logprobs=top) for length in lengths]
    plain = job(TEXT, 4)
    generator.enqueue([*jobs, plain])
    results = drain(generator)
    check_pages(generator)
    for one, length in zip(jobs, lengths, strict=True):
        assert told(one) == expected(generator.model, ids(TEXT[:length])[0].tolist(), top)
        last = results[one][-1]
        assert (last["eos_reason"], last["new_tokens"], one.cached_tokens) == ("max_new_tokens", new, 0)
    assert plain.prompt_scores == ()
    assert not generator.referenced_pages


def test_tokens_are_those_of_a_job_without_scores() -> None:
    for text in ("a", TEXT):
        texts = []
        for top in (None, 3):
            generator = make(cache_tokens=1024)
            one = job(text, 20, prompt_logprobs=top, seed=5)
            generator.enqueue(one)
            drain(generator)
            texts.append(one.full_completion)
        assert texts[0] == texts[1]


def test_adapters_count() -> None:
    generator = make(cache_tokens=1024)
    adapters = [ScriptedLora(1), ScriptedLora(2)]
    one = job(TEXT, 0, prompt_logprobs=2, loras=adapters)
    generator.enqueue(one)
    drain(generator)
    assert told(one) == expected(generator.model, ids(TEXT)[0].tolist(), 2, adapters)


@pytest.mark.parametrize("how", ["ngram", "model"])
def test_drafting_changes_nothing(how: str) -> None:
    generator = speculate(how)
    one = job(TEXT, 8, prompt_logprobs=1)
    generator.enqueue(one)
    drain(generator)
    assert told(one) == expected(generator.model, ids(TEXT)[0].tolist(), 1)


def test_of_a_pair_of_prompts_the_positive_one_is_scored() -> None:
    generator = make(cache_tokens=1024)
    settings = ExLlamaV2Sampler.Settings(cfg_scale=2.0)
    for new in (0, 3):
        one = ExLlamaV2DynamicJob([ids("the fox"), ids(TEXT)], new, gen_settings=settings, prompt_logprobs=1)
        generator.enqueue(one)
        assert drain(generator)[one][-1]["new_tokens"] == new
        assert told(one) == expected(generator.model, ids("the fox")[0].tolist(), 1)


def test_a_job_that_goes_back_to_the_queue_has_its_scores_once() -> None:
    generator = make(cache_tokens=160, max_batch_size=4)
    jobs = [job(TEXT[:40], 60, prompt_logprobs=1, max_rq_tokens=16, seed=i) for i in range(4)]
    generator.enqueue(jobs)
    drain(generator)
    assert sum(one.requeues for one in jobs) > 0
    for one in jobs:
        assert told(one) == expected(generator.model, ids(TEXT[:40])[0].tolist(), 1)


def test_a_prompt_as_long_as_the_context_can_be_scored() -> None:
    generator = make(cache_tokens=256, model_len=64)
    one = ExLlamaV2DynamicJob(torch.full((1, 64), 3), 0, prompt_logprobs=0)
    generator.enqueue(one)
    drain(generator)
    assert len(one.prompt_scores) == 64


def test_equal_candidates_come_by_their_ids() -> None:
    logits = torch.zeros(2, 10)
    logits[1, 7] = 1.0
    logits[:, 8:] = 100.0  # beyond the vocabulary
    first, second = scores_of(logits, [0, 7], 8, 3)
    assert [token for token, _ in first.top] == [0, 1, 2]
    assert [token for token, _ in second.top] == [7, 0, 1]
    assert first.logprob == pytest.approx(-2.0794415)


@given(
    rows=st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=4), top=st.integers(1, 9)
)
def test_candidates_are_those_of_a_stable_sort(rows: list[list[int]], top: int) -> None:
    found = scores_of(torch.tensor(rows, dtype=torch.float32), [0] * len(rows), 6, top)
    for row, score in zip(rows, found, strict=True):
        assert [token for token, _ in score.top] == sorted(range(6), key=lambda i: (-row[i], i))[:top]


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "token_healing": True}, "token_healing exclude"),
    ],
)
def test_impossible_requests_are_refused(given_: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        job("abc", 3, **given_)


def test_prompts_with_images_have_no_scores() -> None:
    image: Any = ScriptedEmbedding([1, 2])
    prompt = torch.tensor([[1, *image.get_ids(), 2]])
    with pytest.raises(RequestError, match="embeddings exclude"):
        ExLlamaV2DynamicJob(prompt, 1, embeddings=[image], prompt_logprobs=0)
