"""Encoding and decoding with tokenizer.model by the SentencePiece library, with the interface of `TokenizerBackend`."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from ..errors import TokenizerError, TokenizerFileError
from ..json_reader import regular_size
from .backend import MAX_FILE_BYTES, require_text

__all__ = ["SentencePieceBackend"]

SPACE = "▁"
# Messages of protocol buffers merge when they are concatenated: this sets normalizer_spec.add_dummy_prefix to false.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
# The decoder's steps in the terms of tokenizer.json, for the table of bytes.
DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


class SentencePieceBackend:
    """Encodes and decodes with tokenizer.model. No special tokens are added to a text unless requested.

    The model's leading space goes before a text, not before the pieces after special tokens (as transformers'
    `legacy=False`). Immutable: thread-safe. Raises TokenizerError for an invalid file.
    """

    def __init__(self, file: Path) -> None:
        try:
            import sentencepiece
        except ImportError as e:
            raise TokenizerError(
                f"{file}: this folder has only a SentencePiece model, which needs the sentencepiece package: "
                'pip install "./packages/exl-core[sentencepiece]" installs it; or use a folder with tokenizer.json'
            ) from e
        self.file = file
        proto = _read(file)
        try:
            self.model = sentencepiece.SentencePieceProcessor(model_proto=proto)
            self._inside = sentencepiece.SentencePieceProcessor(model_proto=proto + NO_DUMMY_PREFIX)
            pieces = self.model.get_piece_size()
        except (RuntimeError, TypeError, ValueError, OSError) as e:
            raise TokenizerError(f"{file}: not a SentencePiece model ({e})") from e
        if not pieces:
            raise TokenizerError(f"{file}: a SentencePiece model without pieces")
        self._pieces = int(pieces)
        self.data: dict[str, Any] = {"model": {}, "decoder": DECODER}
        self.tokenizer = self.model
        self._special: dict[str, int] = {}
        self._split: re.Pattern[str] | None = None
        self._lock = threading.Lock()
        self._control = frozenset(i for i in range(pieces) if self.model.is_control(i) or self.model.is_unknown(i))

    def vocab_size(self) -> int:
        """Return the number of ids, including special tokens after the model's pieces."""
        return max(self._pieces, 1 + max(self._special.values(), default=-1))

    def added_tokens(self) -> dict[int, AddedToken]:
        """Return the control tokens, which decode to no text."""
        return {i: AddedToken(self.model.id_to_piece(i), special=True) for i in sorted(self._control)}

    def use_special_tokens(self, tokens: Mapping[str, int]) -> None:
        """Register texts that `encode(special=True)` converts to ids; the longest match has priority."""
        with self._lock:
            self._special = {text: i for text, i in tokens.items() if text}
            texts = sorted(self._special, key=len, reverse=True)
            self._split = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return token ids of `text`; `special` recognises the text of special tokens."""
        require_text(text)
        split, known = self._split, self._special
        if not special or split is None:
            return list(self.model.encode(text))
        ids: list[int] = []
        for number, part in enumerate(split.split(text)):
            if number % 2:
                ids.append(known[part])
            elif part:
                ids += (self._inside if ids else self.model).encode(part)
        return ids

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Return token ids of each text, as `encode`."""
        return [self.encode(text, special) for text in texts]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text of `ids`; special tokens are omitted unless `special`."""
        texts = {i: text for text, i in self._special.items()}
        parts: list[str] = []
        run: list[int] = []

        def flush() -> None:
            if run:
                parts.append((self._inside if parts else self.model).decode(run))
                run.clear()

        for token_id in ids:
            if token_id in texts or token_id in self._control or not 0 <= token_id < self._pieces:
                if special:
                    flush()
                    parts.append(texts.get(token_id) or self.id_to_piece(token_id) or "")
            else:
                run.append(token_id)
        flush()
        return "".join(parts)

    def id_to_piece(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of a token (a space is U+2581), None for an unknown id."""
        return self.model.id_to_piece(token_id) if 0 <= token_id < self._pieces else None

    def piece_to_id(self, piece: str) -> int | None:
        """Return the id of a vocabulary spelling, or None."""
        found = int(self.model.piece_to_id(piece))
        return found if self.model.id_to_piece(found) == piece else None

    def unused_ids(self) -> frozenset[int]:
        """Return the ids below `vocab_size()` that no token has."""
        return frozenset(range(self._pieces, self.vocab_size()))

    def enumerate_tokens(self) -> list[tuple[int, str]]:
        """Return (id, vocabulary spelling) of every token, by id."""
        return [(i, self.model.id_to_piece(i)) for i in range(self._pieces)]

    def unk_token(self) -> str | None:
        """Return the model's unknown token."""
        return self.id_to_piece(self.model.unk_id())

    def space_char(self) -> str:
        """Return the vocabulary's spelling of a space."""
        return SPACE

    def newline_char(self) -> str:
        """Return the vocabulary's spelling of a newline."""
        ids = self.encode("\n")
        piece = self.id_to_piece(ids[-1]) if ids else None
        return piece[-1] if piece and not piece.startswith("<0x") else "\n"


def _read(file: Path) -> bytes:
    try:
        size = regular_size(file)
        if size > MAX_FILE_BYTES:
            raise TokenizerError(f"{file}: {size} bytes, more than the {MAX_FILE_BYTES} a tokenizer may have")
        return file.read_bytes()
    except OSError as e:
        raise TokenizerFileError(f"No supported tokenizer found: cannot read {file} ({e.strerror or e})") from e
