"""xgrammar with the interface of `llg` (extra `xgrammar`; installs torch and transformers).

xgrammar ignores schema keywords that it cannot enforce. So only schemas made of keywords that it enforces are accepted:
none may be enforced in part. The list was checked with the JSON-Schema-Test-Suite and random generations. Inside
strings, xgrammar allows the three bytes of a lone surrogate (ED A0 80 and up), which are not UTF-8; they are excluded
here.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from exl_filters import bits
from exl_filters.bits import Words
from exl_filters.compiling import CompileBudget
from exl_filters.errors import FilterCompileError, FilterFailed, MissingExtra
from exl_filters.trial import compile_elsewhere
from exl_filters.vocabulary import Vocabulary

__all__ = ["XgrammarMatcher", "compile_xgrammar"]

_lock = threading.Lock()
# Enforced by xgrammar 0.2.8. Excluded, though it accepts them: minLength, maxLength and pattern let control characters
# into strings; it ignores allOf and others.
ENFORCED = frozenset(
    """type properties required additionalProperties items enum const anyOf minItems maxItems
    minimum maximum exclusiveMinimum exclusiveMaximum""".split()  # noqa: SIM905 - read as words
)
# Keywords that do not restrict the valid instances.
ANNOTATIONS = frozenset(
    "$schema title description default examples $comment deprecated readOnly writeOnly".split()  # noqa: SIM905
)
# Most white space at one place: a line break and 20 columns, like llguidance's bounded rule.
MOST_WHITESPACE = 21
# Characters of a grammar that is compiled in this process at once.
SMALL = 256


class _Tables:
    """xgrammar's compiler over a vocabulary, and the ids that would spell a surrogate, alone or after an ED."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.module = _module()
        self.vocabulary = vocabulary
        tokens = self.tokens()
        self.key = hashlib.sha256(repr(tokens).encode()).hexdigest()
        self.info = self.module.TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=[vocabulary.size])
        self.compiler = self.module.GrammarCompiler(self.info, max_threads=2)
        surrogate = re.compile(b"\xed[\xa0-\xbf]")
        spelled = [i for i, raw in enumerate(tokens) if surrogate.search(raw)]
        continued = [i for i, raw in enumerate(tokens) if raw[:1] >= b"\xa0" and raw[:1] <= b"\xbf"]
        self.keep = ~bits.from_ids(spelled, vocabulary.size)
        self.keep_after_ed = self.keep & ~bits.from_ids(continued, vocabulary.size)

    def tokens(self) -> list[bytes]:
        """Return the bytes of every id, and one more id for xgrammar's stop token."""
        return [*(self.vocabulary.bytes_of(i) for i in range(self.vocabulary.size)), b""]

    def compiled(self, call: str, text: str, options: Mapping[str, Any]) -> Any:
        """Compile the grammar in this process, without limits."""
        try:
            return getattr(self.compiler, call)(text, **options)
        except RuntimeError as error:
            raise FilterCompileError(f"xgrammar: {error}") from error

    def kept(self, before: list[int]) -> Words:
        """Return the ids that spell no surrogate after these tokens."""
        follows = bool(before) and self.vocabulary.bytes_of(before[-1]).endswith(b"\xed")
        return self.keep_after_ed if follows else self.keep


