"""`FilterDriver`: runs one private filter by the contract. Hosts and combining filters use filters only through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from exl_filters import bits
from exl_filters.base import ExLlamaV2Filter, overrides
from exl_filters.bits import Words
from exl_filters.context import FilterContext
from exl_filters.errors import FilterError, FilterFailed, FilterRejected, FilterUsageError

__all__ = ["FilterDriver"]


class FilterDriver:
    """Own a filter, its token journal, its mask buffer and its first failure.

    The filter must be native (see `as_filter`) and used by nobody else. Masks are computed once per state. After a
    failure, every call raises that failure until `begin`.
    """

    def __init__(self, filter_: ExLlamaV2Filter, context: FilterContext) -> None:
        self.filter = filter_
        self.context = context
        self.failure: FilterError | None = None
        self._lists_ends = not overrides(filter_, "ended")
        self._words = bits.empty(context.vocab_size)
        self._ragged = context.vocab_size % 32 != 0
        self._fresh = False
        self._has_opinion = False
        self._journal: list[int] = []
        # Journal length at which a stop token or the end of the constraint finished the filter; later tokens never
        # reach it.
        self._done_at: int | None = None
        self._ended_at: int | None = None
        self._prefix: str | bytes | None = ""
        self._guard("attach", lambda: filter_.attach(context))

    def copy(self) -> FilterDriver:
        """Return a driver of a clone, in the same state."""
        new = object.__new__(FilterDriver)
        new.__dict__.update(vars(self))
        new.filter = self.filter.clone()
        new._words, new._journal, new._fresh = self._words.copy(), list(self._journal), False
        return new

    # State.

    @property
    def done(self) -> bool:
        """Whether a stop token or an end token has been fed."""
        return self._done_at is not None

    @property
    def ended(self) -> bool:
        """Whether the constraint itself has ended, as opposed to a stop token outside a constraint."""
        return self._ended_at is not None

    @property
    def complete(self) -> bool:
        """Whether the text so far is a complete sentence of this filter."""
        return self.done or bool(self._guard("is_complete", self.filter.is_complete))

    @property
    def length(self) -> int:
        """Number of tokens in the journal."""
        return len(self._journal)

    def begin(self, prefix: str | bytes | None = "") -> None:
        """Start a new generation; clears a failure."""
        self.failure = None
        self._journal.clear()
        self._done_at = self._ended_at = None
        self._fresh = False
        self._prefix = prefix
        self.filter.background_drop()
        self._guard("begin", lambda: self.filter.begin(prefix or ""))

    def mask(self) -> Words | None:
        """Return the packed mask of the current state, or None for no opinion.

        The driver owns the mask; it is valid until the next call. There is no opinion once the constraint has ended.
        """
        if self.failure is not None:
            raise self.failure
        if self._done_at is not None:
            return None
        if not self._fresh:
            try:
                self._has_opinion = bool(self.filter.fill_bitmask(self._words))
            except BaseException as error:
                self._park("fill_bitmask", error)
            if self._ragged:
                bits.clear_from(self._words, self.context.vocab_size)
            self._fresh = True
        return self._words if self._has_opinion else None

    def take(self, words: Words) -> None:
        """Use `words`, of the context's width, as the mask of the current state. The caller gives the array away."""
        if self._ragged:
            bits.clear_from(words, self.context.vocab_size)
        self._words = words
        self._has_opinion = self._fresh = True

    def ends(self) -> frozenset[int]:
        """Return the end tokens of the current state that the filter lists."""
        if self.done:
            return frozenset()
        allowed, ends = self._guard("next", self.filter.next)
        return frozenset() if allowed is None else frozenset(int(e) for e in ends)

    def feed(self, token: int) -> bool:
        """Accept a token. Returns True when the constraint has ended. Raises `FilterRejected`; the state is then
        unchanged.
        """
        if self.failure is not None:
            raise self.failure
        if self._done_at is None:
            listed = token in self.ends() if self._lists_ends else False
            if token in self.context.stop_ids:
                self._stop(token)
            else:
                try:
                    self.filter.feed(token)
                    ended = listed or (not self._lists_ends and self.filter.ended())
                except BaseException as error:
                    self._park("feed", error)
                self._fresh = False
                if ended:
                    self._done_at = self._ended_at = len(self._journal) + 1
        self._journal.append(token)
        return self.ended

    def _stop(self, token: int) -> None:
        """Finish the filter at a stop token without feeding it: many filters raise on their own EOS."""
        words = self.mask()
        if words is not None and not bits.test(words, token):
            raise FilterRejected(f"stop token {token}: {self.filter.describe()} is not complete", token)
        self._done_at = len(self._journal) + 1
        if words is not None:
            self._ended_at = self._done_at

    def rewind(self, n: int) -> None:
        """Undo the last `n` feeds, also across the end.

        Raises `FilterUsageError` for more than were fed; the state is then unchanged.
        """
        if not 0 <= n <= len(self._journal):
            raise FilterUsageError(f"rewind({n}) after {len(self._journal)} tokens")
        if n == 0:
            return
        seen_before = self._seen()
        del self._journal[len(self._journal) - n :]
        if self._done_at is not None and len(self._journal) < self._done_at:
            self._done_at = self._ended_at = None
        self._fresh = False
        steps = seen_before - self._seen()
        if steps and overrides(self.filter, "rewind"):
            self._guard("rewind", lambda: self.filter.rewind(steps))
        elif steps:
            self._replay()

    def _seen(self) -> int:
        """Return how many tokens of the journal have reached the filter."""
        if self._done_at is None:
            return len(self._journal)
        last_is_stop = self._journal[self._done_at - 1] in self.context.stop_ids
        return self._done_at - 1 if last_is_stop else self._done_at

    def _replay(self) -> None:
        self._guard("begin", lambda: self.filter.begin(self._prefix or ""))
        for token in self._journal[: self._seen()]:
            # `next` is called before each feed: lm-format-enforcer restarts silently when fed twice without it.
            self._guard("next", self.filter.next)
            self._guard("feed", lambda token=token: self.filter.feed(token))

    def validate(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may follow in order; the state is unchanged."""
        if self.done:
            return len(tokens)
        if overrides(self.filter, "validate"):
            return int(self._guard("validate", lambda: self.filter.validate(tokens)))
        accepted = 0
        for token in tokens:
            words = self.mask()
            if words is not None and not bits.test(words, token):
                break
            self.feed(token)
            accepted += 1
        self.rewind(accepted)
        return accepted

    def _guard(self, what: str, call):  # type: ignore[no-untyped-def]
        """Run `call`; keep any failure but a rejection, and raise it as a `FilterError`."""
        try:
            return call()
        except BaseException as error:
            self._park(what, error)

    def _park(self, what: str, error: BaseException) -> NoReturn:
        """Keep a failure for later calls and raise it as a `FilterError`; called while `error` is being handled.

        Takes BaseException, because a panic in a Rust library arrives as one. A rejection is not a failure.
        """
        if isinstance(error, FilterRejected | KeyboardInterrupt | SystemExit | GeneratorExit):
            raise error
        if isinstance(error, FilterError):
            self.failure = error
            raise error
        name = self.filter.describe()
        self.failure = FilterFailed(f"{name}.{what} raised {type(error).__name__}: {error}")
        raise self.failure from error
