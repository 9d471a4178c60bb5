"""Pages reserved a share at a time: jobs that go back to the queue and are resumed as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest

from exl_filters import ExLlamaV2SelectFilter
from exl_generate import ExLlamaV2Sampler, RequestError
from exl_generate.testing import check_pages, drain, streamed_text, streamed_tokens
from exl_generate.testing.small import EOS, TOKENIZER, ids, job, make, naive, run

Settings = ExLlamaV2Sampler.Settings


def finish(generator: Any, jobs: list[Any], limit: int = 3000) -> dict[Any, list[dict[str, Any]]]:
    results: dict[Any, list[dict[str, Any]]] = {one: [] for one in jobs}
    for _ in range(limit):
        for result in generator.iterate():
            results[result["job"]].append(result)
        check_pages(generator)
        if not generator.num_remaining_jobs():
            return results
    raise AssertionError("the queue does not move")


@pytest.mark.covers("generators: page-reservations")
@pytest.mark.parametrize("share", [1, 5, 16, 40])
def test_jobs_that_take_turns_give_the_same_results(share: int) -> None:
    generator = make(cache_tokens=128, max_batch_size=4)
    prompts = ["abcdefgh" * n for n in (1, 2, 3, 1, 4, 2)]
    jobs = [job(text, 60, max_rq_tokens=share, identifier=i) for i, text in enumerate(prompts)]
    serials = generator.enqueue(jobs)
    results = finish(generator, jobs)
    assert sum(one.requeues for one in jobs) > 0
    for one, text, serial in zip(jobs, prompts, serials, strict=True):  # type: ignore[arg-type]
        mine = results[one]
        assert streamed_tokens(mine) == naive(generator, ids(text)[0].tolist(), 60)
        assert [r["stage"] for r in mine].count("started") == 1
        stages = [r["stage"] for r in mine]
        assert "prefill" not in stages[stages.index("streaming") :]
        assert {r["serial"] for r in mine} == {serial}
        assert (mine[-1]["new_tokens"], mine[-1]["prompt_tokens"]) == (60, len(text))


@pytest.mark.covers("generators: page-reservations")
def test_a_short_reservation_lets_more_jobs_run_at_once() -> None:
    counts = []
    for share in (None, 8):
        generator = make(cache_tokens=128, max_batch_size=8)
        generator.enqueue([job(letter * 4, 90, max_rq_tokens=share) for letter in "abcdef"])
        generator.iterate()
        counts.append(generator.num_active_jobs())
    assert counts == [1, 6]


def test_a_lone_job_extends_its_reservation_without_leaving() -> None:
    generator = make()
    one = job("abc", 100, max_rq_tokens=3)
    results = run(generator, one)
    assert one.requeues == 0
    assert streamed_tokens(results) == naive(generator, ids("abc")[0].tolist(), 100)


def test_state_of_a_job_survives_the_queue() -> None:
    """Seeded sampling with history, banned strings held back over the break, and a filter in the middle of a word."""
    rich = Settings(temperature=1.0, top_k=0, top_p=0, mirostat=True, dry_multiplier=0.5, token_repetition_penalty=1.2)
    words = ["the quick brown fox jumps over it", "then nothing happened at all"]
    outputs = []
    for share in (None, 4):
        generator = make(cache_tokens=64, max_batch_size=3)
        jobs = [
            job("abcd", 40, gen_settings=rich, seed=3, max_rq_tokens=share, banned_strings=["ab", "th", "xyzzyx"]),
            job("wxyz", 40, seed=4, max_rq_tokens=share, stop_conditions=[EOS, "quux"], token_healing=True),
            job("q", 40, max_rq_tokens=share, filters=[ExLlamaV2SelectFilter(None, TOKENIZER, words)]),
        ]
        generator.enqueue(jobs)
        results = finish(generator, jobs)
        outputs.append([(streamed_text(results[one]), streamed_tokens(results[one])) for one in jobs])
        assert (share is None) == (sum(one.requeues for one in jobs) == 0)
    assert outputs[0] == outputs[1]
    assert outputs[0][2][0] in words


@pytest.mark.parametrize("rounds", [3, 9, 15, 21])
def test_a_job_may_be_cancelled_while_it_waits_to_go_on(rounds: int) -> None:
    generator = make(cache_tokens=64, max_batch_size=4)
    jobs = [job(letter * 9, 30, max_rq_tokens=2) for letter in "abc"]
    generator.enqueue(jobs)
    for _ in range(rounds):
        generator.iterate()
    waiting = [one for one in generator.pending_jobs if one.resumed] or generator.pending_jobs[:1]
    for one in waiting:
        generator.cancel(one)
    results = drain(generator)
    check_pages(generator)
    assert generator.page_table.reserved == 0
    assert all(results[one][-1]["eos_reason"] == "cancelled" for one in waiting)


def test_an_impossible_share_is_refused() -> None:
    for wrong in (0, -1, 2.5, True, "8"):
        with pytest.raises(RequestError, match="max_rq_tokens"):
            job("a", max_rq_tokens=wrong)
