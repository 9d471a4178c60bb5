"""Methods that wait for a filter's background work wait neither for themselves nor for ever."""

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from background_cases import METHODS, Plugin, V, Watch, composed, plugin

from exl_filters import (
    ExLlamaV2Filter,
    ExLlamaV2SelectFilter,
    FilterBusy,
    FilterStack,
    SequenceFilter,
    as_filter,
    background,
    bits,
)


class Unbegun:
    """A foreign object whose wrapper begins it at the first question, which is asked on the pool."""

    tokenizer = V

    def begin(self, prefix_str):
        time.sleep(0.05)

    def feed(self, token): ...

    def next(self):
        return {0}, set()


def in_time(pool, work):
    return pool.submit(work).result(250)


@pytest.mark.parametrize("kind", ["sequence", "foreign", "own clone"])
def test_a_computation_does_not_wait_for_itself(kind):
    """Each of these calls, while it computes, methods that wait for computations."""

    class Cloning(Plugin):
        def next(self):
            time.sleep(0.05)
            self.validate([])
            self.clone()
            self.begin("")
            return super().next()

    if kind == "sequence":
        f = composed(lambda part: SequenceFilter([ExLlamaV2SelectFilter(None, V, ["a"]), part]))(Watch())
    else:
        f = as_filter(Unbegun()) if kind == "foreign" else Cloning()
    others = ThreadPoolExecutor(2)
    try:

        def work():
            with ThreadPoolExecutor(1) as pool:
                f.background_next(pool)
                time.sleep(0.01)
                return f.get_next()

        assert in_time(others, work) == ([0], set())
    finally:
        others.shutdown(wait=False)


class OwnThreads(ExLlamaV2Filter):
    """A forbidden filter: its computation calls it from threads of its own."""

    native = True
    started = threading.Semaphore(0)

    def __init__(self, method="is_complete"):
        super().__init__(None, V)
        self.method = method

    def clone(self, c=None):
        return type(self)(self.method)

    def begin(self, prefix_str=""): ...

    def feed(self, token): ...

    def is_complete(self):
        return True

    def use_background_worker(self):
        return True

    def next(self):
        self.started.release()
        with ThreadPoolExecutor(2) as own:
            list(own.map(lambda _: METHODS[self.method](self), range(2)))
        return {0}, set()


@pytest.mark.parametrize("method", ["is_complete", "feed", "begin"])
def test_a_computation_that_asks_from_threads_of_its_own_ends_with_an_error(method, pool, monkeypatch):
    monkeypatch.setattr(background, "LONGEST_WAIT", 0.2)
    f = OwnThreads(method)
    f.background_next(pool)
    assert f.started.acquire(timeout=250)  # what has not begun is not waited for
    with ThreadPoolExecutor(1) as caller, pytest.raises(FilterBusy, match="only from its own thread"):
        in_time(caller, f.get_next)
    assert f.background_result is None


def test_a_stack_gets_that_error_and_can_be_closed(pool, monkeypatch):
    monkeypatch.setattr(background, "LONGEST_WAIT", 0.2)
    with FilterStack([OwnThreads()], vocab_size=4, stop_ids=[3]) as stack:
        stack.begin("")
        assert stack.prefetch(pool)
        assert OwnThreads.started.acquire(timeout=250)
        with ThreadPoolExecutor(1) as caller, pytest.raises(FilterBusy, match="only from its own thread"):
            in_time(caller, stack.next_mask)
        with pytest.raises(FilterBusy):
            stack.next_mask()


def test_a_feed_that_cannot_wait_any_longer_changes_nothing(pool, monkeypatch):
    monkeypatch.setattr(background, "LONGEST_WAIT", 0.05)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Plugin):
        watch = Watch()

        def next(self):
            begun.set()
            assert go_on.wait(250)
            return [self.count], set()

    f = Slow()
    f.begin("")
    f.background_next(pool)
    assert begun.wait(250)
    with pytest.raises(FilterBusy, match=r"Slow was called .* after 0.05 s"):
        f.feed(0)
    go_on.set()
    assert f.get_next() == ([0], set())
    f.feed(0)
    assert f.get_next() == ([1], set())


@pytest.mark.parametrize("method", ["get_next", "next", "feed", "clone", "begin", "background_drop", "is_complete"])
def test_work_that_has_not_begun_is_not_waited_for(method):
    """The only thread of the pool is the one that asks: waiting for it would last for ever."""
    f = plugin(Watch())
    with ThreadPoolExecutor(1) as pool:

        def work():
            f.background_next(pool)
            METHODS[method](f)
            return f.get_next()

        assert in_time(pool, work) == ([1 if method == "feed" else 0], set())


