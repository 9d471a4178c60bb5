"""`FilterStack`: all filters of one job, as one constraint. Generators and adapters use filters through it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Executor, Future
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from exl_filters import background, bits
from exl_filters.background import Pending
from exl_filters.base import ExLlamaV2Filter
from exl_filters.bits import Words
from exl_filters.context import FilterContext
from exl_filters.driver import FilterDriver
from exl_filters.errors import (
    Diagnosis,
    FilterBusy,
    FilterDeadEnd,
    FilterError,
    FilterRejected,
    FilterUsageError,
    Opinion,
)
from exl_filters.foreign import ForeignFilter, as_filter, copy_of_foreign
from exl_filters.owners import owners
from exl_filters.tokens import as_token

if TYPE_CHECKING:
    from exl_filters.llg import Matcher

__all__ = ["FilterStack", "Status"]

# Seconds. Handing a mask to a pool and back takes almost as long; a faster mask is computed on the calling thread.
WORTH_A_THREAD = 150e-6


class Status(Enum):
    """State of a constraint."""

    OPEN = "open"
    COMPLETE = "complete"
    DONE = "done"
    DEAD = "dead"
    FAILED = "failed"


class FilterStack:
    """One job's filters, combined by the intersection of their masks.

    All exceptions are `FilterError`s. One thread at a time uses a stack.

    Args:
        filters: Templates. Native filters are cloned, so one list may serve many jobs. Foreign objects that cannot be
            copied are used in place until `close()`.
        vocab_size: Masks cover the ids in [0, vocab_size).
        stop_ids: Every id on which this host stops. None entries are ignored.
        special_ids: Control tokens, never matched by their spelling.
        logits_width: Entries of a row of logits; default: `vocab_size`.
        end_policy: The constraint has ended when "any" filter has ended (as in exllamav2), or when "all" filters with
            an
            opinion have.
        dead_end: When nothing is allowed, "error" raises `FilterDeadEnd`. "eos" offers the stop ids if some filter is
            complete; the one that is fed ends the stack as `cut`.
        prefer_eos: True narrows the mask to the stop ids as soon as one is allowed; "end" narrows it to the end tokens
            that the filters list. As in exllamav2, it has no effect where every filter masks logits itself
            (`can_mask_logits`): such a filter ends by allowing EOS alone, and an EOS among other ids may be text to it.

    Raises:
        FilterBusy: a foreign object that is used in place belongs to another live stack.
        FilterUsageError: `end_policy`, `dead_end` or a filter is not valid.
    """

    def __init__(
        self,
        filters: Sequence[object],
        *,
        vocab_size: int,
        stop_ids: Collection[int | None] = (),
        special_ids: Collection[int] = (),
        logits_width: int | None = None,
        end_policy: Literal["any", "all"] = "any",
        dead_end: Literal["error", "eos"] = "error",
        prefer_eos: bool | Literal["end"] = False,
    ) -> None:
        if end_policy not in ("any", "all") or dead_end not in ("error", "eos"):
            raise FilterUsageError(
                f'end_policy is "any" or "all", dead_end "error" or "eos"; got {end_policy!r}, {dead_end!r}'
            )
        self.context = FilterContext.make(vocab_size, stop_ids, special_ids, logits_width)
        self._end_policy, self._dead_end, self._prefer_eos = end_policy, dead_end, prefer_eos
        self._combined = self._mask = bits.empty(vocab_size)
        self._stop_words = bits.from_ids(self.context.stop_ids, vocab_size)
        self._fresh = False
        self._unrestricted = True
        # The filters with an opinion at the last step (under the "all" end policy), and before each token fed.
        self._spoke: frozenset[int] = frozenset()
        self._spoke_before: list[frozenset[int]] = []
        self._tokens: list[int] = []
        # Number of tokens at which a stop id offered in a dead end cut the text off. No filter receives it or later
        # tokens.
        self._cut_at: int | None = None
        self._claims: list[int] = []
        self._drivers: list[FilterDriver] = []
        self._begun = False
        self._closed = False
        self._pending: Future[None] | None = None
        self._computation: Pending | None = None  # which has that future
        # Seconds that recent masks took: measured the first time, and every time for a host that calls `prefetch`.
        self._cost: float | None = None
        self._clocked = False
        # Index of a word that was not zero in the last mask: usually it shows at once that a mask is not empty.
        self._hint = 0
        try:
            for index, given in enumerate(filters):
                self._drivers.append(FilterDriver(self._take(given, index), self.context))
        except BaseException:
            self.close()
            raise
        if self._drivers and all(_masks_logits(driver.filter) for driver in self._drivers):
            self._prefer_eos = False

    def __enter__(self) -> FilterStack:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # The four methods of a generation.

    def begin(self, prefix: str | bytes | None = "") -> None:
        """Reset every filter. `prefix` is the text that the first token writes again (token healing)."""
        self._wait_pending()
        self._tokens.clear()
        self._spoke_before.clear()
        self._spoke, self._cut_at = frozenset(), None
        self._fresh = False
        self._begun = True
        for driver in self._drivers:
            driver.begin(prefix)

    def next_mask(self) -> Words | None:
        """Return the packed mask of the current state: int32 [ceil(vocab_size/32)], 1 = allowed; None = unrestricted.

        The array belongs to the stack and is valid until the next call of any method. Raises `FilterDeadEnd` when
        nothing is allowed, or the error of a filter.
        """
        if self._pending is not None or self._closed or not self._begun:
            self._compute()
        elif not self._fresh:
            self._compute_now()
        if self._unrestricted:
            return None
        if not self._mask.item(self._hint) and self._empty():
            # A copy apart from the mask, so that the state of the stack stays dead.
            return self._dead_end_offer()
        return self._mask

    def compile_ahead(self, pool: Executor) -> None:
        """Compile on `pool` what speeds up the masks of many jobs of one grammar. Optional: call it before `begin`."""
        for driver in self._drivers:
            compile_ahead = getattr(driver.filter, "compile_ahead", None)
            if compile_ahead is not None:
                compile_ahead(pool)

    def prefetch(self, pool: Executor) -> bool:
        """Compute the next mask on `pool` if that saves time; `next_mask` returns it. Call it right after `feed`.

        Returns False, and starts nothing, in three cases: recent masks took less time than the hand-over, the
        constraint is over, or the mask exists already, here or in a filter of the same template. At most one
        computation runs; every other method waits for it. The next call that needs the mask raises its failure.
        """
        if self._fresh or self._pending is not None or not self._begun or self.ended:
            return False
        self._clocked = True
        if self.knows_mask:
            return False
        if self._cost is None:
            if not any(driver.filter.use_background_worker() for driver in self._drivers):
                return False
        elif self._cost < WORTH_A_THREAD:
            return False
        self._pending = self._submit(pool)
        return True

    @property
    def is_due(self) -> bool:
        """Whether the mask of the current state is needed next and nothing computes it yet."""
        return not self._fresh and self._pending is None and self._begun and not self._closed and not self.ended

    @property
    def knows_mask(self) -> bool:
        """Whether every filter's mask of the current state is known from others of its template."""
        for driver in self._drivers:
            if not getattr(driver.filter, "knows_mask", False):
                return False
        return bool(self._drivers)

    @property
    def mask_key(self) -> object:
        """Return the key of the mask, equal for stacks of one mask; None where it is not known."""
        return getattr(self._drivers[0].filter, "mask_key", None) if len(self._drivers) == 1 else None

    @property
    def only(self) -> ExLlamaV2Filter | None:
        """The filter of a stack that has one, else None."""
        return self._drivers[0].filter if len(self._drivers) == 1 else None

    def expect(self, pending: Pending, future: Future[None]) -> None:
        """Wait in every method, here and in the filters, for a computation of this mask and others.

        Args:
            pending: the computation, which may call the filters itself.
            future: its end.
        """
        self._pending, self._computation = future, pending
        for driver in self._drivers:
            driver.filter._background = pending
            driver.filter.background_result = future

    def expects(self, pending: Pending) -> bool:
        """Whether the stack still waits for the computation `pending`, in the state that it began for."""
        return self._pending is not None and self._computation is pending

    def take(self, matcher: Matcher, mask: Words | None, seconds: float) -> None:
        """Use `mask` as the mask of the current state, computed by `matcher`, that of the only filter.

        Called by the computation of `expect`. A failure is left to the next call that needs the mask.

        Args:
            matcher: the matcher.
            mask: the mask; None where the filter knows it by now.
            seconds: its share of the time that the matchers took.
        """
        driver = self._drivers[0]
        if mask is not None and len(mask) == len(self._combined) and not self._prefer_eos and self._cut_at is None:
            filter_: Any = driver.filter
            if filter_.finish_mask(mask):
                driver.take(mask)
                self._mask, self._unrestricted, self._fresh = mask, False, True
                self._learn(seconds)
                return
        matcher.known = mask
        begun = time.perf_counter()
        try:
            self._compute_now(clocked=False)
            self._learn(seconds + time.perf_counter() - begun)
        except Exception:
            self._fresh = False
        finally:
            matcher.known = None

    def _submit(self, pool: Executor) -> Future[None]:
        """Compute the mask on `pool`. Until it is over, calls on the filters themselves wait for it, too."""
        self._computation = pending = Pending("")
        submitted = [driver.filter for driver in self._drivers if driver.filter.background_result is None]
        for filter_ in submitted:
            filter_._background = pending
        pending.future = future = pool.submit(pending.run, self._compute_now)
        for filter_ in submitted:
            filter_.background_result = future
        return future

    def feed(self, token: Any) -> bool:
        """Accept a token in every filter. Returns True when the constraint has ended (`end_filter`).

        Raises `FilterRejected`, with every filter's state unchanged, for a token that is not allowed. After a stop
        token or the end, further tokens are recorded and ignored. A stop id that `next_mask` offers in a dead end is
        accepted and ends the stack as `cut`.
        """
        token = as_token(token)
        if self._pending is not None:
            self._wait_pending()
        if not self._begun:
            self.begin("")
        spoke = self._speaking() if self._end_policy == "all" else self._spoke
        if self._dead_end == "eos" and self._cut_at is None and self._cuts(token):
            self._cut_at = len(self._tokens) + 1
        if self._cut_at is None:
            self._feed_all(token)
        self._tokens.append(token)
        self._spoke_before.append(self._spoke)
        self._spoke = spoke
        self._fresh = False
        return self.ended

    def _feed_all(self, token: int) -> None:
        """Give a token to every filter, or to none of them."""
        if len(self._drivers) == 1:
            self._drivers[0].feed(token)
            return
        fed: list[FilterDriver] = []
        try:
            for driver in self._drivers:
                driver.feed(token)
                fed.append(driver)
        except FilterRejected:
            for driver in fed:
                driver.rewind(1)
            raise

    def accept_text(self, text: str | bytes, vocabulary: Any = None) -> bool:
        """Feed tokens that spell `text`, where some tokenization of it is permitted. False changes nothing.

        `status` then says whether the text is complete.

        Args:
            text: Text, or its bytes.
            vocabulary: A `Vocabulary` or tokenizer; default: the filters' own.

        Raises:
            FilterUsageError: no vocabulary is known.
        """
        from exl_filters.texts import accept_text
        from exl_filters.vocabulary import vocabulary_of

        known = self._vocabulary() if vocabulary is None else vocabulary_of(vocabulary)
        if known is None:
            raise FilterUsageError("none of the filters has a tokenizer: pass a vocabulary")
        return accept_text(self, known, text)

    def rewind(self, n: int) -> None:
        """Undo the last `n` feeds, also across the end. Raises `FilterUsageError` for more than were fed."""
        if not 0 <= n <= len(self._tokens):
            raise FilterUsageError(f"rewind({n}) after {len(self._tokens)} tokens")
        if n == 0:
            return
        self._wait_pending()
        kept, seen = len(self._tokens) - n, self._seen()
        del self._tokens[kept:]
        self._spoke = self._spoke_before[kept]
        del self._spoke_before[kept:]
        if self._cut_at is not None and kept < self._cut_at:
            self._cut_at = None
        self._fresh = False
        for driver in self._drivers:
            driver.rewind(seen - self._seen())

    def close(self) -> None:
        """Drop pending work and release foreign filters. Safe to call twice; later masks raise `FilterUsageError`."""
        self._wait_pending()
        self._closed, self._fresh = True, False
        for driver in self._drivers:
            driver.filter.background_drop()
        self._drivers = []
        owners.release(self._claims, self)
        self._claims = []

    def copy(self) -> FilterStack:
        """Return another stack in the same state, for example for a beam.

        Raises `FilterBusy` when this stack uses a filter in place.
        """
        if self._claims:
            raise FilterBusy("a stack with filters that cannot be copied cannot be copied either")
        self._wait_pending()
        new = object.__new__(FilterStack)
        new.__dict__.update(vars(self))
        new._drivers = [driver.copy() for driver in self._drivers]
        new._combined = new._mask = self._combined.copy()
        new._tokens, new._spoke_before = list(self._tokens), list(self._spoke_before)
        new._claims, new._fresh = [], False
        return new

    # Properties and questions.

    @property
    def ended(self) -> bool:
        """Whether the constraint has ended, by the end policy or because it was cut."""
        if self._cut_at is not None:
            return True
        if self._end_policy == "any":
            for driver in self._drivers:  # noqa: SIM110 - a generator takes three times as long, at every token
                if driver.ended:
                    return True
            return False
        ended = [driver.ended for driver in self._drivers]
        spoke = [e for index, e in enumerate(ended) if index in self._spoke or e]
        return bool(spoke) and all(spoke)

    @property
    def cut(self) -> bool:
        """Whether a stop id was accepted in a dead end (`dead_end="eos"`): ended without every filter complete."""
        return self._cut_at is not None

    @property
    def complete(self) -> bool:
        """Whether the text so far is a complete sentence of every filter with an opinion."""
        if self._pending is not None:
            self._wait_pending()
        return all(driver.complete for driver in self._drivers if driver.done or driver.mask() is not None)

    @property
    def status(self) -> Status:
        """Return the state of the constraint. Never raises."""
        try:
            self._compute()
            if self.ended or (self._drivers and all(driver.done for driver in self._drivers)):
                return Status.DONE
            if not self._unrestricted and self._empty():
                return Status.DEAD
            return Status.COMPLETE if self.complete else Status.OPEN
        except FilterError:
            return Status.FAILED

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""
        mask = self.next_mask()
        return mask is None or bits.test(mask, token)

    def validate(self, tokens: Iterable[int]) -> int:
        """Return how many of `tokens` (a draft, for example) may follow in order; the state is unchanged."""
        accepted = 0
        try:
            for token in tokens:
                if self.ended or not self.allows(token):
                    break
                self.feed(token)
                accepted += 1
        except FilterDeadEnd:
            # The draft ran into a dead end; the tokens before it may follow.
            pass
        finally:
            self.rewind(accepted)
        return accepted

    @property
    def filters(self) -> list[ExLlamaV2Filter]:
        """The filters of this job (clones, or adapters of foreign objects), in the order given.

        For inspection: the stack does not notice a call that changes one of them. A call waits for a filter that works
        on a pool.
        """
        return [driver.filter for driver in self._drivers]

    # Internal methods.

    def _compute(self) -> None:
        """Bring the combined mask up to date with the state."""
        if self._pending is not None:
            if self._computation is not None:
                self._computation.take_over()
            self._wait_pending()
        if not self._fresh:
            if self._closed:
                # A closed stack has no filters and would allow everything.
                raise FilterUsageError("this FilterStack is closed: it has no filters any more; make a new one")
            if not self._begun:
                self.begin("")
            self._compute_now()

    def _wait_pending(self) -> None:
        """Wait for a background computation, or cancel it. The next call that needs the mask raises its failure."""
        if self._pending is not None:
            background.finish(self._pending)
            self._pending, computation = None, self._computation
            for driver in self._drivers:
                if driver.filter._background is computation:  # so that its methods need not look for it
                    driver.filter.background_result = driver.filter._background = None

    def _compute_now(self, clocked: bool = True) -> None:
        clocked = clocked and (self._clocked or self._cost is None)
        begun = time.perf_counter() if clocked else 0.0
        if len(self._drivers) == 1 and not self._prefer_eos:
            words = self._drivers[0].mask()
            self._unrestricted = words is None or self._cut_at is not None
            if words is not None:
                self._mask = words
        else:
            self._combine()
        self._fresh = True
        if clocked:
            self._learn(time.perf_counter() - begun)

    def _learn(self, taken: float) -> None:
        """Take the seconds of a mask into account."""
        self._cost = taken if self._cost is None else 0.75 * self._cost + 0.25 * taken

    def _combine(self) -> None:
        """Combine all opinions by intersection, narrowed where an end is preferred."""
        masks = [words for driver in self._drivers if (words := driver.mask()) is not None]
        self._unrestricted = not masks or self._cut_at is not None
        if len(masks) == 1 and not self._prefer_eos:
            self._mask = masks[0]
        elif masks:
            self._mask = self._combined
            self._combined[:] = masks[0]
            for words in masks[1:]:
                self._combined &= words
        if self._prefer_eos and not self._unrestricted:
            self._narrow()

    def _empty(self) -> bool:
        """Whether the mask allows nothing. Remembers the nonzero word, so that the next check is faster."""
        if not len(self._mask):
            return True
        octets = self._mask.view(np.uint8)
        at = int(octets.view(np.bool_).argmax())
        self._hint = at >> 2
        return not octets[at]

    def _narrow(self) -> None:
        """Prefer ending over continuing, where ending is allowed."""
        words = self._stop_words
        if self._prefer_eos == "end":
            ends = [token for driver in self._drivers for token in driver.ends()]
            words = bits.from_ids([*ends, *self.context.stop_ids], self.context.vocab_size)
        narrowed = self._combined & words
        if not bits.is_empty(narrowed):
            self._combined[:] = narrowed

    def _speaking(self) -> frozenset[int]:
        """Return the indices of the filters with an opinion at this step; the "all" end policy counts only those."""
        return frozenset(i for i, driver in enumerate(self._drivers) if not driver.done and driver.mask() is not None)

    def _seen(self) -> int:
        """Return how many of the fed tokens have reached the filters."""
        return len(self._tokens) if self._cut_at is None else self._cut_at - 1

    def _offers_stop(self) -> bool:
        """Whether a dead end offers the stop ids."""
        return (
            self._dead_end == "eos" and bool(self.context.stop_ids) and any(driver.complete for driver in self._drivers)
        )

    def _dead_end_offer(self) -> Words:
        if self._offers_stop():
            return self._stop_words.copy()
        raise FilterDeadEnd(self.diagnose())

    def _cuts(self, token: int) -> bool:
        """Whether `token` is a stop id that is offered because nothing else may follow."""
        if self._dead_end != "eos" or token not in self.context.stop_ids or self.ended:
            return False
        self._compute()
        return not self._unrestricted and self._empty() and self._offers_stop()

    def diagnose(self) -> Diagnosis:
        """Return every filter's opinion in the current state, with sample pieces, and the text so far."""
        if self._pending is not None:
            self._wait_pending()
        vocabulary = self._vocabulary()
        opinions = []
        for driver in self._drivers:
            words = driver.mask()
            ids = None if words is None else bits.to_ids(words)
            samples = tuple(_piece(vocabulary, token) for token in (ids or [])[:5])
            opinions.append(
                Opinion(driver.filter.describe(), None if ids is None else len(ids), samples, driver.complete)
            )
        text = "".join(_piece(vocabulary, token) for token in self._tokens)
        return Diagnosis(tuple(opinions), text, len(self._tokens))

    def _vocabulary(self) -> Any:
        from exl_filters.vocabulary import vocabulary_of

        for driver in self._drivers:
            if driver.filter.tokenizer is not None:
                try:
                    return vocabulary_of(driver.filter.tokenizer)
                except FilterError:
                    continue
        return None

    def _take(self, given: object, index: int) -> ExLlamaV2Filter:
        """Return this stack's own instance of a filter that the caller gave."""
        if isinstance(given, ExLlamaV2Filter) and given.native and not isinstance(given, ForeignFilter):
            clone = given.clone()
            if clone is given:
                raise FilterUsageError(f"filters[{index}]: clone() of {type(given).__name__} returned itself")
            return clone  # type: ignore[no-any-return]
        inner = given.inner if isinstance(given, ForeignFilter) else given
        try:
            return as_filter(copy_of_foreign(inner))
        except FilterUsageError:
            wrapped = ForeignFilter(inner)
        self._claims.append(owners.claim(inner, self))
        return wrapped


def worth_a_thread(stacks: Iterable[FilterStack]) -> bool:
    """Whether the next masks of these stacks take longer than a thread's hand-over, as far as known."""
    return sum(np.inf if stack._cost is None else stack._cost for stack in stacks) >= WORTH_A_THREAD


def _masks_logits(filter_: ExLlamaV2Filter) -> bool:
    return filter_.masks_logits if isinstance(filter_, ForeignFilter) else filter_.can_mask_logits()


def _piece(vocabulary: Any, token: int) -> str:
    if vocabulary is None:
        return f"<{token}>"
    text: str = vocabulary.piece(token)
    return text
