"""Typed access to llguidance: its tokenizer, built once from a `Vocabulary`, and its matcher with raised errors.

llguidance never raises for a bad grammar or an illegal token: the matcher enters an error state whose mask is "EOS
only". Every method here checks for that state.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from exl_filters import bits
from exl_filters.bits import Words
from exl_filters.errors import FilterCompileError, FilterFailed
from exl_filters.library import caught, llguidance
from exl_filters.reasons import stop_reason
from exl_filters.vocabulary import Vocabulary

__all__ = ["QUICK", "Matcher", "compile_matcher", "parser_limits", "tokenizer_for"]

QUICK = 0.01
"""Seconds that a grammar takes at most to be compiled again, for jobs that run at the same time."""

_lock = threading.Lock()


def _renew_lock() -> None:
    """Make the lock new in a forked child: the thread that holds it exists only in the parent."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class _Wrapper:
    """The interface that `LLTokenizer` requires of a tokenizer without a tokenizer.json.

    Ids without text are listed as special; otherwise they would match their placeholder.
    """

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, eos: int) -> None:
        self.tokens = [vocabulary.bytes_of(i) for i in range(vocabulary.size)]
        special = [i for i in range(vocabulary.size) if not self.tokens[i]]
        if eos == vocabulary.size:
            self.tokens.append(b"")
            special.append(eos)
        for token in special:
            self.tokens[token] = vocabulary.special_texts.get(token, f"<|special_{token}|>").encode()
        self.special_token_ids = special
        self.eos_token_id = eos
        self.bos_token_id = vocabulary.bos_token_id
        # Does not hold the vocabulary, which holds the tokenizer made of this object: the garbage collector cannot
        # follow references through llguidance.
        self._trie = vocabulary.trie

    def __call__(self, text: bytes | str) -> list[int]:
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        ids: list[int] = []
        position = 0
        while position < len(raw):
            length, token = self._trie.longest(raw, position)
            if length == 0:
                break
            ids.append(token)
            position += length
        return ids


def tokenizer_for(vocabulary: Vocabulary) -> tuple[Any, int]:
    """Return the `LLTokenizer` of a vocabulary and the width of its masks in tokens; built once.

    Built from the tokenizer's own JSON where there is one and it gives the same bytes, which makes forced text
    canonical. Otherwise built from the bytes, with longest-match tokenization. Building takes about a second for 128k
    tokens.
    """
    with _lock:
        held = vocabulary.__dict__.get("_llg")
        if held is None:
            held = vocabulary.__dict__["_llg"] = _build(vocabulary)
        return held


def _build(vocabulary: Vocabulary) -> tuple[Any, int]:
    module = llguidance()
    eos = vocabulary.eos_token_id if vocabulary.eos_token_id is not None else min(vocabulary.stop_ids, default=None)
    if eos is not None and vocabulary.canonical_json is not None:
        try:
            built = module.LLTokenizer(vocabulary.canonical_json(), n_vocab=vocabulary.size, eos_token=eos)
            if _same_bytes(built, vocabulary):
                return built, vocabulary.size
        except (KeyboardInterrupt, SystemExit):
            raise
        # Any other failure, a Rust panic included, means that the JSON cannot be used.
        except BaseException:
            pass
    eos = vocabulary.size if eos is None else eos
    width = max(vocabulary.size, eos + 1)
    return caught(lambda: module.LLTokenizer(_Wrapper(vocabulary, eos), n_vocab=width, eos_token=eos)), width


