"""Choose how many prompt tokens a step computes while other jobs decode, from the time that earlier steps took."""

from __future__ import annotations

from time import perf_counter

__all__ = ["PromptPace"]

#: weight of the newest step in a mean
NEWEST = 0.3
#: pages of prompt tokens in a step before any time is known
FIRST_PAGES = 2
#: parts of a page that a step computes where a whole page takes too long
PARTS = (2, 4)
#: the most that a step of a part takes of the time of a page's, unless it keeps to the target
SHORTER = 0.75
#: seconds between two steps that are no pause, however short the target
NO_PAUSE = 0.05


class PromptPace:
    """Limit the prompt tokens of a step so that jobs that decode wait at most `target` seconds for their next tokens.

    A step lasts from its beginning to that of the next one: on a GPU the next step waits for the prompts of this one.
    Its time is that of decoding, the mean of steps without prompt tokens, and an equal part for each prompt token.
    Steps in which no job decodes are neither limited nor measured; nor is a step after which the caller paused for
    longer than `target` and `NO_PAUSE`.

    Args:
        target: seconds; None limits nothing.
        most: most prompt tokens of any step.
        page_size: limits are whole pages or, where a step is shorter by that, a half or a quarter of one, and at most
            `most`.
    """

    def __init__(self, target: float | None, most: int, page_size: int) -> None:
        self._target, self._most, self._page = target, most, min(page_size, most)
        #: limits below a page
        self._parts = [self._page // part for part in PARTS if self._page >= part]
        self._least = min(self._parts, default=self._page)
        #: whether there is a target
        self.limited = target is not None
        #: mean seconds of a step without prompt tokens; None before the first measurement
        self._base: float | None = None
        #: mean seconds beyond these for each prompt token; None before the first measurement
        self._each: float | None = None
        #: mean seconds of steps that computed a page or a part of one, by tokens, since a step without prompt tokens
        self._took: dict[int, float] = {}
        self._began = self._ended = 0.0
        #: whether jobs decoded in the last step
        self._decoded = False
        #: prompt tokens of the last step and of the step before it
        self._tokens = self._before = 0

    def begin(self, decodes: bool) -> int:
        """Begin a step in which jobs decode or not; return the most prompt tokens that it may compute."""
        if self._target is None:
            return self._most
        now = perf_counter()
        if decodes and self._decoded and now - self._ended <= max(self._target, NO_PAUSE):
            self._learn(now - self._began)
        self._began = self._ended = now
        self._decoded = decodes
        return self._allowed(self._target) if decodes else self._most

    def spent(self, tokens: int) -> None:
        """Record the prompt tokens of the step that has begun."""
        self._before, self._tokens = self._tokens, tokens

    def end(self) -> None:
        """Record that the step returns to the caller, who may pause before the next one."""
        self._ended = perf_counter()

    def _allowed(self, target: float) -> int:
        if self._each is None:
            return min(self._most, FIRST_PAGES * self._page)
        left = target - (self._base or 0.0)
        if left >= self._each * self._most:  # compared before a division, whose result may be infinite
            return self._most
        fit = int(left / self._each) if left > 0 else 0
        if fit >= self._page:
            return min(self._most, fit // self._page * self._page)
        part = next((part for part in self._parts if part <= fit), self._least)
        return part if self._shortens(part, target) else self._page

    def _shortens(self, part: int, target: float) -> bool:
        """Return whether steps of a part of a page are shorter, or may be: a pass also costs time of its own."""
        page, took = self._took.get(self._page), self._took.get(part)
        return page is not None and (took is None or took <= max(target, SHORTER * page))

    def _learn(self, seconds: float) -> None:
        # A GPU may compute a step's prompts in the next step's time, so the tokens of either step may have taken it.
        tokens = min(self._before, self._tokens)
        if self._before == self._tokens and tokens in (self._page, *self._parts):
            self._took[tokens] = _mean(self._took.get(tokens), seconds)
        elif not (self._before or self._tokens):
            self._took.clear()
        if self._base is not None and seconds <= self._base:
            # Prompts only add time: decoding is faster than it was, such as after a first step that compiled something.
            self._base = _mean(self._base, seconds)
        elif tokens >= self._least:
            more = seconds - (self._base or 0.0)
            slowest, fastest = more / tokens, more / max(self._before, self._tokens)
            # Either count may have caused this time, so the mean changes only if it lies outside of both estimates.
            found = slowest if self._each is None else min(max(self._each, fastest), slowest)
            self._each = _mean(self._each, found)
        elif not (self._before or self._tokens):
            self._base = _mean(self._base, seconds)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - NEWEST) * old + NEWEST * new
