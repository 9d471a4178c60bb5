"""Background computations of a filter: every method waits for them, so only one thread uses a filter at a time.

llguidance rejects a matcher that two threads use ("Already borrowed"), and a filter in plain Python would mix two
states. So every method of the contract, in every subclass, first waits for the pending computation. A method that
changes the state drops the computation instead. The computation itself may call its own filter: it is recognized by its
thread. A computation that calls its filter from other threads would wait for itself, so no method waits longer than
`LONGEST_WAIT`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as StillRunning
from typing import Any, TypeVar

from exl_filters.errors import FilterBusy

__all__ = ["ATTRIBUTES", "LONGEST_WAIT", "Pending", "finish", "finish_soon", "guard"]

T = TypeVar("T")

# Attributes of a filter that say what is pending. They are not copied.
ATTRIBUTES = ("background_result", "_background")

# Seconds that a method of a filter waits for the filter's background computation. A mask of a working filter never
# takes as long. Hosts call `get_next`, which waits without a limit.
LONGEST_WAIT = 30.0

# Methods that change the state: a result computed before one of them must not be used after it.
DROPPING = ("attach", "begin", "feed", "rewind")
WAITING = (
    "captures",
    "clone",
    "ended",
    "fill_bitmask",
    "forced",
    "is_complete",
    "mask_logits",
    "next",
    "prepare_logit_mask",
    "validate",
)


class Pending:
    """A computation of a filter on another thread: its kind, its future and, while it runs, its thread."""

    def __init__(self, kind: str, work: Callable[[], None] | None = None) -> None:
        """`work`: the computation of several filters' masks, which `take_over` runs."""
        self.kind = kind
        self.future: Future[Any] | None = None
        self._work = work
        self._thread = 0

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the current thread, recorded as the computation's thread meanwhile; returns its result."""
        self._thread = threading.get_ident()
        try:
            return work()
        finally:
            self._thread = 0

    def take_over(self) -> None:
        """Run `work` on the current thread, once, if it has not begun on any other. A failure leaves the masks open."""
        if self._work is not None and self.future is not None and self.future.cancel():
            work, self._work = self._work, None
            with contextlib.suppress(Exception):
                self.run(work)

    @property
    def here(self) -> bool:
        """Whether the current thread runs this computation."""
        return self._thread == threading.get_ident()


def finish(future: Future[Any], seconds: float | None = None) -> bool:
    """Cancel `future` or wait until it is over. Returns whether it ran; its result or exception is ignored.

    A future that has not begun is cancelled and never waited for: its thread may be the one that calls. Raises
    `StillRunning` when the future is not over after `seconds` (None: no limit).
    """
    if future.done():
        return not future.cancelled()
    if future.cancel():
        return False
    with contextlib.suppress(CancelledError):
        future.exception(seconds)
    return not future.cancelled()


def finish_soon(future: Future[Any], name: str) -> bool:
    """Call `finish` for a method of the filter called `name`. Raises `FilterBusy` after `LONGEST_WAIT` seconds."""
    try:
        return finish(future, LONGEST_WAIT)
    except StillRunning:
        raise FilterBusy(
            f"{name} was called while its background computation ran, which was not over after {LONGEST_WAIT:g} s: a "
            "computation may call its own filter only from its own thread, not from threads that it starts; if it is "
            "just slow, let use_background_worker() return False"
        ) from None


def guard(cls: type[Any], base: type[Any]) -> None:
    """Make the contract's methods of `cls` wait, including those inherited from a class that is not a filter."""
    for names, quiet in ((DROPPING, "_discard_pending"), (WAITING, "_wait_pending")):
        for name in names:
            method = inspect.getattr_static(cls, name, None)
            known = getattr(method, "_waits", None) is method or method is inspect.getattr_static(base, name, None)
            if known:
                continue
            if inspect.isfunction(method):
                setattr(cls, name, _waiting(method, quiet))
            elif _is_method(method):
                setattr(cls, name, _waiting_callable(method, quiet))


def _is_method(value: Any) -> bool:
    """Whether `value` is called with the filter as its first argument: compiled code, a cache around a function."""
    if isinstance(value, (staticmethod, classmethod)):
        return False
    return callable(value) or isinstance(value, (functools.partialmethod, functools.singledispatchmethod))


def _waiting(method: Callable[..., Any], quiet: str) -> Callable[..., Any]:
    """Wrap `method`: call the filter's method named `quiet` first where a computation is pending.

    The methods that run for every token have wrappers with a fixed signature, which cost less than one for any
    arguments.
    """
    parameters = inspect.signature(method).parameters.values()
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
    names = [p.name for p in parameters] if plain else None
    wrapper: Callable[..., Any]
    if names and len(names) == 1:

        def wrapper(self: Any) -> Any:
            if self.background_result is not None:
                getattr(self, quiet)()
            return method(self)

    elif names and names[1:] == ["words"]:

        def wrapper(self: Any, words: Any) -> Any:
            if self.background_result is not None:
                getattr(self, quiet)()
            return method(self, words)

    elif names and names[1:] == ["token"]:

        def wrapper(self: Any, token: Any) -> Any:
            if self.background_result is not None:
                getattr(self, quiet)()
            return method(self, token)

    else:

        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.background_result is not None:
                getattr(self, quiet)()
            return method(self, *args, **kwargs)

    functools.update_wrapper(wrapper, method)
    vars(wrapper)["_waits"] = wrapper  # itself: what wraps it copies the mark
    return wrapper


def _waiting_callable(method: Any, quiet: str) -> Callable[..., Any]:
    """Wrap a callable that is not a plain function, as `_waiting` does.

    The wrapper binds it as Python would and keeps its other attributes (the `cache_clear` of a cache).
    """
    bind = getattr(type(method), "__get__", None)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.background_result is not None:
            getattr(self, quiet)()
        bound = method if bind is None else bind(method, self, type(self))
        return bound(*args, **kwargs)

    functools.update_wrapper(wrapper, method)
    for name in ("cache_clear", "cache_info", "cache_parameters"):
        if hasattr(method, name):
            setattr(wrapper, name, getattr(method, name))
    vars(wrapper)["_waits"] = wrapper  # itself: what wraps it copies the mark
    return wrapper
