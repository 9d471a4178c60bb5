"""Grammars with rules that never end are refused before llguidance follows them for ever."""

import json
import random
from functools import partial
from typing import Any

import pytest
from answers import allowed_ids
from counting import lines

from exl_filters import FilterCompileError
from exl_filters.lark_rules import endless_rules
from exl_filters.testing import standard_vocabulary

V = standard_vocabulary()
pytestmark = pytest.mark.covers("filters: compile-errors")


@pytest.mark.parametrize(
    ("endless", "text"),
    [
        (["r0"], "start: r0 | /a/\nr0: r1 r0 r0\nr1: /x*/\n"),
        (["start", "a", "b"], 'start: a\na: "x" b\nb: "y" a\n'),
        (["r"], 'start: "a" r | "b"\nr: /x*/ (r | "y" r)\n'),
        (["r"], "start: r*\nr: r+\n"),
        (["r"], "start: r?\nr: /x/ r{2,3}\n"),
        ([], 'start: r\nr: "x" r | "y"\n'),
        ([], 'start: r\nr: "x" r?\n'),
        ([], 'start: r\nr: "x" [r]\n'),
        ([], 'start: r\nr: "x" (r | "y")\n'),
        ([], 'start: r\nr: "x" r{0,3}\n'),
        ([], 'start: r\nr: ("x" r)* "z"\n'),
        (
            [],
            'start: A b\nA: /a\\/b/i & ~/c/\n// r: r\nb[capture="n: r", stop=""]: <|call|> <[1,2-3]> "x: y" -> alias\n',
        ),
        (
            [],
            '%llguidance {"no_forcing": true}\n%ignore / /\nstart: %json {"a": {"b: c": [1]}} | "a".."z" | other\n',
        ),
        ([], 'start: a{3} b~2 c~1..4\na: "a"\nb: "b"\n   | "c"\nc: "c"\n'),
        (None, "start: a::x\n"),
        (None, "start: ( a\n"),
        (None, 'start: "a" $\n'),
        (None, "start: %json {\n"),
    ],
)
def test_rules_without_an_end(endless, text):
    assert endless_rules(text) == endless


ENDLESS = "start: /a/ r0 | /b/\nr0: r1 r0\nr1: /x*/\n"


@pytest.mark.parametrize(
    "source",
    [
        {"lark": ENDLESS},
        {"llg": ENDLESS},
        {"llg": json.dumps({"grammars": [{"lark_grammar": ENDLESS}]})},
        {"ebnf": 'root ::= "a" r | "b"\nr ::= [x]* r\n'},
    ],
)
def test_they_are_refused_with_their_name(source):
    pytest.importorskip("llguidance", reason="extra `grammar`")
    from exl_filters import ExLlamaV2GrammarFilter

    with pytest.raises(FilterCompileError, match=r"rule 'r0?' has no finite text"):
        ExLlamaV2GrammarFilter(None, V, **source)


@pytest.mark.parametrize("kind", ["lark", "llg", "ebnf"])
def test_text_forced_for_ever_does_not_hang_a_mask(kind):
    """A takes every a there is, and B wants one more: an a is forced, and again, without an end."""
    pytest.importorskip("llguidance", reason="extra `grammar`")
    from exl_filters import ExLlamaV2GrammarFilter

    source = "start: A B\nA: /a+/\nB: /ab/\n" if kind != "ebnf" else 'root ::= "a"+ "ab"\n'
    given: dict[str, Any] = {kind: source}
    f = ExLlamaV2GrammarFilter(None, V, **given)
    for _ in range(4):
        allowed = allowed_ids(f)
        assert f.forced() == b""
        assert f.validate([allowed[0], allowed[0]]) >= 1
        f.feed(allowed[0])
    assert f.clone().next() == f.next()


def test_a_grammar_that_is_not_understood_is_compiled_all_the_same():
    pytest.importorskip("llguidance", reason="extra `grammar`")
    from exl_filters import ExLlamaV2GrammarFilter

    unread = 'start: %json {"type": "null"}\n    | $\n'
    assert endless_rules(unread) is None
    with pytest.raises(FilterCompileError, match=r"\$"):
        ExLlamaV2GrammarFilter(None, V, lark=unread)
    assert endless_rules("start: " + " | ".join(f'"w{i}"' for i in range(300)) + "\n") == []


@pytest.mark.parametrize(
    "source",
    [
        {"regex": "x{100000000}y"},
        pytest.param({"json_schema": {"type": "string", "pattern": "^x{100000000}$"}}, marks=pytest.mark.full),
    ],
)
def test_long_counted_texts_end_by_llguidances_own_limits(source):
    pytest.importorskip("llguidance", reason="extra `grammar`")
    from exl_filters import ExLlamaV2GrammarFilter, FilterError

    with pytest.raises(FilterError, match=r"[tT]oo many"):
        walk(ExLlamaV2GrammarFilter(None, V, **source))


def walk(f):
    for _ in range(3):
        f.feed(f.next()[0][0])


def chain(rules):
    return [f'r{i}: "a" r{i + 1}\n' for i in range(rules)]


def test_it_takes_large_grammars():
    assert endless_rules("".join(chain(20_000))) == []
    assert (endless_rules("".join(reversed(chain(20_000))) + "r20000: r0\n") or [])[:1] == ["r19999"]


@pytest.mark.parametrize(
    "order", [list, lambda rules: rules[::-1], lambda rules: random.Random(0).sample(rules, len(rules))]
)
def test_it_does_as_much_for_every_rule_however_many_there_are(order):
    sources = ["".join(order(chain(n))) + f'r{n}: "z"\n' for n in (250, 2000)]
    once, eight_times = (lines(partial(endless_rules, source)) for source in sources)
    assert once > 250
    assert eight_times < 16 * once
