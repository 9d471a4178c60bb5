"""The compiled start of a grammar, shared by all filters that are cloned from one."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Executor, Future

from exl_filters.cores import available_cores
from exl_filters.errors import FilterError
from exl_filters.llg import Matcher
from exl_filters.regex_states import PatternStates
from exl_filters.xgr import XgrammarMatcher

__all__ = ["AnyMatcher", "StartState"]

AnyMatcher = Matcher | XgrammarMatcher

JOBS_OF_LEXER = 6
"""Jobs that share a lexer. A lexer of fewer jobs meets more states for the first time, which takes longer."""


def most_lexers() -> int:
    """Return how many lexers of a grammar are made at most: as many as threads compute masks."""
    return max(1, min(32, available_cores() * 8 // 10))


class StartState:
    """The matchers of a grammar at its start.

    Copies of an llguidance matcher share a lexer, which one thread at a time may use. So a grammar is compiled anew for
    every few jobs that run at the same time, up to one lexer a thread: their masks are then computed side by side.
    Lexers that are not used any more are dropped. `compile_ahead` makes lexers; no job waits for them.

    Args:
        matcher: a matcher at the start.
        states: the states of the pattern, whose masks all clones share; None for other sources.
    """

    shared_between_clones = True

    def __init__(self, matcher: AnyMatcher, states: PatternStates | None = None) -> None:
        self._lexers: list[tuple[AnyMatcher, weakref.WeakSet[AnyMatcher]]] = [(matcher, weakref.WeakSet())]
        #: matchers of clones that have not begun
        self._waiting: weakref.WeakSet[AnyMatcher] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._again = matcher.again if isinstance(matcher, Matcher) else None
        self._compiling: Future[None] | None = None
        self.states = states

    def copy(self, matcher: AnyMatcher) -> AnyMatcher:
        """Return a copy of a matcher, for a clone."""
        made = matcher.copy()
        with self._lock:
            self._waiting.add(made)
        return made

    def start(self) -> AnyMatcher:
        """Return a matcher at the start of the grammar, of the lexer that the fewest jobs use."""
        with self._lock:
            unused = [lexer for lexer in self._lexers[1:] if not lexer[1]]
            for lexer in unused[: max(0, len(self._lexers) - self._wanted() - 1)]:  # one stays for the next job
                self._lexers.remove(lexer)
            matcher, started = min(self._lexers, key=lambda lexer: len(lexer[1]))
            made = matcher.copy()
            started.add(made)
            return made

    def compile_ahead(self, pool: Executor) -> None:
        """Compile on `pool` the lexers that the present clones need. Those that begin earlier share what there is."""
        begun = self._compiling
        if self._again is None or len(self._lexers) >= self._wanted() or (begun is not None and not begun.done()):
            return
        self._compiling = pool.submit(self._compile)

    def _wanted(self) -> int:
        """Return the number of lexers for the matchers in use; one of these is the template's own."""
        used = len(self._waiting) + sum(len(started) for _, started in self._lexers)
        return max(1, min(most_lexers(), -(-(used - 1) // JOBS_OF_LEXER)))

    def _compile(self) -> None:
        try:
            while self._again is not None and len(self._lexers) < self._wanted():
                self._lexers.append((self._again(), weakref.WeakSet()))
        except (FilterError, MemoryError):  # the lexers that exist are enough
            self._again = None
