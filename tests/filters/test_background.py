"""Masks computed while the model runs: only where it pays, never stale, failures delivered; compile time limits."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from exl_filters import (
    ExLlamaV2Filter,
    ExLlamaV2SelectFilter,
    FilterCompileError,
    FilterFailed,
    FilterStack,
    Vocabulary,
    bits,
    compile_in_background,
    compile_within,
    host,
)

V = Vocabulary([*"abc", "</s>"], eos_token_id=3, special_ids=[3])


class Slow(ExLlamaV2Filter):
    """Allows one id after another; takes its time; remembers on which thread."""

    threads: list = []  # noqa: RUF012 - shared on purpose: clones write here
    begun = threading.Semaphore(0)
    fails_at = None

    def __init__(self):
        super().__init__(None, V)
        self.count = 0

    def begin(self, prefix_str=""):
        self.count = 0

    def feed(self, token):
        self.count += 1

    def next(self):
        self.threads.append(threading.current_thread().name)
        self.begun.release()
        time.sleep(0.002)
        if self.count == self.fails_at:
            raise ValueError("boom")
        return {self.count % 3}, set()

    def use_background_worker(self):
        return True


def stack(*filters):
    s = FilterStack(filters, vocab_size=4, stop_ids=[3])
    s.begin()
    return s


@pytest.mark.covers("filters: background")
def test_a_slow_mask_is_computed_on_the_pool_and_is_the_same(pool):
    s, plain = stack(Slow()), stack(Slow())
    Slow.threads.clear()
    for token in (0, 1, 2, 0):
        while Slow.begun.acquire(blocking=False):
            pass
        assert s.prefetch(pool)
        assert not s.prefetch(pool)
        assert Slow.begun.acquire(timeout=250)  # before that the mask would be computed here
        assert bits.to_ids(s.next_mask()) == bits.to_ids(plain.next_mask()) == [token]
        assert not s.prefetch(pool)
        s.feed(token)
        plain.feed(token)
    assert sum(name.startswith("pool") for name in Slow.threads) == 4


@pytest.mark.covers("filters: background")
def test_a_quick_mask_stays_where_it_is(pool, monkeypatch):
    monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=float))  # a busy machine takes no time either
    s = stack(ExLlamaV2SelectFilter(None, V, ["abcabc"]))
    for token in (0, 1, 2):
        s.next_mask()
        s.feed(token)
        assert s.prefetch(pool) is False


def noted(submit, submitted):
    """`submit`, which adds its futures to `submitted`."""

    def note(*args):
        submitted.append(submit(*args))
        return submitted[-1]

    return note


@pytest.mark.parametrize("what", ["feed", "rewind", "begin", "close", "copy", "status"])
def test_every_call_waits_and_no_mask_is_stale(pool, what, monkeypatch):
    s = stack(Slow())
    submitted: list[Any] = []
    s.feed(0)
    monkeypatch.setattr(pool, "submit", noted(pool.submit, submitted))
    assert s.prefetch(pool)
    if what == "feed":
        s.feed(1)
        assert bits.to_ids(s.next_mask()) == [2]
    elif what == "rewind":
        s.rewind(1)
        assert bits.to_ids(s.next_mask()) == [0]
    elif what == "begin":
        s.begin()
        assert bits.to_ids(s.next_mask()) == [0]
    elif what == "close":
        s.close()
    elif what == "copy":
        other = s.copy()
        other.feed(1)
        assert bits.to_ids(s.next_mask()) == [1]
        assert bits.to_ids(other.next_mask()) == [2]
    else:
        assert s.status.value == "open"
    assert len(submitted) == 1
    assert submitted[0].done()


def test_a_failure_in_the_background_is_raised_where_the_mask_is_wanted(pool):
    class Failing(Slow):
        fails_at = 1  # type: ignore[assignment]

    s = stack(Failing())
    s.feed(0)
    assert s.prefetch(pool)
    with pytest.raises(FilterFailed, match="boom"):
        s.next_mask()
    s.begin()
    assert bits.to_ids(s.next_mask()) == [0]


@pytest.mark.covers("filters: compile-errors")
def test_compiling_has_a_time_limit():
    f = compile_within(250, ExLlamaV2SelectFilter, None, V, ["ab"])
    assert f.next()[0] == [0]
    over = threading.Event()
    with pytest.raises(FilterCompileError, match=r"0\.05 s"):
        compile_within(0.05, over.wait, 250)
    over.set()
    with pytest.raises(FilterCompileError, match="options"):
        compile_within(250, ExLlamaV2SelectFilter, None, V, [])
    assert compile_in_background(ExLlamaV2SelectFilter, None, V, ["b"]).result(250).next()[0] == [1]
