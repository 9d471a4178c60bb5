"""Vocabularies that reveal common faults of filters.

They hold split characters, duplicates, holes, and control tokens that spell like text.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Literal

from hypothesis import strategies as st

from exl_filters.testing.languages import Language
from exl_filters.vocabulary import Vocabulary

__all__ = ["real_vocabulary", "standard_vocabulary", "vocabularies"]

_WORDS = [b" the", b"the", b"The", b"THE", b"a", b"  ", b"\n", b'{"', b'":', b',"', b"<s>", "é".encode(), "😀".encode()]
_BYTES = [bytes([i]) for i in range(256)]


def real_vocabulary(name: Literal["bpe", "unigram"]) -> Vocabulary:
    """Return a vocabulary of 2000 tokens by its `name`: "bpe", byte-level BPE, or "unigram", with word-start marks and
    byte fallback.
    """
    from exl_filters.readers import from_tokenizer_json

    with resources.as_file(resources.files("exl_filters.testing") / "data" / f"{name}.json") as path:
        return from_tokenizer_json(str(path))


def standard_vocabulary(language: Language | None = None) -> Vocabulary:
    """Return a fixed vocabulary with all bytes, words, cuts of the language's samples, a hole, specials and two stop
    ids.
    """
    words = [*_WORDS, *_cuts(list(language.samples if language else ())[:4])[:40]]
    tokens: list[bytes | None] = [*_BYTES, *words, None, None, None, None]
    n = len(tokens)
    return Vocabulary(
        tokens,
        eos_token_id=n - 1,
        stop_ids=[n - 2],
        special_ids=[n - 1, n - 2, n - 3],
        special_texts={n - 1: "</s>", n - 2: "<end>", n - 3: "the"},
    )


@st.composite
def vocabularies(
    draw: st.DrawFn, language: Language | None = None, *, all_bytes: bool = True, max_words: int = 16
) -> Vocabulary:
    """Draw a vocabulary of about 300 ids over `language`.

    It holds the 256 bytes (unless `all_bytes` is False), up to `max_words` words, repeated texts, tokens without text,
    holes, tokens longer than 300 bytes, and control tokens that spell like content. It also holds pieces of the
    language's texts cut anywhere, inside characters too. One or two stop ids are at the end, at 0, or in between.
    """
    samples = list(language.samples if language else ())
    if language is not None:
        samples.append(draw(language.sentences))
    cuts = _cuts(samples) or [b"x"]
    # Texts cut out of the language, and the same with a suffix: a filter must handle tokens that go past an end.
    cut = st.sampled_from(cuts)
    past = st.tuples(st.sampled_from([*samples, *cuts]), st.sampled_from([b"x", b" ", b"\n", b'"'])).map(b"".join)
    words = draw(st.lists(st.one_of(cut, cut, past, st.sampled_from(_WORDS)), max_size=max_words))
    words += [s + b"x" for s in samples[: draw(st.integers(0, 4))]]
    # Beginnings of the texts in one token, and second ids for existing texts.
    head = draw(st.integers(1, 6))
    words += [s[:head] for s in samples if len(s) > 1]
    words += draw(st.lists(st.sampled_from([*words, *(s[:1] for s in samples if s), b"a"]), min_size=1, max_size=3))
    extras = draw(
        st.lists(st.sampled_from([b"", None, b"ab" * 160, b"\xff\xfe", words[0] if words else b"x"]), max_size=4)
    )
    tokens: list[bytes | None] = [*(_BYTES if all_bytes else []), *words, *extras]
    if draw(st.booleans()):
        tokens = list(draw(st.permutations(tokens))) if len(tokens) < 40 else tokens[::-1]
    # Holes in front move every id to another bit of its word.
    tokens[:0] = [None] * draw(st.integers(0, 31))
    spelling = draw(st.sampled_from([*cuts[:8], b"</s>", b"the"])).decode("utf-8", "replace")
    stops = draw(st.integers(1, 2))
    where = draw(st.sampled_from(["end", "start", "inside"]))
    at = {"end": len(tokens), "start": 0, "inside": len(tokens) // 2}[where]
    tokens[at:at] = [None] * (stops + 1)
    ids = list(range(at, at + stops + 1))
    return Vocabulary(
        tokens,
        eos_token_id=ids[0],
        stop_ids=ids[:stops],
        special_ids=ids,
        special_texts={ids[0]: "</s>", ids[-1]: spelling},
        pad_token_id=draw(st.sampled_from([None, ids[0], -1])),
    )


def _cuts(samples: Sequence[bytes]) -> list[bytes]:
    """Return substrings of the samples, short ones first, at most some hundreds."""
    found: dict[bytes, None] = {}
    for text in samples:
        text = text[:24]
        for length in range(2, len(text) + 1):
            for start in range(len(text) - length + 1):
                found[text[start : start + length]] = None
    return sorted(found, key=len)[:400]
