"""Filters of one pattern share masks by the state of the pattern; each mask is the one that llguidance computes."""

import random
from pathlib import Path

import numpy as np
import pytest
from effort import trials
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_filters import FilterStack, Vocabulary, bits
from exl_filters.bits import Words
from exl_filters.readers import from_tokenizer_json
from exl_filters.regex_states import states_of

pytest.importorskip("llguidance", reason="extra `grammar`")
from exl_filters.grammar import ExLlamaV2GrammarFilter
from exl_filters.grammar_source import grammar_text
from exl_filters.llg import Matcher, compile_matcher

MODEL = from_tokenizer_json(str(Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-fp16" / "tokenizer.json"))
STOP = MODEL.eos_token_id
#: bytes, and longer tokens that end anywhere in the texts below
SMALL = Vocabulary(
    [bytes([i]) for i in range(256)]
    + [b"</s>", b"ab", b"abc", b"ba", b"aaa", b" a", b"b ", b"12", b"1a", b"-1", b"\n\n", b"a\n", "\u00e9a".encode()],
    eos_token_id=256,
    special_ids=[256],
)

atoms = st.sampled_from(
    [
        *("a", "b", "1", "-", " ", r"\n", ".", r"\d", r"\w", r"\s", r"\.", "[ab]", "[a-c1-]", r"[^a\n]", r"[\d ]"),
        *("\u00e9", "[a\u00e9]", r"\D", "ab"),
    ]
)
counts = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "{20}", "{5,30}"])


def nested(inner):
    group = st.lists(inner, min_size=1, max_size=3).map("".join)
    either = st.lists(group, min_size=1, max_size=3).map("|".join)
    return st.builds(lambda body, mark, count: f"({mark}{body}){count}", either, st.sampled_from(["", "?:"]), counts)


patterns = st.lists(
    st.recursive(st.builds(str.__add__, atoms, counts), nested, max_leaves=6), min_size=1, max_size=3
).map("".join)


def oracle(pattern: str, vocabulary: Vocabulary) -> Matcher:
    text = grammar_text({"regex": pattern}, whitespace="bounded", no_forcing=False, leading_space=False)
    return compile_matcher(text, vocabulary)


def stacks_of(pattern: str, vocabulary: Vocabulary, count: int) -> list[FilterStack]:
    made = ExLlamaV2GrammarFilter(None, vocabulary, regex=pattern)
    stacks = [FilterStack([made], vocab_size=vocabulary.size, stop_ids=vocabulary.stop_ids) for _ in range(count)]
    for stack in stacks:
        stack.begin("")
    return stacks


def mask_of(stack: FilterStack) -> Words:
    mask = stack.next_mask()
    assert mask is not None
    return mask.copy()


def walk(stack: FilterStack, matcher: Matcher, rng: random.Random, steps: int) -> list[int]:
    """Compare the masks of a random walk with those of a matcher that nothing else uses; returns the tokens."""
    path: list[int] = []
    width = stack.context.vocab_size
    for _ in range(steps):
        expected = bits.empty(width)
        matcher.mask_into(expected)
        mask = stack.next_mask()
        assert mask is not None
        assert np.array_equal(mask, expected), path
        ids = [token for token in bits.to_ids(mask) if token not in stack.context.stop_ids]
        if not ids:
            break
        path.append(rng.choice(ids))
        matcher.consume([path[-1]])
        if stack.feed(path[-1]):
            break
    return path


@settings(max_examples=trials(80, 10), deadline=None)
@given(patterns, st.integers(0, 1000))
def test_masks_are_those_of_llguidance(pattern, seed):
    rng = random.Random(seed)
    for stack in stacks_of(pattern, SMALL, 3):
        walk(stack, oracle(pattern, SMALL), rng, 12)


@pytest.mark.parametrize("pattern", ["([A-Za-z0-9]{1,12} ){500}", r"[^\n]{1,400}", r"(\w+[.,] )*", "[ab]{3}|[ab]{9}"])
def test_masks_of_a_vocabulary_of_words(pattern):
    rng = random.Random(3)
    for stack in stacks_of(pattern, MODEL, 3):
        walk(stack, oracle(pattern, MODEL), rng, 25)


