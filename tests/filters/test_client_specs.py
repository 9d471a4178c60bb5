"""Specifications from a client: types, broken texts, stop ids, healing prefixes, amounts; exit codes."""

import json
import os
import threading
from typing import Any

import numpy as np
import pytest
from preloaded import run

from exl_filters import (
    BanFilter,
    CompileBudget,
    ExLlamaV2Filter,
    ExLlamaV2PrefixFilter,
    ExLlamaV2SelectFilter,
    FilterCompileError,
    FilterError,
    FilterFailed,
    FilterStack,
    FilterUsageError,
    LengthFilter,
    SequenceFilter,
    TriggeredFilter,
    Vocabulary,
    bits,
    from_spec,
)
from exl_filters.cli import main
from exl_filters.compiling import MOST_AT_ONCE, compile_in_background

PIECES = ["a", "b", "he", "hell", "hello", "hello!", "l", "lo", "o", "!", "é", "</s>"]
EOS = len(PIECES) - 1
V = Vocabulary(PIECES, eos_token_id=EOS, special_ids=[EOS])


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "select", "options": 5},
        {"type": "prefix", "prefix_strings": 5},
        {"type": "ban", "ids": ["x"]},
        {"type": "ban", "texts": 7},
        {"type": "length", "max_tokens": "x"},
        {"type": "token-set", "slots": 5},
        {"type": "sequence", "filters": 3},
        {"type": "triggered", "inner": {"type": "select", "options": ["a"]}, "on": []},
    ],
)
def test_a_spec_of_wrong_types_is_a_filter_error(spec):
    with pytest.raises(FilterError):
        from_spec(spec, V)


WRAPPED = {
    "all-of": lambda inner: {"type": "all-of", "filters": [inner]},
    "any-of": lambda inner: {"type": "any-of", "filters": [inner]},
    "sequence": lambda inner: {"type": "sequence", "filters": [inner]},
    "logged": lambda inner: {"type": "logged", "inner": inner},
    "triggered": lambda inner: {"type": "triggered", "inner": inner, "on": 0},
}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_filters_in_one_another_have_a_limit(wrapped):
    spec = {"type": "select", "options": ["hello"]}
    for _ in range(16):
        spec = wrapped(spec)
    stack = FilterStack([from_spec(spec, V)], vocab_size=len(PIECES), stop_ids=[EOS])
    for token in (0,) * 16 if spec["type"] == "triggered" else ():
        stack.feed(token)
    assert [i for i in range(len(PIECES)) if stack.allows(i)] == [2, 3, 4]
    for _ in range(2000):
        spec = wrapped(spec)
    with pytest.raises(FilterCompileError, match="more than 16 filters"):
        from_spec(spec, V)


def test_a_sequence_in_a_sequence_costs_no_multiple_of_it():
    class Counted(ExLlamaV2SelectFilter):
        made = 0

        def clone(self, c=None):
            Counted.made += 1
            return super().clone(c)

    made: Any = Counted(None, V, ["hello"])
    for _ in range(12):
        made = SequenceFilter([made])
    stack = FilterStack([made], vocab_size=len(PIECES), stop_ids=[EOS])
    assert stack.feed(PIECES.index("hell")) is False
    assert stack.feed(PIECES.index("o")) is True
    assert Counted.made < 5000


