"""`pause` and `unpause`: a paused job loses nothing, and the others continue."""

from __future__ import annotations

import threading

from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from exl_generate.testing import check_pages, drain, streamed_text, streamed_tokens
from exl_generate.testing.small import ids, job, make, naive


def test_a_paused_job_generates_nothing_and_keeps_its_pages() -> None:
    generator = make()
    held, other = job("abc", 30), job("xyz", 12)
    generator.enqueue([held, other])
    for _ in range(4):
        generator.iterate()
    held.pause()
    held.pause()
    before, pages = held.new_tokens, list(held.sequence.allocated_pages)
    assert held.paused
    while not other.is_finished:
        assert all(result["job"] is other for result in generator.iterate())
    assert generator.iterate() == []
    assert (held.new_tokens, held.sequence.allocated_pages) == (before, pages)
    assert generator.num_active_jobs() == 1
    held.unpause()
    held.unpause()
    drain(generator)
    assert held.sequence.ids.tolist()[3:] == naive(generator, ids("abc")[0].tolist(), 30)
    check_pages(generator)


@examples(25, 10)
@given(toggles=st.lists(st.integers(1, 4), max_size=8), paused_first=st.booleans())
def test_pauses_change_no_token(toggles: list[int], paused_first: bool) -> None:
    generator = make()
    one = job("hello there", 15, stop_conditions=["zz"])
    if paused_first:
        one.pause()
    generator.enqueue(one)
    results = []
    for rounds in toggles:
        for _ in range(rounds):
            results += generator.iterate()
        if one.paused:
            one.unpause()
        else:
            one.pause()
    one.unpause()
    results += drain(generator).get(one, [])
    assert streamed_tokens(results) == naive(generator, ids("hello there")[0].tolist(), 15)
    assert streamed_text(results) == one.full_completion


def test_pause_of_a_finished_job_has_no_effect() -> None:
    generator = make()
    one = job("ab", 3)
    generator.enqueue(one)
    drain(generator)
    one.pause()
    assert not one.paused
    one.unpause()
    assert one.is_finished


def test_a_paused_job_can_be_cancelled() -> None:
    generator = make()
    one = job("ab", 30)
    generator.enqueue(one)
    for _ in range(3):
        generator.iterate()
    one.pause()
    generator.cancel(one)
    assert generator.iterate()[-1]["eos_reason"] == "cancelled"
    assert generator.num_remaining_jobs() == 0
    check_pages(generator)


def test_pause_from_another_thread_between_rounds() -> None:
    generator = make()
    one = job("ab", 100)
    generator.enqueue(one)
    for toggle, paused in ((one.pause, True), (one.unpause, False)) * 2:
        before = one.new_tokens
        generator.iterate()
        thread = threading.Thread(target=toggle)
        thread.start()
        thread.join()
        assert one.paused == paused
        assert (one.new_tokens == before) == (not paused)
    drain(generator)
    assert one.new_tokens == 100
