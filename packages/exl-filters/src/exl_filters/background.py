"""One thread at a time: whatever is asked of a filter waits for what runs in its background (spec FC-3).

llguidance refuses a matcher that two threads use ("Already borrowed"), and a filter of plain Python would mix two
states. So every method of the contract, in every subclass, begins by waiting for the pending computation, or by
dropping it where the method changes the state. The computation itself passes: it is known by its thread. One that asks
from threads of its own would wait for itself, so no method waits longer than `LONGEST_WAIT`.
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

# Attributes of a filter that say what is pending; no copy has them.
ATTRIBUTES = ("background_result", "_background")

# Seconds that a method of a filter waits for what runs in the filter's background. No mask of a filter that works takes
# as long; hosts, which wait for nothing but the result, wait until it is there.
LONGEST_WAIT = 30.0

# A result computed for the state before these must not be taken for the state after them.
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
    """A computation of a filter on another thread: its kind, its future, and the thread it runs on, while it runs."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.future: Future[Any] | None = None
        self._thread = 0

    def run(self, work: Callable[[], T]) -> T:
        self._thread = threading.get_ident()
        try:
            return work()
        finally:
            self._thread = 0

    @property
    def here(self) -> bool:
        """Whether it is this thread that runs it."""
        return self._thread == threading.get_ident()


def finish(future: Future[Any], seconds: float | None = None) -> bool:
    """Cancel `future` or wait until it is over, whatever came of it; whether it ran. Raises `StillRunning` when it is
    not over in time.

    What has not begun is never waited for: the thread it would run on may be the one that asks, or wait for it.
    """
    if future.cancel():
        return False
    with contextlib.suppress(CancelledError):
        future.exception(seconds)
    return not future.cancelled()


def finish_soon(future: Future[Any], name: str) -> bool:
    """`finish` for a method of the filter called `name`: `FilterBusy` beyond `LONGEST_WAIT`."""
    try:
        return finish(future, LONGEST_WAIT)
    except StillRunning:
        raise FilterBusy(
            f"{name} was asked while its background computation ran, which was not over after {LONGEST_WAIT:g} s: a "
            "computation may ask its own filter only from its own thread, not from threads that it starts; where it is "
            "just slow, let use_background_worker() return False"
        ) from None


def guard(cls: type[Any], base: type[Any]) -> None:
    """Make the methods of `cls` wait, also those it has from a class that is no filter."""
    for names, quiet in ((DROPPING, "_forsake"), (WAITING, "_settle")):
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
    """Whether it is called with the filter, or in its name: compiled code, a cache around a function, ..."""
    if isinstance(value, (staticmethod, classmethod)):
        return False
    return callable(value) or isinstance(value, (functools.partialmethod, functools.singledispatchmethod))


def _waiting(method: Callable[..., Any], quiet: str) -> Callable[..., Any]:
    """`method`, behind `self._forsake()` or `self._settle()` where something is pending.

    The methods of every token have wrappers of their own: a quarter of the cost of one for all arguments.
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
    """As `_waiting`, for what is no plain function. It is bound as Python would, and keeps what else it offers (the
    `cache_clear` of a cache)."""
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
