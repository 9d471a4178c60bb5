"""Random schemas: what comes out complete validates with jsonschema; random texts never leave their language."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from effort import trials
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exl_filters import ExLlamaV2SelectFilter, FilterCompileError, FilterStack, apply_mask, vocabulary_of
from exl_filters.readers import from_tokenizer_json

pytest.importorskip("llguidance", reason="extra `grammar`")
jsonschema = pytest.importorskip("jsonschema")
from exl_filters.grammar import ExLlamaV2GrammarFilter  # noqa: E402 - after the extra is known to be here

MODEL = from_tokenizer_json(str(Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-fp16" / "tokenizer.json"))

STRINGS = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(3, 9),
        "pattern": st.sampled_from(["^a+$", "b"]),
    },
)
NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={"minimum": st.integers(-9, 3), "maximum": st.integers(3, 200)},
)
SIMPLE = st.one_of(
    STRINGS,
    NUMBERS,
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "x"}, {"enum": ["é", 1, None]}]),
)


def larger(inner):
    names = st.sampled_from(["a", "b", "cé"])
    objects = st.dictionaries(names, inner, min_size=1, max_size=3).flatmap(
        lambda properties: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(properties),
                "required": st.lists(st.sampled_from(sorted(properties)), unique=True),
                "additionalProperties": st.just(False),
            }
        )
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner},
        optional={"minItems": st.integers(0, 2), "maxItems": st.integers(2, 3)},
    )
    return st.one_of(objects, arrays, st.lists(inner, min_size=1, max_size=2).map(lambda of: {"anyOf": of}))


def generate(template, vocabulary, rng, limit=120):
    """A random permitted text, stop tokens preferred once they are offered; None when cut."""
    with FilterStack([template], vocab_size=vocabulary.size, stop_ids=vocabulary.stop_ids, prefer_eos=True) as stack:
        text, ended = b"", False
        for _ in range(limit):
            logits = rng.standard_normal(vocabulary.size).astype(np.float32)
            token = int(apply_mask(logits, stack.next_mask()).argmax())
            ended = stack.feed(token)
            text += vocabulary.bytes_of(token)
            if ended:
                return text.decode()
    return None


@settings(max_examples=trials(60, 15), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.recursive(SIMPLE, larger, max_leaves=5), st.integers(0, 2**32 - 1))
def test_complete_outputs_are_valid(schema, seed):
    try:
        f = ExLlamaV2GrammarFilter(None, MODEL, json_schema=schema)
    except FilterCompileError:
        return  # refused: nothing is promised, nothing is let through
    rng = np.random.default_rng(seed)
    for _ in range(3):
        text = generate(f, MODEL, rng)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)


PATTERN = r"(yes|no), (I|we) (am|are)( not)?\."
OPTIONS = ["yes", "no", "no way", "😀 sure"]


@pytest.mark.parametrize(
    ("make", "judge"),
    [
        (lambda: ExLlamaV2GrammarFilter(None, MODEL, regex=PATTERN), lambda text: re.fullmatch(PATTERN, text)),
        (lambda: ExLlamaV2SelectFilter(None, MODEL, OPTIONS), lambda text: text in OPTIONS),
        (lambda: ExLlamaV2SelectFilter(None, MODEL, OPTIONS, True), lambda text: text.casefold() in OPTIONS),
    ],
)
def test_five_hundred_texts_and_none_outside_the_language(make, judge):
    assert vocabulary_of(MODEL) is MODEL
    rng, f = np.random.default_rng(0), make()
    for _ in range(500):
        text = generate(f, MODEL, rng)
        assert text is not None
        assert judge(text), text
