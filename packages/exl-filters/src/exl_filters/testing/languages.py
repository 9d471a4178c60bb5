"""Oracles: the texts that a filter may produce, decided by code simpler than the filter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from exl_filters.errors import FilterUsageError
from exl_filters.testing.regexes import PartialRegex

__all__ = ["Language", "anything", "as_language", "finite", "json_schema", "regex", "starts_with"]

Answer = bool | None


@dataclass(frozen=True)
class Language:
    """A set of byte strings.

    Args:
        name: Name in messages.
        prefix: Whether bytes begin a text of the language: True, False, or None for unknown.
        whole: Whether bytes are a text of the language: True, False, or None for unknown.
        sentences: A strategy of texts of the language.
        samples: A few texts, from which vocabulary tokens are cut.
        opinion_ends: The filter may have no opinion after a text of the language (`starts_with`).
    """

    name: str
    prefix: Callable[[bytes], Answer]
    whole: Callable[[bytes], Answer]
    sentences: st.SearchStrategy[bytes]
    samples: Sequence[bytes] = field(default_factory=tuple)
    opinion_ends: bool = False


def finite(options: Iterable[str | bytes]) -> Language:
    """Build the language of exactly the texts in `options`. Raises `FilterUsageError` for none."""
    texts = [_bytes(option) for option in options]
    if not texts:
        raise FilterUsageError("a finite language needs at least one text")
    known = frozenset(texts)
    beginnings = {text[:n] for text in texts for n in range(len(text) + 1)}
    return Language(
        f"finite({texts!r:.60})", beginnings.__contains__, known.__contains__, st.sampled_from(sorted(known)), texts
    )


def starts_with(prefixes: Iterable[str | bytes]) -> Language:
    """Build the language of texts that begin with one of `prefixes`; the filter may have no opinion afterwards."""
    texts = [_bytes(prefix) for prefix in prefixes]

    def reached(text: bytes) -> bool:
        return any(text.startswith(p) for p in texts)

    def prefix(text: bytes) -> bool:
        return reached(text) or any(p.startswith(text) for p in texts)

    sentences = st.tuples(st.sampled_from(texts), st.binary(max_size=4)).map(lambda pair: pair[0] + pair[1])
    return Language(f"starts_with({texts!r:.60})", prefix, reached, sentences, texts, opinion_ends=True)


def regex(pattern: str | re.Pattern[str]) -> Language:
    """Build the language of texts that a pattern matches from end to end.

    Prefixes are decided for patterns without look-around and references.
    """
    compiled = re.compile(pattern) if isinstance(pattern, str) else pattern
    partial = PartialRegex(compiled)

    def whole(text: bytes) -> Answer:
        try:
            return compiled.fullmatch(text.decode("utf-8")) is not None
        except UnicodeDecodeError:
            return False

    sentences = st.from_regex(compiled, fullmatch=True).filter(_encodable).map(str.encode)
    return Language(f"regex({compiled.pattern!r:.60})", partial.prefix, whole, sentences, partial.samples())


def json_schema(schema: Any, sentences: Iterable[str | bytes] = ()) -> Language:
    """Build the language of JSON texts that validate against a schema (needs jsonschema).

    Prefixes are known only for those of `sentences`.
    """
    import json

    import jsonschema

    validator = jsonschema.validators.validator_for(schema)(schema)
    texts = [_bytes(sentence) for sentence in sentences]
    beginnings = {text[:n] for text in texts for n in range(len(text) + 1)}

    def whole(text: bytes) -> Answer:
        try:
            return bool(validator.is_valid(json.loads(text.decode("utf-8"))))
        except ValueError:
            return False

    return Language(
        "json_schema", lambda text: True if text in beginnings else None, whole, st.sampled_from(texts or [b""]), texts
    )


def anything() -> Language:
    """Build the language of every text."""
    return Language("anything", lambda _: True, lambda _: True, st.binary(max_size=6), (b"the cat", "é😀".encode()))


def as_language(given: Any) -> Language | None:
    """Convert to a `Language`: a list of strings (finite), a compiled pattern, a function that returns one, or None."""
    if given is None or isinstance(given, Language):
        return given
    if callable(given):
        return as_language(given())
    if isinstance(given, re.Pattern):
        return regex(given)
    if isinstance(given, Iterable) and not isinstance(given, str | bytes):
        return finite(given)
    raise FilterUsageError(f"a language is a Language, a list of strings or a compiled pattern; got {given!r:.60}")


def _bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text


def _encodable(text: str) -> bool:
    return not any(0xD800 <= ord(c) < 0xE000 for c in text)
