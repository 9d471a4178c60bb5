"""The compiled start of a grammar, shared by all filters that are cloned from one."""

from __future__ import annotations

import os
import threading
import weakref

from exl_filters.errors import FilterError
from exl_filters.llg import Matcher
from exl_filters.regex_states import PatternStates
from exl_filters.xgr import XgrammarMatcher

__all__ = ["AnyMatcher", "StartState"]

AnyMatcher = Matcher | XgrammarMatcher

JOBS_OF_LEXER = 3
"""Matchers that share a lexer before another one is made."""


def most_lexers() -> int:
    """Return how many lexers of a grammar are made at most: as many as threads compute masks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(32, cores * 8 // 10))


class StartState:
    """The matchers of a grammar at its start.

    Copies of an llguidance matcher share a lexer, which one thread at a time may use. So a grammar is compiled anew for
    every few jobs that run at the same time, up to one lexer a thread: their masks are then computed side by side.
    Lexers that are not used any more are dropped.

    Args:
        matcher: a matcher at the start.
        states: the states of the pattern, whose masks all clones share; None for other sources.
    """

    shared_between_clones = True

    def __init__(self, matcher: AnyMatcher, states: PatternStates | None = None) -> None:
        self._lexers: list[tuple[AnyMatcher, weakref.WeakSet[AnyMatcher]]] = [(matcher, weakref.WeakSet())]
        self._lock = threading.Lock()
        self._again = matcher.again if isinstance(matcher, Matcher) else None
        self.states = states

    def start(self) -> AnyMatcher:
        """Return a matcher at the start of the grammar."""
        with self._lock:
            self._release()
            matcher, started = min(self._lexers, key=lambda lexer: len(lexer[1]))
            if len(started) >= JOBS_OF_LEXER and (another := self._another()) is not None:
                matcher, started = another, weakref.WeakSet()
                self._lexers.append((matcher, started))
            made = matcher.copy()
            started.add(made)
            return made

    def _release(self) -> None:
        """Drop the lexers that no job uses but the first and one more, for which the next job may ask again."""
        unused = [lexer for lexer in self._lexers[1:] if not lexer[1]]
        for lexer in unused[1:]:
            self._lexers.remove(lexer)

    def _another(self) -> Matcher | None:
        if self._again is None or len(self._lexers) >= most_lexers():
            return None
        try:
            return self._again()
        except FilterError:  # out of memory, for example: those that exist serve
            self._again = None
            return None
