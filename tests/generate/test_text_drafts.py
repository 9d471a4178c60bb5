"""Drafts from text: guesses from the answers to earlier jobs, and the tokens, which stay those of the model alone."""

from __future__ import annotations

from typing import Any

import pytest
from effort import trials

from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler, RequestError
from exl_generate.testing import check_pages, drain, streamed_tokens
from exl_generate.testing.small import AsAsked, ids, job, make, run

Settings = ExLlamaV2Sampler.Settings
LETTERS = ids("abcdefghijklmnopqrstuvwxyz")[0].tolist()


def recite(context: list[int]) -> int:
    """The alphabet, once; backwards after a prompt that begins with "{"."""
    step = -1 if context[0] == int(ids("{")[0, 0]) else 1
    at = LETTERS.index(context[-1]) if context[-1] in LETTERS else -step
    return LETTERS[(at + step) % len(LETTERS)]


def reciter(tokens: int, **kw: Any) -> ExLlamaV2DynamicGenerator:
    generator = make(recite, use_ngram_draft=True, shared_ngram_tokens=tokens, **kw)
    generator.drafter.length = AsAsked(generator.num_draft_tokens)
    return generator


def held(generator: ExLlamaV2DynamicGenerator, prompt: str, **kw: Any) -> int:
    """Run a job alone; returns how many guesses held."""
    return int(run(generator, job(prompt, 24, **kw))[-1]["accepted_draft_tokens"])


def test_jobs_draft_from_the_answers_to_earlier_jobs() -> None:
    generator = reciter(200)
    assert held(generator, "!a") == 0, "the alphabet has no letter twice"
    assert held(generator, "!a") > 15
    assert held(reciter(0), "!a") == 0


@pytest.mark.parametrize(("before", "now"), [(b"one", b"two"), (b"one", b"one"), (b"one", b""), (b"", b"two")])
def test_a_salted_job_neither_leaves_its_answer_nor_drafts_from_others(before: bytes, now: bytes) -> None:
    """The time that a job takes must not tell what others have asked."""
    generator = reciter(200)
    held(generator, "!a", cache_salt=before)
    assert held(generator, "!a", cache_salt=now) == 0


def test_the_oldest_answers_leave() -> None:
    for tokens, known in ((64, False), (4000, True)):
        generator = reciter(tokens)
        held(generator, "!a")
        for _ in range(4):
            held(generator, "{z")
        assert (held(generator, "!a") > 15) == known


def test_a_cancelled_job_leaves_its_answer() -> None:
    generator = reciter(200)
    one = job("!a", 26)
    generator.enqueue(one)
    for _ in range(20):
        generator.iterate()
    generator.cancel(one)
    assert held(generator, "!a") > 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [Settings.greedy(), Settings(temperature=1.5, top_k=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("features", [{}, {"banned_strings": ["cd", "x"]}, {"stop_conditions": ["fg"]}])
def test_sharing_changes_no_token(settings: Any, features: dict[str, Any]) -> None:
    """Jobs that wait, share pages of a prefix, give way to each other and rewind."""
    texts = ("!a", "xyz", "the ab", "!a", "{z", "abcabc abcabc abcabc") * trials(3, 2)
    told = []
    for kw in ({}, {"use_ngram_draft": True}, {"use_ngram_draft": True, "shared_ngram_tokens": 70, "max_ngram": 12}):
        generator = make(None, cache_tokens=128, max_batch_size=3, **kw)
        jobs = [
            job(text, 20, gen_settings=settings, seed=at, max_rq_tokens=6 if at % 2 else None, **features)
            for at, text in enumerate(texts)
        ]
        generator.enqueue(jobs)
        found = drain(generator)
        check_pages(generator)
        told.append([streamed_tokens(found[one]) for one in jobs])
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"shared_ngram_tokens": 10}, "needs use_ngram_draft=True"),
        ({"shared_ngram_tokens": -1, "use_ngram_draft": True}, "shared_ngram_tokens"),
        ({"shared_ngram_tokens": 1 << 40, "use_ngram_draft": True}, "at most"),
        ({"shared_ngram_tokens": "many", "use_ngram_draft": True}, "shared_ngram_tokens"),
    ],
)
def test_a_wrong_number_of_shared_tokens_is_rejected(kw: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(**kw)
