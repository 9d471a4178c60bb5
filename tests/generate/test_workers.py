"""Threads for filters keep working wherever a Ctrl-C interrupts: no thread is lost, and no caller waits for ever."""

from __future__ import annotations

import _thread
import contextlib
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from interrupting import interrupted_at, skip_unless_with_is_safe
from preloaded import run

from exl_generate.dynamic import workers
from exl_generate.dynamic.workers import DaemonPool

#: Seconds for what takes none: whoever waits as long waits for ever.
LONG = 120

#: The second: of a Condition that is interrupted while it waits, and so is not locked.
INTERRUPTED = (KeyboardInterrupt, RuntimeError)


def python_threads() -> int:
    """Threads that run Python, also those that `threading` does not know."""
    return len(sys._current_frames())  # noqa: SLF001


@contextlib.contextmanager
def pool_of(count: int) -> Iterator[DaemonPool]:
    """A pool whose threads end with it."""
    pool = DaemonPool(count)
    yield pool
    pool.shutdown()


def all_at_once(pool: DaemonPool, count: int) -> None:
    """All its threads work at the same time."""
    together = threading.Barrier(count, timeout=LONG)
    futures = [pool.submit(together.wait) for _ in range(count)]
    assert sorted(future.result(timeout=LONG) for future in futures) == list(range(count))


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # for ever, if it is never met: pytest ends that
        time.sleep(0.001)


def submit(pool: DaemonPool) -> None:
    pool.submit(int)


def wait(pool: DaemonPool) -> None:
    assert pool.submit(time.sleep, 0.002).result(timeout=LONG) is None


def cancel(pool: DaemonPool) -> None:
    future = pool.submit(time.sleep, 0.002)
    if not future.cancel():
        future.exception(timeout=LONG)


@pytest.mark.parametrize("use", [submit, wait, cancel])
@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupt_at_any_call_of_the_pools_own(use: Callable[[DaemonPool], None], begun: bool) -> None:
    threads = python_threads()
    for number in itertools.count(1):
        with pool_of(2) as pool:
            if begun:
                pool.submit(int).result(timeout=LONG)
            try:
                with interrupted_at(number) as raised:
                    use(pool)
            except INTERRUPTED:
                pass
            all_at_once(pool, 2)
        if not raised:
            break
    assert number > 8
    wait_until(lambda: python_threads() <= threads)  # none that nobody can end


@contextlib.contextmanager
def random_interrupts(dice: random.Random, armed: list[bool]) -> Iterator[None]:
    """Raise KeyboardInterrupt at random moments while `armed`.

    The garbage collector does not run meanwhile, so it frees no objects of other tests. An interrupt that is raised in
    a destructor is not reported.
    """
    over = False

    def strike(*_: object) -> None:
        if not over:
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(2e-5, 4e-4))
        if left and time.monotonic() - began > left:  # clock: as above
            armed[0] = False
            handler(signal.SIGALRM, None)
        if armed[0]:
            raise KeyboardInterrupt

    (left, _), began = signal.setitimer(signal.ITIMER_REAL, 0), time.monotonic()  # clock: pytest's, for a hang
    handler: Any = signal.signal(signal.SIGALRM, strike)
    reports, sys.unraisablehook = sys.unraisablehook, deque[object](maxlen=0).append
    gc.disable()
    strike()
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            passed = time.monotonic() - began  # clock: as above
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - passed))
        sys.unraisablehook = reports
        gc.enable()


def test_many_interrupts_do_not_change_the_pool() -> None:
    skip_unless_with_is_safe()
    dice, raised, armed = random.Random(5), 0, [False]
    with pool_of(3) as pool:
        for _ in range(200):
            if raised > 500:
                break
            with random_interrupts(dice, armed):
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
    assert raised > 500


def test_no_more_threads_than_are_needed() -> None:
    with pool_of(8) as pool:
        for _ in range(50):
            assert pool.submit(len, "abc").result(timeout=LONG) == 3
        assert pool.started == 1
        all_at_once(pool, 4)
        assert pool.started == 4
        failed = pool.submit(int, "x")
        with pytest.raises(ValueError, match="invalid literal"):
            failed.result(timeout=LONG)
        all_at_once(pool, 8)
        all_at_once(pool, 8)
        assert pool.started == 8
    assert workers.filter_pool() is workers.filter_pool()


def test_finished_work_is_not_counted_when_its_callbacks_run() -> None:
    """The next work to be submitted then finds a thread."""
    with pool_of(8) as pool:
        for work in (time.sleep, "no function"):
            begin, counts = threading.Event(), deque[int]()
            pool.submit(begin.wait)
            future = pool.submit(work, 0)  # type: ignore[arg-type]
            future.add_done_callback(lambda _, counts=counts: counts.append(pool.load))  # type: ignore[misc]
            wait_until(partial(bool, counts))
            assert counts == deque([1])
            begin.set()
            wait_until(lambda: not pool.load)


def test_a_thread_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with pool_of(2) as pool:
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(_thread, "start_new_thread", none_left)
                with pytest.raises(RuntimeError, match="can't start"):
                    pool.submit(int)
        all_at_once(pool, 2)
        assert pool.started == 2


def test_a_thread_has_a_name_and_keeps_nothing_of_what_it_did() -> None:
    class Mask: ...

    with pool_of(1) as pool:
        kept = []
        for fails in (False, True):
            given, made = Mask(), Mask()
            kept += [weakref.ref(given), weakref.ref(made)]

            def work(given: Mask, made: Mask = made, fails: bool = fails) -> Mask:
                assert threading.current_thread().name == "exl-filter"
                if fails:
                    raise ValueError(given)
                return made

            future = pool.submit(work, given)
            assert (future.exception(timeout=LONG) is not None) == fails
            del work, given, made, future
        wait_until(lambda: not any(reference() for reference in kept))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own() -> None:
    """Threads of its parent do not come along; a filter would be waited for for ever."""
    code = """
import os
from exl_generate.dynamic.workers import filter_pool
assert filter_pool().submit(len, "abc").result(timeout=120) == 3
child = os.fork()
if not child:
    os._exit(filter_pool().submit(len, "abc").result(timeout=120) - 3)
assert os.waitpid(child, 0)[1] == 0
assert filter_pool().submit(len, "abc").result(timeout=120) == 3
"""
    done = run(["-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr


def test_the_end_waits_for_tasks_that_run_and_begins_no_others() -> None:
    begin, done = threading.Event(), deque[str]()

    def slow() -> None:
        begin.wait()
        done.append("slow")

    with pool_of(1) as pool:
        running = pool.submit(slow)
        wait_until(running.running)
        waiting = pool.submit(done.append, "waiting")
        assert not pool.finish(0.01), "it does not wait for ever"
        begin.set()
        assert pool.finish(LONG)
        assert list(done) == ["slow"]
        wait_until(waiting.cancelled)


@pytest.mark.parametrize("task", ["ends", "block"])
def test_a_process_ends_while_a_task_runs(task: str) -> None:
    """Python ends a thread that returns from native code later; the task is over before, unless it takes very long."""
    code = f"""
import threading, time
from exl_generate.dynamic import workers
workers.LONGEST_EXIT = 0.05 if {task!r} == "block" else 120.0
begun = threading.Event()
def work():
    begun.set()
    if {task!r} == "block":
        threading.Event().wait()
    time.sleep(0.1)
    print("over", flush=True)
workers.filter_pool().submit(work)
begun.wait()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run(["-c", code], env=env, torn_down=True)  # the interpreter's end is what is tested here
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if task == "block" else "over\n")
