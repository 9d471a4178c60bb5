"""lm-format-enforcer through our filter, and its own exllamav2 class, unmodified, through FilterStack."""

import json
import random
import re
import sys
import types

import pytest
from answers import allowed_ids

from exl_filters import FilterBusy, FilterCompileError, FilterRejected, FilterStack, Vocabulary, bits
from exl_filters.token_enforcer import ExLlamaV2TokenEnforcerFilter

lmfe = pytest.importorskip("lmformatenforcer", reason="extra `enforcer`")

EOS = 256
WORDS = ["yes", "es", '{"', '":', "true", "12", '"}', "a1", "name"]
VOCAB = Vocabulary([bytes([i]) for i in range(256)] + [b"</s>", *WORDS, None], eos_token_id=EOS, special_ids=[EOS])
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def regex(pattern):
    return ExLlamaV2TokenEnforcerFilter(None, VOCAB, lmfe.RegexParser(pattern))


def generate(stack, rng, limit=200):
    text = b""
    for _ in range(limit):
        token = rng.choice(bits.to_ids(stack.next_mask()))
        if stack.feed(token) or token == EOS:
            return text.decode()
        text += VOCAB.bytes_of(token)
    return None


def stack_of(f):
    return FilterStack([f], vocab_size=VOCAB.size, stop_ids=[EOS])


def test_random_generations_match():
    rng = random.Random(3)
    template = regex(r"(yes|no)-[ab]{1,3}[0-9]")
    schema = ExLlamaV2TokenEnforcerFilter(None, VOCAB, lmfe.JsonSchemaParser(SCHEMA))
    valid = 0
    for _ in range(30):
        assert re.fullmatch(r"(yes|no)-[ab]{1,3}[0-9]", generate(stack_of(template), rng))
        text = generate(stack_of(schema), rng)
        if text is not None:
            value = json.loads(text)
            assert set(value) == {"name", "age"}
            assert isinstance(
                value["age"], int | float
            )  # the library takes 1e9 for an integer, and does not enforce maximum
            valid += 1
    assert valid > 10


def test_int_feeds_rewind_clone_and_rejection():
    f = regex("yes|no")
    start = f.next()
    assert {VOCAB.piece(i) for i in start[0]} == {"y", "yes", "n"}
    with pytest.raises(FilterRejected):
        f.feed(ord("x"))
    f.feed(ord("y"))
    copy = f.clone()
    f.feed(ord("e"))
    assert {VOCAB.piece(i) for i in copy.next()[0]} == {"e", "es"}
    f.rewind(2)
    assert f.next() == start
    f.feed(257)
    assert f.is_complete()
    assert f.next() == ([EOS], {EOS})
    f.feed(EOS)
    f.feed(EOS)


def test_the_callers_parser_is_left_alone():
    parser = lmfe.JsonSchemaParser(SCHEMA)
    before = parser.config.alphabet
    ExLlamaV2TokenEnforcerFilter(None, VOCAB, parser)
    assert parser.config.alphabet == before
    with pytest.raises(FilterCompileError):
        ExLlamaV2TokenEnforcerFilter(None, VOCAB, "yes|no")


def test_healing():
    v = Vocabulary([*"abyes ", " y", " yes", "</s>"], eos_token_id=8, special_ids=[8])
    f = ExLlamaV2TokenEnforcerFilter(None, v, lmfe.RegexParser("yes|no"))
    f.begin(" ")
    assert [v.piece(i) for i in allowed_ids(f)] == [" ", " y", " yes"]
    f.feed(6)
    assert [v.piece(i) for i in allowed_ids(f)] == ["e"]


@pytest.fixture
def integration(monkeypatch):
    """lm-format-enforcer's exllamav2 module, imported as its users do; the name it takes from exllamav2 is ours."""
    pytest.importorskip("torch")
    package = types.ModuleType("exllamav2")

    class Tokenizer:
        """The attributes that the module reads."""

        eos_token_id, bos_token_id, pad_token_id, unk_token_id = EOS, None, -1, None
        extended_id_to_piece = types.MappingProxyType({EOS: "</s>"})
        actual_vocab_size = VOCAB.size
        tokenizer = VOCAB

        def get_id_to_piece_list(self):
            return VOCAB.get_id_to_piece_list()

        def decode(self, ids):
            return VOCAB.decode(ids)

    package.ExLlamaV2Tokenizer = Tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "exllamav2", package)
    monkeypatch.delitem(sys.modules, "lmformatenforcer.integrations.exllamav2", raising=False)
    import lmformatenforcer.integrations.exllamav2 as module

    yield module
    sys.modules.pop("lmformatenforcer.integrations.exllamav2", None)


@pytest.mark.covers("filters: foreign-classes")
def test_its_own_class_runs_unmodified(integration):
    rng = random.Random(4)
    pattern = "(yes|no)[0-9]{2}"
    theirs = integration.ExLlamaV2TokenEnforcerFilter(lmfe.RegexParser(pattern), integration.ExLlamaV2Tokenizer())
    for _ in range(5):
        with stack_of(theirs) as stack:
            with pytest.raises(FilterBusy):
                stack_of(theirs)
            stack.begin()
            first = bits.to_ids(stack.next_mask())
            assert re.fullmatch(pattern, generate(stack, rng))
            stack.rewind(2)
            stack.begin()
            assert bits.to_ids(stack.next_mask()) == first
    ours = regex(pattern)
    for path in ([], [ord("n")], [ord("n"), ord("o")], [257], [257, ord("1")]):
        with stack_of(theirs) as a, stack_of(ours) as b:
            for token in path:
                a.feed(token)
                b.feed(token)
            assert bits.to_ids(a.next_mask()) == bits.to_ids(b.next_mask())
