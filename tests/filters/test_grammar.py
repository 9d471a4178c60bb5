"""Grammar filters on llguidance: sources, whitespace, stop ids, rewind, healing, errors at construction."""

import gc
import json
import random
import re
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from answers import allowed_ids, mask_ids

from exl_filters import (
    FilterCompileError,
    FilterContext,
    FilterFailed,
    FilterRejected,
    FilterStack,
    FilterUsageError,
    Status,
    Vocabulary,
    bits,
    from_spec,
)
from exl_filters.readers import from_tokenizer_json

pytest.importorskip("llguidance", reason="extra `grammar`")
from exl_filters.grammar import ExLlamaV2GrammarFilter

EOS, EOT, HOLE = 256, 257, 258
WORDS = [b"yes", b"es", b'{"', b'":', b"true", b" ", "😀".encode()[:2], "😀".encode()[2:], b'"}', b"  ", b"1", b"23"]
VOCAB = Vocabulary(
    [bytes([i]) for i in range(256)] + [b"</s>", b"<eot>", None, *WORDS],
    eos_token_id=EOS,
    stop_ids=[EOT],
    special_ids=[EOS, EOT],
)
MODEL = from_tokenizer_json(str(Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-fp16" / "tokenizer.json"))
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def make(vocab=VOCAB, **source):
    return ExLlamaV2GrammarFilter(None, vocab, **source)


def takes(f, text):
    """Whether the bytes of `text` are permitted one by one, and whether the filter is complete after them."""
    f = f.clone()
    f.begin("")
    for byte in text.encode():
        if f.ended():
            return None
        try:
            f.feed(byte)
        except FilterRejected:
            return None
    return f.is_complete()


def generate(f, vocab, rng, limit=300):
    """A random permitted text; None when cut at the limit."""
    stack = FilterStack([f], vocab_size=vocab.size, stop_ids=vocab.stop_ids)
    text = b""
    for _ in range(limit):
        token = rng.choice(mask_ids(stack))
        ended = stack.feed(token)
        text += vocab.bytes_of(token)
        if ended:
            return text
    return None


@pytest.mark.covers("filters: grammars")
@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ({"regex": r"[a-c]+(1|2)"}, ["a1", "abc2"], ["1", "a3", "a12", "d1"]),
        ({"regex": r"a/b\/c"}, ["a/b/c"], ["a/b", "ab"]),
        ({"regex": "😀+x"}, ["😀x", "😀😀x"], ["x", "😀"]),
        ({"choice": ["yes", "no", "no way"]}, ["yes", "no", "no way"], ["y", "nope"]),
        ({"lark": 'start: "a" start "b" | "c"'}, ["c", "aacbb"], ["ac", "acbb"]),
        ({"gbnf": 'root ::= "a" | "b" root'}, ["a", "bba"], ["b", "ab"]),
        ({"ebnf": 'root ::= "a" | "b" root'}, ["a", "bba"], ["b", "ab"]),
        (
            {"json_schema": SCHEMA},
            ['{"name":"a","age":1}', '{ "name": "😀", "age": 10, "ok": true }', '{\n  "name": "a",\n  "age": 1\n}'],
            ['{"age":1,"name":"a"}', '{  "name": "a"', '{"name":"123456789"', "{}", ' {"'],
        ),
        ({"json_schema": json.dumps({"enum": ["x", 3]})}, ['"x"', "3"], ["x", "4"]),
        ({"json_schema": {"name": "n", "schema": {"type": "null"}}}, ["null"], ["1"]),
        ({"json_schema": True}, ["null", "[1]", '{"a":{}}'], ["nul]", "[,"]),
        ({"json_schema": {"type": "null"}, "leading_space": True}, ["null", " null"], ["  null", "null "]),
        ({"json_schema": {"type": "array"}, "whitespace": "compact"}, ["[1,2]"], ["[1, 2]"]),
        ({"json_schema": {"type": "array"}, "whitespace": "any"}, ["[1,2]", "[ \n\n  1 ]"], ["[1 2]"]),
        ({"json_schema": {"type": "array"}, "whitespace": "[ ]{1,2}"}, ["[1,2]", "[  1 ]"], ["[\n1]", "[   1]"]),
    ],
)
def test_languages(source, good, bad):
    f = make(**source)
    for text in good:
        assert takes(f, text) is True, text
    for text in bad:
        assert not takes(f, text), text