def test_a_class_with_a_background_of_its_own_is_left_to_itself(pool):
    """The class copies the background of exllamav2's base class: the thread of its future is not known."""

    class Own(Plugin):
        def background_next(self, pool):
            assert self.background_result is None
            self.background_result = pool.submit(self.next)

        def get_next(self, mask=False):
            if self.background_result is not None:
                result = self.background_result.result()
                self.background_result = None
                return result
            return self.next()

        def next(self):
            time.sleep(0.02)
            return super().next()

    f = Own()
    f.begin("")
    for token in range(3):
        f.background_next(pool)
        assert f.get_next() == ([token], set())
        f.background_next(pool)
        f.feed(token)
        assert f.background_result is None


def test_methods_of_a_class_that_is_no_filter_wait_too(pool):
    watch = Watch()

    class Asking:
        def next(self):
            return watch("next", lambda: ([0], set()))

        def is_complete(self):
            return watch("is_complete", lambda: False)

    class Mixed(Asking, ExLlamaV2Filter):
        def begin(self, prefix_str=""): ...

        def feed(self, token): ...

    f = Mixed(None, V)
    f.background_next(pool)
    assert watch.entered.wait(250)
    assert f.is_complete() is False
    assert f.get_next() == ([0], set())
    assert watch.overlaps == []


def count_up_too(self, token):
    self.count += 1


def count_up(self, token):
    self.count += 1


class Compiled:
    """A callable that binds like compiled code, but is no function."""

    def __get__(self, instance, owner=None):
        return self if instance is None else lambda token: self(instance, token)

    def __call__(self, instance, token):
        count_up(instance, token)


@pytest.mark.parametrize(
    "feed",
    [
        functools.lru_cache(count_up),
        functools.partialmethod(count_up),
        functools.singledispatchmethod(count_up),
        functools.wraps(ExLlamaV2SelectFilter.feed)(count_up_too),
        Compiled(),
    ],
    ids=lambda f: type(f).__name__,
)
def test_methods_that_are_no_functions_drop_what_is_stale(feed, pool):
    Odd = type("Odd", (Plugin,), {"watch": Watch(), "feed": feed})
    f = Odd()
    f.begin("")
    f.background_next(pool)
    assert f.watch.entered.wait(250)
    f.feed(1)
    assert f.watch.overlaps == []
    assert f.get_next() == ([1], set())
    by_name = not isinstance(feed, functools.singledispatchmethod)  # which dispatches by place only
    f.feed(token=2) if by_name else f.feed(2)
    assert f.get_next() == ([2], set())
    Later: Any = type("Later", (Odd,), {})
    assert Later.feed is Odd.feed  # type: ignore[attr-defined]


def test_a_drop_of_the_filters_own_may_stop_its_computation(pool):
    class Stoppable(Plugin):
        def __init__(self):
            super().__init__()
            self.started, self.stop = threading.Event(), threading.Event()

        def next(self):
            self.started.set()
            assert self.stop.wait(250)
            return [self.count % 3], set()

        def background_drop(self):
            self.stop.set()
            super().background_drop()

    f = Stoppable()
    f.begin()
    f.background_next(pool)
    assert f.started.wait(250)
    f.feed(0)
    assert f.get_next() == ([1], set())


def test_caches_keep_what_they_offer_and_static_methods_stay(pool):
    class Cached(Plugin):
        watch = Watch()
        feed = count_up

        @functools.lru_cache  # noqa: B019
        def next(self):
            return [self.count], set()

        @staticmethod
        def forced():
            return b"a"

        @classmethod
        def ended(cls):
            return cls is Cached

    f = Cached()
    f.begin("")
    f.background_next(pool)
    assert f.get_next() == ([0], set())
    f.feed(1)
    assert f.next() == ([0], set())
    f.next.cache_clear()
    assert f.next() == ([1], set())
    assert (f.forced(), f.ended()) == (b"a", True)


def test_arguments_reach_methods_by_name_and_by_place():
    f = ExLlamaV2SelectFilter(None, V, ["ab"])
    f.begin(prefix_str="")
    f.feed(token=0)
    words = bits.empty(4)
    assert f.fill_bitmask(words=words)
    assert bits.to_ids(words) == [1]
    f.rewind(n=1)
    assert f.validate(tokens=[0, 1]) == 2
    assert f.clone(c=None).next() == f.next()


def test_a_copy_of_a_foreign_filter_waits_for_the_original(pool):
    watch = Watch()

    class Old(ExLlamaV2Filter):
        def __init__(self):
            super().__init__(None, V)
            self.a, self.b = 0, 0

        def begin(self, prefix_str=""):
            self.a = self.b = 0

        def feed(self, token): ...

        def next(self):
            def work():
                self.a += 1
                watch.go_on.wait(0.05)  # clock: as in Watch
                self.b += 1
                return {0}, set()

            return watch("next", work)

    f = Old()
    f.background_next(pool)
    assert watch.entered.wait(250)
    with FilterStack([f], vocab_size=4, stop_ids=[3]) as stack:
        wrapped: Any = stack.filters[0]
        inner = wrapped.inner
        assert inner is not f
        assert (inner.a, inner.b) == (1, 1)
        assert inner.background_result is None
    assert f.get_next() == ({0}, set())