def _same_bytes(built: Any, vocabulary: Vocabulary) -> bool:
    step = max(1, vocabulary.size // 500)
    for token in range(0, vocabulary.size, step):
        raw = vocabulary.bytes_of(token)
        if raw and (built.is_special_token(token) or built.decode_bytes([token]) != raw):
            return False
    return True


class Matcher:
    """One `LLMatcher`: writes masks, counts the tokens it consumed, raises `FilterFailed` when it fails."""

    def __init__(
        self, raw: Any, width: int, eos: int, *, lexer: object = None, again: Callable[[], Matcher] | None = None
    ) -> None:
        self.raw, self.width, self.eos = raw, width, eos
        #: the same for all copies, which take turns at one lexer
        self.lexer = object() if lexer is None else lexer
        #: compiles the grammar once more, with a lexer of its own; None where that takes long, and in copies
        self.again = again
        self.consumed = 0
        # The target of the last mask, and the buffer that llguidance wrote: the target, or one of the matcher's width.
        self._target: Words | None = None
        self._buffer: Words | None = None
        self._address = self._octets = 0
        #: the mask of the current state, if it is known already; the next `mask_into` uses it
        self.known: Words | None = None

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state."""
        new = Matcher(self.raw.deep_copy(), self.width, self.eos, lexer=self.lexer)
        new.consumed = self.consumed
        return new

    def mask_into(self, target: Words) -> bool:
        """Write the mask of the state over `target`, of any width.

        Returns True when the matcher is stopped and allows the EOS alone; a failed matcher is always stopped. A target
        of the matcher's own width is written in place, and its address is looked up once.
        """
        if self.known is not None:
            known, self.known = self.known, None
            bits.copy_into(known, target)
            return self._stopped_and_sound()
        if target is not self._target:
            fits = len(target) == bits.word_count(self.width) and target.flags.c_contiguous
            self._target = target
            self._buffer = buffer = target if fits else bits.empty(self.width)
            self._address, self._octets = buffer.ctypes.data, buffer.nbytes
        self.raw.unsafe_compute_mask_ptr(self._address, self._octets)
        stopped = self._stopped_and_sound()
        if self._buffer is not target and self._buffer is not None:
            bits.copy_into(self._buffer, target)
        return stopped

    def _stopped_and_sound(self) -> bool:
        """Return whether the matcher is stopped. Raises `FilterFailed` if it has failed."""
        stopped: bool = self.raw.is_stopped()
        if stopped:
            self.check()
        return stopped

    def consume(self, tokens: list[int]) -> bool:
        """Consume all of the tokens, or none of them. Returns False for none."""
        taken = self.raw.try_consume_tokens(tokens)
        if taken < len(tokens):
            self.check()
            if taken:
                self.raw.rollback(taken)
                self.check()
            return False
        self.consumed += taken
        return True

    def accepts(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens may follow in order."""
        count = int(self.raw.validate_tokens(list(tokens)))
        self.check()
        return count

    def rollback(self, n: int) -> None:
        """Undo `n` consumed tokens. Raises `FilterFailed` for more: that would break the matcher."""
        if n > self.consumed:
            raise FilterFailed(f"rollback of {n} tokens after {self.consumed}")
        if n:
            self.raw.rollback(n)
            self.check()
            self.consumed -= n

    def forced(self) -> bytes:
        """Return the bytes that every continuation begins with."""
        return bytes(self.raw.compute_ff_bytes())

    def captures(self) -> list[tuple[str, bytes]]:
        """Return the named captures so far, as (name, bytes)."""
        return list(self.raw.get_captures())

    @property
    def accepting(self) -> bool:
        """Whether the text so far is a sentence of the grammar."""
        return bool(self.raw.is_accepting())

    @property
    def stopped(self) -> bool:
        """Whether nothing may follow."""
        return bool(self.raw.is_stopped())

    def check(self) -> None:
        """Raise `FilterFailed` if the matcher is in its error state."""
        if self.raw.is_error():
            raise FilterFailed(f"llguidance: {stop_reason(str(self.raw.get_error()))}")


def parser_limits(limits: Mapping[str, int] | None) -> Any:
    """Return llguidance's object for limits by name. Raises `FilterCompileError` for other names and values."""
    if limits and "verbose_errors" in limits:
        raise FilterCompileError("limits: verbose_errors is not a limit and cannot be set; leave it out")
    for name, limit in (limits or {}).items():
        if not isinstance(limit, int) or limit < 0:
            raise FilterCompileError(f"limits: {name} is {limit!r}; it must be an integer of 0 or more")
    try:
        return llguidance().LLParserLimits(verbose_errors=False, **(limits or {}))
    except (TypeError, ValueError, OverflowError) as error:
        raise FilterCompileError(f"limits: {error}") from error


def compile_matcher(
    grammar: str,
    vocabulary: Vocabulary,
    limits: Mapping[str, int] | None = None,
) -> Matcher:
    """Compile `grammar` (llguidance's serialized form) and return a matcher at its start.

    Args:
        grammar: The grammar.
        vocabulary: The vocabulary that masks cover.
        limits: llguidance's parser limits by name; each an integer of 0 or more.

    Raises:
        FilterCompileError: with llguidance's reason and position, also when a limit is exceeded.
        MemoryError: there is not enough memory to compile it in this process.
    """
    module, most = llguidance(), parser_limits(limits)
    tokenizer, width = tokenizer_for(vocabulary)
    began = time.perf_counter()
    raw = caught(lambda: module.LLMatcher(tokenizer, grammar, log_level=0, limits=most))
    seconds = time.perf_counter() - began
    if raw.is_error():
        raise FilterCompileError(str(raw.get_error()).strip())
    warnings = raw.get_grammar_warnings()
    if warnings:
        raise FilterCompileError("cannot be enforced: " + "; ".join(str(w) for w in warnings))
    again = partial(compile_matcher, grammar, vocabulary, limits) if seconds < QUICK else None
    return Matcher(raw, width, int(tokenizer.eos_token), again=again)