class XgrammarMatcher:
    """One `GrammarMatcher` with the methods of `llg.Matcher`."""

    def __init__(self, raw: Any, tables: _Tables, fed: list[int]) -> None:
        self._raw, self._tables, self._size = raw, tables, tables.vocabulary.size
        size = self._size
        self._fed = fed
        # One id more than the vocabulary has: xgrammar's stop token, which is outside the vocabulary.
        self._words = np.zeros((1, bits.word_count(size + 1)), dtype=np.int32)
        self._stopped: tuple[int, bool] = (-1, False)

    def copy(self) -> XgrammarMatcher:
        """Return an independent matcher in the same state."""
        return XgrammarMatcher(self._raw.fork(), self._tables, list(self._fed))

    @property
    def consumed(self) -> int:
        """Number of tokens consumed."""
        return len(self._fed)

    def mask_into(self, target: Words) -> bool:
        """Write the mask of the state over `target`. Always returns False; `stopped` says that nothing may follow."""
        self._raw.fill_next_token_bitmask(self._words)
        words = self._words[0]
        bits.put(words, self._size, False)
        bits.copy_into(words, target)
        bits.and_into(self._tables.kept(self._fed), target)
        return False

    def consume(self, tokens: list[int]) -> bool:
        """Consume all of the tokens, or none of them. Returns False for none."""
        for count, token in enumerate(tokens):
            if not bits.test(self._tables.kept(self._fed), token) or not self._raw.accept_token(token):
                self.rollback(count)
                return False
            self._fed.append(token)
        self._stopped = (-1, False)
        return True

    def accepts(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens may follow in order."""
        trial = self.copy()
        return next((count for count, token in enumerate(tokens) if not trial.consume([token])), len(tokens))

    def rollback(self, n: int) -> None:
        """Undo `n` consumed tokens. Raises `FilterFailed` for more than were consumed."""
        if n > self.consumed:
            raise FilterFailed(f"rollback of {n} tokens after {self.consumed}")
        if n:
            self._raw.rollback(n)
            del self._fed[len(self._fed) - n :]
            self._stopped = (-1, False)

    @property
    def accepting(self) -> bool:
        """Whether the text so far is a sentence of the grammar."""
        return bool(self._raw.is_completed())

    @property
    def stopped(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        if not self.accepting:
            return False
        if self._stopped[0] != self.consumed:
            words = bits.empty(self._size)
            self.mask_into(words)
            self._stopped = (self.consumed, bits.is_empty(words))
        return self._stopped[1]

    def forced(self) -> bytes:
        """Return the bytes that every continuation begins with."""
        try:
            return str(self._raw.find_jump_forward_string()).encode()
        except UnicodeDecodeError:
            return b""  # inside a character

    def captures(self) -> list[tuple[str, bytes]]:
        """Return the named captures so far, as (name, bytes)."""
        return list(self._raw.get_captures())


def compile_xgrammar(
    source: Mapping[str, Any],
    vocabulary: Vocabulary,
    whitespace: str,
    limits: Mapping[str, int] | None,
    budget: CompileBudget,
) -> XgrammarMatcher:
    """Return a matcher at the start of the one grammar in `source` (a source of `grammar_text` and its value).

    The grammar is compiled in another process, within the budget; a very small or trusted one in this process. Raises
    `FilterCompileError` for a grammar that xgrammar rejects or would not enforce, `MissingExtra` where it is not
    installed.
    """
    if limits:
        raise FilterCompileError("limits are llguidance's; xgrammar takes none")
    _module()
    ((kind, value),) = source.items()
    options: dict[str, Any] = {}
    if kind == "json_schema":
        refuse_unenforced(value)
        call, text = "compile_json_schema", json.dumps(value)
        options = {"strict_mode": False, **_whitespace(whitespace)}
    elif kind == "regex":
        call, text = "compile_regex", value
    elif kind in ("gbnf", "ebnf"):
        call, text = "compile_grammar", value
    elif kind == "choice":
        call, text = "compile_grammar", "root ::= " + " | ".join(json.dumps(option) for option in value)
    else:
        raise FilterCompileError(f"the xgrammar back end takes json_schema, regex, ebnf and choice, not {kind}")
    tables = _tables(vocabulary)
    if budget.trust or _is_small(kind, text):
        compiled = tables.compiled(call, text, options)
    else:
        written = compile_elsewhere(call, text, options, tables.key, tables.tokens, budget)
        compiled = tables.module.CompiledGrammar.deserialize_json(written, tables.info)
    return XgrammarMatcher(tables.module.GrammarMatcher(compiled), tables, [])


def _is_small(kind: str, text: str) -> bool:
    """Whether compiling is fast: few states, and no counted repeats, which are written out."""
    if len(text) > SMALL or re.search(r"\d{3}", text) is not None:
        return False
    return kind in ("json_schema", "choice") or "{" not in text


def refuse_unenforced(schema: Any) -> None:
    """Raise `FilterCompileError` for a keyword outside of `ENFORCED`, anywhere in the schema."""
    for at, sub in subschemas(schema, "#"):
        if not isinstance(sub, dict):
            if sub is False:
                raise FilterCompileError(f"xgrammar back end: {at} is false, which allows nothing")
            continue
        unknown = sub.keys() - ENFORCED - ANNOTATIONS
        if unknown:
            raise FilterCompileError(f"xgrammar back end: {at} has {sorted(unknown)}, which would not be enforced")
        _refuse_combinations(at, sub)
        _refuse_names(at, sub)


def _refuse_combinations(at: str, sub: dict[str, Any]) -> None:
    """Reject keywords that xgrammar enforces alone and drops next to others, and missing types."""
    exclusive = sub.keys() & {"enum", "const", "anyOf"}
    if exclusive and sub.keys() - ANNOTATIONS - exclusive - {"type"}:
        raise FilterCompileError(f"xgrammar back end: {at} has {sorted(exclusive)} with other keywords")
    if len(exclusive) > 1 or ("anyOf" in exclusive and "type" in sub):
        raise FilterCompileError(f"xgrammar back end: {at} has {sorted(sub.keys() & ENFORCED)}, of which it takes one")
    if "type" in sub and exclusive:
        raise FilterCompileError(f"xgrammar back end: {at} has a type with {sorted(exclusive)}; leave it out")
    if not exclusive and not isinstance(sub.get("type"), str) and sub.keys() - ANNOTATIONS:
        raise FilterCompileError(f"xgrammar back end: {at} must have one type")
    if isinstance(sub.get("items"), list):
        raise FilterCompileError(f"xgrammar back end: {at} has a list of items")


def _refuse_names(at: str, sub: dict[str, Any]) -> None:
    """Reject names that xgrammar drops, and names that escapes would bypass."""
    properties, required = sub.get("properties", {}), sub.get("required", [])
    if isinstance(required, list) and isinstance(properties, dict):
        dropped = [name for name in required if name not in properties]
        if dropped:
            raise FilterCompileError(
                f"xgrammar back end: {at} requires {dropped!r:.60}, not under properties, which would not be enforced; "
                "put each under properties"
            )
    if properties and sub.get("additionalProperties", True) is not False:
        raise FilterCompileError(
            f"xgrammar back end: {at} has properties in an open object, where a name written with escapes would not be "
            "held to its schema; set additionalProperties to false"
        )


def subschemas(schema: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Yield a schema and all schemas in it, with their places."""
    yield at, schema
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        if name == "properties" and isinstance(value, dict):
            for key, sub in value.items():
                yield from subschemas(sub, f"{at}/properties/{key}")
        elif name in ("items", "additionalProperties") and isinstance(value, dict | bool):
            if value is not False:
                yield from subschemas(value, f"{at}/{name}")
        elif name == "anyOf" and isinstance(value, list):
            for index, sub in enumerate(value):
                yield from subschemas(sub, f"{at}/anyOf/{index}")


def _whitespace(rule: str) -> dict[str, Any]:
    if rule == "compact":
        return {"any_whitespace": False, "separators": (",", ":")}
    if rule == "any":
        return {"any_whitespace": True}
    if rule == "bounded":
        return {"any_whitespace": True, "max_whitespace_cnt": MOST_WHITESPACE}
    raise FilterCompileError(f'the xgrammar back end takes whitespace "bounded", "compact" or "any", not {rule!r}')


def _module() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise MissingExtra("the xgrammar back end", "xgrammar", "xgrammar") from error
    return xgrammar


def _tables(vocabulary: Vocabulary) -> _Tables:
    """Return the tables of a vocabulary, built once."""
    with _lock:
        held = vocabulary.__dict__.get("_xgrammar")
        if held is None:
            held = vocabulary.__dict__["_xgrammar"] = _Tables(vocabulary)
        return held
