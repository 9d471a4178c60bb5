"""`generator.snapshot()`: counted numbers are those that going through everything gives."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from exl_generate import ExLlamaV2DynamicGenerator, GeneratorSnapshot
from exl_generate.testing import check_pages, drain
from exl_generate.testing.small import PAGE, job, make, speculate

GROWING = [f.name for f in dataclasses.fields(GeneratorSnapshot)][9:]


def check(generator: ExLlamaV2DynamicGenerator) -> GeneratorSnapshot:
    """The snapshot, compared with what the public lists show."""
    found = generator.snapshot()
    active = generator.active_jobs
    assert found.prefilling_jobs == sum(not one.prefilled for one in active)
    assert found.paused_jobs == sum(one.prefilled and one.paused for one in active)
    assert found.decoding_rows == sum(len(one.sequences) for one in active if one.prefilled and not one.paused)
    assert found.queued_jobs == generator.num_pending_jobs()
    pages = generator.all_pages
    assert found.pinned_pages == sum(page.ref_count > 0 for page in pages)
    assert found.cached_pages == sum(page.ref_count == 0 and page.valid > 0 for page in pages)
    assert found.free_pages == sum(page.ref_count == 0 and page.valid == 0 for page in pages)
    assert found.total_pages == len(pages)
    return found


def test_an_idle_generator() -> None:
    found = make(cache_tokens=256).snapshot()
    assert found.total_pages == found.free_pages == 256 // PAGE
    assert [value for name, value in dataclasses.asdict(found).items() if not name.endswith("pages")] == [0] * 12


def test_the_life_of_two_jobs() -> None:
    generator = make(max_chunk_size=32, max_batch_size=1)
    prompt = "abcdefghij" * 5  # 49 tokens to compute: 32 and 17
    first, second = job(prompt, 4), job(prompt, 4)
    generator.enqueue([first, second])
    assert (check(generator).queued_jobs, check(generator).queued_tokens) == (2, 98)
    generator.iterate()
    found = check(generator)
    assert (found.steps, found.prefilling_jobs, found.queued_jobs, found.queued_tokens) == (1, 1, 1, 49)
    assert (found.prefilled_tokens, found.decoding_rows) == (32, 0)
    generator.iterate()
    found = check(generator)
    assert (found.prefilled_tokens, found.decoding_rows, found.generated_tokens) == (49, 1, 1)
    drain(generator)
    found = check(generator)
    assert (found.prompt_tokens, found.found_tokens, found.prefilled_tokens) == (98, 48, 50)  # 3 full pages were found
    assert (found.generated_tokens, found.pinned_pages, found.queued_tokens) == (8, 0, 0)


def test_cached_pages_are_no_queued_work() -> None:
    generator = make()
    generator.enqueue(job("abcdefghij" * 5, 1))
    drain(generator)
    generator.enqueue(job("abcdefghij" * 5, 1))
    assert generator.snapshot().queued_tokens == 49 - 3 * PAGE
    generator.clear_queue()
    assert generator.snapshot().queued_tokens == 0


@pytest.mark.parametrize("how", ["ngram", "model"])
def test_drafts_are_counted(how: str) -> None:
    generator = speculate(how, lambda context: 3 + context[-1] % 5)
    jobs = [job("abcabc", 12), job("xyxyxy", 9)]
    generator.enqueue(jobs)
    drain(generator)
    found = generator.snapshot()
    assert found.drafted_tokens == sum(one.drafted_tokens for one in jobs) > 0
    assert found.accepted_draft_tokens == sum(one.accepted_draft_tokens for one in jobs) > 0
    assert found.generated_tokens == 21


@examples(40, 15)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["add", "step", "cancel", "pause", "unpause"]), st.integers(0, 9)), max_size=40
    ),
    share=st.sampled_from([None, 3]),
)
def test_numbers_agree_with_a_count_after_any_events(moves: list[tuple[str, int]], share: int | None) -> None:
    generator = make(cache_tokens=8 * PAGE, max_chunk_size=PAGE, max_batch_size=3)
    jobs: list[Any] = []
    before = generator.snapshot()
    for move, number in moves:
        if move == "add":
            jobs.append(job("abcdefghij" * (1 + number % 4) + "klm"[number % 3], 4 + number, max_rq_tokens=share))
            generator.enqueue(jobs[-1])
        elif move == "step":
            generator.iterate()
        elif jobs:
            one = jobs[number % len(jobs)]
            {"cancel": lambda one=one: generator.cancel(one), "pause": one.pause, "unpause": one.unpause}[move]()
        now = check(generator)
        assert all(getattr(before, name) <= getattr(now, name) for name in GROWING)
        before = now
    for one in jobs:
        one.unpause()
    drain(generator)
    check_pages(generator)
    found = check(generator)
    assert (found.queued_tokens, found.decoding_rows, found.pinned_pages) == (0, 0, 0)
    assert found.found_tokens == sum(one.cached_tokens for one in jobs if one.time_first_prefill is not None)


def test_from_another_thread_while_rounds_run() -> None:
    generator = make()
    generator.enqueue([job("abcdefghij" * (1 + i % 3), 60) for i in range(12)])
    failures: list[BaseException] = []
    seen: list[GeneratorSnapshot] = []
    done = threading.Event()

    def look() -> None:
        try:
            while not done.is_set():
                seen.append(generator.snapshot())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    drain(generator)
    done.set()
    thread.join()
    assert not failures
    assert seen
    assert all(one.pinned_pages + one.cached_pages + one.free_pages <= one.total_pages for one in seen)