def test_a_state_is_computed_once(monkeypatch):
    """Counters that no token can exhaust do not tell states apart."""
    computed = []
    mask_into = Matcher.mask_into

    def counted(matcher, words):
        computed.append(matcher)
        return mask_into(matcher, words)

    monkeypatch.setattr(Matcher, "mask_into", counted)
    first, *others = stacks_of("([ab]{1,12} ){500}", SMALL, 8)
    letters, space = [SMALL.ids_of(text)[0] for text in (b"ab", b"b")], SMALL.ids_of(b" ")[0]

    def words(stack, count):
        for number in range(count):
            for token in (*letters, *letters[: number % 2], space):
                stack.next_mask()
                stack.feed(token)

    words(first, 4)
    before = len(computed)
    assert before <= 6
    for stack in others:
        words(stack, 100)
    assert len(computed) == before


def test_no_mask_is_shared_where_the_next_text_is_forced():
    """The spelling of text that must follow depends on the tokens before."""
    (stack,) = stacks_of("[ab]cccc[ab]", MODEL, 1)
    grammar = stack.filters[0]
    assert isinstance(grammar, ExLlamaV2GrammarFilter)
    stack.next_mask()
    assert grammar.knows_mask
    stack.feed(MODEL.ids_of(b"a")[0])
    stack.next_mask()
    assert not grammar.knows_mask
    assert grammar.mask_key is None


def test_rewinding_beginning_again_and_healing():
    rng = random.Random(1)
    one, other = stacks_of("([a-z]{2,5}-){2,40}", MODEL, 2)
    path = walk(one, oracle("([a-z]{2,5}-){2,40}", MODEL), rng, 9)
    masks = []
    for token in path:
        masks.append(mask_of(other))
        other.feed(token)
    for back in (3, 1, 4):
        other.rewind(back)
        for token, mask in zip(path[-back:], masks[-back:], strict=True):
            assert np.array_equal(mask_of(other), mask)
            other.feed(token)
    other.begin("")
    assert np.array_equal(mask_of(other), masks[0])
    other.begin("a")  # the first token writes this text again
    healing = bits.to_ids(mask_of(other))
    assert healing
    assert all(MODEL.bytes_of(token).startswith(b"a") for token in healing)
    other.feed(MODEL.ids_of(b"a")[0])
    assert np.array_equal(mask_of(other), masks[0])


def test_a_host_with_stop_ids_of_its_own():
    """The masks that are shared hold no host's stop ids."""
    made = ExLlamaV2GrammarFilter(None, SMALL, regex="([ab]{1,3} ?)+")
    hosts = [[256], [256, 0], [256, 1]]
    stacks = [FilterStack([made], vocab_size=SMALL.size, stop_ids=stops) for stops in hosts]
    for number, text in enumerate((b"ab", b"b ", b"ab")):
        for stack, stops in zip(stacks, hosts, strict=True):
            mask = stack.next_mask()
            assert mask is not None
            assert {token for token in (0, 1, 256) if bits.test(mask, token)} == (set(stops) if number else set())
            stack.feed(SMALL.ids_of(text)[0])


@pytest.mark.parametrize(("bound", "value"), [("MAX_MASKS", 2), ("MAX_STATES", 2), ("MAX_WORK", 40), ("MAX_TERM", 7)])
def test_few_states_and_masks_are_kept(monkeypatch, bound, value):
    monkeypatch.setattr(f"exl_filters.regex_states.{bound}", value)
    rng = random.Random(5)
    for stack in stacks_of("([ab]{1,4}1)+", SMALL, 4):
        walk(stack, oracle("([ab]{1,4}1)+", SMALL), rng, 30)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?i)a", "^a", "a$", r"\bword", r"\p{L}+", "a*?", "a{2}{3}", "[[:alpha:]]", "[a&&b]", r"\x41", "(?P<n>a)"),
        *("[]a]", "a++", "a{,3}", "[z-a]", r"[a-\d]", r"[^\s\S]", "(a", "a)", "a|*", "a" * 401, r"\<a", "[a-", "[^"),
    ],
)
def test_patterns_that_are_not_followed(pattern):
    assert states_of(pattern, 10) is None


def test_a_pattern_whose_derivatives_grow_is_given_up():
    assert states_of("(a?b?c?d?e?f?g?h?i?j?){40}" * 12, 1000) is None
    states = states_of("((a|b)*a(a|b){12}){3}", 1000)
    assert states is not None
    rng, state = random.Random(1), states.start
    for _ in range(100):
        state = states.feed(state, rng.choice([b"a", b"b"]))
    assert state is None


def test_text_beyond_ascii_is_not_followed():
    states = states_of("[^\n]+", 10)
    assert states is not None
    assert states.feed(states.start, b"ab") is not None
    assert states.feed(states.start, "a\u00e9".encode()) is None
    assert states.feed(states.start, b"") is None
    assert states.feed(None, b"a") is None
