"""`ExLlamaV2TokenEnforcerFilter`: lm-format-enforcer's character parsers as a native filter (extra `enforcer`)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Hashable
from typing import Any

from exl_filters import bits
from exl_filters.errors import FilterCompileError, MissingExtra
from exl_filters.state_filter import Choice, StateFilter
from exl_filters.vocabulary import Vocabulary

__all__ = ["ExLlamaV2TokenEnforcerFilter"]

# Masks kept per filter family; parsers give equal states equal keys.
MAX_CACHED = 256


class _Cache:
    """Choices by parser state; shared by clones."""

    shared_between_clones = True

    def __init__(self) -> None:
        self._choices: dict[Hashable, Choice] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Choice | None:
        """Return the choice of a key, or None."""
        return self._choices.get(key)

    def put(self, key: Hashable, choice: Choice) -> None:
        """Store a choice; the oldest one is dropped at the limit."""
        with self._lock:
            if len(self._choices) >= MAX_CACHED:
                self._choices.pop(next(iter(self._choices)))
            self._choices[key] = choice


# (parser, text still to be regenerated)
_State = tuple[Any, bytes]


class ExLlamaV2TokenEnforcerFilter(StateFilter[_State]):
    """Constrain the output to a text of a `CharacterLevelParser` (JsonSchemaParser, RegexParser, UnionParser, ...).

    Unlike the class of the same name in lm-format-enforcer, it is cloned per job, takes int feeds and rewinds. It does
    not grow with the generated text, and it reports a failing parser instead of ending the text. It works on
    characters, as the library does: it cannot produce a character that the vocabulary spells only in pieces.
    `ExLlamaV2GrammarFilter` can.

    Args:
        model: Kept for exllamav2's API; may be None.
        tokenizer: A `Vocabulary` or any tokenizer that `vocabulary_of` takes.
        character_level_parser: A parser of lm-format-enforcer; it is copied.

    Raises:
        FilterCompileError: `character_level_parser` is not such a parser.
        MissingExtra: lm-format-enforcer is not installed.
    """

    def __init__(self, model: Any, tokenizer: Any, character_level_parser: Any) -> None:
        super().__init__(model, tokenizer)
        if not callable(getattr(character_level_parser, "get_allowed_characters", None)):
            raise FilterCompileError(
                f"character_level_parser must be lm-format-enforcer's, got {type(character_level_parser).__name__}"
            )
        self._data = _tokenizer_data(self.vocabulary)
        self._control = frozenset(i for i, text, _ in self._data.regular_tokens if min(text) < " ")
        # A private copy: the alphabet of this vocabulary is written into the parser's configuration.
        self._root = copy.deepcopy(character_level_parser)
        self._root.config = _parser_config(character_level_parser, self._data.tokenizer_alphabet)
        self._cache = _Cache()
        self.begin("")

    def use_background_worker(self) -> bool:
        """Return True: masks may be computed on another thread."""
        return True

    def describe(self) -> str:
        """Name the parser's class."""
        return f"TokenEnforcer({type(self._root).__name__})"

    def _start(self, prefix: bytes) -> _State:
        return self._root, prefix

    def _choice(self, state: _State) -> Choice:
        parser, pending = state
        key = None if pending else parser.cache_key()
        choice = self._cache.get(key) if key is not None else None
        if choice is None:
            ids = self._healing(parser, pending) if pending else self._collect(parser)
            choice = Choice(bits.from_ids(ids, self.vocabulary.size))
            if key is not None:
                self._cache.put(key, choice)
        return choice

    def _advance(self, state: _State, token: int) -> _State:
        parser, pending = state
        raw = self.vocabulary.bytes_of(token)
        if len(raw) < len(pending):
            return parser, pending[len(raw) :]
        for character in raw[len(pending) :].decode("utf-8"):
            parser = parser.add_character(character)
        return parser, b""

    def _whole(self, state: _State) -> bool:
        return not state[1] and bool(state[0].can_end())

    def _collect(self, parser: Any) -> list[int]:
        """Return the ids whose characters the parser takes, by walking the parser and the prefix tree together.

        Inside free JSON text, the library's ready-made lists are used, except after a quote.
        """
        ids: list[int] = []
        shortcut = parser.shortcut_key()
        only = None
        if isinstance(shortcut, tuple) and shortcut[0] == "json_freetext":
            _, length, shortest, longest = shortcut
            lists = self._data.tokenizer_tree.json_freetext_tokens
            least = min(lists.max_token_len, max(0, shortest - length))
            most = min(lists.max_token_len, longest - length)
            # The lists hold tokens with raw control characters, which JSON forbids inside strings.
            found = lists.lookup_allowed_tokens(least, most).allowed_tokens
            ids.extend(i for i in found if i not in self._control)
            only = '"'
        todo = [(parser, self._data.tokenizer_tree.root)]
        while todo:
            at, node = todo.pop()
            ids.extend(node.tokens)
            allowed = set(at.get_allowed_characters())
            explored = node.children.keys() & (allowed if only is None else allowed & {only})
            todo.extend((at.add_character(character), node.children[character]) for character in explored)
            only = None
        return ids

    def _healing(self, parser: Any, pending: bytes) -> list[int]:
        """Return the ids that start with the text to write again and whose surplus the parser takes."""
        found = [i for i, surplus in self.vocabulary.tokens_starting_with(pending) if _takes(parser, surplus)]
        if not found:
            found = [i for n in range(1, len(pending)) for i in self.vocabulary.ids_of(pending[:n])]
        return found


def _takes(parser: Any, surplus: bytes) -> bool:
    try:
        text = surplus.decode("utf-8")
    except UnicodeDecodeError:
        return False
    for character in text:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return True


_data_lock = threading.Lock()


def _tokenizer_data(vocabulary: Vocabulary) -> Any:
    """Return lm-format-enforcer's tables for a vocabulary, built once (seconds at 128k tokens)."""
    try:
        from lmformatenforcer import TokenEnforcerTokenizerData
    except ImportError as error:
        raise MissingExtra("ExLlamaV2TokenEnforcerFilter", "enforcer", "lm-format-enforcer") from error
    with _data_lock:
        held = vocabulary.__dict__.get("_lmfe")
        if held is None:
            regular = []
            for token in range(vocabulary.size):
                raw = vocabulary.bytes_of(token)
                try:
                    text = raw.decode("utf-8")
                except UnicodeDecodeError:
                    continue
                if text:
                    regular.append((token, text, text.startswith(" ")))
            held = TokenEnforcerTokenizerData(
                regular, vocabulary.decode, vocabulary.eos_token_id, False, vocabulary.size
            )
            vocabulary.__dict__["_lmfe"] = held
        return held


def _parser_config(parser: Any, alphabet: str) -> Any:
    config = copy.copy(parser.config)
    config.alphabet = alphabet
    return config
