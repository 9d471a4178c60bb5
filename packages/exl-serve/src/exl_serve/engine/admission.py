"""The queue in front of the generator: choose the next request. A pure data structure; the clock is an argument.

Priority classes come first, and a request moves up one class for every `ageing` seconds that it has waited. Within a
class, the key with the smallest counter of served cost is next (virtual token counters: Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024). Within a key, the oldest request is next. The generator gets only requests
that can start soon, so that the order is decided late.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from exl_serve.errors import ServeError

__all__ = ["SPARE_JOBS", "Admission", "Entry", "Rates", "queue_full", "queue_limit"]

PROMPT_COST, CACHED_COST, GENERATED_COST = 1.0, 0.1, 2.0
"""Cost of a token, in computed prompt tokens."""
LEAST_RETRY, MOST_RETRY = 1.0, 60.0
SPARE_JOBS = 4
"""Jobs that may wait in the generator's own queue although it has no room for them."""
SPARE = 1024
"""Unused entries of keys and deadlines that are kept before they are removed."""


_jitter = random.Random()


@dataclass(slots=True)
class Rates:
    """Tokens a second; 0 where nothing was measured yet."""

    prefill: float = 0.0
    #: (tokens, seconds) of each step that `decode` does not count yet
    steps: list[tuple[int, float]] = field(default_factory=list)
    _decode: float = 0.0

    @property
    def decode(self) -> float:
        """The rate of the steps so far. One without tokens computes prompts and does not count."""
        for tokens, seconds in self.steps:
            if tokens and seconds > 0:
                self._decode = _average(self._decode, tokens / seconds)
        self.steps.clear()
        return self._decode

    def measured_prompt(self, tokens: int, seconds: float) -> None:
        """Take a prompt into account; a short one says little."""
        if tokens > 64 and seconds > 0:
            self.prefill = _average(self.prefill, tokens / seconds)


def _average(before: float, now: float) -> float:
    return now if before == 0 else 0.9 * before + 0.1 * now


@dataclass(eq=False, slots=True)
class Entry:
    """A waiting request."""

    key: str
    weight: float
    priority: int
    prompt_tokens: int
    new_tokens: int
    arrived: float
    deadline: float | None
    payload: Any
    number: int = 0
    #: it was accepted before, by an engine that has ended
    again: bool = False


