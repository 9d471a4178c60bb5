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
from exl_filters.library import llguidance

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


def test_stacks_that_take_part():
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


class Nobody(Executor):
    """Begins no task."""

    def submit(self, fn, /, *args, **kwargs):
        return Future()


def test_a_task_that_no_thread_has_begun_is_run_where_the_first_mask_is_needed(executor):
    schemas = [{"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": n}} for n in range(3, 9)]
    stacks, others = ([stack_of(source) for source in schemas] for _ in range(2))
    for stack in [*stacks, *others]:
        stack.begin("")
    changed = stacks[1]
    for _ in range(3):
        executor.calls.clear()
        assert prefetch_together(stacks, Nobody()) == 6
        changed.begin("")  # its mask is another one now
        others[1].begin("")
        for stack, other in zip(stacks, others, strict=True):
            assert np.array_equal(stack.next_mask(), other.next_mask())
        assert executor.calls == [5], "all but the one that changed, in one call"
        for stack, other in zip(stacks, others, strict=True):
            token = bits.to_ids(stack.next_mask())[0]
            assert stack.feed(token) == other.feed(token)


def test_a_task_that_nobody_begins_may_be_dropped_or_fail(monkeypatch):
    stacks = [stack_of(SOURCES[0]) for _ in range(3)]
    for stack in stacks:
        stack.begin("")
    expected = stacks[0].next_mask().copy()
    for stack in stacks:
        stack.begin("")
    prefetch_together(stacks, Nobody())
    stacks[2].close()
    assert np.array_equal(stacks[0].next_mask(), expected)
    stacks[0].begin("")
    stacks[1].begin("")

    def broken():
        raise MemoryError("no room for the masks")

    monkeypatch.setattr("exl_filters.together.executor", broken)
    prefetch_together(stacks[:2], Nobody())
    assert all(np.array_equal(stack.next_mask(), expected) for stack in stacks[:2])


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


class Recording:
    """llguidance's executor, and how many masks each call was for."""

    def __init__(self):
        self.executor = llguidance().LLExecutor(1)
        self.calls = []

    def unsafe_compute_mask_ptr(self, wanted, *where):
        self.calls.append(len(wanted))
        self.executor.unsafe_compute_mask_ptr(wanted, *where)


@pytest.fixture
def executor(monkeypatch):
    made = Recording()
    monkeypatch.setattr("exl_filters.together.executor", lambda: made)
    return made


def stacks_of_one(count, **source):
    made = ExLlamaV2GrammarFilter(None, MODEL, **source)
    stacks = [FilterStack([made], vocab_size=MODEL.size, stop_ids=[STOP]) for _ in range(count)]
    for stack in stacks:
        stack.begin("")
    return stacks


def test_a_mask_that_jobs_share_is_computed_once(executor):
    stacks, pool = stacks_of_one(4, regex="([a-z]{1,6} ){1,9}"), Threads()
    assert prefetch_together(stacks, pool) == 4
    masks = [stack.next_mask().copy() for stack in stacks]
    assert all(np.array_equal(mask, masks[0]) for mask in masks)
    for stack in stacks:
        stack.feed(MODEL.ids_of(b"a")[0])
    stacks[0].feed(MODEL.ids_of(b"b")[0])
    assert prefetch_together(stacks, pool) == 4
    assert not np.array_equal(stacks[0].next_mask(), stacks[1].next_mask())
    for stack in stacks:
        stack.begin("")
    assert prefetch_together(stacks, pool) == 4, "what is known is copied there, too"
    assert all(np.array_equal(stack.next_mask(), masks[0]) for stack in stacks)
    assert executor.calls == [2], "the mask of the start is known from the template"


def test_masks_that_are_not_of_a_pattern_are_all_computed(executor):
    stacks = stacks_of_one(3, json_schema={"type": "array", "items": {"type": "integer"}})
    assert prefetch_together(stacks, Threads()) == 3
    assert np.array_equal(stacks[0].next_mask(), stacks[2].next_mask())
    assert executor.calls == [3]


def test_stop_ids_of_the_host_are_added(executor):
    made = ExLlamaV2GrammarFilter(None, MODEL, json_schema={"type": "integer"})
    digit, other = MODEL.ids_of(b"1")[0], MODEL.ids_of(b"x")[0]
    stacks = [FilterStack([made], vocab_size=MODEL.size, stop_ids=[STOP, other]) for _ in range(2)]
    for stack in stacks:
        stack.begin("")
        stack.feed(digit)
    assert prefetch_together(stacks, Threads()) == 2
    assert STOP is not None
    assert all(stack.allows(token) for stack in stacks for token in (other, STOP, digit))
    assert executor.calls == [2]


def test_masks_that_take_less_time_than_the_hand_over_are_computed_at_once(monkeypatch):
    """Masks are slow until one has been measured; then their sum is compared with the hand-over."""
    monkeypatch.setattr("exl_filters.host.WORTH_A_THREAD", 1e9)
    stacks, pool = stacks_of_one(3, json_schema={"type": "integer"}), Threads()
    assert prefetch_together(stacks, pool) == 3
    for stack in stacks:
        assert stack.next_mask() is not None
        stack.feed(MODEL.ids_of(b"1")[0])
    assert prefetch_together(stacks, pool) == 0
    assert not any(stack.prefetch(pool) for stack in stacks)
    monkeypatch.setattr("exl_filters.host.WORTH_A_THREAD", 1e-9)
    assert prefetch_together(stacks, pool) == 3