@pytest.mark.parametrize(
    "make",
    [
        lambda: ExLlamaV2SelectFilter(None, V, ["\ud800"]),
        lambda: ExLlamaV2SelectFilter(None, V, ["\ud800"], case_insensitive=True),
        lambda: ExLlamaV2PrefixFilter(None, V, "a\ud800"),
        lambda: BanFilter(None, V, texts=["\ud800"]),
        lambda: TriggeredFilter(ExLlamaV2SelectFilter(None, V, ["a"]), "\ud800"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(make):
    with pytest.raises(FilterCompileError, match="surrogate"):
        make()


def test_half_of_a_surrogate_pair_in_a_grammar_is_refused():
    grammar = pytest.importorskip("exl_filters.grammar")
    pytest.importorskip("llguidance", reason="extra `grammar`")
    for kind in ("regex", "lark", "ebnf"):
        with pytest.raises(FilterCompileError, match="surrogate"):
            grammar.ExLlamaV2GrammarFilter(None, V, **{kind: "a\ud800"})


def test_line_breaks_in_patterns():
    """A backslash before a line break is that line break, in classes too; blanks are patterns."""
    grammar = pytest.importorskip("exl_filters.grammar")
    pytest.importorskip("llguidance", reason="extra `grammar`")
    every = Vocabulary([*(bytes([i]) for i in range(256)), None], eos_token_id=256, special_ids=[256])

    def takes(regex, text):
        template = grammar.ExLlamaV2GrammarFilter(None, every, regex=regex)
        with FilterStack([template], vocab_size=every.size, stop_ids=every.stop_ids) as stack:
            return stack.accept_text(text, every) and (stack.ended or stack.complete)

    for regex, right, wrong in [
        ("a\\\n", "a\n", "a\\n"),
        ("[\\\n]", "\n", "\\"),
        ("a\nb", "a\nb", "a\\nb"),
        ("a\\\\\n", "a\\\n", "a\n"),
        ("a/b", "a/b", "a\\/b"),
        (r"a\/b", "a/b", "a\\/b"),
        ("\n", "\n", "n"),
        (" ", " ", ""),
    ]:
        assert takes(regex, right), regex
        assert not takes(regex, wrong), regex


def test_a_ban_of_stop_ids_is_refused():
    with pytest.raises(FilterCompileError, match=f"{EOS}.*are stop ids.*LengthFilter"):
        BanFilter(None, V, ids=[0, EOS])


def test_a_healing_prefix_does_not_count_for_lengths():
    f = LengthFilter(None, V, max_chars=2)
    f.begin("hell")
    allowed, _ = f.next()
    assert allowed is not None
    assert {PIECES[i] for i in allowed} == {"he", "hell", "hello", "hello!"}
    for tokens, left in ((["hello"], 1), (["hell", "o"], 1), (["he", "l", "lo"], 1), (["hello!"], 0)):
        f.begin("hell")
        for piece in tokens:
            f.feed(PIECES.index(piece))
        words = bits.empty(V.size)
        assert f.fill_bitmask(words)
        assert any(bits.test(words, PIECES.index(p)) for p in ("a", "é")) == (left > 0), tokens
        assert not bits.test(words, PIECES.index("he"))
        assert bits.test(words, EOS)
    few = LengthFilter(None, V, min_tokens=1)
    few.begin("hell")
    few.feed(PIECES.index("hell"))
    assert not few.is_complete()
    few.feed(PIECES.index("o"))
    assert few.is_complete()


def test_a_cue_in_the_healing_prefix_is_none():
    f = TriggeredFilter(ExLlamaV2SelectFilter(None, V, ["a"]), "ell")
    f.begin("hell")
    f.feed(PIECES.index("hello"))
    assert f.next()[0] is None
    f.begin("he")
    f.feed(PIECES.index("hell"))
    assert f.next()[0] is None  # "ell" begins before what is constrained
    f = TriggeredFilter(ExLlamaV2SelectFilter(None, V, ["a"]), "lo")
    f.begin("he")
    f.feed(PIECES.index("hello"))
    assert f.next()[0] == [PIECES.index("a")]


def test_a_sequence_at_too_many_places_fails_by_name():
    grammar = pytest.importorskip("exl_filters.grammar")
    pytest.importorskip("llguidance", reason="extra `grammar`")
    part = grammar.ExLlamaV2GrammarFilter(None, V, regex="a*")
    f = SequenceFilter([part, part, part])

    def feed_many():
        for _ in range(200):
            f.feed(PIECES.index("a"))

    with pytest.raises(FilterFailed, match="places of its parts at once; the limit is 256"):
        feed_many()


def test_a_closed_stack_allows_nothing():
    stack = FilterStack([ExLlamaV2SelectFilter(None, V, ["a"])], vocab_size=V.size, stop_ids=[EOS])
    stack.next_mask()
    stack.close()
    stack.close()
    with pytest.raises(FilterUsageError, match="closed"):
        stack.next_mask()
    with pytest.raises(FilterUsageError, match="closed"):
        stack.allows(3)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "list"])
def test_zeros_and_ones_are_no_ids(dtype):
    class Integers(ExLlamaV2Filter):
        def next(self):
            mask = np.zeros(V.size, dtype="int64" if dtype == "list" else dtype)
            mask[[3, 5]] = 1
            return (mask.tolist() if dtype == "list" else mask), set()

        def begin(self, prefix_str=""):
            pass

        def feed(self, token):
            pass

    with (
        FilterStack([Integers(None, V)], vocab_size=V.size, stop_ids=[EOS]) as stack,
        pytest.raises(FilterFailed, match="some of them repeated"),
    ):
        stack.next_mask()


def test_budgets_of_wrong_types():
    with pytest.raises(FilterUsageError, match="seconds above 0"):
        CompileBudget(seconds="5")  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_compiles_while_the_parents_places_are_taken():
    held, release = threading.Semaphore(0), threading.Event()

    def slow():
        held.release()
        release.wait(250)

    for _ in range(MOST_AT_ONCE):
        compile_in_background(slow)
    for _ in range(MOST_AT_ONCE):
        held.acquire()
    child = os.fork()
    if child == 0:
        made = compile_in_background(ExLlamaV2SelectFilter, None, V, ["a"], within=120)
        os._exit(0 if made.result(timeout=200) is not None else 3)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        release.set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokenizer", "/nonexistent.json"], "No such file"),
        (["--tokenizer", "/"], "directory"),
        (["--tokenizer", os.devnull], "no tokenizer.json"),
        (["--params", "[1]"], "JSON object"),
        (["--language", "[1]"], "list of texts"),
        (["--examples", "0"], "at least 1"),
        (["--xfail", "/nonexistent"], "nonexistent"),
    ],
)
def test_a_filter_that_cannot_be_checked_is_exit_code_two(arguments, said, capsys):
    pytest.importorskip("hypothesis", reason="extra `testing`")
    assert main(["check", "select", *(arguments if "--params" in arguments else []), *_rest(arguments)]) == 2
    assert said in capsys.readouterr().err


def _rest(arguments):
    return [] if "--params" in arguments else ["--params", json.dumps({"options": ["a"]}), *arguments]


def test_nothing_installed_is_nothing_checked():
    done = run(["-m", "exl_filters", "check", "installed"], env={**os.environ, "EXL_FILTERS_PLUGINS": "none"})
    assert done.returncode == 2, done.stdout + done.stderr
    assert "nothing was checked" in done.stderr