@pytest.mark.covers("filters: compile-errors")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "exactly one"),
        ({"regex": "(a"}, "unclosed"),
        ({"regex": ""}, "non-empty"),
        ({"lark": "start: nothing"}, "nothing"),
        ({"lark": "begin: /a/"}, "start"),
        ({"gbnf": "root ::= ("}, "line 1"),
        ({"choice": []}, "at least one"),
        ({"choice": "abc"}, "list"),
        ({"choice": ["a", 3]}, "strings"),
        ({"json_schema": False}, "nothing"),
        ({"json_schema": "{"}, "JSON"),
        ({"json_schema": 3}, "object"),
        ({"json_schema": {"type": "nonsense"}}, "nonsense"),
        ({"json_schema": {"type": "object", "unevaluatedProperties": False}}, "unevaluatedProperties"),
        ({"json_schema": {"type": "string", "contains": {}, "if": {}}}, "if"),
        ({"json_schema": {"$ref": "#/$defs/none"}}, "none"),
        ({"json_schema": {"type": "null"}, "whitespace": "("}, "whitespace"),
        ({"json_schema": {"type": "null"}, "whitespace": 5}, "whitespace"),
        ({"json_schema": {"type": "null"}, "whitespace": None}, "whitespace"),
        ({"regex": "a", "limits": {"max_nothing": 3}}, "max_nothing"),
        ({"regex": "a", "limits": {"verbose_errors": True}}, "verbose_errors is not a limit"),
        ({"regex": "a", "limits": {"verbose_errors": 0}}, "verbose_errors is not a limit"),
        ({"regex": "[ab]{1,2000}[cd]{1,2000}x", "limits": {"initial_lexer_fuel": 10}}, "limit"),
        ({"regex": "a", "on_complete": "stop"}, "on_complete"),
        ({"lark": 'start: "a"', "leading_space": True}, "leading_space"),
    ],
)
def test_unenforceable_grammars_are_refused_at_construction(source, reason):
    with pytest.raises(FilterCompileError, match=reason):
        make(**source)


def test_the_callers_schema_is_not_changed():
    schema = json.loads(json.dumps(SCHEMA))
    make(json_schema=schema)
    assert schema == SCHEMA


@pytest.mark.covers("filters: stop-ids")
def test_stop_ids_are_offered_when_whole_and_only_then():
    f = make(regex="[ab]+")
    assert not set(f.next()[0]) & {EOS, EOT}
    f.feed(97)
    ids, ends = f.next()
    assert {EOS, EOT, 97, 98} <= set(ids)
    assert ends == {EOS, EOT}
    assert HOLE not in ids
    f.feed(EOT)
    assert f.ended()
    assert f.next() == ([EOS, EOT], {EOS, EOT})


def test_on_complete_end_and_eos():
    f = make(regex="ab")
    f.feed(97)
    assert f.next() == ([98], {98})
    f.feed(98)
    assert f.ended()
    g = make(regex="ab", on_complete="eos")
    g.feed(97)
    assert g.next() == ([98], set())
    g.feed(98)
    assert not g.ended()
    assert g.next() == ([EOS, EOT], {EOS, EOT})
    g.feed(EOS)
    assert g.ended()


def test_specials_are_matched_by_name_only():
    v = Vocabulary([*"<tol>", "<tool>", "</s>"], eos_token_id=6, special_ids=[5, 6])
    assert 5 not in make(v, regex="<tool>").next()[0]
    named = make(v, lark="start: <tool>")
    assert named.next()[0] == [5]
    named.feed(5)
    assert named.ended()


def test_a_rejected_token_leaves_the_state():
    f = make(json_schema=SCHEMA)
    before = f.next()
    for token in (ord("x"), EOS, HOLE, 10**6, -1):
        with pytest.raises(FilterRejected):
            f.feed(token)
        assert f.next() == before
    f.feed(ord("{"))


def test_rewind_from_everywhere():
    rng = random.Random(1)
    f = make(json_schema=SCHEMA, no_forcing=True)
    trace, path = [f.next()], []
    while not f.ended():
        path.append(rng.choice(f.next()[0]))
        f.feed(path[-1])
        trace.append(f.next())
    f.feed(EOS)
    f.feed(-1)
    f.rewind(2)
    for _ in range(60):
        n = rng.randrange(len(path) + 1)
        f.rewind(n)
        assert f.next() == trace[len(path) - n]
        for i in range(len(path) - n, len(path)):
            f.feed(path[i])
    assert f.ended()
    with pytest.raises(FilterUsageError):
        f.rewind(len(path) + 1)


def test_clones_are_independent_and_templates_are_shared_between_threads():
    f = make(json_schema=SCHEMA)
    f.feed(ord("{"))
    copy = f.clone()
    copy.feed(ord('"'))
    assert set(f.next()[0]) >= {ord('"')}
    results = []

    def run(seed):
        results.append(generate(make_from, VOCAB, random.Random(seed)))

    make_from = make(json_schema=SCHEMA)
    threads = [threading.Thread(target=run, args=(seed,)) for seed in [1, 2, 3, 4] * 4]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    alone = {generate(make_from, VOCAB, random.Random(seed)) for seed in (1, 2, 3, 4)}
    assert set(results) == alone
    assert len(results) == 16


