"""Encoding and decoding with tokenizer.json by the Hugging Face tokenizers library."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ..errors import InputError, TokenizerError, TokenizerFileError
from ..json_reader import regular_size

__all__ = ["TokenizerBackend", "require_text"]

MAX_FILE_BYTES = 256 << 20  # the largest published tokenizer.json is about 35 MB
LONG_TEXT = 1500
"""Characters of a text beyond which the library's call for batches encodes it, and ids beyond which that for batches
decodes them: only these calls release the GIL, so that other threads go on."""


class TokenizerBackend:
    """Encodes and decodes with tokenizer.json. No special tokens are added to a text unless requested.

    Two encoders share the file. The plain encoder reads the text of special tokens as ordinary text. The special
    encoder, made on first use, converts it to their ids, exactly as transformers does. Both are immutable: thread-safe.
    """

    #: None: third-party filters (formatron) only check that the attribute exists
    vocab = None

    def __init__(self, file: Path) -> None:
        self.file = file
        text = _read(file)
        self.data: dict[str, Any] = _parse(file, text)
        self._text = text
        _check_merges(file, self.data)
        self.tokenizer = _build(file, text)
        self.tokenizer.encode_special_tokens = True  # the library's name for: encode them as text
        self._special: Tokenizer | None = None
        self._special_tokens: dict[str, int] = {}
        self._lock = threading.Lock()
        ids = set(self.tokenizer.get_vocab(with_added_tokens=True).values())
        self._size, self._tokens = 1 + max(ids, default=-1), len(ids)
        self._ids = frozenset(ids) if len(ids) < self._size else None  # None: all

    def vocab_size(self) -> int:
        """Return the number of ids, added tokens included: one more than the highest id, even if ids are missing.

        This is a method, because third-party filters call it.
        """
        return self._size

    def unused_ids(self) -> frozenset[int]:
        """Return the ids below `vocab_size()` that no token has."""
        return frozenset() if self._ids is None else frozenset(range(self._size)) - self._ids

    def added_tokens(self) -> dict[int, AddedToken]:
        """Return the file's added_tokens by id."""
        return dict(self.tokenizer.get_added_tokens_decoder())

    def use_special_tokens(self, tokens: Mapping[str, int]) -> None:
        """Register texts that `encode(special=True)` converts to ids, beyond the special tokens of the file."""
        with self._lock:
            self._special_tokens = dict(tokens)
            self._special = None

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return token ids of `text`; `special` recognises the text of special tokens.

        Raises InputError, TokenizerError.
        """
        require_text(text)
        tokenizer = self._special_tokenizer() if special else self.tokenizer
        with _library_errors(self.file):
            if len(text) > LONG_TEXT:
                # Without the places of tokens in the text, which take milliseconds to free: no thread runs meanwhile.
                encoding = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
            else:
                encoding = tokenizer.encode(text, add_special_tokens=False)
            ids: list[int] = encoding.ids
        return ids

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Return token ids of each text, as `encode`."""
        if len(texts) == 1:  # the library's threads would not help
            return [self.encode(texts[0], special)]
        for text in texts:
            require_text(text)
        tokenizer = self._special_tokenizer() if special else self.tokenizer
        with _library_errors(self.file):
            return [e.ids for e in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text of `ids`; special tokens are omitted unless `special`."""
        with _library_errors(self.file):
            if len(ids) > LONG_TEXT:
                return str(self.tokenizer.decode_batch([list(ids)], skip_special_tokens=not special)[0])
            return self.tokenizer.decode(list(ids), skip_special_tokens=not special)

    def id_to_piece(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of a token (with U+0120, U+2581 and the like), None for an unknown id."""
        return self.tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    def piece_to_id(self, piece: str) -> int | None:
        """Return the id of a vocabulary spelling, or None."""
        return self.tokenizer.token_to_id(piece)

    def enumerate_tokens(self) -> list[tuple[int, str]]:
        """Return (id, vocabulary spelling) of every token, by id."""
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        if self._ids is not None or len(vocabulary) != self._tokens:  # ids are missing, or two tokens share one
            return sorted((i, p) for p, i in vocabulary.items())
        pieces = [""] * self._size
        for piece, token_id in vocabulary.items():
            pieces[token_id] = piece
        return list(enumerate(pieces))

    def unk_token(self) -> str | None:
        """Return the model section's unknown token, or None."""
        model = self.data.get("model") or {}
        token = model.get("unk_token")
        if token is None and isinstance(model.get("unk_id"), int):
            token = self.id_to_piece(model["unk_id"])
        return token if isinstance(token, str) else None

    def space_char(self) -> str:
        """Return the vocabulary's spelling of a space, found by encoding one."""
        return self._first_char(" ")

    def newline_char(self) -> str:
        """Return the vocabulary's spelling of a newline."""
        return self._first_char("\n")

    def _first_char(self, text: str) -> str:
        ids = self.encode(text)
        piece = self.id_to_piece(ids[-1]) if ids else None
        return piece[-1] if piece else text

    def _special_tokenizer(self) -> Tokenizer:
        with self._lock:
            if self._special is None:
                tokenizer = _build(self.file, self._text)
                for text, token_id in sorted(self._special_tokens.items(), key=lambda item: item[1]):
                    known = tokenizer.token_to_id(text)
                    fits = known == token_id or (known is None and token_id == tokenizer.get_vocab_size())
                    # Adding a token that the file registers already would drop its lstrip and rstrip flags.
                    if fits and token_id not in tokenizer.get_added_tokens_decoder():
                        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
                self._special = tokenizer
            return self._special


@contextmanager
def _library_errors(file: Path) -> Iterator[None]:
    """Convert the library's errors over contradictory files (exceptions and panics) into TokenizerError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as e:
        raise TokenizerError(f"{file}: the tokenizers library cannot use it ({e})") from e


def require_text(text: object) -> None:
    """Raise InputError for an object that is no str, or for a str with lone surrogates, which have no UTF-8."""
    if not isinstance(text, str):
        raise InputError(f"encode takes a str or a list of str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InputError(f"the text holds a lone surrogate at character {e.start}: it cannot be encoded") from e


def _read(file: Path) -> str:
    try:
        size = regular_size(file)
        if size > MAX_FILE_BYTES:
            raise TokenizerError(f"{file}: {size} bytes, more than the {MAX_FILE_BYTES} a tokenizer may have")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise TokenizerError(f"{file}: not UTF-8 text ({e})") from e
    except OSError as e:
        raise TokenizerFileError(f"No supported tokenizer found: cannot read {file} ({e.strerror or e})") from e


def _parse(file: Path, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise TokenizerError(f"{file}: not valid JSON ({e})") from e
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise TokenizerError(f"{file}: not a tokenizer: no `model` object")
    return data


def _check_merges(file: Path, data: Mapping[str, Any]) -> None:
    """Reject merges without the prefix that the library strips from them: it would abort the process."""
    model = data.get("model")
    prefix = model.get("continuing_subword_prefix") if isinstance(model, Mapping) else None
    if not isinstance(prefix, str) or not prefix or not isinstance(model, Mapping):
        return
    merges = model.get("merges")
    for merge in merges if isinstance(merges, list) else []:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        right = parts[-1] if isinstance(parts, list) and parts else None
        if not isinstance(right, str) or not right.startswith(prefix):
            raise TokenizerError(
                f"{file}: merge {str(merge)[:80]!r} does not continue with continuing_subword_prefix {prefix[:20]!r}; "
                "every merge's second part must"
            )


def _build(file: Path, text: str) -> Tokenizer:
    with _library_errors(file):
        tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
