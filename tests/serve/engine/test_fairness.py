"""The shares of an engine that busy keys get, in a simulation of its turns."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from exl_serve.engine.admission import GENERATED_COST, PROMPT_COST, Admission, Entry, Rates

Size = tuple[int, int]
"""Tokens of a prompt, and of its answer."""
MOST_PROMPT, MOST_NEW = 300, 60


class Simulation:
    """An engine with `batch` rows and keys that always have requests waiting, of the sizes that `keys` repeats."""

    def __init__(self, batch: int, keys: Mapping[str, Sequence[Size]], weights: Mapping[str, float]) -> None:
        self.batch, self.weights = batch, weights
        self.queue = Admission(1000)
        self.sizes: dict[str, Iterator[Size]] = {key: itertools.cycle(sizes) for key, sizes in keys.items()}
        self.running: list[tuple[Entry, int]] = []
        #: cost of the computed tokens by key, by its weight
        self.served: defaultdict[str, float] = defaultdict(float)
        for key in keys:
            for _ in range(2 * batch + 1):
                self.add(key)

    def add(self, key: str) -> None:
        prompt, new = next(self.sizes[key])
        self.queue.add(Entry(key, self.weights[key], 1, prompt, new, 0.0, None, None), 0.0, Rates())

    def charge(self, one: Entry, *, prompt: int = 0, generated: int = 0) -> None:
        self.queue.charge(one.key, one.weight, prompt=prompt, generated=generated)
        self.served[one.key] += (PROMPT_COST * prompt + GENERATED_COST * generated) / one.weight

    def step(self) -> None:
        """Fill the rows, and make a token in each."""
        while len(self.running) < self.batch:
            one = self.queue.pop(0.0)
            assert one is not None
            self.add(one.key)
            self.charge(one, prompt=one.prompt_tokens)
            self.running.append((one, one.new_tokens))
        left = []
        for one, tokens in self.running:
            self.charge(one, generated=1)
            if tokens > 1:
                left.append((one, tokens - 1))
            else:
                self.queue.done(one.key)
        self.running = left


SIZES = st.lists(st.tuples(st.integers(1, MOST_PROMPT), st.integers(1, MOST_NEW)), min_size=1, max_size=5)


@given(st.integers(1, 8), SIZES, SIZES, st.sampled_from([1.0, 3.0]), st.integers(50, 600))
@examples(200, 20)
def test_busy_keys_get_their_shares(
    batch: int, ones: list[Size], others: list[Size], weight: float, steps: int
) -> None:
    """Over any stretch of time, what two keys got differs by at most twice a batch of the longest requests."""
    made = Simulation(batch, {"a": ones, "b": others}, {"a": 1.0, "b": weight})
    leads = [0.0]
    for _ in range(steps):
        made.step()
        leads.append(made.served["a"] - made.served["b"])
    longest = max(PROMPT_COST * prompt + GENERATED_COST * new for prompt, new in [*ones, *others])
    assert max(leads) - min(leads) <= 2 * batch * longest


@pytest.mark.parametrize("waiting", [1, 10_000])
def test_one_request_waits_for_a_turn_of_each_other_key(waiting: int) -> None:
    queue = Admission(20_000)
    for _ in range(waiting + 3):
        queue.add(Entry("many", 1.0, 1, 100, 100, 0.0, None, None), 0.0, Rates())
    for _ in range(3):  # they run
        one = queue.pop(0.0)
        assert one is not None
        queue.charge(one.key, 1.0, prompt=100)
    queue.add(Entry("one", 1.0, 1, 100, 100, 0.0, None, None), 0.0, Rates())
    turns = []
    for _ in range(2):
        one = queue.pop(0.0)
        assert one is not None
        queue.charge(one.key, 1.0, prompt=100)
        turns.append(one.key)
    assert "one" in turns