@pytest.mark.covers("filters: healing")
def test_healing_consumes_the_surplus_only():
    v = Vocabulary(
        [bytes([i]) for i in range(256)] + [b"</s>", b" {", b' {"', b" x", b"{", b" "],
        eos_token_id=256,
        special_ids=[256],
    )
    f = make(v, json_schema=SCHEMA)
    f.begin(" ")
    assert [v.piece(i) for i in f.next()[0]] == [" ", " {", ' {"', " "]
    f.feed(258)
    fresh = make(v, json_schema=SCHEMA)
    fresh.feed(ord("{"))
    fresh.feed(ord('"'))
    assert f.next() == fresh.next()
    f.rewind(1)
    f.feed(257)
    f.feed(ord('"'))
    assert f.next() == fresh.next()
    f.begin("ab")
    assert f.next()[0] == [97]
    f.feed(97)
    assert f.next()[0] == [98]


def test_no_forcing_allows_every_spelling():
    assert [VOCAB.piece(i) for i in fed(make(regex="yes"), "y").next()[0]] == ["es"]
    assert [VOCAB.piece(i) for i in fed(make(regex="yes", no_forcing=True), "y").next()[0]] == ["e", "es"]
    assert fed(make(regex="yes"), "y").forced() == b"es"


def drive(stack, tokens):
    for token in tokens:
        stack.next_mask()
        stack.feed(token)


def fed(f, text):
    for byte in text.encode():
        f.feed(byte)
    return f


def test_validate_counts_drafts():
    f = make(regex="ab+")
    assert f.validate([97, 98, 98, 99]) == 3
    assert f.validate([97, EOS]) == 1
    assert f.validate([97, 98, EOS, 98]) == 3
    assert f.validate([HOLE]) == 0
    assert make(regex="ab").validate([97, 98, EOS]) == 2  # over with b: what follows is not of the constraint
    assert f.next()[0] == [97]


@pytest.mark.covers("filters: combination")
def test_mask_mode_agrees_with_next():
    f = fed(make(json_schema=SCHEMA), '{"name":"')
    for width in (VOCAB.size, VOCAB.size + 1, VOCAB.size + 64):
        f.prepare_logit_mask()
        logits = np.full(width, 2.0, dtype=np.float16)
        out = f.mask_logits(logits)
        assert np.flatnonzero(np.isfinite(out)).tolist() == f.next()[0]
        assert (logits == 2).all()


def test_a_vocabulary_without_eos_and_specs():
    v = Vocabulary([*"ab"])
    f = make(v, regex="ab*")
    f.feed(0)
    assert f.next()[0] == [1]
    assert f.is_complete()
    g = from_spec(make(json_schema=SCHEMA, no_forcing=True).spec(), VOCAB)
    assert takes(g, '{"name":"a","age":1}')
    assert g.spec()["json_schema"] == SCHEMA


def test_a_matcher_in_error_is_a_failure_not_a_short_text():
    f = make(lark='start: "a" start start | "b"', limits={"step_max_items": 5})
    stack = FilterStack([f], vocab_size=VOCAB.size, stop_ids=VOCAB.stop_ids)
    with pytest.raises(FilterFailed, match="llguidance"):
        drive(stack, [97] * 50)
    assert stack.status is Status.FAILED


def test_random_generations_are_sentences_and_valid_json():
    jsonschema = pytest.importorskip("jsonschema")
    rng = random.Random(5)
    schema = make(MODEL, json_schema=SCHEMA)
    pattern = r"[a-d]{1,4}(-[0-9]{2})?"
    regex = make(MODEL, regex=pattern)
    done = 0
    for _ in range(60):
        text = generate(schema, MODEL, rng)
        if text is not None:
            jsonschema.validate(json.loads(text), SCHEMA)
            done += 1
        word = generate(regex, MODEL, rng)
        assert re.fullmatch(pattern, word.decode())
    assert done > 30


def test_a_schema_with_the_pair_that_tabby_users_wrote():
    from exl_filters import ExLlamaV2PrefixFilter

    stack = FilterStack(
        [make(json_schema=SCHEMA), ExLlamaV2PrefixFilter(None, VOCAB, ["[", "{"])],
        vocab_size=VOCAB.size,
        stop_ids=[EOS],
    )
    assert {VOCAB.piece(i) for i in mask_ids(stack)} == {"{", '{"'}