@dataclass
class Admission:
    """The waiting requests: at most `max_requests`, with at most `max_prompt_tokens` prompt tokens.

    `max_prompt_tokens` None means the tokens that `target_ttft` seconds of the measured prefill rate compute.
    """

    max_requests: int
    max_prompt_tokens: int | None = None
    target_ttft: float = 20.0
    ageing: float = 30.0
    seed: int | None = None
    #: served cost by key, divided by its weight
    counters: dict[str, float] = field(default_factory=dict)
    queued_tokens: int = 0

    def __post_init__(self) -> None:
        #: by key and priority, in order of arrival
        self._waiting: dict[str, dict[int, OrderedDict[int, Entry]]] = {}
        self._active: dict[str, int] = {}
        #: (deadline, number, entry), soonest first; some have been taken out since
        self._deadlines: list[tuple[float, int, Entry]] = []
        self.count = self._numbers = self._new_tokens = 0
        self._random = random.Random(self.seed)

    def add(self, entry: Entry, now: float, rates: Rates, computing: int = 0) -> None:
        """Queue a request. `computing`: prompt tokens that the generator has and has not computed.

        Raises ServeError 429 for a full queue, 408 for a deadline that cannot be met. One that was accepted before is
        always queued.
        """
        if not entry.again:
            self._check(entry, now, rates, computing)
        self._numbers += 1
        entry.number = self._numbers
        self._lift(entry.key)
        self._waiting.setdefault(entry.key, {}).setdefault(entry.priority, OrderedDict())[entry.number] = entry
        self.count += 1
        self.queued_tokens += entry.prompt_tokens
        self._new_tokens += entry.new_tokens
        if entry.deadline is not None:
            heapq.heappush(self._deadlines, (entry.deadline, entry.number, entry))

    def _check(self, entry: Entry, now: float, rates: Rates, computing: int) -> None:
        """Raise ServeError 429 or 408 for a request that must not be queued."""
        self.check_room(0, rates)
        wait = self.predicted_wait(rates, computing)
        before = self.queued_tokens + computing
        most = self.max_prompt_tokens
        if most is None and rates.prefill > 0:
            most = max(1, int(self.target_ttft * rates.prefill))
        # One request may wait, however long it is.
        if most is not None and (self.count or before >= most) and before + entry.prompt_tokens > most:
            raise queue_full(f"{before} prompt tokens wait, and at most {most} may", wait, self._random)
        if entry.deadline is not None and now + wait > entry.deadline:
            raise ServeError(
                408,
                "timeout",
                "deadline_exceeded",
                f"the predicted wait of {wait:.1f} s is longer than the request's deadline: ask again later, or allow "
                "more time",
                retry_after=_retry(wait, self._random),
            )

    def check_room(self, besides: int, rates: Rates) -> None:
        """Raise ServeError 429 if the queue is full, together with `besides` requests that wait elsewhere."""
        if self.count + besides >= self.max_requests:
            text = f"{self.count + besides} requests wait, the most that may"
            raise queue_full(text, self.predicted_wait(rates), self._random)

    def pop(self, now: float) -> Entry | None:
        """Return the next request, or None; it counts as active until `done`."""
        best: tuple[float, float, int] | None = None
        chosen: Entry | None = None
        for key, classes in self._waiting.items():
            for entries in classes.values():
                entry = next(iter(entries.values()))  # of one priority, the oldest request comes first
                rank = (self._class(entry, now), self.counters.get(key, 0.0), entry.number)
                if best is None or rank < best:
                    best, chosen = rank, entry
        if chosen is not None:
            self._take(chosen)
            self._active[chosen.key] = self._active.get(chosen.key, 0) + 1
        return chosen

    def remove(self, entry: Entry) -> bool:
        """Remove a waiting request. Returns False if it does not wait."""
        if not self._waits(entry):
            return False
        self._take(entry)
        return True

    def expired(self, now: float) -> list[Entry]:
        """Remove and return all requests whose deadline has passed."""
        late = []
        while self._deadlines and now > self._deadlines[0][0]:
            entry = heapq.heappop(self._deadlines)[2]
            if self._waits(entry):
                self._take(entry)
                late.append(entry)
        return late

    def charge(self, key: str, weight: float, *, prompt: int = 0, cached: int = 0, generated: int = 0) -> None:
        """Add the cost of computed tokens to a key's counter."""
        cost = PROMPT_COST * prompt + CACHED_COST * cached + GENERATED_COST * generated
        self.counters[key] = self.counters.get(key, 0.0) + cost / max(weight, 1e-6)

    def done(self, key: str) -> None:
        """Record that an active request of this key has ended."""
        left = self._active.get(key, 0) - 1
        if left > 0:
            self._active[key] = left
        else:
            self._active.pop(key, None)
        if not self._active and not self._waiting:
            self.counters.clear()  # no key waits or runs
        elif len(self.counters) > 2 * (len(self._active) + len(self._waiting)) + SPARE:
            self._forget_keys()

    def predicted_wait(self, rates: Rates, computing: int = 0) -> float:
        """Return the approximate seconds until a request that comes now would start.

        `computing`: prompt tokens that are computed before those of the queue.
        """
        wait = (self.queued_tokens + computing) / rates.prefill if rates.prefill > 0 else 0.0
        # Answers are rarely as long as their limit.
        return wait + (0.25 * self._new_tokens / rates.decode if rates.decode > 0 else 0.0)

    def _lift(self, key: str) -> None:
        """Raise the counter of a key that returns from idleness to the least busy one: idle time earns no credit."""
        if key in self._active or key in self._waiting:
            return
        if self._active or self._waiting:
            self.counters[key] = max(self.counters.get(key, 0.0), self._least())

    def _least(self) -> float:
        """Return the smallest counter of the busy keys."""
        return min(self.counters.get(key, 0.0) for key in (*self._active, *self._waiting))

    def _forget_keys(self) -> None:
        """Forget idle keys with at most the smallest counter: on return they are lifted to it anyway."""
        busy, least = {*self._active, *self._waiting}, self._least()
        self.counters = {key: cost for key, cost in self.counters.items() if key in busy or cost > least}

    def _waits(self, entry: Entry) -> bool:
        return entry.number in self._waiting.get(entry.key, {}).get(entry.priority, ())

    def _class(self, entry: Entry, now: float) -> int:
        return max(0, entry.priority - int((now - entry.arrived) / self.ageing))

    def _take(self, entry: Entry) -> None:
        classes = self._waiting[entry.key]
        del classes[entry.priority][entry.number]
        if not classes[entry.priority]:
            del classes[entry.priority]
        if not classes:
            del self._waiting[entry.key]
        self.count -= 1
        self.queued_tokens -= entry.prompt_tokens
        self._new_tokens -= entry.new_tokens
        if len(self._deadlines) > 2 * self.count + SPARE:
            self._deadlines = [one for one in self._deadlines if self._waits(one[2])]
            heapq.heapify(self._deadlines)


def queue_limit(configured: int | None, batch: int) -> int:
    """Return how many requests may wait for a model. `batch`: its batch size."""
    return configured or 8 * batch


def queue_full(what: str, wait: float, source: random.Random = _jitter) -> ServeError:
    """Return the error for a full queue. `wait`: the predicted seconds of waiting."""
    text = f"the queue of this model is full: {what}; try again later"
    return ServeError(429, "rate_limit_error", "queue_full", text, retry_after=_retry(wait, source))


def _retry(wait: float, source: random.Random) -> float:
    """Return seconds with 20 % of jitter, so that rejected clients do not return together."""
    return min(MOST_RETRY, max(LEAST_RETRY, wait)) * source.uniform(0.8, 1.2)
