"""Choose how many prompt tokens a step computes while other jobs decode, from the time that earlier steps took."""

from __future__ import annotations

from time import perf_counter

__all__ = ["PromptPace"]

#: weight of the newest step in the mean time of a token
NEWEST = 0.3
#: pages of prompt tokens in a step before any time is known
FIRST_PAGES = 2


class PromptPace:
    """Limit the prompt tokens of a step so that jobs that decode wait at most `target` seconds for their next tokens.

    A step lasts from its beginning to that of the next one: on a GPU the next step waits for the prompts of this one.
    Steps in which no job decodes are neither limited nor measured.

    Args:
        target: seconds; None limits nothing.
        most: most prompt tokens of any step.
        page_size: limits are whole pages, at least one, and at most `most`.
    """

    def __init__(self, target: float | None, most: int, page_size: int) -> None:
        self._target, self._most, self._page = target, most, min(page_size, most)
        #: whether there is a target
        self.limited = target is not None
        #: mean seconds of a step for each of its prompt tokens, decoding included; 0 before the first measurement
        self._each = 0.0
        self._began = 0.0
        #: whether jobs decoded in the last step
        self._decoded = False
        #: prompt tokens of the last step and of the step before it
        self._tokens = self._before = 0

    def begin(self, decodes: bool) -> int:
        """Begin a step in which jobs decode or not; return the most prompt tokens that it may compute."""
        if self._target is None:
            return self._most
        now = perf_counter()
        if decodes and self._decoded:
            self._learn(now - self._began)
        self._began, self._decoded = now, decodes
        if not decodes:
            return self._most
        pages = FIRST_PAGES if self._each == 0 else int(self._target / self._each) // self._page
        return min(self._most, max(1, pages) * self._page)

    def spent(self, tokens: int) -> None:
        """Record the prompt tokens of the step that has begun."""
        self._before, self._tokens = self._tokens, tokens

    def _learn(self, seconds: float) -> None:
        # A GPU may compute a step's prompts in the next step's time, so the tokens of either step may have taken it.
        tokens = min(self._before, self._tokens)
        if tokens >= self._page:
            each = seconds / tokens
            self._each = each if self._each == 0 else (1 - NEWEST) * self._each + NEWEST * each
