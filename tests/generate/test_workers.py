"""Threads for filters go on working whatever a Ctrl-C breaks into: none is lost, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from exl_generate.dynamic import workers
from exl_generate.dynamic.workers import _DaemonPool

sys.path.insert(0, str(Path(__file__).parents[1]))
from breaking_in import broken_into

pytestmark = pytest.mark.timeout(60)  # so long where the main thread waits for a lock that nobody gives back

#: The second: of a Condition that is broken into while it waits, and so is not locked.
INTERRUPTED = (KeyboardInterrupt, RuntimeError)


class _End(Future[Any]):
    """Ends the thread that comes to it."""

    def set_running_or_notify_cancel(self) -> bool:
        raise SystemExit


@contextlib.contextmanager
def pool_of(count: int) -> Iterator[_DaemonPool]:
    """A pool whose threads end behind it."""
    pool = _DaemonPool(count)
    yield pool
    for _ in range(count):
        pool._queue.put((_End(), int, (), {}))


def all_at_once(pool: _DaemonPool, count: int) -> None:
    """All its threads work, each beside the others."""
    together = threading.Barrier(count, timeout=20)
    futures = [pool.submit(together.wait) for _ in range(count)]
    assert sorted(future.result(timeout=20) for future in futures) == list(range(count))


def submit(pool: _DaemonPool) -> None:
    pool.submit(int)


def wait(pool: _DaemonPool) -> None:
    assert pool.submit(time.sleep, 0.002).result(timeout=20) is None


def cancel(pool: _DaemonPool) -> None:
    future = pool.submit(time.sleep, 0.002)
    if not future.cancel():
        future.exception(timeout=20)


@pytest.mark.parametrize("use", [submit, wait, cancel])
@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupt_at_any_call_of_the_pools_own(use: Callable[[_DaemonPool], None], begun: bool) -> None:
    for number in itertools.count(1):
        with pool_of(2) as pool:
            if begun:
                pool.submit(int).result(timeout=20)
            try:
                with broken_into(number) as struck:
                    use(pool)
            except INTERRUPTED:
                pass
            all_at_once(pool, 2)
        if not struck:
            break
    assert number > 8


@contextlib.contextmanager
def storm(dice: random.Random, armed: list[bool]) -> Iterator[None]:
    """KeyboardInterrupt at random moments, while `armed`. What other tests have left is not cleared away meanwhile, and
    nobody hears of one that comes where Python takes an object away."""
    over = False

    def strike(*_: object) -> None:
        if not over:
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(2e-5, 4e-4))
        if armed[0]:
            raise KeyboardInterrupt

    timer, handler = signal.setitimer(signal.ITIMER_REAL, 0), signal.signal(signal.SIGALRM, strike)  # pytest's
    reports, sys.unraisablehook = sys.unraisablehook, deque[object](maxlen=0).append
    gc.disable()
    strike()
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        sys.unraisablehook = reports
        gc.enable()


def test_a_storm_of_interrupts_leaves_the_pool_as_it_was() -> None:
    dice, raised, armed = random.Random(5), 0, [False]
    until = time.monotonic() + 3
    with pool_of(3) as pool:
        while raised < 1500 and time.monotonic() < until:
            with storm(dice, armed):
                for _ in range(50):
                    try:
                        armed[0] = True
                        for use in (submit, wait, cancel, cancel, submit):
                            use(pool)
                        armed[0] = False
                    except INTERRUPTED:
                        armed[0] = False
                        raised += 1
            all_at_once(pool, 3)
    assert raised > 100


def test_no_more_threads_than_are_needed() -> None:
    with pool_of(8) as pool:
        for _ in range(50):
            assert pool.submit(len, "abc").result(timeout=20) == 3
        assert pool._started == 1
        all_at_once(pool, 4)
        assert pool._started == 4
        failed = pool.submit(int, "x")
        with pytest.raises(ValueError, match="invalid literal"):
            failed.result(timeout=20)
        all_at_once(pool, 8)
        all_at_once(pool, 8)
        assert pool._started == 8
    assert workers.filter_pool() is workers.filter_pool()
