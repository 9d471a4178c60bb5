"""Compiling grammars with a time limit, off the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from exl_filters.errors import FilterCompileError

__all__ = ["compile_in_background", "compile_within"]

F = TypeVar("F")


def compile_in_background(make: Callable[..., F], *args: Any, **kwargs: Any) -> Future[F]:
    """Call `make` (a filter class, say) on its own thread; the future gives the filter or raises what it raised."""
    future: Future[F] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(make(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="exl-filters-compile", daemon=True).start()
    return future


def compile_within(seconds: float, make: Callable[..., F], *args: Any, **kwargs: Any) -> F:
    """The filter `make` gives, or `FilterCompileError` when it takes longer than `seconds`.

    The thread that works on it is left behind; llguidance's own limits (`limits=` of the grammar filter) end it.
    """
    future = compile_in_background(make, *args, **kwargs)
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        if future.done():
            raise
        raise FilterCompileError(
            f"not compiled within {seconds:g} s: simplify it, allow more time, or lower its limits to fail sooner"
        ) from None
