"""Tables over the vocabulary for healing, filters and detokenizing; each is built once, under a lock, on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .vocabulary import BYTE_TOKEN

__all__ = ["CharTrieNode", "VocabularyTables", "build_trie", "prefix_dict"]

T = TypeVar("T")


class CharTrieNode:
    """`children`: next character -> node. `leaf`: ids of the tokens whose text ends here."""

    __slots__ = ("children", "leaf")

    def __init__(self) -> None:
        self.children: dict[str, CharTrieNode] = {}
        self.leaf: list[int] = []


def build_trie(pieces: list[str]) -> CharTrieNode:
    """Build a trie over the texts of all tokens; empty texts belong to no node."""
    root = CharTrieNode()
    for token_id, piece in enumerate(pieces):
        if not piece:
            continue
        node = root
        for character in piece:
            following = node.children.get(character)
            if following is None:
                following = node.children[character] = CharTrieNode()
            node = following
        node.leaf.append(token_id)
    return root


def prefix_dict(pieces: list[str]) -> dict[str, list[int]]:
    """Return the text of every token -> sorted ids of all tokens whose text starts with it."""
    ids_of: dict[str, list[int]] = {}
    for token_id, piece in enumerate(pieces):
        if piece:
            ids_of.setdefault(piece, []).append(token_id)
    result: dict[str, list[int]] = {piece: [] for piece in ids_of}
    open_prefixes: list[str] = []
    for piece in sorted(ids_of):  # all texts that start with p directly follow p
        while open_prefixes and not piece.startswith(open_prefixes[-1]):
            open_prefixes.pop()
        open_prefixes.append(piece)
        for prefix in open_prefixes:
            result[prefix] += ids_of[piece]
    for ids in result.values():
        ids.sort()
    return result


class VocabularyTables:
    """The tables of one tokenizer. `describe(include_special)` returns the bytes of every id."""

    def __init__(
        self,
        describe: Callable[[bool], list[bytes]],
        undefined: frozenset[int],
        vocab_pieces: Callable[[], list[tuple[int, str]]],
        model_vocab_size: int,
    ) -> None:
        self._describe = describe
        self._undefined = undefined
        self._vocab_pieces = vocab_pieces
        self._model_vocab_size = model_vocab_size
        self._lock = threading.RLock()
        self._built: dict[str, Any] = {}

    def id_to_bytes(self, include_special: bool = False) -> list[bytes]:
        """Return the bytes of each id."""
        return self._once(f"bytes{include_special}", lambda: self._describe(include_special))

    def id_to_piece(self, include_special: bool = False) -> list[str]:
        """Return the text of each id."""

        def build() -> list[str]:
            pieces = [b.decode("utf-8", "replace") for b in self.id_to_bytes(include_special)]
            for token_id in self._undefined:
                pieces[token_id] = f"\ufffd_undefined_token_{token_id}_\ufffd"
            return pieces

        return self._once(f"pieces{include_special}", build)

    def id_to_ord(self) -> list[int]:
        """Return the byte value of `<0xNN>` tokens and of single characters up to 255, else -1."""

        def build() -> list[int]:
            ords = [-1] * len(self.id_to_bytes())
            for token_id, text in enumerate(self.id_to_piece()):
                if len(text) == 1 and ord(text) <= 255:
                    ords[token_id] = ord(text)
            for token_id, piece in self._vocab_pieces():
                match = BYTE_TOKEN.fullmatch(piece)
                if match:
                    ords[token_id] = int(match.group(1), 16)
            return ords

        return self._once("ords", build)

    def piece_to_id(self) -> dict[str, int]:
        """Return text -> id."""
        return self._once("piece_to_id", lambda: {p: i for i, p in enumerate(self.id_to_piece()) if p})

    def prefix_to_ids(self) -> dict[str, list[int]]:
        """Return the text of each token -> sorted ids of all tokens whose text starts with it."""
        return self._once("prefixes", lambda: prefix_dict(self.id_to_piece()))

    def prefix_id_to_ids(self) -> dict[int, list[int]]:
        """Return each id -> sorted ids of all tokens whose text starts with its text."""

        def build() -> dict[int, list[int]]:
            prefixes, pieces = self.prefix_to_ids(), self.id_to_piece()
            table = {i: prefixes[p] for i, p in enumerate(pieces) if p}
            for token_id in range(max(self._model_vocab_size, len(pieces))):
                table.setdefault(token_id, [token_id])
            return table

        return self._once("prefix_ids", build)

    def char_trie(self, case_insensitive: bool = False) -> CharTrieNode:
        """Return a trie over the texts of all tokens, lower-cased if `case_insensitive`."""

        def build() -> CharTrieNode:
            pieces = self.id_to_piece()
            return build_trie([p.lower() for p in pieces] if case_insensitive else pieces)

        return self._once(f"trie{case_insensitive}", build)

    def build_all(self) -> None:
        """Build all tables, so that no request waits for one."""
        for include_special in (False, True):
            self.id_to_piece(include_special)
        self.id_to_ord()
        self.piece_to_id()
        self.prefix_id_to_ids()
        self.char_trie()
        self.char_trie(case_insensitive=True)

    def _once(self, name: str, build: Callable[[], T]) -> T:
        built = self._built.get(name)
        if built is None:
            with self._lock:
                built = self._built.get(name)
                if built is None:
                    built = self._built[name] = build()
        return cast(T, built)
