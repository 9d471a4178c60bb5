"""Jobs of one grammar that run at the same time use several lexers: masks are those of one."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from exl_filters import FilterStack, bits
from exl_filters.readers import from_tokenizer_json

pytest.importorskip("llguidance", reason="extra `grammar`")
from exl_filters import start_states
from exl_filters.errors import FilterCompileError
from exl_filters.grammar import ExLlamaV2GrammarFilter
from exl_filters.llg import Matcher, compile_matcher
from exl_filters.start_states import StartState

MODEL = from_tokenizer_json(str(Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-fp16" / "tokenizer.json"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
LARK = 'start: item (", " item)*\nitem: /[a-z]{1,5}/ "=" /[0-9]+/\n'


class Pool(Executor):
    """Runs what is submitted on request."""

    def __init__(self):
        self.tasks = []

    def submit(self, fn, /, *args, **kwargs):
        future: Future[object] = Future()
        self.tasks.append(lambda: future.set_result(fn(*args, **kwargs)))
        return future

    def run(self):
        while self.tasks:
            self.tasks.pop(0)()


@pytest.fixture(autouse=True)
def many_cores(monkeypatch):
    monkeypatch.setattr(start_states, "most_lexers", lambda: 4)
    monkeypatch.setattr(start_states, "JOBS_OF_LEXER", 3)
    monkeypatch.setattr("exl_filters.llg.QUICK", 1e9)  # however slow this machine is now


def stacks_of(filter_, count):
    stacks, pool = [], Pool()
    for _ in range(count):
        stacks.append(FilterStack([filter_], vocab_size=MODEL.size, stop_ids=[MODEL.eos_token_id]))
        stacks[-1].compile_ahead(pool)
    assert len(pool.tasks) <= 1, "one task compiles all lexers"
    pool.run()
    for stack in stacks:
        stack.begin("")
    return stacks


def lexers(stacks):
    return {id(stack.filters[0].asked_matcher.lexer) for stack in stacks}


@pytest.mark.parametrize("source", [{"json_schema": SCHEMA}, {"lark": LARK}, {"regex": "([a-z]{1,6}, ){2,9}"}])
def test_masks_do_not_depend_on_the_lexer(source):
    filter_ = ExLlamaV2GrammarFilter(None, MODEL, **source)
    stacks, rng = stacks_of(filter_, 14), random.Random(1)
    assert len(lexers(stacks)) == 4
    for _ in range(15):
        masks = [stack.next_mask() for stack in stacks]
        assert all(np.array_equal(mask, masks[0]) for mask in masks)
        token = rng.choice(bits.to_ids(masks[0]))
        if stacks[0].feed(token):
            break
        for stack in stacks[1:]:
            stack.feed(token)


def test_few_jobs_share_a_lexer_and_those_that_end_leave_theirs():
    filter_ = ExLlamaV2GrammarFilter(None, MODEL, json_schema=SCHEMA)
    for _ in range(5):
        stacks = stacks_of(filter_, 2)
        assert len(lexers(stacks)) == 1
        del stacks
        gc.collect()
    assert len(lexers(stacks_of(filter_, 8))) == 3


def template_of(again):
    """The start of a grammar that `again` compiles, and what starts matchers for that many jobs at once."""
    first, pool = again(), Pool()
    first.again = again
    template = StartState(first)

    def started(count):
        waiting = [template.copy(first) for _ in range(count)]
        template.compile_ahead(pool)
        pool.run()
        return [template.start() for _ in waiting]

    return template, started


def test_lexers_that_are_not_used_any_more_are_dropped():
    made = []

    def compiled():
        matcher = compile_matcher(LARK, MODEL)
        made.append(weakref.ref(matcher))
        return matcher

    def kept():
        gc.collect()
        return sum(ref() is not None for ref in made)

    _template, started = template_of(compiled)
    matchers = started(12)
    assert kept() == 4
    del matchers[1:]
    gc.collect()
    matchers += started(1)
    assert kept() == 2, "the first, and one for the next jobs"
    matchers += started(10)
    assert kept() == 4
    masks = [bits.empty(MODEL.size) for _ in matchers]
    for matcher, mask in zip(matchers, masks, strict=True):
        matcher.mask_into(mask)
    assert all(np.array_equal(mask, masks[0]) for mask in masks)


def test_jobs_that_begin_before_the_lexers_are_compiled_share_those_that_there_are():
    filter_, pool = ExLlamaV2GrammarFilter(None, MODEL, json_schema=SCHEMA), Pool()
    stacks = [FilterStack([filter_], vocab_size=MODEL.size, stop_ids=[MODEL.eos_token_id]) for _ in range(12)]
    for stack in stacks:
        stack.compile_ahead(pool)
    for stack in stacks[:9]:
        stack.begin("")
    assert len(lexers(stacks[:9])) == 1
    pool.run()
    for stack in stacks[9:]:
        stack.begin("")
    assert len(lexers(stacks[9:])) == 3, "those that nobody uses yet"
    masks = [stack.next_mask() for stack in stacks]
    assert len({mask.tobytes() for mask in masks if mask is not None}) == 1
    assert all(mask is not None for mask in masks)


def test_a_pool_that_takes_nothing_is_asked_again():
    filter_, pool = ExLlamaV2GrammarFilter(None, MODEL, json_schema=SCHEMA), Pool()
    stacks = [FilterStack([filter_], vocab_size=MODEL.size, stop_ids=[MODEL.eos_token_id]) for _ in range(9)]

    class Closed(Pool):
        def submit(self, fn, /, *args, **kwargs):
            raise RuntimeError("no further tasks")

    with pytest.raises(RuntimeError, match="no further tasks"):
        stacks[0].compile_ahead(Closed())
    stacks[0].compile_ahead(pool)
    assert len(pool.tasks) == 1


def test_a_pool_that_drops_its_tasks_does_not_keep_others_from_compiling():
    """The generator of a pool is closed while other generators use the filter."""
    filter_ = ExLlamaV2GrammarFilter(None, MODEL, json_schema=SCHEMA)
    stacks = [FilterStack([filter_], vocab_size=MODEL.size, stop_ids=[MODEL.eos_token_id]) for _ in range(9)]
    busy, pool = threading.Event(), Pool()
    with ThreadPoolExecutor(1) as closed:
        closed.submit(busy.wait)
        try:
            stacks[0].compile_ahead(closed)
            closed.shutdown(wait=False, cancel_futures=True)
        finally:
            busy.set()
    stacks[0].compile_ahead(pool)
    assert len(pool.tasks) == 1


def test_a_grammar_that_takes_long_to_compile_keeps_one_lexer(monkeypatch):
    monkeypatch.setattr("exl_filters.llg.QUICK", 0.0)
    assert len(lexers(stacks_of(ExLlamaV2GrammarFilter(None, MODEL, json_schema=SCHEMA), 14))) == 1


@pytest.mark.parametrize("error", [FilterCompileError("no memory is left"), MemoryError()])
def test_a_grammar_that_cannot_be_compiled_again_keeps_its_lexer(error):
    compiled: list[Matcher | None] = []

    def once():
        if compiled:
            compiled.append(None)
            raise error
        compiled.append(compile_matcher(LARK, MODEL))
        return compiled[0]

    _template, started = template_of(once)
    assert len({id(matcher.lexer) for matcher in started(14)}) == 1
    assert len(compiled) == 2
    assert len({id(matcher.lexer) for matcher in started(14)}) == 1
    assert len(compiled) == 2, "not tried again"


def test_copies_have_the_lexer_of_their_original():
    one = compile_matcher('start: "ab" | "ac"', MODEL)
    assert isinstance(one, Matcher)
    assert one.copy().lexer is one.lexer
    assert one.again is not None
    assert one.again().lexer is not one.lexer
