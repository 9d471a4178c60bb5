"""LAW-12 to LAW-15, LAW-29, LAW-30: copies, background evaluation, threads."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypothesis import strategies as st

from exl_filters import registry
from exl_filters.registry import from_spec
from exl_filters.testing.case import Case, Observed
from exl_filters.testing.laws.law import law

__all__: list[str] = []


@law(12)
def clone_equal(case: Case) -> None:
    """A clone is another object in the same state."""
    f = case.make()
    case.walk(f, 4, deep=2)
    copy = case.clone(f)
    case.expect(copy is not f, "clone() returned the filter itself")
    case.expect(type(copy) is type(f), f"clone() of {type(f).__name__} is a {type(copy).__name__}")
    case.equal(case.next(copy), case.next(f), "the clone answers differently")
    for token in case.walk(f, 4):
        case.feed(copy, token)
    case.equal(case.next(copy), case.next(f), "the clone takes another way with the same tokens")


@law(13)
def clone_independent(case: Case) -> None:
    """Feeding a filter or its clone leaves the other alone."""
    f = case.make()
    case.walk(f, 3)
    copy = case.clone(f)
    here, there = (f, copy) if case.draw(st.booleans()) else (copy, f)
    before = case.next(there)
    case.walk(here, 5, least=1)
    if case.draw(st.booleans()):
        case.begin(here, "")
    case.equal(case.next(there), before, "moving one moved the other")
    got = copy.get_next()
    case.equal(_observed(got), case.next(copy), "get_next() of a clone is not next()")


@law(14)
def background_equal(case: Case) -> None:
    """Background evaluation gives the foreground's answer."""
    f = case.make()
    case.walk(f, 4)
    expected = case.next(f)
    token = case.choose(f)
    judge = case.clone(f)
    with ThreadPoolExecutor(1) as pool:
        case.note(f"{case.of(f)}.background_next(pool)")
        f.background_next(pool)
        what = case.draw(st.sampled_from(["collect", "drop", "clone", "begin", "feed"]))
        case.note(f"# then {what}")
        if what == "collect":
            case.equal(_observed(f.get_next()), expected, "the background's answer differs")
        elif what == "drop":
            f.background_drop()
        elif what == "clone":
            copy = case.clone(f)
            case.equal(_observed(copy.get_next()), expected, "a clone made while work was pending")
            f.background_drop()
        elif what == "begin":
            case.begin(f, "")
            case.equal(_observed(f.get_next()), case.next(case.make()), "a stale result was delivered after begin()")
            return
        else:
            if token is not None:
                case.feed(judge, token)
                case.feed(f, token)
                case.equal(_observed(f.get_next()), case.next(judge), "a stale result was delivered after feed()")
                return
        case.expect(getattr(f, "background_result", None) is None or what == "feed", "work is still pending")
        f.background_drop()
        case.equal(_observed(f.get_next()), expected, "after collecting or dropping")
        if case.can(f, "prepare_logit_mask"):
            case.note(f"{case.of(f)}.background_prepare_logit_mask(pool)")
            f.background_prepare_logit_mask(pool)
            case.equal(f.get_next(mask=True), True, "get_next(mask=True) after background_prepare_logit_mask()")
            f.background_next(pool)
            case.equal(f.get_next(mask=True), True, "get_next(mask=True) with a result of the other kind pending")
            case.equal(_observed(f.get_next()), expected, "after masks in the background")


@law(15)
def background_errors(case: Case) -> None:
    """A failure in the background is delivered once and leaves a usable filter."""
    f = case.make()

    def fail() -> Any:
        raise ZeroDivisionError("planted by the law kit")

    case.note(f"{case.of(f)}.next = a function that raises; background_next(pool)")
    f.next = fail
    with ThreadPoolExecutor(1) as pool:
        f.background_next(pool)
        if case.draw(st.booleans()):
            try:
                f.get_next()
            except ZeroDivisionError:
                pass
            else:
                case.expect(False, "get_next() did not deliver the failure")
        else:
            _undisturbed(case, f.background_drop, "background_drop() raised the failure")
        del f.next
        _undisturbed(case, lambda: f.begin(""), "begin() raised the failure")
        case.equal(_observed(f.get_next()), case.next(case.make()), "the filter is not usable after a failure")
        f.background_next(pool)
        case.equal(_observed(f.get_next()), case.next(f), "no new work can be submitted after a failure")


@law(29, needs=["spec"], examples=0.3)
def spec_round_trip(case: Case) -> None:
    """spec() and pickle give an equal filter."""
    f = case.make()
    with _known(f):
        again = from_spec(f.spec(), case.vocabulary)
        restored = pickle.loads(pickle.dumps(f))
    for other in (again, restored):
        if callable(getattr(other, "attach", None)):
            other.attach(case.context)
        other.begin("")
    for _ in range(4):
        expected = case.next(f)
        case.equal(_observed(again.next()), expected, "the filter made from spec() answers differently")
        case.equal(_observed(restored.next()), expected, "the unpickled filter answers differently")
        token = case.choose(f)
        if token is None or case.is_terminal(f, token):
            return
        for other in (f, again, restored):
            other.feed(token)


@contextlib.contextmanager
def _known(f: Any) -> Iterator[None]:
    """Register the class for the duration of a `with` block, unless a distribution registers it."""
    name, kind = f.spec()["type"], type(f)
    if name in registry.names() or registry.names_of(kind):
        yield
        return
    registry.register(name, kind)
    try:
        yield
    finally:
        registry.unregister(name)


@law(30, examples=0.2)
def threads(case: Case) -> None:
    """Clones on threads of their own behave as alone."""
    f = case.make()
    paths = [case.walk(case.clone(f), 5) for _ in range(4)]
    expected = [_run(case.clone(f), path) for path in paths]
    clones = [f.clone() for _ in paths]
    barrier = threading.Barrier(len(paths))

    def work(index: int) -> list[Observed]:
        barrier.wait(10)
        return _run(clones[index], paths[index])

    with ThreadPoolExecutor(len(paths)) as pool:
        results = list(pool.map(work, range(len(paths))))
    case.equal(results, expected, "clones on threads answer differently")
    # One instance, each call on another thread: no state may be thread-local.
    handed = f.clone()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        for step, token in enumerate(paths[0]):
            pool = one if step % 2 else two
            got = _observed(pool.submit(handed.next).result())
            case.equal(got, expected[0][step], "the answer depends on the thread that asks")
            (two if step % 2 else one).submit(handed.feed, _form(handed, token)).result()
        case.equal(_observed(handed.next()), expected[0][-1], "the answer depends on the thread that fed")


def _run(f: Any, path: list[int]) -> list[Observed]:
    answers = [_observed(f.next())]
    for token in path:
        f.feed(_form(f, token))
        answers.append(_observed(f.next()))
    return answers


def _form(f: Any, token: int) -> Any:
    from exl_filters.base import ExLlamaV2Filter
    from exl_filters.tokens import fed_token

    return token if isinstance(f, ExLlamaV2Filter) else fed_token(token)


def _observed(answer: Any) -> Observed:
    allowed, ends = answer
    return (None if allowed is None else frozenset(allowed)), frozenset(ends)


def _undisturbed(case: Case, call: Any, message: str) -> None:
    try:
        call()
    except Exception as error:
        case.expect(False, f"{message}: {type(error).__name__}: {error}")
