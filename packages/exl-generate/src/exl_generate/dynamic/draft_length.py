"""How many tokens to draft in a step: as many as give the most tokens per second, down to none.

A step with k guesses costs draft passes and a wider pass of the model. It pays if enough guesses hold. Both are
measured: the time of a step, relative to a step without guesses, and the share of guesses that held. The choice decides
how fast a job runs, never which tokens it gets.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from exl_kernels.drafting import DraftText

__all__ = ["Acceptance", "DraftLength", "FixedDraftLength", "JobDrafts", "geometric"]

Clock = Callable[[], float]

#: Iterations of the first comparison of lengths: as many guesses as allowed, fewer, and none. A load on the machine
#: then slows all of them. The first step with or without guesses is not measured if others were: those may be
#: prelaunched and have warm caches.
FIRST_TURNS = 4
#: Steps with guesses between two measurements of a step without guesses.
STEPS_BETWEEN_LOOKS = 128
#: Largest share of the time without drafting that may be spent on testing whether guesses would hold.
REVIEW_SHARE = 0.015
#: Largest share of that time that may be spent on measuring steps with guesses again.
MEASURE_SHARE = 0.015
#: A change of length must promise this much more speed, so that noise does not flip it.
WORTH_CHANGING = 1.04


def _typical(times: Sequence[float] | deque[float]) -> float:
    """Return a time that a load on the machine has probably not stretched: one below the median."""
    return sorted(times)[(len(times) - 1) // 3]


class Acceptance:
    """The share of guesses that hold; recent guesses count more. `parent` learns the same observations."""

    def __init__(self, memory: float, parent: Acceptance | None = None) -> None:
        self._memory = memory
        self._parent = parent
        self._held = self._tried = 0.0

    def learn(self, drafted: int, held: int) -> None:
        """Record that the first `held` of `drafted` consecutive guesses held; later guesses carry no information."""
        tried = held + (held < drafted)
        kept = (1.0 - 1.0 / self._memory) ** tried
        self._held = self._held * kept + held
        self._tried = self._tried * kept + tried
        if self._parent is not None:
            self._parent.learn(drafted, held)

    def review(self, tried: int, held: int) -> None:
        """Record that `held` of `tried` tokens, each guessed after the true tokens before it, were guessed right."""
        kept = (1.0 - 1.0 / self._memory) ** tried
        self._held = self._held * kept + held
        self._tried = self._tried * kept + tried
        if self._parent is not None:
            self._parent.review(tried, held)

    @property
    def rate(self) -> float:
        """Probability that the next guess holds. With little evidence, the rate of `parent`; at first an optimistic
        one.
        """
        prior, weight = (0.8, 2.0) if self._parent is None else (self._parent.rate, 4.0)
        return (self._held + weight * prior) / (self._tried + weight)


class JobDrafts:
    """The draft tokens of one job. `enabled`: whether the generator drafts at all."""

    __slots__ = ("acceptance", "accepted", "drafted", "enabled", "on_end", "text")

    def __init__(self, acceptance: Acceptance | None = None, enabled: bool = False) -> None:
        self.acceptance = Acceptance(1.0) if acceptance is None else acceptance
        self.enabled = enabled
        #: draft tokens evaluated
        self.drafted = 0
        #: draft tokens that the model sampled itself
        self.accepted = 0
        #: the job's text, where guesses come from it
        self.text: DraftText | None = None
        #: receives the job's ids when it ends
        self.on_end: Callable[[NDArray[np.int64]], None] | None = None

    def end(self, ids: NDArray[np.int64]) -> None:
        """Release the memory for drafting: the job with these ids is over."""
        on_end, self.on_end, self.text = self.on_end, None, None
        if on_end is not None:
            on_end(ids)

    @property
    def rejected(self) -> int:
        """Draft tokens that were evaluated and discarded."""
        return self.drafted - self.accepted


class _Costs:
    """Costs of steps of one batch size: seconds without guesses, and with guesses relative to that."""

    def __init__(self, planned: Sequence[int], ratios: dict[int, deque[float]]) -> None:
        self.planned = deque(planned)
        self.plain: deque[float] = deque(maxlen=5)
        self.ratios = {guesses: deque(found, maxlen=5) for guesses, found in ratios.items()}
        #: steps with guesses, until what a step without them costs is known
        self.waiting: list[tuple[int, float]] = []

    def add(self, guesses: int, seconds: float) -> None:
        if guesses == 0:
            self.plain.append(seconds)
        else:
            self.waiting.append((guesses, seconds))
        if self.plain and not self.planned and (unit := _typical(self.plain)) > 0:
            for k, took in self.waiting:
                self.ratios.setdefault(k, deque(maxlen=5)).append(took / unit)
            self.waiting.clear()

    def knows(self, guesses: int) -> bool:
        """Whether a step with so many guesses was measured."""
        return guesses in self.ratios or any(k == guesses for k, _ in self.waiting)

    def of(self, guesses: int) -> float:
        """Return the cost of a step with `guesses` guesses, relative to one without: measured, or interpolated."""
        below, above = (0, 1.0), None
        for k, found in sorted(self.ratios.items()):
            if k <= guesses:
                below = (k, _typical(found))
            elif above is None:
                above = (k, _typical(found))
        if below[0] == guesses or above is None:
            return below[1] * (1.0 if below[0] == 0 else (1 + guesses) / (1 + below[0]))
        return below[1] + (above[1] - below[1]) * (guesses - below[0]) / (above[0] - below[0])


def geometric(rate: float, room: int) -> list[float]:
    """Return the chances of `room` consecutive guesses of which each holds with probability `rate`."""
    return [rate**guess for guess in range(1, room + 1)]


class DraftLength:
    """Choose the number of guesses of each step, from 0 to `most`, the same for all jobs of the step.

    Call `plan` before a step and `record` after it. Without drafting, `review_due` sometimes asks for a review of the
    jobs' acceptance; pass its time to `reviewed`.

    Args:
        most: Most guesses in a step.
        clock: Returns seconds.
    """

    def __init__(self, most: int, clock: Clock = time.perf_counter) -> None:
        self.most = most
        self.clock = clock
        #: the length in force
        self.current = most
        #: a guess that holds less probably than this, with all guesses before it, costs more than it gains
        self.least_chance = 0.0
        self._overall = Acceptance(256.0)
        self._sizes: dict[int, _Costs] = {}
        self._last: _Costs | None = None
        self._before = 0
        self._steps = self._tried = 0
        self._idle_seconds = self._unmeasured_seconds = 0.0
        self._review_seconds = 0.0
        self._review_steps = 0

    def acceptance(self) -> Acceptance:
        """Return an estimate for a new job; it starts from the estimates of all jobs."""
        return Acceptance(32.0, self._overall)

    @property
    def next_is_plain(self) -> bool:
        """Whether the next step will have no guesses, as known before its jobs are chosen."""
        costs = self._last
        return self.most == 0 or (costs.planned[0] if costs is not None and costs.planned else self.current) == 0

    def plan(self, jobs: Sequence[Sequence[float]], overhead: Callable[[], float] = lambda: 0.0) -> int:
        """Return the number of guesses in the next step of these jobs.

        Args:
            jobs: For each guess that a job has room for, the probability that it and all guesses before it hold.
            overhead: Seconds that drafting would take before the step, to catch up after steps without drafting.
        """
        self.least_chance = 0.0
        if self.most == 0 or not jobs:
            return 0
        costs = self._last = self._costs(len(jobs))
        if costs.planned:
            return costs.planned.popleft()
        self._steps += 1
        self.current = self._best(costs, self._tokens(jobs))
        if self.current > 0:
            if self._steps % STEPS_BETWEEN_LOOKS == 0:
                other = self._another()
                costs.planned.extend([0, other, other])
                return 0
        elif self._steps % 32 == 0:
            expected = overhead() + 3 * costs.of(self.most) * (_typical(costs.plain) if costs.plain else 0.0)
            if expected < MEASURE_SHARE * self._unmeasured_seconds:
                self._unmeasured_seconds = 0.0
                costs.planned.extend([self.most, self._another()])
                return self.most
        return self.current

    def record(self, size: int, guesses: int, seconds: float) -> None:
        """Record a step of `size` jobs that took `seconds`, drafting included, with `guesses` guesses a job on average,
        rounded up.
        """
        costs = self._costs(size)
        if (guesses > 0) == (self._before > 0) or (guesses > 0 and not costs.knows(guesses)):
            costs.add(guesses, seconds)
        self._before = guesses
        if self.current == 0:
            self._idle_seconds += seconds
            self._unmeasured_seconds += seconds
            self._review_steps += 1

    def review_due(self) -> bool:
        """Whether it is time to test, without drafting, how many guesses would have held."""
        return (
            self.current == 0 and self._review_steps >= 32 and self._review_seconds <= REVIEW_SHARE * self._idle_seconds
        )

    def reviewed(self, seconds: float) -> None:
        """Record the time of a review, in seconds."""
        self._review_seconds, self._idle_seconds, self._review_steps = seconds, 0.0, 0

    def _costs(self, size: int) -> _Costs:
        bucket = (size - 1).bit_length()
        found = self._sizes.get(bucket)
        if found is None:
            known = min(self._sizes, key=lambda other: abs(other - bucket), default=None)
            if known is None:
                turns = ((self.most, self.most, self._another(), 0, 0) for _ in range(FIRST_TURNS))
                found = _Costs([k for turn in turns for k in turn], {})
            else:
                found = _Costs([0, 0, 0], self._sizes[known].ratios)
            self._sizes[bucket] = found
        return found

    def _another(self) -> int:
        """Return a length to try; the lengths alternate."""
        self._tried = self._tried % self.most + 1
        return self._tried

    def _best(self, costs: _Costs, tokens: Sequence[float]) -> int:
        speeds = [expected / costs.of(k) for k, expected in enumerate(tokens)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if speeds[best] <= WORTH_CHANGING * speeds[self.current]:
            best = self.current
        if best > 0:
            # A row costs its share of what makes the step slower; a token is worth the time that one takes.
            self.least_chance = max(0.0, speeds[best] * (costs.of(best) - 1.0) / (best * tokens[0]))
        return best

    def _tokens(self, jobs: Sequence[Sequence[float]]) -> list[float]:
        """Return the expected tokens of a step by the number of guesses: one for each job, and the guesses that hold.

        The sum of the chances of a job's guesses is the expected number of those that hold.
        """
        gains = [0.0] * self.most
        for chances in jobs:
            for guess, chance in enumerate(chances[: self.most]):
                gains[guess] += chance
        return [len(jobs) + sum(gains[:guesses]) for guesses in range(self.most + 1)]


class FixedDraftLength(DraftLength):
    """Draft the full length in every step, whatever the clock measures."""

    def plan(self, jobs: Sequence[Sequence[float]], overhead: Callable[[], float] = lambda: 0.0) -> int:
        """Return the full length."""
        return self.most
