"""Masks of many jobs, computed in one task, are those that each stack computes alone."""

import random
import threading
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl_filters import (
    ExLlamaV2SelectFilter,
    FilterStack,
    Vocabulary,
    bits,
    prefetch_together,
)
from exl_filters.readers import from_tokenizer_json

pytest.importorskip("llguidance", reason="extra `grammar`")
from exl_filters.grammar import ExLlamaV2GrammarFilter

MODEL = from_tokenizer_json(str(Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-fp16" / "tokenizer.json"))
STOP = MODEL.eos_token_id
SOURCES = [
    {"regex": "([a-z]{1,6} ){1,9}"},
    {"json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    {"regex": "(yes|no)"},
]


def stack_of(source, **options):
    made = ExLlamaV2GrammarFilter(None, MODEL, **source)
    return FilterStack([made], vocab_size=MODEL.size, stop_ids=[STOP], **options)


class Threads(Executor):
    """Runs each task at once, in a thread of its own, and counts them."""

    def __init__(self):
        self.tasks = 0

    def submit(self, fn, /, *args, **kwargs):
        self.tasks += 1
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def run():
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run).start()
        return future


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """However fast this machine computes a mask, it is worth a thread."""
    monkeypatch.setattr("exl_filters.host.WORTH_A_THREAD", 0.0)


def walk(seed, together):
    """The masks of a few stacks in random walks, and the tokens."""
    rng, pool = random.Random(seed), Threads()
    stacks = [stack_of(source) for source in SOURCES * 3]
    found, taken = [], 0
    for stack in stacks:
        stack.begin("")
    for _ in range(12):
        going = [stack for stack in stacks if not stack.ended]
        taken += prefetch_together(going, pool) if together else 0
        for stack in going:
            if rng.random() < 0.1:
                stack.begin("")  # a computation that nobody needs
            mask = stack.next_mask()
            found.append(None if mask is None else mask.copy())
            ids = bits.to_ids(mask)
            stack.feed(rng.choice(sorted(ids)))
    assert not together or (taken > 12 and pool.tasks <= 12)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_masks_are_those_of_each_stack_alone(seed):
    one, other = walk(seed, together=False), walk(seed, together=True)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a, b)


def test_who_takes_part():
    """Stacks of one grammar that are due; others keep their way."""
    pool = Threads()
    due = [stack_of(SOURCES[0]) for _ in range(3)]
    fresh, new, narrowed = stack_of(SOURCES[0]), stack_of(SOURCES[0]), stack_of(SOURCES[2], prefer_eos=True)
    select = FilterStack([ExLlamaV2SelectFilter(None, MODEL, ["a", "b"])], vocab_size=MODEL.size)
    two = ExLlamaV2GrammarFilter(None, MODEL, regex="a+"), ExLlamaV2GrammarFilter(None, MODEL, regex="a*")
    pair = FilterStack(list(two), vocab_size=MODEL.size, stop_ids=[STOP])
    for stack in (*due, fresh, narrowed, select, pair):
        stack.begin("")
    fresh.next_mask()
    for alone in (new, fresh, select, pair):
        assert prefetch_together([due[0], alone], pool) == 0
    assert prefetch_together([*due, new, fresh, select, pair], pool) == 3
    assert prefetch_together(due, pool) == 0, "they wait already"
    assert [stack.next_mask().any() for stack in due] == [True] * 3
    assert pool.tasks == 1
    assert prefetch_together([due[0], narrowed], pool) == 0
    for stack in due:
        stack.close()
    assert prefetch_together(due, pool) == 0


def test_a_failure_reaches_the_stack_that_has_it():
    pool = Threads()
    stacks = [stack_of(SOURCES[0]) for _ in range(3)]
    for stack in stacks:
        stack.begin("")
    broken = stacks[1].filters[0]
    broken.fill_bitmask = lambda words: 1 / 0
    assert prefetch_together(stacks, pool) == 3
    assert stacks[0].next_mask().any()
    with pytest.raises(Exception, match="division"):
        stacks[1].next_mask()
    assert stacks[2].next_mask().any()


def test_a_vocabulary_without_the_text_that_a_grammar_needs():
    """Only the stop token may follow: the matcher is not stopped, though its text cannot go on."""
    small = Vocabulary([b"a", b"</s>"], eos_token_id=1, special_ids=[1])
    made = [
        FilterStack([ExLlamaV2GrammarFilter(None, small, regex="ab?")], vocab_size=2, stop_ids=[1]) for _ in range(2)
    ]
    for stack in made:
        stack.begin("")
        stack.next_mask()
        stack.feed(0)
    assert prefetch_together(made, Threads()) == 2
    for stack in made:
        mask = stack.next_mask()
        assert mask is not None
        assert list(bits.to_ids(mask)) == [1]


def test_closing_while_masks_are_computed():
    pool = Threads()
    for _ in range(20):
        stacks = [stack_of(SOURCES[0]) for _ in range(4)]
        for stack in stacks:
            stack.begin("")
        assert prefetch_together(stacks, pool) == 4
        stacks[0].close()
        for stack in stacks[1:]:
            assert stack.next_mask().any()
            stack.close()