@pytest.mark.parametrize("head", ["", "%llguidance {}\n", '%llguidance {"no_forcing": false}\n'])
def test_no_forcing_goes_into_the_grammars_own_options(head):
    """`no_forcing` joins the options line of a grammar, which every EBNF has."""
    for source in ({"lark": head + 'start: "yes" | "no"\n'}, {"ebnf": 'root ::= "yes" | "no"\n'}):
        f = ExLlamaV2GrammarFilter(None, VOCAB, no_forcing=True, **source)
        plain = ExLlamaV2GrammarFilter(None, VOCAB, regex="yes|no", no_forcing=True)
        assert f.next()[0] == plain.next()[0]


def test_validate_is_what_the_masks_allow():
    f = ExLlamaV2GrammarFilter(None, VOCAB, regex="yes|no")
    for text in ("yes", "no"):
        for path in ([*VOCAB.encode(text)[0]], [VOCAB.ids_of(bytes([b]))[0] for b in text.encode()]):
            judge, permitted = f.clone(), 0
            for token in path:
                if int(token) not in judge.next()[0]:
                    break
                judge.feed(int(token))
                permitted += 1
            assert f.validate([int(t) for t in path]) == permitted


@pytest.mark.covers("filters: white-space")
def test_captures_leading_space_and_runaway_whitespace():
    f = make(lark='start: "name: " name "."\nname[capture]: /[a-z]+/\n')
    for byte in b"name: ada.":
        f.feed(byte)
    assert ("name", b"ada") in f.captures()
    f = make(json_schema={"type": "object"}, leading_space=True)
    for text, good in ((' {"a": 1}', True), ('{"a": 1}', True), ('  {"a": 1}', False), ('{  "a": 1}', False)):
        assert bool(takes(f, text)) == good, text
    assert takes(make(json_schema={"type": "object"}, whitespace="any"), '{     "a"   : 1}')


@pytest.mark.parametrize(
    "source",
    [
        {"regex": "(a|ab|yes){1,3}"},
        {"json_schema": {"type": ["integer", "boolean"]}},
        {"choice": ["a", "abc"], "on_complete": "eos"},
        {"lark": 'start: "a"* "b"?\n'},
    ],
)
@pytest.mark.parametrize("stops", [[261], [260, 261]])
def test_the_mask_taken_as_it_is_equals_the_mask_put_together(source, stops):
    """With one stop id and a vocabulary without holes llguidance's own mask is used; the long way says the same."""
    words = [*(bytes([i]) for i in range(256)), b"ab", b"yes", b'{"', b'":', None, None]
    vocab = Vocabulary(words, eos_token_id=260, special_ids=[260, 261])
    quick = ExLlamaV2GrammarFilter(None, vocab, **source)
    slow = quick.clone()
    rng = random.Random(1)
    quick.attach(FilterContext.make(vocab.size, [260], [260, 261]))
    slow.attach(FilterContext.make(vocab.size, stops, [260, 261]))
    whole = 0
    for _ in range(20):
        quick.begin("")
        slow.begin("")
        for _ in range(12):
            one, two = bits.full(vocab.size), bits.empty(vocab.size)
            assert quick.fill_bitmask(one)
            assert slow.fill_bitmask(two)
            allowed, long_way = set(bits.to_ids(one)), set(bits.to_ids(two))
            assert allowed - {260} == long_way - {260, 261}
            assert (260 in allowed) == long_way.issuperset(stops) == bool(long_way & set(stops))
            assert 260 in allowed or not quick.is_complete()
            whole += quick.is_complete()
            token = rng.choice(allowed_ids(quick))
            quick.feed(token)
            slow.feed(stops[0] if token == 260 else token)
            if quick.ended():
                break
    assert whole
    for token in (-1, vocab.size, 10**6):
        quick.begin("")
        with pytest.raises(FilterRejected):
            quick.feed(token)
        assert quick.next()[0]


def test_a_vocabulary_without_references_is_freed():
    """llguidance's tables of a large vocabulary are 100 MB; a server that changes models must not keep them."""
    vocab = Vocabulary([*(bytes([i]) for i in range(256)), None], eos_token_id=256, special_ids=[256])
    f = ExLlamaV2GrammarFilter(None, vocab, json_schema={"type": "object"})
    f.feed(next(iter(allowed_ids(f))))
    gone = weakref.ref(vocab)
    del f, vocab
    gc.collect()
    assert gone() is None


def test_a_token_too_long_for_the_engine_is_a_typed_error():
    """llguidance's tables panic over tokens of more than 1024 bytes."""
    vocab = Vocabulary(["a" * 1025, "a", None], eos_token_id=2, special_ids=[2])
    with pytest.raises(FilterCompileError, match="llguidance"):
        ExLlamaV2GrammarFilter(None, vocab, regex="a+")
